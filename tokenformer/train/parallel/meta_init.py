"""First weights of a model that was built on the meta device, where it takes no memory.

Each module's are drawn whole, on the CPU, from a generator seeded by the run's seed and the
module's name, and each process keeps its part. So a model too large for one process can be made,
and its weights are the same on any number of processes and on any device.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tokenformer.models.seeds import named_seed


@torch.no_grad()
def draw_weights(model: Any, seed: int, device: torch.device) -> None:
    """Give `model`, a PreTrainedModel on the meta device, sharded or not, the weights of `seed`."""
    drawn: dict[int, nn.Parameter] = {}  # by the parameter they replace, so that tied ones stay so
    with torch.random.fork_rng(devices=[]):
        for name, module in model.named_modules():
            own = {n: p for n, p in module._parameters.items() if p is not None}
            if any(id(p) not in drawn for p in own.values()):
                torch.manual_seed(named_seed(seed, name))
                whole = draw(model, module, own)
                for n, p in own.items():
                    drawn.setdefault(id(p), parted(whole[n], p, device))
            for n, p in own.items():
                module._parameters[n] = drawn[id(p)]
    strange = [name for name, _ in model.named_buffers()]
    assert not strange, f"buffers on the meta device have lost their values: {strange}"


def draw(model: Any, module: nn.Module, own: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """The whole parameters of one module, by the model's own rule."""
    alone = copy.copy(module)
    alone._parameters = dict(module._parameters)
    for name, parameter in own.items():
        alone._parameters[name] = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype))
    model._init_weights(alone)
    return {name: alone._parameters[name] for name in own}  # type: ignore[misc]


def parted(whole: Tensor, parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """A process's part of a whole tensor, spread as `parameter` is."""
    value = whole.detach().to(device)
    if isinstance(parameter, DTensor):
        value = part_of(value, parameter)
    return nn.Parameter(value, requires_grad=parameter.requires_grad)


def part_of(whole: Tensor, sharded: DTensor) -> DTensor:
    """A tensor that every process has whole, spread as `sharded` is; nothing needs to be sent."""
    return distribute_tensor(whole, sharded.device_mesh, sharded.placements, src_data_rank=None)
