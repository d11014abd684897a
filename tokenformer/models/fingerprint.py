"""A short hash of a model's weights, to recognize the model that an adapter was trained on."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return a hash of named weights, rounded to bfloat16 so that a model and its copy in bfloat16
    agree; None if one has no data yet."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        if tensor.is_meta:
            return None
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        rounded = tensor.detach().to("cpu", torch.bfloat16).contiguous()
        digest.update(rounded.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
