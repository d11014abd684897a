"""How often, how strongly and where each token of one layer fires: sums over a stream of inputs.

A token fires at a position where its weight is at least a threshold. Memory does not grow with the
number of inputs: every token has a histogram and its few strongest contexts, at most one per
sample.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tokenformer.growth.tokens.token_usage import MASSES, MAX_SCORES
from tokenformer.layers.pattention import Pattention

LOW, WIDTH, BINS = -0.25, 0.25, 24
"""Weights are counted in bins of this width from LOW on; the last bin has all that are larger. With
a scale equal to the token count, the mean square of the normalized scores is 1."""


@dataclass
class FiringSums:
    """Sums over the positions that a layer has seen."""

    fired: Tensor  # [n], int64
    weights: Tensor  # [n], float64: sums of the weights,
    magnitudes: Tensor  # [n], of |weight|,
    squares: Tensor  # [n], of weight^2,
    shares: Tensor  # [n], and of the token's share of the norm (`growth.tokens.token_usage`)
    largest: Tensor  # [n], float32
    histogram: Tensor  # [n, BINS], int64
    top_weights: Tensor  # [n, K], float32, descending; -inf where there is none yet
    top_samples: Tensor  # [n, K], int64
    top_positions: Tensor  # [n, K], int64

    @classmethod
    def zeros(cls, tokens: int, contexts: int) -> "FiringSums":
        def sums() -> Tensor:
            return torch.zeros(tokens, dtype=torch.float64)

        return cls(
            torch.zeros(tokens, dtype=torch.int64),
            sums(),
            sums(),
            sums(),
            sums(),
            torch.full((tokens,), -torch.inf),
            torch.zeros(tokens, BINS, dtype=torch.int64),
            torch.full((tokens, contexts), -torch.inf),
            torch.full((tokens, contexts), -1, dtype=torch.int64),
            torch.full((tokens, contexts), -1, dtype=torch.int64),
        )

    def tensors(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


class LayerFiring:
    """Adds the inputs of one layer to its sums."""

    def __init__(self, layer: Pattention, threshold: float, sums: FiringSums) -> None:
        self.layer, self.threshold, self.sums = layer, threshold, sums

    def add(self, x: Tensor, first_sample: int) -> None:
        """Add inputs [B, T, d], the samples from `first_sample` on."""
        for start, part in sample_chunks(x, self.layer.num_tokens):
            best: tuple[Tensor, Tensor] | None = None
            for offset, rows in part:  # positions from `offset` on
                weights = self.count(rows)  # [b, t, n]
                found = weights.max(1)
                values, positions = found.values.float(), found.indices + offset
                if best is not None:
                    better = values > best[0]  # the first of equals
                    values = torch.where(better, values, best[0])
                    positions = torch.where(better, positions, best[1])
                best = values, positions
            if best is not None:
                self.keep(*best, first_sample + start)

    def count(self, x: Tensor) -> Tensor:
        """Add positions to the sums and return the weights [b, t, n]."""
        layer, sums = self.layer, self.sums
        scores, ungated, weights = layer.token_weights(x)
        rows = weights.flatten(0, 1)  # [R, n]
        mass = MASSES[layer.theta].of_scores(scores.flatten(0, 1), ungated.flatten(0, 1))
        total = mass.sum(-1, keepdim=True)
        share = torch.where(total > 0, mass / total, 0.0)  # a row may have no score at all
        sums.fired += (rows >= self.threshold).sum(0).cpu()
        sums.weights += rows.sum(0).cpu().double()
        sums.magnitudes += rows.abs().sum(0).cpu().double()
        sums.squares += rows.square().sum(0).cpu().double()
        sums.shares += share.sum(0).cpu().double()
        sums.largest = torch.maximum(sums.largest, rows.amax(0).cpu().float())
        bins = ((rows - LOW) / WIDTH).clamp_(0, BINS - 1).long()
        bins += BINS * torch.arange(rows.shape[1], device=rows.device)
        counts = torch.bincount(bins.flatten(), minlength=rows.shape[1] * BINS)
        sums.histogram += counts.view(-1, BINS).cpu()
        return weights

    def keep(self, weights: Tensor, positions: Tensor, first_sample: int) -> None:
        """Keep the strongest contexts, given each sample's strongest position, [b, n]. A weight of
        zero is none: rows of a sparse layer skip tokens."""
        sums, weights, positions = self.sums, weights.T.cpu(), positions.T.cpu()  # [n, b]
        weights = weights.masked_fill(weights == 0, -torch.inf)
        rows = (weights.amax(1) > sums.top_weights[:, -1]).nonzero().flatten()
        if not len(rows):
            return
        samples = first_sample + torch.arange(weights.shape[1]).expand(len(rows), -1)
        all_weights = torch.cat([sums.top_weights[rows], weights[rows]], 1)
        # A stable order: of equal weights the earlier sample stays.
        order = all_weights.argsort(dim=1, descending=True, stable=True)
        order = order[:, : sums.top_weights.shape[1]]
        sums.top_weights[rows] = all_weights.gather(1, order)
        for kept, new in ((sums.top_samples, samples), (sums.top_positions, positions[rows])):
            kept[rows] = torch.cat([kept[rows], new], 1).gather(1, order)


def sample_chunks(x: Tensor, tokens: int) -> Iterator[tuple[int, Iterator[tuple[int, Tensor]]]]:
    """Split inputs [B, T, d] so that the scores of `tokens` fit in `MAX_SCORES`: yield the first
    sample of each part, and its chunks of positions with their first position."""
    rows = max(1, MAX_SCORES // tokens)
    samples = max(1, rows // x.shape[1])
    for start in range(0, len(x), samples):
        part = x[start : start + samples]
        length = rows if samples == 1 else x.shape[1]
        yield (
            start,
            (
                (offset, part[:, offset : offset + length])
                for offset in range(0, x.shape[1], length)
            ),
        )
