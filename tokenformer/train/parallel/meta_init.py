"""Initialize a model that was built on the meta device, where it takes no memory.

The parameters of each module are initialized whole on the CPU, from a generator seeded by the run's
seed and the module's name, and each rank keeps its shard. So no rank holds the whole model, and the
weights are the same on any number of ranks and on any device. Buffers are whole on every rank.
"""

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tokenformer.models.seeds import named_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def init_weights(model: "PreTrainedModel", seed: int, device: torch.device) -> None:
    """Give a model on the meta device, sharded or not, its initial weights for `seed`."""
    done: dict[int, nn.Parameter] = {}  # by id of the meta parameter, so that tied ones stay tied
    with torch.random.fork_rng(devices=[]):
        for name, module in model.named_modules():
            own = {n: p for n, p in module._parameters.items() if p is not None}
            buffers = {n: b for n, b in module._buffers.items() if b is not None}
            if buffers or any(id(p) not in done for p in own.values()):
                torch.manual_seed(named_seed(seed, name))
                whole = init_module(model, module, own | buffers)
                for n, p in own.items():
                    done.setdefault(id(p), shard_parameter(whole[n], p, device))
                for n in buffers:  # every rank holds them whole
                    module._buffers[n] = whole[n].to(device)
            for n, p in own.items():
                module._parameters[n] = done[id(p)]


def init_module(
    model: "PreTrainedModel", module: nn.Module, own: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the whole parameters and buffers of one module, initialized by the model's own
    rule, which must cover all of them."""
    alone = copy.copy(module)
    alone._parameters, alone._buffers = dict(module._parameters), dict(module._buffers)
    for name, tensor in own.items():
        whole = torch.full(tensor.shape, torch.nan, dtype=tensor.dtype)
        if name in alone._parameters:
            alone._parameters[name] = nn.Parameter(whole)
        else:
            alone._buffers[name] = whole
    model._init_weights(alone)
    return {name: getattr(alone, name).detach() for name in own}


def shard_parameter(whole: Tensor, parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return this rank's shard of a whole tensor, sharded like `parameter`."""
    value = whole.detach().to(device)
    if isinstance(parameter, DTensor):
        value = shard_like(value, parameter)
    return nn.Parameter(value, requires_grad=parameter.requires_grad)


def shard_like(whole: Tensor, sharded: DTensor) -> DTensor:
    """Shard a tensor that every rank holds whole, without communication."""
    return distribute_tensor(whole, sharded.device_mesh, sharded.placements, src_data_rank=None)
