"""Joining the tokens of two models, such as two fine-tunes of one.

    joined, report = tokenformer.merge(a, b)

Every layer becomes the mean of the two. Tokens that both have, bit for bit, are kept once; the
others are a's own and b's own, appended with half their value each (`own="average"`), or with their
value as it is (`own="sum"`), which adds what b has learned beyond a to a. A token of a stays in its
row; b's own follow.

The scale is set so that every token keeps the weight it had. Theta divides by the mass of all
scores (see `token_usage`), so each row accounts for a share of the layer's scale in proportion to
its mass, and the joined scale is the sum of these shares:

    s = mean(s_a r_a(common), s_b r_b(common)) + s_a r_a(own) + s_b r_b(own)

with r the share of a set of rows in its layer's mass, estimated from the lengths of the keys. So s
is a's where b is a, or a grown by zero keys: the joined model is then exactly a. It stays close to
it where both have added a little to the same tokens, and is s_a + s_b where nothing is common.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from tokenformer.growth.growth_report import GrowthReport
from tokenformer.growth.origin import NEW, Origin
from tokenformer.growth.tokens.prefix import active_share
from tokenformer.growth.tokens.rewrite import replace_tokens
from tokenformer.growth.tokens.token_set import (
    Replacement,
    TokenSet,
    check_tokenformer,
    token_layers,
)
from tokenformer.growth.tokens.token_usage import MASSES

CHOICES = {"embeddings": ("a", "b", "average"), "own": ("average", "sum")}
SAME = (
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
"""Options in which models that can be joined do not differ."""


@torch.no_grad()
def merge(
    a: Any, b: Any, *, embeddings: str = "average", own: str = "average"
) -> tuple[Any, GrowthReport]:
    """A model with the tokens of both, and a report that counts from `a`. Both are left alone.

    Args:
        a: a TokenFormer.
        b: a TokenFormer of the same shape; numbers of tokens and scales may differ.
        embeddings: whose embeddings, learned positions and norms: `a`, `b` or their `average`.
        own: `average` or `sum`, what becomes of tokens that only one has.
    """
    for name, value in {"embeddings": embeddings, "own": own}.items():
        if value not in CHOICES[name]:
            raise ValueError(
                f"{name}={value!r} is unknown; choose one of {', '.join(CHOICES[name])}"
            )
    for model in (a, b):
        check_tokenformer(model, "can be joined")
    check_same(a, b)
    others = {name: tensor.to(a.device) for name, tensor in b.state_dict().items()}
    replacements = {}
    for name, (place, module) in token_layers(a).items():
        pair = TokenSet.of(module), TokenSet.of(b.get_submodule(name), a.device)
        replacements[name] = joined(
            *pair, module.theta, 0.5 if own == "average" else 1.0, b.config.row_rates(*place)
        )

    def combined(name: str, tensor: Tensor) -> tuple[Tensor, Origin]:
        if embeddings == "a":
            return tensor.clone(), Origin(name)
        if embeddings == "b":  # of which the optimizer of a knows nothing
            return others[name].clone(), Origin(name, torch.full((len(tensor),), NEW))
        return (tensor + others[name]) / 2, Origin(name, scale=0.5)

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


def check_same(a: Any, b: Any) -> None:
    """Refuse models that cannot be joined, with all the differences in one line."""
    if type(a.config) is not type(b.config):
        raise ValueError(
            f"a {type(a).__name__} and a {type(b).__name__} cannot be joined: they are of "
            "different kinds"
        )
    names = [name for name in SAME if hasattr(a.config, name)]
    if getattr(a.config, "positions", None) == "learned":
        names.append("max_position_embeddings")
    pairs = {name: (getattr(a.config, name), getattr(b.config, name)) for name in names}
    pairs["dtype"] = (a.dtype, b.dtype)
    differences = [f"{name} {x} and {y}" for name, (x, y) in pairs.items() if x != y]
    if differences:
        raise ValueError(f"models of different shape cannot be joined: {', '.join(differences)}")


@dataclass(frozen=True)
class Pairing:
    """Rows that are bit-equal in both, one to one, and those that only one has."""

    common_a: list[int]
    common_b: list[int]
    own_a: list[int]
    own_b: list[int]


def joined(
    a: TokenSet, b: TokenSet, theta: str, factor: float, rates_of_b: list[float] | None = None
) -> Replacement:
    """The tokens of both; those of one alone with their value times `factor`."""
    rows = paired(a, b)
    factors = a.values.new_ones(a.size, 1)
    factors[rows.own_a] = factor
    tokens = TokenSet(
        torch.cat([a.keys, b.keys[rows.own_b]]),
        torch.cat([a.values * factors, b.values[rows.own_b] * factor]),
        joined_scale(a, b, rows, theta),
    )
    added = len(rows.own_b)
    return Replacement(
        tokens,
        torch.cat([torch.arange(a.size), torch.full((added,), NEW)]),
        torch.cat([factors, factors.new_ones(added, 1)]),
        [1.0 if rates_of_b is None else rates_of_b[row] for row in rows.own_b],
    )


def joined_scale(a: TokenSet, b: TokenSet, rows: Pairing, theta: str) -> float:
    in_common, alone = [], 0.0
    for tokens, common, own in ((a, rows.common_a, rows.own_a), (b, rows.common_b, rows.own_b)):
        mass = MASSES[theta].of_keys(tokens.keys.double())
        shared, single = mass[common].sum().item(), mass[own].sum().item()
        # Of keys that are all zero none carries more than another.
        share = shared / (shared + single) if shared + single > 0 else float(bool(common))
        in_common.append(tokens.scale * share)
        alone += tokens.scale * (1 - share)
    return sum(in_common) / 2 + alone


def paired(a: TokenSet, b: TokenSet) -> Pairing:
    waiting: dict[bytes, list[int]] = {}
    for row, mark in enumerate(marks(a)):
        waiting.setdefault(mark, []).append(row)
    common_a, common_b, own_b = [], [], []
    for row, mark in enumerate(marks(b)):
        if waiting.get(mark):
            common_a.append(waiting[mark].pop(0))
            common_b.append(row)
        else:
            own_b.append(row)
    own_a = sorted(row for rows in waiting.values() for row in rows)
    return Pairing(common_a, common_b, own_a, own_b)


def marks(tokens: TokenSet) -> list[bytes]:
    """A hash of every token: of the bits of its key and value."""
    halves = [half.cpu().contiguous().view(torch.uint8) for half in (tokens.keys, tokens.values)]
    return [
        blake2b(key.tobytes() + value.tobytes(), digest_size=16).digest()
        for key, value in zip(*(half.numpy() for half in halves), strict=True)
    ]
