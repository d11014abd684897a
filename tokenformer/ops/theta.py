"""Theta: the modified softmaxes that turn scores into the weights of the value tokens.

Each takes scores A [..., n] and the scale s (`scale_tokens`) and returns weights of the same shape:

    l2_gelu   gelu( sqrt(s) A / ||A||_2 )          the paper's (section 3.2) and the released code's
    gelu_l2   sqrt(s) gelu(A) / ||gelu(A)||_2
    l1_gelu   gelu( s A / ||A||_1 )                the second row of the paper's ablation
    softmax   s exp(A) / ||exp(A)||_1              the first row

Two details that the released code leaves open:

- Norms accumulate in fp32 or wider, so a long fp16 row does not overflow, and the weights are
  rounded to the scores' dtype only once.
- A zero row has zero weights and zero gradient, where the plain formula gives 0/0. A row counts as
  zero when its norm is below sqrt(tiny) (1e-19 in fp32), where its squares underflow. `softmax`
  needs no such rule: equal scores weigh all tokens equally.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Theta = Callable[[Tensor, float | Tensor, str, float], Tensor]


def l2_gelu(scores: Tensor, scale: float | Tensor, approximate: str, eps: float) -> Tensor:
    factor = scale**0.5 / (_norm(scores, 2) + eps)  # [..., 1]
    return F.gelu(scores * factor, approximate=approximate)


def gelu_l2(scores: Tensor, scale: float | Tensor, approximate: str, eps: float) -> Tensor:
    weights = F.gelu(scores.to(accumulation_dtype(scores.dtype)), approximate=approximate)
    return weights * (scale**0.5 / (_norm(weights, 2) + eps))


def l1_gelu(scores: Tensor, scale: float | Tensor, approximate: str, eps: float) -> Tensor:
    factor = scale / (_norm(scores, 1) + eps)  # [..., 1]
    return F.gelu(scores * factor, approximate=approximate)


def softmax(scores: Tensor, scale: float | Tensor, approximate: str, eps: float) -> Tensor:
    return scale * torch.softmax(scores, dim=-1, dtype=accumulation_dtype(scores.dtype))


THETAS: dict[str, Theta] = {
    "l2_gelu": l2_gelu,
    "gelu_l2": gelu_l2,
    "l1_gelu": l1_gelu,
    "softmax": softmax,
}


class ThetaOptions(NamedTuple):
    """One theta with its settings: how scores become weights."""

    theta: str
    scale: float | Tensor
    approximate: str
    eps: float

    def weights(self, scores: Tensor) -> Tensor:
        return THETAS[self.theta](scores, self.scale, self.approximate, self.eps)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def zero_is_infinite(norm: Tensor) -> Tensor:
    """Replace the norms of zero rows by infinity: dividing by it makes these rows and their
    gradients zero instead of NaN."""
    wide = accumulation_dtype(norm.dtype)
    return norm.masked_fill(norm < math.sqrt(torch.finfo(wide).tiny), math.inf)


def _norm(rows: Tensor, order: int) -> Tensor:
    """Return the norm over the tokens, [..., 1]; infinite for zero rows."""
    wide = accumulation_dtype(rows.dtype)
    return zero_is_infinite(
        torch.linalg.vector_norm(rows, ord=order, dim=-1, keepdim=True, dtype=wide)
    )
