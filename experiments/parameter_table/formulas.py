"""The paper's table of parameters and FLOPs: its formulas as functions, beside our accounting.

Symbols are the paper's: L layers, width d, vocabulary V, text length T, and n_q, n_k, n_v, n_o and
n_ff tokens. Its column "Training FLOPs" is the forward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """What the formulas need of a configuration."""

    layers: int
    width: int
    vocabulary: int
    qkv: int = 0
    """n_q + n_k + n_v; 0 for a Transformer."""
    output: int = 0
    ffn: int = 0

    @classmethod
    def of(cls, config: Any) -> "Shape":
        sizes = (config.num_hidden_layers, config.hidden_size, config.vocab_size)
        if not hasattr(config, "ffn_tokens"):
            return cls(*sizes)
        qkv = sum(config.tokens(projection, 0) for projection in "qkv")
        return cls(*sizes, qkv, config.tokens("o", 0), config.tokens("ffn", 0))


Formula = Callable[[Shape], int]
LongFormula = Callable[[Shape, int], int]


@dataclass(frozen=True)
class Row:
    """An operation. `part` is its name in `tokenformer.models.accounting`."""

    operation: str
    part: str
    transformer: tuple[str, Formula] | None
    """Parameters, as a formula and a function; None for a dash."""
    tokenformer: tuple[str, Formula] | None
    transformer_flops: tuple[str, LongFormula] | None
    tokenformer_flops: tuple[str, LongFormula] | None

    def parameters(self, family: str) -> tuple[str, Formula] | None:
        return self.tokenformer if family == "tokenformer" else self.transformer

    def flops(self, family: str) -> tuple[str, LongFormula] | None:
        return self.tokenformer_flops if family == "tokenformer" else self.transformer_flops


EMBED = ("V d", lambda s: s.vocabulary * s.width)
ATTEND = ("4 L d T²", lambda s, t: 4 * s.layers * s.width * t**2)
DE_EMBED = ("2 V d", lambda s, t: 2 * s.vocabulary * s.width)
ROWS = (
    Row("embed", "embedding", EMBED, EMBED, None, None),
    Row(
        "attention: QKV project",
        "qkv",
        ("3 L d²", lambda s: 3 * s.layers * s.width**2),
        ("2 L d (n_q + n_k + n_v)", lambda s: 2 * s.layers * s.width * s.qkv),
        ("6 L d² T", lambda s, t: 6 * s.layers * s.width**2 * t),
        ("4 L d (n_q + n_k + n_v) T", lambda s, t: 4 * s.layers * s.width * s.qkv * t),
    ),
    Row("attention: token-token", "token_token", None, None, ATTEND, ATTEND),
    Row(
        "attention: output project",
        "output",
        ("L d²", lambda s: s.layers * s.width**2),
        ("2 L d n_o", lambda s: 2 * s.layers * s.width * s.output),
        ("2 L d² T", lambda s, t: 2 * s.layers * s.width**2 * t),
        ("4 L d n_o T", lambda s, t: 4 * s.layers * s.width * s.output * t),
    ),
    Row(
        "feed-forward",
        "ffn",
        ("8 L d²", lambda s: 8 * s.layers * s.width**2),
        ("2 L d n_ff", lambda s: 2 * s.layers * s.width * s.ffn),
        ("16 L d² T", lambda s, t: 16 * s.layers * s.width**2 * t),
        ("4 L d n_ff T", lambda s, t: 4 * s.layers * s.width * s.ffn * t),
    ),
    Row("de-embed", "head", None, None, DE_EMBED, DE_EMBED),
)
"""Table 3 of the paper, without its total."""
UNEMBEDDED = ("qkv", "output", "ffn")
"""The parts of N, the total without embedding."""
TOTAL = {
    "transformer": ("12 L d²", "2 N T + 4 L d T²"),
    "tokenformer": ("2 L d (n_q + n_k + n_v + n_o + n_ff)", "2 N T + 4 L d T²"),
}


def total_parameters(shape: Shape) -> int:
    """N in the paper's last row."""
    if not shape.ffn:
        return 12 * shape.layers * shape.width**2
    return 2 * shape.layers * shape.width * (shape.qkv + shape.output + shape.ffn)


def total_flops(shape: Shape, length: int) -> int:
    return 2 * total_parameters(shape) * length + 4 * shape.layers * shape.width * length**2


@dataclass(frozen=True)
class Difference:
    """A formula whose value is not that of our accounting."""

    operation: str
    model: str
    column: str
    paper: int
    ours: int


def differences(name: str, config: Any, length: int) -> list[Difference]:
    """Compare every row of the table, and its total, with our accounting of a language model."""
    from tokenformer.models.accounting import count_parameters, forward_flops

    family = "tokenformer" if hasattr(config, "ffn_tokens") else "transformer"
    shape, counts, flops = Shape.of(config), count_parameters(config), forward_flops(config, length)
    pairs = []
    for row in ROWS:
        if formula := row.parameters(family):
            pairs.append((row.operation, "parameters", formula[1](shape), counts[row.part]))
        if long_formula := row.flops(family):
            found = long_formula[1](shape, length)
            pairs.append((row.operation, "FLOPs", found, flops[row.part]))
    unembedded = sum(counts[part] for part in UNEMBEDDED)
    computed = sum(flops.values()) - flops["head"]
    pairs.append(("total", "parameters", total_parameters(shape), unembedded))
    pairs.append(("total", "FLOPs", total_flops(shape, length), computed))
    return [
        Difference(operation, name, column, paper, ours)
        for operation, column, paper, ours in pairs
        if paper != ours
    ]
