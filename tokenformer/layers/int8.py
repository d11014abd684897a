"""Layers with int8 weights and one scale per token or row: a quarter of the memory.

For inference only. With few rows, as in decoding, native code multiplies in integers
(`ops/backends/native`): it rounds the rows to int16, whose error is far below that of the int8
weights. More rows, other devices and other dtypes dequantize the weights first, for the duration of
the call.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenformer.layers.pattention import Pattention
from tokenformer.ops import pattention
from tokenformer.ops.backends.auto import can_use_native
from tokenformer.ops.backends.native import few_rows

LARGEST = 127


def quantize(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a matrix [n, d] by row: int8 [n, d] in -127..127, and scales [n]."""
    scales = matrix.detach().float().abs().amax(1) / LARGEST
    scales = scales.masked_fill(scales == 0, 1)
    return (matrix.detach().float() / scales[:, None]).round_().to(torch.int8), scales


def dequantize(matrix: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return matrix.to(dtype) * scales.to(dtype)[:, None]


def fixed(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class Int8Layer(nn.Module):
    """Keeps its scales in fp32 when the model is cast to another dtype."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        kept = {name: p.data for name, p in self._parameters.items() if p is not None}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            parameter = self._parameters[name]
            if parameter is not None and parameter.dtype != before.dtype:
                self.dtype = parameter.dtype
                parameter.data = before.to(parameter.device)
        return self


class Int8Pattention(Int8Layer):
    """A Pattention layer with int8 tokens."""

    key_tokens: nn.Parameter  # [n, d_in], int8
    value_tokens: nn.Parameter  # [n, d_out], int8
    key_scales: nn.Parameter  # [n]
    value_scales: nn.Parameter  # [n]
    active_tokens = None
    backend = "auto"

    def __init__(self, layer: Pattention) -> None:
        super().__init__()
        if layer.active_tokens is not None or isinstance(layer.scale_tokens, Tensor):
            raise ValueError(
                "int8 needs a layer with all tokens active (no prefix) and a fixed scale_tokens"
            )
        self.theta, self.scale_tokens = layer.theta, layer.scale_tokens
        self.approximate, self.eps = layer.approximate, layer.eps
        for name, matrix in (("key", layer.key_tokens), ("value", layer.value_tokens)):
            numbers, scales = quantize(matrix)
            setattr(self, f"{name}_tokens", fixed(numbers))
            setattr(self, f"{name}_scales", fixed(scales))

    def forward(self, x: Tensor) -> Tensor:
        if can_use_native(x, self.key_tokens, self.value_tokens):
            scales = self.key_scales.float(), self.value_scales.float()
            tokens = few_rows.token_pointers(
                self.key_tokens, self.value_tokens, self.scale_tokens, *scales
            )
            theta = few_rows.theta_struct(self.theta, self.approximate, self.eps)
            return few_rows.pattention(x, tokens, torch.int8, theta)
        return pattention(
            x,
            dequantize(self.key_tokens, self.key_scales, x.dtype),
            dequantize(self.value_tokens, self.value_scales, x.dtype),
            scale_tokens=self.scale_tokens,
            theta=self.theta,
            approximate=self.approximate,
            eps=self.eps,
        )

    def extra_repr(self) -> str:
        (count, d_in), d_out = self.key_tokens.shape, self.value_tokens.shape[1]
        return f"in_features={d_in}, out_features={d_out}, num_tokens={count}, theta={self.theta!r}"


class Int8Rows(Int8Layer):
    """A matrix with int8 rows, quantized from `like.weight`."""

    weight: nn.Parameter  # [n, d]
    scales: nn.Parameter  # [n]

    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        numbers, scales = quantize(like.weight)  # type: ignore[arg-type]
        self.weight, self.scales = fixed(numbers), fixed(scales)

    def share(self, other: "Int8Rows") -> None:
        """Tie the weights to those of `other`."""
        self.weight, self.scales = other.weight, other.scales

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}"


class Int8Linear(Int8Rows):
    """nn.Linear without bias, int8."""

    def forward(self, x: Tensor) -> Tensor:
        if can_use_native(x, self.weight):
            return few_rows.linear(x, self.weight, self.scales.float())
        return F.linear(x, dequantize(self.weight, self.scales, x.dtype))


class Int8Embedding(Int8Rows):
    def __init__(self, like: nn.Embedding, dtype: torch.dtype) -> None:
        super().__init__(like)
        self.dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        rows = F.embedding(ids, self.weight).to(self.dtype)
        return rows * F.embedding(ids, self.scales[:, None]).to(self.dtype)
