"""Drop-in replacements of torch's Transformer encoder and decoder layers.

`TokenformerEncoderLayer` and `TokenformerDecoderLayer` have the signatures of
`nn.TransformerEncoderLayer` and `nn.TransformerDecoderLayer` and work in `nn.TransformerEncoder`,
`nn.TransformerDecoder` and `nn.Transformer`. They have parameter tokens instead of hidden units.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tokenformer.layers.attention import Attention
from tokenformer.layers.norm import LayerNorm
from tokenformer.layers.pattention import Pattention

Sublayer = Callable[[Tensor], Tensor]


def pre_norm_residual(x: Tensor, norm: Sublayer, sublayer: Sublayer, dropout: Sublayer) -> Tensor:
    return x + dropout(sublayer(norm(x)))


def post_norm_residual(x: Tensor, norm: Sublayer, sublayer: Sublayer, dropout: Sublayer) -> Tensor:
    return norm(x + dropout(sublayer(x)))


class _LayerAttention(Attention):
    batch_first: bool  # torch's containers look it up here


class _TransformerLayer(nn.Module):
    """The base of both layers: construction, and the residual around each sublayer."""

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        *,
        qkv_tokens: int | None = None,
        output_tokens: int | None = None,
        theta: str = "l2_gelu",
        layer_norm_eps: float = 1e-5,
        norm_parameters: str = "none",
        batch_first: bool = False,
        norm_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if nhead < 1 or d_model % nhead:
            raise ValueError(f"d_model={d_model} must be a multiple of nhead={nhead}")
        self.nhead = nhead
        self.batch_first = batch_first
        self.residual = pre_norm_residual if norm_first else post_norm_residual

        def tokens(count: int | None) -> Pattention:
            count = d_model if count is None else count
            return Pattention(d_model, d_model, count, theta=theta, device=device, dtype=dtype)

        def norm() -> LayerNorm:
            return LayerNorm(
                d_model, parameters=norm_parameters, eps=layer_norm_eps, device=device, dtype=dtype
            )

        def attention() -> Attention:
            built = _LayerAttention(
                tokens(qkv_tokens),
                tokens(qkv_tokens),
                tokens(qkv_tokens),
                tokens(output_tokens),
                head_dim=d_model // nhead,
                num_heads=nhead,
                dropout=dropout,
            )
            built.batch_first = batch_first
            return built

        self.ffn = tokens(dim_feedforward)
        self.dropout = nn.Dropout(dropout)
        self._add_parts(attention, norm)

    def _add_parts(self, attention: Callable[[], Attention], norm: Callable[[], LayerNorm]) -> None:
        self.self_attn = attention()
        self.norm1 = norm()
        self.norm2 = norm()

    def _apply_sublayer(self, x: Tensor, norm: nn.Module, sublayer: Sublayer) -> Tensor:
        return self.residual(x, norm, sublayer, self.dropout)

    def _to_batch_first(self, x: Tensor) -> Tensor:
        """Convert any of torch's layouts, including [T, d], to [B, T, d]."""
        if x.ndim == 2:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _from_batch_first(self, x: Tensor, ndim: int) -> Tensor:
        if ndim == 2:
            return x.squeeze(0)
        return x if self.batch_first else x.transpose(0, 1)


class TokenformerEncoderLayer(_TransformerLayer):
    """Self-attention and a feed-forward Pattention, like `nn.TransformerEncoderLayer`.

    Args:
        d_model: hidden size.
        nhead: number of attention heads.
        dim_feedforward: parameter tokens of the feed-forward Pattention.
        dropout: dropout probability, as in torch.
        qkv_tokens: parameter tokens of each of the q, k and v projections, by default `d_model`.
        output_tokens: parameter tokens of the output projection, by default `d_model`.
        theta: the modified softmax, instead of torch's `activation`.
        layer_norm_eps: epsilon of the norms.
        norm_parameters: `none`, `bias`, `weight` or `weight_bias`.
        batch_first: whether inputs are `[B, T, d]`, as in torch.
        norm_first: pre-norm, the default as in the paper; torch's default is post-norm.

    There is no `bias` argument.
    """

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        x = self._to_batch_first(src)
        mask = attention_mask(x, x, src_mask, src_key_padding_mask, is_causal, self.nhead)
        x = self._apply_sublayer(
            x, self.norm1, lambda normed: self.self_attn(normed, attention_mask=mask)[0]
        )
        x = self._apply_sublayer(x, self.norm2, self.ffn)
        return self._from_batch_first(x, src.ndim)


