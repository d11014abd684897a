"""The process group of a run, and DDP, FSDP2 and tensor parallelism applied to its model.

Model code is single-device code. `distribute` wraps the task's module with DDP or FSDP2 and may
shard the tokens of every layer.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tokenformer.layers.pattention import Pattention
from tokenformer.models.loading import device
from tokenformer.models.token_parallel import shard_tokens
from tokenformer.train.parallel.mesh import Mesh
from tokenformer.train.parallel.meta_init import init_weights
from tokenformer.train.parallel.ranks import Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def process_group() -> Iterator[Ranks]:
    """Join the process group that torchrun describes in the environment, if any. Within another
    such block, use its group."""
    if "RANK" not in os.environ or dist.is_initialized():
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


def distribute(
    model: "PreTrainedModel", module: nn.Module, parallel: str, seed: int, mesh: Mesh
) -> nn.Module:
    """Return `module`, which contains `model`, on this rank's device: replicated or sharded over
    the data ranks, its tokens sharded over the tensor ranks. A model on the meta device gets its
    initial weights from `seed`."""
    has_weights = not any(parameter.is_meta for parameter in model.parameters())
    if has_weights:
        model.to(device())
    devices = None  # all ranks
    if mesh.devices is not None:
        check_tokens(model, mesh.devices["tp"].size(), mesh.data.count)
        shard_tokens(model, mesh.devices["tp"])
        parallel, devices = "fsdp", mesh.devices["data"]  # DDP does not support DTensors
    alone = mesh.data.count == 1
    if parallel == "fsdp" and not alone:
        for layer in blocks(module):
            fully_shard(layer, mesh=devices)
        fully_shard(module, mesh=devices)
    if not has_weights:
        init_weights(model, seed, device())
    return module if alone or parallel == "fsdp" else DistributedDataParallel(module)


def check_tokens(model: nn.Module, count: int, data_ranks: int) -> None:
    """Raise if the model has no tokens to shard over `count` ranks, or too few for FSDP2, which
    fails on a rank without any."""
    tokens = [layer.num_tokens for layer in model.modules() if isinstance(layer, Pattention)]
    if not tokens:
        raise ValueError(
            f"tensor_parallel={count} shards parameter tokens, but {type(model).__name__} has "
            "none; set it to 1"
        )
    fewest = min(tokens)
    if data_ranks > 1 and -(-fewest // count) * (count - 1) >= fewest:
        raise ValueError(
            f"tensor_parallel={count} leaves a process without any of the {fewest} tokens of a "
            "layer; choose a smaller number"
        )


def blocks(module: nn.Module) -> list[nn.Module]:
    """Return the repeated layers; FSDP2 shards each as a unit."""
    model: Any = module
    return list(model.model.model.layers)


def gradient_sync(module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
    """Return a context for forward and backward of a micro-batch; gradients are exchanged between
    the ranks only if `enabled`, at the last micro-batch of a step."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(enabled)
        return nullcontext()
    if isinstance(module, DistributedDataParallel) and not enabled:
        return module.no_sync()
    return nullcontext()


def reshard(module: nn.Module) -> None:
    """Drop gathered weights after the shards were changed in place. FSDP2 keeps those of the
    outermost module gathered after an evaluation and would use them again."""
    if isinstance(module, FSDPModule):
        module.reshard()


def sum_over_ranks(value: float, ranks: Ranks) -> float:
    """Return the sum over `ranks`, the same on each."""
    if ranks.count == 1:
        return value
    box = torch.tensor(value, dtype=torch.float64, device=device())
    dist.all_reduce(box, group=ranks.group)
    return box.item()


def max_over_ranks(value: int) -> int:
    """Return the maximum over all ranks, the same on each."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box = torch.tensor(value)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return int(box.item())
