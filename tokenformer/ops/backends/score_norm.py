"""The norm of all scores of a row, without the scores: ||x K^T||^2 = x^T G x, G = K^T K.

    norms = score_norms(x, keys)        # [R, d], [n, d] -> [R, 1]

G costs n d^2 once per call, and d^2 a row. It is used as its Cholesky factor, that of
`streamed.gram_root`. Where there is none, with float64 inputs, and with fewer rows than channels,
the norms come from a pass over the scores; where the keys stay the same, from `exact_gram_root`.
Both directions are registered operators, so torch.compile does not look inside.
"""

from typing import Any

import torch
from torch import Tensor

from tokenformer.ops.backends.autograd import no_autocast
from tokenformer.ops.backends.derivatives import add_product, product
from tokenformer.ops.backends.streamed import Chunks, gram_root, known
from tokenformer.ops.theta import accumulation_dtype, zero_is_infinite

PACKED_ROWS = 64
"""As in `native/routed.h`."""


def score_norms(x: Tensor, keys: Tensor, root: Tensor | None = None) -> Tensor:
    """Return the norms [R, 1] in fp32 or wider. With `root`, that is `exact_gram_root(keys)`, no
    gradient reaches the keys."""
    if root is not None:
        return norms_from(x, root)
    norms: Tensor = registered_norms(x, keys)[0]
    return norms


def exact_gram_root(keys: Tensor) -> Tensor:
    """Return an upper matrix R [min(n, d), d] with R^T R = K^T K, also where `gram_root` finds
    none."""
    if keys.is_meta:
        return keys.new_empty(min(keys.shape), keys.shape[1], dtype=accumulation_dtype(keys.dtype))
    root = gram_root(keys)
    if known(root):
        return root
    return torch.linalg.qr(keys.double(), mode="r").R.to(root.dtype).contiguous()


def pack_upper(root: Tensor) -> Tensor:
    """Return the numbers of an upper matrix row by row, without the zeros left of its diagonal
    blocks, so that they are read in one stream."""
    return torch.cat([part.flatten() for part in upper_parts(root)])


def unpack_upper(packed: Tensor, rows: int, width: int) -> Tensor:
    """The inverse of `pack_upper`, [rows, width]."""
    root = packed.new_zeros(rows, width)
    parts = upper_parts(root)
    for part, numbers in zip(parts, packed.split([part.numel() for part in parts]), strict=True):
        part.copy_(numbers.view_as(part))
    return root


def upper_parts(root: Tensor) -> list[Tensor]:
    blocks = enumerate(root.split(PACKED_ROWS))
    return [some[:, block * PACKED_ROWS :] for block, some in blocks]


def norms_from(x: Tensor, root: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.to(root.dtype) @ root.T, dim=1, keepdim=True)


def norms_of_scores(x: Tensor, keys: Tensor) -> Tensor:
    squares = x.new_zeros(x.shape[0], 1, dtype=accumulation_dtype(x.dtype))
    for _, some_keys, _, (scores,) in Chunks(x, keys, keys, 1):
        product(x, some_keys.T, scores)
        squares += torch.linalg.vector_norm(scores, dim=1, keepdim=True) ** 2
    return squares.sqrt_()


def uses_gram(x: Tensor) -> bool:
    return x.dtype != torch.float64 and x.shape[0] >= x.shape[1]


@torch.library.custom_op("tokenformer::score_norms", mutates_args=())
def registered_norms(x: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norms and the factor of the Gram matrix, empty if it was not used."""
    with no_autocast(x):
        root = (
            gram_root(keys)
            if uses_gram(x)
            else x.new_empty(0, 0, dtype=accumulation_dtype(x.dtype))
        )
        return norms_from(x, root) if known(root) else norms_of_scores(x, keys), root


@registered_norms.register_fake
def _(x: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    wide = accumulation_dtype(x.dtype)
    width = x.shape[1] if uses_gram(x) else 0
    return x.new_empty(x.shape[0], 1, dtype=wide), x.new_empty(width, width, dtype=wide)


@torch.library.custom_op("tokenformer::score_norms_backward", mutates_args=())
def registered_backward(
    grad: Tensor, x: Tensor, keys: Tensor, norms: Tensor, root: Tensor
) -> tuple[Tensor, Tensor]:
    """d||A|| = (x G dx + x K^T dK x^T) / ||A||."""
    with no_autocast(x):
        wide = norms.dtype
        share = grad / zero_is_infinite(norms)  # [R, 1]
        if known(root):
            slope = x.to(wide) @ root.T @ root
        else:
            slope = x.new_zeros(x.shape, dtype=wide)
            for _, some_keys, _, (scores,) in Chunks(x, keys, keys, 1):
                product(x, some_keys.T, scores)
                add_product(slope, scores, some_keys)
        moment = x.T @ (share * x).to(x.dtype)  # [d, d]
        return (share * slope).to(x.dtype), keys @ moment


@registered_backward.register_fake
def _(grad: Tensor, x: Tensor, keys: Tensor, norms: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(keys)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, Tensor | None]:
    if grad is None:
        return None, None
    dx, dkeys = registered_backward(grad, *ctx.saved_tensors)
    return dx, dkeys


registered_norms.register_autograd(_backward, setup_context=_save)
