"""The ranks of a run as a mesh of two dimensions, `data` and `tp` (tensor parallel).

Ranks along `data` process different slices of the batch. Ranks along `tp` process the same samples,
each with a slice of every layer's tokens.
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

# A gradient norm over both dimensions takes two all-reduces; torch warns that it could be one.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


@dataclass(frozen=True)
class Mesh:
    data: Ranks
    tensor: Ranks | None = None
    """None without tensor parallelism; `data` then holds all ranks."""
    devices: DeviceMesh | None = None

    def share_generators(self) -> None:
        """Copy the random number generators of the first tensor rank to the others, which must
        sample the same numbers, as for drop path. A checkpoint of fewer ranks does not restore the
        generators of all."""
        if self.tensor is not None:
            rng.restore(self.tensor.share(rng.states()))


def make_mesh(tensor_parallel: int, kind: str) -> Mesh:
    """Return the mesh of all ranks on devices of type `kind`, `tensor_parallel` of them along `tp`.
    Collective."""
    ranks = Ranks()
    data = count_data_ranks(ranks.count, tensor_parallel)
    if tensor_parallel == 1:
        return Mesh(ranks)
    devices = make_devices(dist.group.WORLD, data, kind)
    return Mesh(Ranks(devices.get_group("data")), Ranks(devices.get_group("tp")), devices)


def count_data_ranks(processes: int, tensor_parallel: int) -> int:
    """Return the number of processes, or of groups that share tokens, that split the batch."""
    if processes % tensor_parallel:
        raise ValueError(
            f"tensor_parallel={tensor_parallel} must divide the number of processes, which is "
            f"{processes}"
        )
    return processes // tensor_parallel


def check_batch_size(batch_size: int, data_ranks: int) -> None:
    if batch_size % data_ranks:
        raise ValueError(
            f"batch_size={batch_size} must be a multiple of the {data_ranks} processes that "
            "share it"
        )


@cache
def make_devices(world: Any, data: int, kind: str) -> DeviceMesh:
    """Return the device mesh; made once per process group `world` and reused by later stages."""
    shape = (data, dist.get_world_size(world) // data)
    return init_device_mesh(kind, shape, mesh_dim_names=("data", "tp"))


def mesh_of(tensor: Tensor) -> Any:
    """Return the device mesh that a tensor is sharded over; None if it is not."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def group_by_mesh(tensors: Iterable[T]) -> list[list[T]]:
    """Group tensors by device mesh: torch's foreach operations cannot mix meshes."""
    groups: dict[Any, list[T]] = {}
    for tensor in tensors:
        groups.setdefault(mesh_of(tensor), []).append(tensor)
    return [*groups.values()]
