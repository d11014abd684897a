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

    def forward(self, x: Tensor, routing: tuple[Any, ...] = (), **options: Any) -> Tensor:
        """x [B, T, d] -> [B, T, d]; `options` are passed to the attention, `routing` to all
        projections, beside their input."""
        attended = self.attention(self.attention_norm(x), routing=routing, **options)[0]
        x = x + self.drop_path(attended)
        return x + self.drop_path(self.ffn(self.ffn_norm(x), *routing))


class ParallelBlock(SequentialBlock):
    """Both branches read the same x, as in GPT-NeoX."""

    def forward(self, x: Tensor, routing: tuple[Any, ...] = (), **options: Any) -> Tensor:
        attended = self.attention(self.attention_norm(x), routing=routing, **options)[0]
        fed = self.ffn(self.ffn_norm(x), *routing)
        return x + self.drop_path(attended) + self.drop_path(fed)
