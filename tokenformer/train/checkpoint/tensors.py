"""The tensors of a model by name, under any wrapper (DDP, FSDP2, torch.compile), ready to store."""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tokenformer.errors import CheckpointError

T = TypeVar("T", bound=Tensor)

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DDP and torch.compile."""
    inner: Any = model
    while isinstance(inner, DistributedDataParallel) or hasattr(inner, "_orig_mod"):
        inner = inner.module if isinstance(inner, DistributedDataParallel) else inner._orig_mod
    return inner


def plain_name(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers, without copying; tied ones once."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in unwrap(model).state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"model state {plain_name(name)} is {tensor!r:.60}, not a tensor")
        if tensor.is_meta:
            raise CheckpointError(f"model.{plain_name(name)} is on the meta device, without data")
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[f"model.{plain_name(name)}"] = tensor.detach()
    return found


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of a tensor whose local shard holds a NaN or an infinity, or None."""
    for name, tensor in tensors.items():
        part = local(tensor).detach()
        # A NaN or infinity shows in the sum; only a sum that overflows needs the second check.
        if (
            part.is_floating_point()
            and not part.sum(dtype=wide(part)).isfinite()
            and not part.isfinite().all()
        ):
            return name
    return None


def wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def storable(tensors: Mapping[str, Tensor], *, copy: bool) -> dict[str, Tensor]:
    """Return the tensors as safetensors needs them: contiguous and without shared memory. `copy`
    makes a snapshot in CPU memory."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        if copy:
            tensor = tensor.to("cpu", copy=True)
        part = local(tensor)
        if not part.is_contiguous() or part.untyped_storage().data_ptr() in seen:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        seen.add(part.untyped_storage().data_ptr())
        found[name] = tensor
    return found
