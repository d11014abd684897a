"""Merging the tokens of two dense layers; see `merge` for the scale."""

from dataclasses import dataclass
from hashlib import blake2b

import torch

from tokenformer.growth.parameter_mapping import NEW
from tokenformer.growth.tokens.token_set import Replacement, TokenSet
from tokenformer.growth.tokens.token_usage import MASSES


@dataclass(frozen=True)
class RowMatch:
    """Rows, or groups of them, that are bit-identical in both models, one to one, and those that
    only one has."""

    common_a: list[int]
    common_b: list[int]
    own_a: list[int]
    own_b: list[int]


def merge_layer(
    a: TokenSet, b: TokenSet, theta: str, factor: float, rates_of_b: list[float] | None = None
) -> Replacement:
    """Combine the tokens of a layer; values that only one model has are multiplied by `factor`."""
    rows = match_rows(token_hashes(a), token_hashes(b))
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


def match_rows(a: list[bytes], b: list[bytes]) -> RowMatch:
    """Match the hashes of the rows of two models."""
    unmatched: dict[bytes, list[int]] = {}
    for row, digest in enumerate(a):
        unmatched.setdefault(digest, []).append(row)
    common_a, common_b, own_b = [], [], []
    for row, digest in enumerate(b):
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
