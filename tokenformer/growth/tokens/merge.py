"""Merging two models, such as two fine-tunes of one, by combining their tokens.

    merged, report = tokenformer.merge(a, b)

Tokens that are bit-identical in both models are kept once. The others are a's own and b's own
tokens: they keep half of their value (`own="average"`, each layer becomes the mean of the two), or
all of it (`own="sum"`, which adds what b learned to a). The tokens of a keep their rows; b's own
tokens follow.

The scale is set so that every token keeps its weight. Theta divides by the mass of all scores (see
`token_usage`), so each token accounts for a part of the layer's scale in proportion to its mass,
and the merged scale is the sum of these parts:

    s = mean(s_a r_a(common), s_b r_b(common)) + s_a r_a(own) + s_b r_b(own)

where r is the share of a set of tokens in its layer's mass, estimated from the norms of the keys.
If b equals a, or is a grown by zero keys, s equals s_a and the merged model is exactly a. If both
added a few tokens to the same model, s stays close to s_a. Without common tokens it is s_a + s_b.
"""

from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from tokenformer.growth.growth_report import GrowthReport
from tokenformer.growth.model_from_tensors import ModelT
from tokenformer.growth.parameter_mapping import NEW, ParameterMapping
from tokenformer.growth.tokens.prefix import active_share
from tokenformer.growth.tokens.rewrite import replace_tokens
from tokenformer.growth.tokens.token_set import (
    Replacement,
    TokenSet,
    check_tokenformer,
    token_layers,
)
from tokenformer.growth.tokens.token_usage import MASSES
from tokenformer.models.backbone import BlockPreTrainedModel

CHOICES = {"embeddings": ("a", "b", "average"), "own": ("average", "sum")}
MUST_AGREE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "positions",
    "rotary_fraction",
    "rotary_base",
    "norm",
    "norm_parameters",
    "norm_eps",
    "final_norm_parameters",
    "residual",
    "hidden_act",
    "theta",
    "theta_eps",
    "tie_word_embeddings",
    "image_size",
    "patch_size",
    "num_channels",
    "pooling",
    "num_labels",
)
"""Configuration options that must be equal in both models."""


@torch.no_grad()
def merge(
    a: ModelT, b: ModelT, *, embeddings: str = "average", own: str = "average"
) -> tuple[ModelT, GrowthReport]:
    """Return a model with the tokens of both, and a report of the changes to `a`.

    Args:
        a: a TokenFormer; neither model is changed.
        b: a TokenFormer of the same shape; token counts and scales may differ.
        embeddings: use the embeddings, learned positions and norms of `a`, of `b`, or their
            `average`.
        own: `average` or `sum`, how to combine tokens that only one model has.
    """
    for name, value in {"embeddings": embeddings, "own": own}.items():
        if value not in CHOICES[name]:
            raise ValueError(
                f"{name}={value!r} is unknown; choose one of {', '.join(CHOICES[name])}"
            )
    for model in (a, b):
        check_tokenformer(model, "can be merged")
    check_mergeable(a, b)
    others = {name: tensor.to(a.device) for name, tensor in b.state_dict().items()}
    replacements = {}
    for name, (projection, module) in token_layers(a).items():
        pair = TokenSet.of(module), TokenSet.of(b.get_submodule(name), a.device)
        replacements[name] = merge_layer(
            *pair, module.theta, 0.5 if own == "average" else 1.0, b.config.row_rates(*projection)
        )

    def combined(name: str, tensor: Tensor) -> tuple[Tensor, ParameterMapping]:
        if embeddings == "a":
            return tensor.clone(), ParameterMapping(name)
        if embeddings == "b":  # the optimizer of a has no state for these
            return others[name].clone(), ParameterMapping(name, torch.full((len(tensor),), NEW))
        return (tensor + others[name]) / 2, ParameterMapping(name, scale=0.5)

    with active_share(a, None):  # the report compares with the whole model
        return replace_tokens(
            a,
            replacements,
            method="merge",
            scale="combined",
            exact=None,
            learned_scale=a.config.learned_scale or b.config.learned_scale,
            copy=combined,
        )


