"""Many processes, one run: the process group, and a model spread over it from outside.

Model code is single-device code. `distribute` wraps what a task trains, by DDP or FSDP2, and may
spread the tokens of every layer besides; the loop asks it only two things: to hold back the
exchange of gradients while it accumulates, and for sums over all ranks.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tokenformer.layers.pattention import Pattention
from tokenformer.models.token_parallel import spread_tokens
from tokenformer.train.parallel.mesh import Mesh
from tokenformer.train.parallel.meta_init import draw_weights
from tokenformer.train.parallel.ranks import Ranks


@contextmanager
def process_group() -> Iterator[Ranks]:
    """The group that torchrun describes in the environment; alone without it."""
    if "RANK" not in os.environ:
        yield Ranks()
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend="cpu:gloo,cuda:nccl" if cuda else "gloo")
    try:
        yield Ranks()
    finally:
        dist.destroy_process_group()


def device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def distribute(model: Any, module: nn.Module, parallel: str, seed: int, mesh: Mesh) -> nn.Module:
    """`module`, which trains `model`, as it is to be called: on this process's device, replicated
    or sharded over the ranks of the data, its tokens spread over the others. A model on the meta
    device gets its first weights, by `seed`."""
    has_weights = not any(parameter.is_meta for parameter in model.parameters())
    if has_weights:
        model.to(device())
    among = None  # all processes
    if mesh.devices is not None:
        check_tokens(model, mesh)
        spread_tokens(model, mesh.devices["tp"])
        parallel, among = "fsdp", mesh.devices["data"]  # DDP knows nothing of spread tensors
    alone = mesh.data.count == 1
    if parallel == "fsdp" and not alone:
        for layer in blocks(module):
            fully_shard(layer, mesh=among)
        fully_shard(module, mesh=among)
    if not has_weights:
        draw_weights(model, seed, device())
    return module if alone or parallel == "fsdp" else DistributedDataParallel(module)


def check_tokens(model: Any, mesh: Mesh) -> None:
    """Refuse a model that has no tokens to spread, or too few for FSDP2, which fails on a process
    without any."""
    assert mesh.tensor is not None
    count = mesh.tensor.count
    tokens = [layer.num_tokens for layer in model.modules() if isinstance(layer, Pattention)]
    if not tokens:
        raise ValueError(
            f"tensor_parallel={count} spreads parameter tokens; {type(model).__name__} has none, "
            "so it must be 1"
        )
    fewest = min(tokens)
    if mesh.data.count > 1 and -(-fewest // count) * (count - 1) >= fewest:
        raise ValueError(
            f"tensor_parallel={count} leaves a process without any of the {fewest} tokens of a "
            "layer; choose less"
        )


def blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated layers, each a unit of sharding."""
    model: Any = module
    return list(model.model.model.layers)


def hold_gradients(module: nn.Module, hold: bool) -> Any:
    """A context for forward and backward of a micro-batch that is not the step's last."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(not hold)
        return nullcontext()
    if isinstance(module, DistributedDataParallel) and hold:
        return module.no_sync()
    return nullcontext()


def gather_anew(module: nn.Module) -> None:
    """To be called when weights were changed in place: FSDP2 leaves those of the outermost module
    gathered after an evaluation, and would go on with them."""
    if isinstance(module, FSDPModule):
        module.reshard()


def total(value: float, ranks: Ranks) -> float:
    """The sum over some ranks, the same on each."""
    if ranks.count == 1:
        return value
    box = torch.tensor(value, dtype=torch.float64, device=device())
    dist.all_reduce(box, group=ranks.group)
    return box.item()


def largest(value: int) -> int:
    """The largest over all ranks, the same on each."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box = torch.tensor(value)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return int(box.item())
