"""Baselines: the authors' formula, a Transformer MLP with as many weights, a GPT in plain torch."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenformer.layers import Pattention


def released(x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Pattention as the authors' code computes it.

    The unit scale, the mask of ones, the norm, the division and the square root of the token count
    are separate passes over the scores; autograd saves four matrices of their size.
    """
    mask = x.new_ones(x.shape[-2], keys.shape[0])
    scores = x @ keys.T * 1
    scores *= mask
    normed = scores / torch.norm(scores, p=2, dim=-1, keepdim=True) * keys.shape[0] ** 0.5
    return F.gelu(normed) @ values


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.gelu(x @ up.T) @ down


def use_released_formula(model: Any) -> Any:
    """Make every Pattention layer of the model compute the released formula."""
    for module in model.modules():
        if isinstance(module, Pattention):
            module.forward = partial(released_layer, module)  # type: ignore[method-assign]
    return model


def released_layer(layer: Pattention, x: Tensor) -> Tensor:
    return released(x, layer.key_tokens, layer.value_tokens)


class PlainGPT(nn.Module):
    """A GPT in plain torch with the parts of nanoGPT: one product for q, k and v, torch's fused
    attention, learned positions, no biases, all logits at once. Returns the mean loss."""

    def __init__(
        self, vocab: int, width: int, inner: int, layers: int, heads: int, length: int
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([PlainBlock(width, inner, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        inputs, targets = ids[:, :-1], ids[:, 1:]
        hidden = self.tokens(inputs) + self.places(torch.arange(inputs.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class PlainBlock(nn.Module):
    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.qkv, self.out = (nn.Linear(width, n * width, bias=False) for n in (3, 1))
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        heads = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))
