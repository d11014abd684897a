"""Layers with int8 weights and one scale per token or row: a quarter of the memory."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenformer.layers.pattention import Pattention
from tokenformer.layers.quantized import QuantizedLayer, QuantizedPattention, fixed
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


class Int8Pattention(QuantizedPattention):
    """key_tokens [n, d_in] and value_tokens [n, d_out] in int8; key_scales and value_scales [n]."""

    scales_dtype = torch.float32

    def __init__(self, layer: Pattention) -> None:
        super().__init__(layer)
        for name, matrix in (("key", layer.key_tokens), ("value", layer.value_tokens)):
            numbers, scales = quantize(matrix)
            setattr(self, f"{name}_tokens", fixed(numbers))
            setattr(self, f"{name}_scales", fixed(scales))

    def dequantized(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        keys = dequantize(self.key_tokens, self.key_scales, dtype)
        return keys, dequantize(self.value_tokens, self.value_scales, dtype)


class Int8Rows(QuantizedLayer):
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
        if x.shape[-1] == self.weight.shape[1] and can_use_native(x, self.weight):
            return few_rows.linear(x, self.weight, self.scales.float())
        return F.linear(x, self.dequantized(x.dtype))

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        return dequantize(self.weight, self.scales, dtype)


class Int8Embedding(Int8Rows):
    def __init__(self, like: nn.Embedding, dtype: torch.dtype) -> None:
        super().__init__(like)
        self.dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        rows = F.embedding(ids, self.weight).to(self.dtype)
        return rows * F.embedding(ids, self.scales[:, None]).to(self.dtype)
