"""Derivatives of the weights of a Pattention layer by its scores, in closed form (Appendix A).

Weights S [R, n] of scores A [R, n] with the scale s, which is n in a model that has not grown:

    softmax   S = s p, p = softmax(A)              dS_i/dA_j = s p_i (1[i = j] - p_j)
    l2_gelu   S = gelu(Z), Z = sqrt(s) A / ||A||   dS_i/dA_j = gelu'(Z_i) (s 1[i = j] - Z_i Z_j)
                                                               / (sqrt(s) ||A||)

The paper's softmax divides the scores by sqrt(d); that of its ablation and of this package does
not.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def softmax_derivatives(scores: Tensor, scale: float) -> Tensor:
    p = torch.softmax(scores, dim=-1)  # [R, n]
    return scale * (torch.diag_embed(p) - p[:, :, None] * p[:, None, :])  # [R, n, n]


def l2_gelu_derivatives(scores: Tensor, scale: float) -> Tensor:
    norm = torch.linalg.vector_norm(scores, dim=-1, keepdim=True)  # [R, 1]
    z = math.sqrt(scale) * scores / norm
    products = z[:, :, None] * z[:, None, :]  # [R, n, n]
    same = scale * torch.eye(scores.shape[-1], dtype=scores.dtype)
    factor = gelu_derivative(z) / (math.sqrt(scale) * norm)  # [R, n]
    return factor[:, :, None] * (same - products)


def gelu_derivative(z: Tensor) -> Tensor:
    """The derivative of z Phi(z)."""
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    return (1 + torch.erf(z / math.sqrt(2))) / 2 + z * density


DERIVATIVES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "softmax": softmax_derivatives,
    "l2_gelu": l2_gelu_derivatives,
}


def split_diagonal(derivatives: Tensor) -> tuple[Tensor, Tensor]:
    """Return the diagonal and the off-diagonal entries of [R, n, n], each as a vector."""
    same = torch.eye(derivatives.shape[-1], dtype=torch.bool)
    return derivatives[:, same].flatten(), derivatives[:, ~same].flatten()
