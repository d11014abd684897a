"""Pattention with `l2_gelu` in one native call forward and one backward, for training on a CPU.

`direct` uses it where it can. In a narrow model torch's passes between the products, and starting
and stopping threads for each of them, take as long as the products themselves. Up to three layers
of the same input, q, k and v, are computed in one call.
"""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tokenformer.ops.backends.derivatives import rows_per_product
from tokenformer.ops.backends.interface import Saved
from tokenformer.ops.backends.native.library import MAX_GROUPS, FusedLayers, function, library
from tokenformer.ops.theta import ThetaOptions

BLOCK_ROWS = 256
"""Rows of a thread between two products. With fewer the products are slower, with more the scores
of a block leave the cache."""
FLOPS_PER_THREAD = 1 << 21
"""Work of each thread at least; starting a thread for less costs more than it saves."""


class TokenGroup(NamedTuple):
    """The tokens of one layer and how their scores become weights."""

    keys: Tensor  # [n, d_in]
    values: Tensor  # [n, d_out]
    options: ThetaOptions


class GroupGradients(NamedTuple):
    keys: Tensor
    values: Tensor
    scale: Tensor


def supports(x: Tensor, *groups: TokenGroup) -> bool:
    """Whether native code can take these layers: `l2_gelu`, fp32 on a CPU."""
    return (
        x.is_cpu
        and x.dtype is torch.float32
        and all(map(is_supported, groups))
        and len(groups) <= MAX_GROUPS
        and gemm() is not None
    )


def is_supported(group: TokenGroup) -> bool:
    keys, values, options = group
    return (
        options.theta == "l2_gelu"
        and keys.dtype is values.dtype is torch.float32
        and keys.is_contiguous()
        and values.is_contiguous()
    )


def forward(x: Tensor, groups: Sequence[TokenGroup], *, save: bool) -> tuple[list[Tensor], Saved]:
    """Rows x [R, d_in] -> [R, d_out] of each layer. Saves the scores [R, n] of all layers and the
    factor and norm of each row and layer, [R, 2 * layers]."""
    x, rows = x.contiguous(), x.shape[0]
    keys = joined([group.keys for group in groups])
    tokens = keys.shape[0]
    outs = [x.new_empty(rows, group.values.shape[1]) for group in groups]
    scores, stats = x.new_empty(rows if save else 0, tokens), x.new_empty(rows, 2 * len(groups))
    layers = make_layers(x, keys, groups, scores if save else None, stats)
    for place, out in zip(layers.groups, outs, strict=False):
        place.out = out.data_ptr()
    scratch = x.new_empty(layers.threads * layers.block_rows, tokens)
    function("fused_forward")(ctypes.addressof(layers), scratch.data_ptr())
    return outs, (scores, stats)


def backward(
    grads: Sequence[Tensor], x: Tensor, groups: Sequence[TokenGroup], saved: Saved
) -> tuple[Tensor, list[GroupGradients]]:
    """The gradients of x, and of the keys, values and scale of each layer."""
    x, (scores, stats) = x.contiguous(), saved
    rows, count = x.shape[0], len(groups)
    keys = joined([group.keys for group in groups])
    dx, dkeys = torch.empty_like(x), torch.empty_like(keys)
    dvalues = [torch.empty_like(group.values) for group in groups]
    sums = x.new_empty(rows, count)
    if rows:
        layers = make_layers(x, keys, groups, scores, stats)
        for place, grad, dvalue in zip(layers.groups, grads, dvalues, strict=False):
            place.grad, place.dvalues = grad.data_ptr(), dvalue.data_ptr()
        product_rows = min(rows, rows_per_product(keys.shape[0]))
        scratch = x.new_empty(2 * product_rows, keys.shape[0])
        function("fused_backward")(
            ctypes.addressof(layers),
            product_rows,
            scratch.data_ptr(),
            scratch[product_rows:].data_ptr(),
            dx.data_ptr(),
            dkeys.data_ptr(),
            sums.data_ptr(),
        )
    else:
        for gradient in (dkeys, *dvalues):
            gradient.zero_()
    parts = [dkeys] if count == 1 else dkeys.split([len(group.keys) for group in groups])
    found = []
    for g, (group, dkey, dvalue) in enumerate(zip(groups, parts, dvalues, strict=True)):
        scale = group.options.scale
        if isinstance(scale, Tensor):  # d f / d s = f / 2 s
            dscale = torch.dot(sums[:, g], stats[:, 2 * g]) * (0.5 / float(scale))
        else:
            dscale = NO_GRADIENT
        found.append(GroupGradients(dkey, dvalue, dscale))
    return dx, found


NO_GRADIENT = torch.zeros((), device="cpu")
"""Of a scale that is a number."""


def joined(keys: list[Tensor]) -> Tensor:
    return keys[0] if len(keys) == 1 else torch.cat([part.detach() for part in keys])


def make_layers(
    x: Tensor, keys: Tensor, groups: Sequence[TokenGroup], scores: Tensor | None, stats: Tensor
) -> FusedLayers:
    (rows, d_in), tokens = x.shape, keys.shape[0]
    flops = 4 * rows * tokens * d_in
    threads = max(1, min(torch.get_num_threads(), flops // FLOPS_PER_THREAD))
    layers = FusedLayers(
        gemm(),
        x.data_ptr(),
        keys.data_ptr(),
        None if scores is None else scores.data_ptr(),
        stats.data_ptr(),
        rows,
        d_in,
        tokens,
        min(BLOCK_ROWS, -(-rows // threads) + 7),
        len(groups),
        threads,
    )
    for place, (_, values, options) in zip(layers.groups, groups, strict=False):
        place.values = values.data_ptr()
        place.n, place.d_out = values.shape
        place.root, place.eps = float(options.scale) ** 0.5, options.eps
        place.is_tanh = options.approximate == "tanh"
    return layers


@functools.cache
def gemm() -> int | None:
    """Return the address of the fp32 matrix product of torch's BLAS; None if there is none, or no
    library with OpenMP to call it from."""
    loaded = library()
    if loaded is None or not loaded.has_openmp():
        return None
    folder = Path(torch.__file__).parent / "lib"
    for file in sorted(folder.glob("libtorch_cpu.*")):
        try:  # also finds the symbols of libraries that this one depends on
            return ctypes.cast(ctypes.CDLL(str(file)).sgemm_, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None
