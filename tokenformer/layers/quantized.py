"""Base classes of layers with quantized weights, for inference only.

With few rows, as in decoding, native code multiplies in integers (`ops/backends/native`): it rounds
the rows too, whose error is far below that of the weights. More rows, other devices and other
dtypes dequantize the weights first, for the duration of the call.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tokenformer.layers.pattention import Pattention
from tokenformer.ops import pattention
from tokenformer.ops.backends.auto import can_use_native
from tokenformer.ops.backends.native import few_rows
from tokenformer.ops.backends.native.library import Tokens


def fixed(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class QuantizedLayer(nn.Module):
    """Keeps the dtype of its scales when the model is cast to another."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        kept = {name: p.data for name, p in self._parameters.items() if p is not None}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            parameter = self._parameters[name]
            if parameter is not None and parameter.dtype != before.dtype:
                self.dtype = parameter.dtype
                parameter.data = before.to(parameter.device)
        return self


class QuantizedPattention(QuantizedLayer):
    """A Pattention layer with quantized tokens."""

    key_tokens: nn.Parameter
    value_tokens: nn.Parameter
    key_scales: nn.Parameter
    value_scales: nn.Parameter
    active_tokens = None
    backend = "auto"
    scales_dtype: torch.dtype

    def __init__(self, layer: Pattention) -> None:
        super().__init__()
        if layer.active_tokens is not None or isinstance(layer.scale_tokens, Tensor):
            raise ValueError(
                "quantization needs a layer with all tokens active (no prefix) and a fixed "
                "scale_tokens"
            )
        self.theta, self.scale_tokens = layer.theta, layer.scale_tokens
        self.approximate, self.eps = layer.approximate, layer.eps
        self.num_tokens, self.in_features = layer.key_tokens.shape
        self.out_features = layer.value_tokens.shape[1]

    def dequantized(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys [n, d_in] and values [n, d_out]."""
        raise NotImplementedError

    def supports_native(self, x: Tensor) -> bool:
        """Whether native code can take these rows; `pointers` are then valid."""
        scales = self.key_scales, self.value_scales
        return (
            x.shape[-1] == self.in_features
            and all(part.is_contiguous() and part.dtype == self.scales_dtype for part in scales)
            and can_use_native(x, self.key_tokens, self.value_tokens)
        )

    def pointers(self) -> Tokens:
        tensors = self.key_tokens, self.value_tokens, self.key_scales, self.value_scales
        shape = self.num_tokens, self.in_features, self.out_features
        return Tokens(*(t.data_ptr() for t in tensors), *shape, float(self.scale_tokens))

    def forward(self, x: Tensor) -> Tensor:
        if self.supports_native(x):
            theta = few_rows.theta_struct(self.theta, self.approximate, self.eps)
            return few_rows.pattention(x, self.pointers(), self.key_tokens.dtype, theta)
        return self.attend(x)

    def attend(self, x: Tensor) -> Tensor:
        """Dequantize the tokens and attend to them."""
        return pattention(
            x,
            *self.dequantized(x.dtype),
            scale_tokens=self.scale_tokens,
            theta=self.theta,
            approximate=self.approximate,
            eps=self.eps,
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"num_tokens={self.num_tokens}, theta={self.theta!r}"
        )
