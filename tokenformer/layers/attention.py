"""Token-token attention: multi-head or grouped-query, causal or not, self or cross, with KV cache.

The paper's equations 6 to 8, with heads. The four projections are arguments, so the same attention
works with Pattention and linear projections.
"""

import math
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenformer.layers.pattention import project_all
from tokenformer.layers.positions import Rotation, rotate_all


class Cache(Protocol):
    """The interface of a KV cache; the caches of transformers have it."""

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, H_kv, T, head_dim] and return all cached ones of the layer.
        If a cache also returns unused positions, the caller must mask them."""
        ...


class Attention(nn.Module):
    def __init__(
        self,
        q: nn.Module,
        k: nn.Module,
        v: nn.Module,
        o: nn.Module,
        *,
        head_dim: int,
        num_heads: int,
        num_key_value_heads: int | None = None,
        is_causal: bool = False,
        dropout: float = 0.0,
        layer_idx: int = 0,
    ) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = q, k, v, o
        self.head_dim = head_dim
        num_key_value_heads = num_key_value_heads or num_heads
        if num_heads % num_key_value_heads:
            raise ValueError(
                f"num_heads={num_heads} must be a multiple of "
                f"num_key_value_heads={num_key_value_heads}"
            )
        self.num_key_value_groups = num_heads // num_key_value_heads
        self.scaling = head_dim**-0.5
        self.is_causal = is_causal
        self.dropout = dropout
        self.layer_idx = layer_idx

    def forward(
        self,
        x: Tensor,
        *,
        context: Tensor | None = None,
        rotation: Rotation | None = None,
        attention_mask: Any = None,
        past_key_values: Cache | None = None,
        routing: tuple[Any, ...] = (),
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from x [B, T, d] to itself, or to `context` [B, S, d].

        `attention_mask` broadcasts to [B, H, T, S]: True, or 0 in a float mask, means "attend". It
        applies in addition to the causal mask. `routing` are further arguments of the projections,
        such as the `ModalityRows` of a `ModalityPattention`.
        Returns the output and, if `attend` computes them, the attention weights.
        """
        if context is None:
            projected = project_all((self.q, self.k, self.v), x, *routing)
        else:
            projected = [self.q(x, *routing), self.k(context), self.v(context)]
        query, key, value = map(self._split_heads, projected)  # [B, H or H_kv, T or S, head_dim]
        if rotation is not None:
            query, key = rotate_all((query, key), rotation)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attended, weights = self.attend(query, key, value, attention_mask, **options)
        return self.o(attended.flatten(-2), *routing), weights  # [B, T, H, head_dim] -> [B, T, d]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[B, H, T, head_dim] -> [B, T, H, head_dim], with torch's fused attention."""
        new, total = query.shape[-2], key.shape[-2]
        if self.is_causal and new > 1 and (attention_mask is not None or total > new):
            # SDPA takes either a mask or `is_causal`, which aligns the first query with the first
            # key; but cached keys precede the queries.
            causal = query.new_ones(new, total, dtype=torch.bool).tril(total - new)
            if attention_mask is None:
                attention_mask = causal
            elif attention_mask.dtype == torch.bool:
                attention_mask = attention_mask & causal
            else:
                attention_mask = attention_mask.masked_fill(~causal, -math.inf)
        attended = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.is_causal and attention_mask is None and new > 1,
            scale=self.scaling,
            enable_gqa=self.num_key_value_groups > 1,
        )
        return attended.transpose(1, 2), None

    def _split_heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, H, T, head_dim]
