"""Names of parameter tokens and of the layers that hold them.

    str(Token("3.ffn", 17))          # "3.ffn.17": token 17 of the feed-forward layer of block 3
    Token.parse("3.ffn.17")

A layer is named by its block and its projection: q, k, v, o or ffn.
"""

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from tokenformer.errors import TokenformerError
from tokenformer.growth.tokens.token_counts import check_not_quantized
from tokenformer.growth.tokens.token_set import token_layers
from tokenformer.layers.pattention import Pattention
from tokenformer.models.configuration import PROJECTIONS, TokenConfig
from tokenformer.models.image_text_configuration import TokenformerImageTextConfig

WRITERS = ("o", "ffn")
"""Projections whose output is added to the residual stream; the logits depend on it directly."""


class TokenNameError(TokenformerError, ValueError):
    """A name of a token or layer that the model does not have."""


class Token(NamedTuple):
    layer: str
    number: int

    def __str__(self) -> str:
        return f"{self.layer}.{self.number}"

    @classmethod
    def parse(cls, text: str) -> "Token":
        layer, _, number = text.strip().rpartition(".")
        if not number.isdecimal() or not layer:
            raise TokenNameError(f"{text!r} is not a token; an example of one is 3.ffn.17")
        return cls(layer, int(number))


AnyToken = Token | str
"""A token or its name."""


def named_layers(model: nn.Module, names: Iterable[str] | None = None) -> dict[str, Pattention]:
    """Return the Pattention layers of a model by short name, block by block; or only those named.

    `names` may be layers (3.ffn), blocks (3) or projections (ffn).
    """
    if hasattr(model, "peft_config"):
        raise TypeError(
            "the model has an adapter attached; merge it (model.merge_and_unload()), or look at "
            "the base (model.unload())"
        )
    check_interpretable(model)
    places = sorted(
        token_layers(model).values(), key=lambda each: (each[0][1], PROJECTIONS.index(each[0][0]))
    )
    layers = {f"{number}.{projection}": layer for (projection, number), layer in places}
    if names is None:
        return layers
    wanted = [names] if isinstance(names, str) else list(names)
    found = {n: layer for n, layer in layers.items() if {n, *n.split(".")} & set(wanted)}
    known = {part for name in layers for part in (name, *name.split("."))}
    if unknown := [name for name in wanted if name not in known]:
        raise TokenNameError(f"the model has no layer {unknown[0]!r}; it has {', '.join(layers)}")
    return found


def check_interpretable(model: nn.Module) -> None:
    """Raise unless the model is a TokenFormer of one modality, dense or sparse, not quantized."""
    config = getattr(model, "config", None)
    if not isinstance(config, TokenConfig):
        name = type(model).__name__
        raise TypeError(f"only a TokenFormer's tokens can be interpreted, not a {name}'s")
    if isinstance(config, TokenformerImageTextConfig):
        raise TypeError(
            "a vision-language model cannot be interpreted; use the vision or the language model "
            "that it was joined from"
        )
    check_not_quantized(config)


def full_names(model: nn.Module) -> dict[str, str]:
    """Return the name of every Pattention layer in the model by its short name."""
    return {f"{place[1]}.{place[0]}": name for name, (place, _) in token_layers(model).items()}


def check_tokens(layers: dict[str, Pattention], tokens: Iterable[AnyToken]) -> list[Token]:
    """Return tokens in order and once each; raise for unknown ones."""
    found = []
    for token in tokens:
        token = Token.parse(token) if isinstance(token, str) else Token(*token)
        if token.layer not in layers:
            raise TokenNameError(f"token {token}: there is no layer {token.layer!r}")
        count = layers[token.layer].num_tokens
        if not 0 <= token.number < count:
            raise TokenNameError(f"token {token}: {token.layer} has {count} tokens, from 0")
        found.append(token)
    return list(dict.fromkeys(found))
