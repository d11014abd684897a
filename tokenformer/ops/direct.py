"""Pattention by plain products, with the least kept for the backward pass: the scores.

The passes over the scores go block by block of rows, so that they find them in the cache; what they
make of them is made again in the backward pass. The released code keeps five matrices of the
scores' size, this one.
"""

import torch
from torch import Tensor

from tokenformer.ops.rules import RULES, Grads, Kept, Scale
from tokenformer.ops.theta import accumulation_dtype

BLOCK_BYTES = 4 << 20
"""Of a block of scores."""
FEWEST_ROWS = 256
"""Fewer make slow products."""


class Direct:
    """One theta."""

    def __init__(self, theta: str, scale: Scale, approximate: str, eps: float) -> None:
        self.rule = RULES[theta](scale, approximate, eps)

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, *, keep: bool = True
    ) -> tuple[Tensor, Kept]:
        """Rows [R, d_in] -> [R, d_out]; kept are the scores [R, n] and their statistics [R, k]."""
        wide = accumulation_dtype(x.dtype)
        out = x.new_empty(x.shape[0], values.shape[1])
        scores = x.new_empty(x.shape[0] if keep else 0, keys.shape[0])
        kept = []
        for part in blocks(x, keys.shape[0]):
            found = scores[part] if keep else x.new_empty(len(x[part]), keys.shape[0])
            block = torch.mm(x[part], keys.T, out=found).to(wide)
            stats = self.rule.stats(block)
            torch.mm(self.rule.weights(block, stats).to(x.dtype), values, out=out[part])
            kept.append(torch.cat(stats, dim=1))
        return out, (scores, torch.cat(kept) if kept else x.new_zeros(0, 2, dtype=wide))

    def backward(self, grad: Tensor, x: Tensor, keys: Tensor, values: Tensor, kept: Kept) -> Grads:
        scores, stats = kept
        dx, dkeys, dvalues = torch.empty_like(x), torch.zeros_like(keys), torch.zeros_like(values)
        dscale = stats.new_zeros(())
        for part in blocks(x, keys.shape[0]):
            block, numbers = scores[part].to(stats.dtype), stats[part].split(1, dim=1)
            dvalues.addmm_(self.rule.weights(block, numbers).to(x.dtype).T, grad[part])
            dweights = torch.mm(grad[part], values.T).to(stats.dtype)
            dblock, along = self.rule.backward(block, dweights, numbers)
            dblock = dblock.to(x.dtype)
            torch.mm(dblock, keys, out=dx[part])
            dkeys.addmm_(dblock.T, x[part])
            dscale += along.sum()
        return dx, dkeys, dvalues, dscale


def blocks(x: Tensor, tokens: int) -> list[slice]:
    """Of rows. All at once on a device that hides its memory's latency, and where sums over blocks
    would be rounded to half precision each time."""
    rows = x.shape[0]
    if x.device.type != "cpu" or x.dtype.itemsize < 4:
        return [slice(0, rows)] if rows else []
    step = max(FEWEST_ROWS, BLOCK_BYTES // (tokens * x.dtype.itemsize))
    return [slice(start, min(rows, start + step)) for start in range(0, rows, step)]
