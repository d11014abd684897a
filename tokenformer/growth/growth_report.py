"""What growth did: what was added where, how far each layer and the output moved.

A report prints as a table and saves as JSON. In memory it also keeps the old and the new parameters
paired, which is what `grow_optimizer` needs.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from tokenformer.growth.origin import Origin


@dataclass(frozen=True)
class Part:
    """One layer, or one matrix, that growth has changed."""

    name: str
    before: tuple[int, ...]
    """Its size: the number of tokens, or the shape of a matrix; none of what is in a new layer."""
    after: tuple[int, ...]
    scale_before: float | None = None
    scale_after: float | None = None
    change: float | None = None
    """Largest change of its output on random rows, as a share of the largest output."""


@dataclass
class GrowthReport:
    method: str
    init: str | None
    seed: int
    parts: list[Part]
    parameters_before: int
    parameters_after: int
    scale: str | None = None
    """The policy the scales were set by."""
    exact: bool | None = None
    """Whether the method promises the same function as before; None where it depends on the init.
    `max_output_change` says what came of it."""
    max_output_change: float | None = None
    """Largest change of a logit on random input, as a share of the largest; None from disk."""
    origins: dict[str, Origin] = field(default_factory=dict, repr=False)
    """By the names of the new parameters."""
    old: Mapping[str, nn.Parameter] = field(default_factory=dict, repr=False)
    new: Mapping[str, nn.Parameter] = field(default_factory=dict, repr=False)

    def pair(self, old: nn.Module, new: nn.Module) -> None:
        """Keep both models' parameters, and freeze the new ones as the old ones were."""
        self.old, self.new = dict(old.named_parameters()), dict(new.named_parameters())
        for name, parameter in self.new.items():
            source = self.origins[name].name
            parameter.requires_grad_(source is None or self.old[source].requires_grad)

    @property
    def max_layer_change(self) -> float | None:
        changes = [part.change for part in self.parts if part.change is not None]
        return max(changes, default=None)

    def asdict(self) -> dict[str, Any]:
        kept = ("method", "init", "scale", "seed", "exact", "parameters_before", "parameters_after")
        return {
            **{name: getattr(self, name) for name in kept},
            "max_layer_change": self.max_layer_change,
            "max_output_change": self.max_output_change,
            "parts": [asdict(part) for part in self.parts],
        }

    def save(self, path: Path | str) -> None:
        Path(path).write_text(json.dumps(self.asdict(), indent=2) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        promise = {True: "exact", False: "not exact", None: None}[self.exact]
        how = ", ".join(word for word in (self.method, self.init, promise) if word)
        lines = [f"{self.parameters_before:,} -> {self.parameters_after:,} parameters ({how})"]
        rows = [("", "before", "after", "scale", "change"), *map(cells, gathered(self.parts))]
        widths = [max(len(row[place]) for row in rows) for place in range(5)]
        for row in rows:
            first, *rest = (cell.ljust(widths[0]) if not p else cell.rjust(widths[p])
                            for p, cell in enumerate(row))  # fmt: skip
            lines.append("  ".join([first, *rest]).rstrip())
        if self.max_layer_change is not None:
            lines.append(f"largest change of a layer's output   {self.max_layer_change:.1e}")
        if self.max_output_change is not None:
            lines.append(f"largest change of the logits         {self.max_output_change:.1e}")
        return "\n".join(lines)


def cells(part: Part) -> tuple[str, str, str, str, str]:
    scale = ""
    if part.scale_before is not None and part.scale_after is not None:
        same = part.scale_before == part.scale_after
        scale = (
            f"{part.scale_after:g}" if same else f"{part.scale_before:g} -> {part.scale_after:g}"
        )
    change = "" if part.change is None else f"{part.change:.1e}"
    return part.name, size(part.before), size(part.after), scale, change


def size(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{n:,}" for n in shape)


def kind_of(name: str) -> str:
    """The name with the number of its layer left out."""
    return ".".join("*" if word.isdigit() else word for word in name.split("."))


def gathered(parts: list[Part]) -> list[Part]:
    """Parts that are alike in all layers as one line, with the largest change among them."""
    groups: dict[tuple[Any, ...], list[Part]] = {}
    for part in parts:
        key = (kind_of(part.name), part.before, part.after, part.scale_before, part.scale_after)
        groups.setdefault(key, []).append(part)
    lines = []
    for (kind, *_), alike in groups.items():
        changes = [part.change for part in alike if part.change is not None]
        first = alike[0]
        lines.append(
            Part(
                kind if len(alike) > 1 else first.name,
                first.before,
                first.after,
                first.scale_before,
                first.scale_after,
                max(changes, default=None),
            )
        )
    return lines
