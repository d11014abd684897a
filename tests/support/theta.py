"""The modified softmaxes by their formulas, in float64 with numpy."""

import math

import numpy as np


def gelu(x: np.ndarray, approximate: str = "none") -> np.ndarray:
    if approximate == "tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * np.vectorize(math.erfc, otypes=[float])(-x / math.sqrt(2))


def over_norm(rows: np.ndarray, order: int, eps: float) -> np.ndarray:
    norms = np.linalg.norm(rows, ord=order, axis=-1, keepdims=True) if rows.size else rows[..., :1]
    return np.divide(rows, norms + eps, out=np.zeros_like(rows), where=norms > 0)


def expected_weights(
    theta: str, A: np.ndarray, s: float, approximate: str = "none", eps: float = 0.0
) -> np.ndarray:
    """Return the weights of scores A with scale s."""
    if theta == "l2_gelu":
        return gelu(math.sqrt(s) * over_norm(A, 2, eps), approximate)
    if theta == "gelu_l2":
        return math.sqrt(s) * over_norm(gelu(A, approximate), 2, eps)
    if theta == "l1_gelu":
        return gelu(s * over_norm(A, 1, eps), approximate)
    exponentials = np.exp(A - A.max(axis=-1, keepdims=True))
    return s * exponentials / exponentials.sum(axis=-1, keepdims=True)