class TokenformerDecoderLayer(_TransformerLayer):
    """Self-attention, cross-attention to `memory` and a feed-forward Pattention, like
    `nn.TransformerDecoderLayer`. See `TokenformerEncoderLayer` for the arguments."""

    def _add_parts(self, attention: Callable[[], Attention], norm: Callable[[], LayerNorm]) -> None:
        super()._add_parts(attention, norm)
        self.multihead_attn = attention()
        self.norm3 = norm()

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        x, context = self._to_batch_first(tgt), self._to_batch_first(memory)
        self_mask = attention_mask(x, x, tgt_mask, tgt_key_padding_mask, tgt_is_causal, self.nhead)
        cross_mask = attention_mask(
            x, context, memory_mask, memory_key_padding_mask, memory_is_causal, self.nhead
        )
        x = self._apply_sublayer(
            x, self.norm1, lambda normed: self.self_attn(normed, attention_mask=self_mask)[0]
        )

        def attend_to_memory(normed: Tensor) -> Tensor:
            return self.multihead_attn(normed, context=context, attention_mask=cross_mask)[0]

        x = self._apply_sublayer(x, self.norm2, attend_to_memory)
        x = self._apply_sublayer(x, self.norm3, self.ffn)
        return self._from_batch_first(x, tgt.ndim)


def attention_mask(
    x: Tensor,
    context: Tensor,
    mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    nhead: int,
) -> Tensor | None:
    """Combine torch's three kinds of masks into one for SDPA, broadcastable to [B, H, T, S].

    In torch's layers a boolean True means "do not attend" and a float is added to the scores; a
    mask is [T, S] or [B * nhead, T, S], a padding mask [B, S]. For SDPA True means "attend".
    """
    batch, length, seen = x.shape[0], x.shape[1], context.shape[1]
    masks = []
    if mask is not None:
        _check_mask("the mask", mask, [(length, seen), (batch * nhead, length, seen)])
        masks.append(mask if mask.ndim == 2 else mask.unflatten(0, (batch, nhead)))
    if key_padding_mask is not None:
        unbatched = [(seen,)] if batch == 1 else []
        _check_mask("the key padding mask", key_padding_mask, [(batch, seen), *unbatched])
        masks.append(key_padding_mask.view(batch, 1, 1, seen))
    if is_causal and mask is None:
        masks.append(x.new_ones(length, seen, dtype=torch.bool).triu(1))
    if not masks:
        return None
    if all(m.dtype == torch.bool for m in masks):
        allowed = ~masks[0]
        for m in masks[1:]:
            allowed = allowed & ~m
        return allowed
    zero = x.new_zeros(())
    added = [zero.masked_fill(m, -math.inf) if m.dtype == torch.bool else m for m in masks]
    return sum(added[1:], start=added[0]).to(x.dtype)


def _check_mask(name: str, mask: Tensor, shapes: list[tuple[int, ...]]) -> None:
    """Refuse a mask of the wrong shape, and integer masks, whose 0s and 1s would be added."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{name} is {mask.dtype}; it must be bool or floating point")
    if tuple(mask.shape) not in shapes:
        accepted = " or ".join(str(shape) for shape in shapes)
        raise ValueError(f"{name} has shape {tuple(mask.shape)}; it must be {accepted}")
