"""Thresholded Pattention: tokens that would add little to the output of a row are skipped.

layer = ThresholdedPattention(768, 768, num_tokens=3072, threshold=0.02)

All scores are computed, so unlike routing this saves only the reading of values. It needs no
training (TEAL, arXiv 2408.14690).
"""

import math
from typing import Any

import torch
from torch import Tensor

from tokenformer.layers.pattention import Pattention, TokenWeights
from tokenformer.ops.theta import ThetaOptions


class ThresholdedPattention(Pattention):
    """`Pattention` without the tokens whose |weight| |value| is below `threshold` in a row."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_tokens: int,
        *,
        threshold: float,
        **options: Any,
    ) -> None:
        if not (threshold >= 0 and math.isfinite(threshold)):
            raise ValueError(f"threshold={threshold} must be a finite number of at least 0")
        super().__init__(in_features, out_features, num_tokens, **options)
        self.threshold = threshold

    def forward(self, x: Tensor) -> Tensor:
        keys, values, scale = self.token_set()
        options = ThetaOptions(self.theta, scale, self.approximate, self.eps)
        scores = x @ keys.T  # [..., n]
        weights = self.without_small(options.weights(scores), values)
        return weights.to(scores.dtype) @ values

    def without_small(self, weights: Tensor, values: Tensor) -> Tensor:
        added = weights.abs() * torch.linalg.vector_norm(values.to(weights.dtype), dim=1)
        return weights.masked_fill(added < self.threshold, 0.0)

    def token_weights(self, x: Tensor) -> TokenWeights:
        scores, whole, _ = super().token_weights(x)
        return TokenWeights(scores, whole, self.without_small(whole, self.value_tokens))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, threshold={self.threshold:g}"
