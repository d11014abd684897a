"""Pattention by plain products, with the least kept for the backward pass: the scores.

Products go over many rows at a time, the passes between them over few, in memory that is reused;
what the passes make of the scores is made again in the backward pass.
"""

import torch
from torch import Tensor

from tokenformer.ops.rules import RULES, Grads, Kept, Pass, Scale, cached_rows, product
from tokenformer.ops.theta import accumulation_dtype

BLOCK_ROWS = 1024
"""Of a product. Fewer make it slower, more would need more memory for the passes between."""
MANY_TOKENS = 6144
"""Of which half as many rows are as fast: that memory is new, and costs more than it gives."""


class Direct:
    """One theta."""

    def __init__(self, theta: str, scale: Scale, approximate: str, eps: float) -> None:
        self.rule = RULES[theta](scale, approximate, eps)

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, *, keep: bool = True
    ) -> tuple[Tensor, Kept]:
        """Rows [R, d_in] -> [R, d_out]; kept are the scores [R, n] and their statistics [R, k]."""
        rows, tokens, wide = x.shape[0], keys.shape[0], accumulation_dtype(x.dtype)
        out = x.new_empty(rows, values.shape[1])
        scores = x.new_empty(rows if keep else 0, tokens)
        stats = x.new_empty(rows, self.rule.numbers, dtype=wide)
        weights = x.new_empty(largest(x, keys), tokens, dtype=wide)
        for part in blocks(x, keys):
            found, some = x[part], weights[: len(x[part])]
            if keep:
                block = torch.mm(found, keys.T, out=scores[part]).to(wide)
            else:
                block = product(found, keys.T, some)
            for few in cached_rows(block):
                numbers = self.rule.weigh(block[few], some[few])
                torch.cat(numbers, dim=1, out=stats[part][few])
            torch.mm(some.to(x.dtype), values, out=out[part])
        return out, (scores, stats)

    def backward(self, grad: Tensor, x: Tensor, keys: Tensor, values: Tensor, kept: Kept) -> Grads:
        scores, stats = kept
        dx, dkeys, dvalues = (torch.empty_like(tensor) for tensor in (x, keys, values))
        dscale = stats.new_zeros(())
        room = [stats.new_empty(largest(x, keys), keys.shape[0]) for _ in range(2)]
        for part in blocks(x, keys):
            block = scores[part].to(stats.dtype)
            weights, dblock = (matrix[: len(block)] for matrix in room)
            product(grad[part], values.T, dblock)
            some = cached_rows(block)
            work = torch.empty_like(block[some[0]])
            for few in some:
                numbers = stats[part][few].split(1, dim=1)
                spare = work[: len(block[few])]
                over = Pass(block[few], dblock[few], weights[few], spare, numbers)
                dscale += self.rule.backward(over).sum()
            dscores = dblock.to(x.dtype)
            torch.mm(dscores, keys, out=dx[part])
            # Into memory that is not made zero first: it would be gone through once more.
            beta = 0 if part.start == 0 else 1
            torch.addmm(dkeys, dscores.T, x[part], beta=beta, out=dkeys)
            torch.addmm(dvalues, weights.to(x.dtype).T, grad[part], beta=beta, out=dvalues)
        if not len(x):
            dkeys.zero_()
            dvalues.zero_()
        return dx, dkeys, dvalues, dscale


def largest(x: Tensor, keys: Tensor) -> int:
    return max((part.stop - part.start for part in blocks(x, keys)), default=0)


def blocks(x: Tensor, keys: Tensor) -> list[slice]:
    """Of rows. All at once on a device that hides its memory's latency, and where sums over blocks
    would be rounded to half precision each time."""
    rows = x.shape[0]
    step = BLOCK_ROWS if keys.shape[0] <= MANY_TOKENS else BLOCK_ROWS // 2
    if x.device.type != "cpu" or x.dtype.itemsize < 4:
        step = max(1, rows)
    return [slice(start, min(rows, start + step)) for start in range(0, rows, step)]
