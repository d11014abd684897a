"""What can be read off the weights: words that a value promotes, and tokens that are alike.

The logit lens: a value token of a layer that writes to the residual stream, through the final
norm's weight and centering, times the output head, is what it adds to each logit (up to the norm's
scale, which depends on the input).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_ENTRIES = 1 << 24
"""Entries of a matrix in memory at once."""


class Ranked(NamedTuple):
    """The first few of a ranking for every token."""

    ids: Tensor  # [n, k], int64
    scores: Tensor  # [n, k], float32, best first


def promoted_and_suppressed(values: Tensor, head: Tensor, count: int) -> tuple[Ranked, Ranked]:
    """Return the logits that each value [n, d] raises and lowers most, by the rows of
    `score_map.lens_rows`, [logits, d]."""
    count = min(count, len(head))
    up, down = [], []
    for chunk in values.to(head.dtype).split(max(1, MAX_ENTRIES // len(head))):
        logits = chunk @ head.T
        up.append(logits.topk(count))
        down.append(logits.topk(count, largest=False))
    return ranked(up), ranked(down)


def nearest(rows: Tensor, count: int) -> Ranked:
    """Return the other rows [n, d] with the largest cosine similarity; -1 where there is none."""
    unit = F.normalize(rows, dim=1)  # zero rows stay zero
    count = min(count, len(rows) - 1)
    found, start = [], 0
    for chunk in unit.split(max(1, MAX_ENTRIES // len(rows))):
        similarity = chunk @ unit.T
        own = torch.arange(len(chunk), device=rows.device)
        similarity[own, start + own] = -torch.inf
        found.append(similarity.topk(count))
        start += len(chunk)
    return ranked(found)


def ranked(parts: list[torch.return_types.topk]) -> Ranked:
    return Ranked(
        torch.cat([part.indices for part in parts]).cpu(),
        torch.cat([part.values for part in parts]).cpu().float(),
    )
