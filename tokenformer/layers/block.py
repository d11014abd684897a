"""Pre-norm residual blocks: token-token attention, then token-parameter attention (or an MLP)."""

from typing import Any

from torch import Tensor, nn

from tokenformer.layers.attention import Attention
from tokenformer.layers.drop_path import DropPath


class SequentialBlock(nn.Module):
    """x = x + attention(norm(x)), then x + ffn(norm(x)): the paper's equations 4 and 5.

    `drop_path` is the probability of dropping a branch for a training sample.
    """

    def __init__(
        self,
        attention: Attention,
        ffn: nn.Module,
        attention_norm: nn.Module,
        ffn_norm: nn.Module,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.ffn_norm = ffn_norm
        self.ffn = ffn
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        """x [B, T, d] -> [B, T, d]; `options` are passed to the attention."""
        x = x + self.drop_path(self.attention(self.attention_norm(x), **options)[0])
        return x + self.drop_path(self.ffn(self.ffn_norm(x)))


class ParallelBlock(SequentialBlock):
    """Both branches read the same x, as in GPT-NeoX."""

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        attended = self.attention(self.attention_norm(x), **options)[0]
        return x + self.drop_path(attended) + self.drop_path(self.ffn(self.ffn_norm(x)))
