"""The processes of a run as a grid: one dimension shares the batch, the other the tokens.

Processes that differ only in their place along `tp` see the same samples and have a slice of every
layer's tokens each; those that differ along `data` have slices of the batch.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tokenformer.train import rng
from tokenformer.train.parallel.ranks import Ranks

T = TypeVar("T", bound=Tensor)

# A gradient norm over both dimensions takes two sums; torch warns that it could be one.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


@dataclass(frozen=True)
class Mesh:
    data: Ranks
    tensor: Ranks | None = None
    """None where no tokens are spread; `data` is then everyone."""
    devices: DeviceMesh | None = None

    def share_generators(self) -> None:
        """Have those that share tokens draw the same random numbers, as for drop path; loading what
        fewer processes saved leaves the generators of some as they were."""
        if self.tensor is not None:
            rng.restore(self.tensor.share(rng.states()))


def make_mesh(tensor_parallel: int, kind: str) -> Mesh:
    """The grid of all processes, `tensor_parallel` of which share the tokens, on devices of a kind.
    Collective."""
    everyone = Ranks()
    if everyone.count % tensor_parallel:
        raise ValueError(
            f"tensor_parallel={tensor_parallel} must divide the number of processes, which is "
            f"{everyone.count}"
        )
    if tensor_parallel == 1:
        return Mesh(everyone)
    devices = make_devices(dist.group.WORLD, everyone.count // tensor_parallel, kind)
    return Mesh(Ranks(devices.get_group("data")), Ranks(devices.get_group("tp")), devices)


@cache
def make_devices(world: Any, data: int, kind: str) -> DeviceMesh:
    """Once in the life of the process group `world`: stages and rollbacks come back to it."""
    shape = (data, dist.get_world_size(world) // data)
    return init_device_mesh(kind, shape, mesh_dim_names=("data", "tp"))


def mesh_of(tensor: Tensor) -> Any:
    """What a tensor is spread over; None if this process has it whole."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def by_mesh(tensors: Iterable[T]) -> list[list[T]]:
    """Tensors in lists as torch's operations on lists take them: none mixes two meshes."""
    found: dict[Any, list[T]] = {}
    for tensor in tensors:
        found.setdefault(mesh_of(tensor), []).append(tensor)
    return [*found.values()]
