"""Pre-norm residual blocks: token-token attention, then token-parameter attention (or an MLP)."""

from typing import Any

from torch import Tensor, nn

from tokenformer.layers.attention import Attention


class SequentialBlock(nn.Module):
    """x + attention(norm(x)), and on its result x + ffn(norm(x)): the paper's equations 4 and 5."""

    def __init__(
        self, attention: Attention, ffn: nn.Module, attention_norm: nn.Module, ffn_norm: nn.Module
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.ffn_norm = ffn_norm
        self.ffn = ffn

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        """x [B, T, d]; `options` go to the attention."""
        x = x + self.attention(self.attention_norm(x), **options)[0]
        return x + self.ffn(self.ffn_norm(x))


class ParallelBlock(SequentialBlock):
    """Both branches read the same x: NeoX's parallel residual."""

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        attended = self.attention(self.attention_norm(x), **options)[0]
        return x + attended + self.ffn(self.ffn_norm(x))