def check_mergeable(a: BlockPreTrainedModel, b: BlockPreTrainedModel) -> None:
    """Raise ValueError with all differences if the models cannot be merged."""
    if type(a.config) is not type(b.config):
        raise ValueError(
            f"a {type(a).__name__} and a {type(b).__name__} cannot be merged; give two models of "
            "the same class"
        )
    names = [name for name in MUST_AGREE if hasattr(a.config, name)]
    if getattr(a.config, "positions", None) == "learned":
        names.append("max_position_embeddings")
    pairs = {name: (getattr(a.config, name), getattr(b.config, name)) for name in names}
    pairs["dtype"] = (a.dtype, b.dtype)
    differences = [f"{name} {x} and {y}" for name, (x, y) in pairs.items() if x != y]
    if differences:
        raise ValueError(f"models of different shape cannot be merged: {', '.join(differences)}")


@dataclass(frozen=True)
class RowMatch:
    """Rows that are bit-identical in both models, one to one, and rows that only one has."""

    common_a: list[int]
    common_b: list[int]
    own_a: list[int]
    own_b: list[int]


def merge_layer(
    a: TokenSet, b: TokenSet, theta: str, factor: float, rates_of_b: list[float] | None = None
) -> Replacement:
    """Combine the tokens of a layer; values that only one model has are multiplied by `factor`."""
    rows = match_rows(a, b)
    factors = a.values.new_ones(a.size, 1)
    factors[rows.own_a] = factor
    tokens = TokenSet(
        torch.cat([a.keys, b.keys[rows.own_b]]),
        torch.cat([a.values * factors, b.values[rows.own_b] * factor]),
        merged_scale(a, b, rows, theta),
    )
    added = len(rows.own_b)
    return Replacement(
        tokens,
        torch.cat([torch.arange(a.size), torch.full((added,), NEW)]),
        torch.cat([factors, factors.new_ones(added, 1)]),
        [1.0 if rates_of_b is None else rates_of_b[row] for row in rows.own_b],
    )


def merged_scale(a: TokenSet, b: TokenSet, rows: RowMatch, theta: str) -> float:
    in_common, alone = [], 0.0
    for tokens, common, own in ((a, rows.common_a, rows.own_a), (b, rows.common_b, rows.own_b)):
        mass = MASSES[theta].of_keys(tokens.keys.double())
        shared, single = mass[common].sum().item(), mass[own].sum().item()
        # If all keys are zero, no token has mass.
        share = shared / (shared + single) if shared + single > 0 else float(bool(common))
        in_common.append(tokens.scale * share)
        alone += tokens.scale * (1 - share)
    return sum(in_common) / 2 + alone


def match_rows(a: TokenSet, b: TokenSet) -> RowMatch:
    unmatched: dict[bytes, list[int]] = {}
    for row, digest in enumerate(token_hashes(a)):
        unmatched.setdefault(digest, []).append(row)
    common_a, common_b, own_b = [], [], []
    for row, digest in enumerate(token_hashes(b)):
        if unmatched.get(digest):
            common_a.append(unmatched[digest].pop(0))
            common_b.append(row)
        else:
            own_b.append(row)
    own_a = sorted(row for rows in unmatched.values() for row in rows)
    return RowMatch(common_a, common_b, own_a, own_b)


def token_hashes(tokens: TokenSet) -> list[bytes]:
    """Return a hash of the bits of every token's key and value."""
    halves = [half.cpu().contiguous().view(torch.uint8) for half in (tokens.keys, tokens.values)]
    return [
        blake2b(key.tobytes() + value.tobytes(), digest_size=16).digest()
        for key, value in zip(*(half.numpy() for half in halves), strict=True)
    ]
