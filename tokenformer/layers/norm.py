"""Layer norm and RMS norm with any subset of their parameters.

The norms of a TokenFormer have no parameters (`parameters="none"`), so that growth and merging only
deal with key and value tokens; the paper ablates `bias` and `weight_bias`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_PARAMETERS = ("none", "bias", "weight", "weight_bias")


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps), then the weight and bias named in `parameters`."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        size: int,
        *,
        parameters: str = "none",
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if parameters not in NORM_PARAMETERS:
            raise ValueError(
                f"parameters={parameters!r} is unknown; choose one of {', '.join(NORM_PARAMETERS)}"
            )
        self.size = size
        self.eps = eps
        for name in ("weight", "bias"):
            wanted = name in parameters.split("_")
            value = nn.Parameter(torch.empty(size, device=device, dtype=dtype)) if wanted else None
            self.register_parameter(name, value)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        present = [name for name in ("weight", "bias") if getattr(self, name) is not None]
        return f"{self.size}, parameters={'_'.join(present) or 'none'}, eps={self.eps:g}"


class RMSNorm(LayerNorm):
    """x / sqrt(mean(x^2) + eps): layer norm without centering."""

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x, (self.size,), self.weight, self.eps)
        return normed if self.bias is None else normed + self.bias


NORMS: dict[str, type[LayerNorm]] = {"layer_norm": LayerNorm, "rms_norm": RMSNorm}
