"""The report of a growth: what was added where, and how much each layer and the output changed.

A report prints as a table and saves as JSON. After growth in memory it also holds the old and new
parameters, which `grow_optimizer` needs.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from tokenformer.growth.parameter_mapping import ParameterMapping


@dataclass(frozen=True)
class ChangedPart:
    """A layer or matrix that growth changed."""

    name: str
    before: tuple[int, ...]
    """The number of tokens, or the shape of a matrix; empty for a new one."""
    after: tuple[int, ...]
    scale_before: float | None = None
    scale_after: float | None = None
    change: float | None = None
    """Largest change of its output on random rows, relative to the largest output."""


@dataclass
class GrowthReport:
    method: str
    init: str | None
    seed: int
    parts: list[ChangedPart]
    parameters_before: int
    parameters_after: int
    scale: str | None = None
    """The scale policy."""
    exact: bool | None = None
    """Whether the method preserves the function; None where that depends on the initialization.
    `max_output_change` is the measured change."""
    max_output_change: float | None = None
    """Largest change of a logit on random input, relative to the largest; None after growth on
    disk."""
    mappings: dict[str, ParameterMapping] = field(default_factory=dict, repr=False)
    """By new parameter name."""
    old: Mapping[str, nn.Parameter] = field(default_factory=dict, repr=False)
    new: Mapping[str, nn.Parameter] = field(default_factory=dict, repr=False)

    def pair(self, old: nn.Module, new: nn.Module) -> None:
        """Store the parameters of both models, and copy `requires_grad` to the new ones."""
        self.old, self.new = dict(old.named_parameters()), dict(new.named_parameters())
        for name, parameter in self.new.items():
            source = self.mappings[name].source
            parameter.requires_grad_(source is None or self.old[source].requires_grad)

    @property
    def max_layer_change(self) -> float | None:
        changes = [part.change for part in self.parts if part.change is not None]
        return max(changes, default=None)

    def asdict(self) -> dict[str, Any]:
        saved = (
            "method",
            "init",
            "scale",
            "seed",
            "exact",
            "parameters_before",
            "parameters_after",
        )
        return {
            **{name: getattr(self, name) for name in saved},
            "max_layer_change": self.max_layer_change,
            "max_output_change": self.max_output_change,
            "parts": [asdict(part) for part in self.parts],
        }

    def save(self, path: Path | str) -> None:
        Path(path).write_text(json.dumps(self.asdict(), indent=2) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        exact = {True: "exact", False: "not exact", None: None}[self.exact]
        how = ", ".join(word for word in (self.method, self.init, exact) if word)
        lines = [f"{self.parameters_before:,} -> {self.parameters_after:,} parameters ({how})"]
        rows = [
            ("", "before", "after", "scale", "change"),
            *map(table_row, group_alike(self.parts)),
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        for name, *numbers in rows:
            cells = [text.rjust(width) for text, width in zip(numbers, widths[1:], strict=True)]
            lines.append("  ".join([name.ljust(widths[0]), *cells]).rstrip())
        if self.max_layer_change is not None:
            lines.append(f"largest change of a layer's output   {self.max_layer_change:.1e}")
        if self.max_output_change is not None:
            lines.append(f"largest change of the logits         {self.max_output_change:.1e}")
        return "\n".join(lines)


def table_row(part: ChangedPart) -> tuple[str, str, str, str, str]:
    scale = ""
    if part.scale_before is not None and part.scale_after is not None:
        same = part.scale_before == part.scale_after
        scale = (
            f"{part.scale_after:g}" if same else f"{part.scale_before:g} -> {part.scale_after:g}"
        )
    change = "" if part.change is None else f"{part.change:.1e}"
    return part.name, format_shape(part.before), format_shape(part.after), scale, change


def format_shape(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{n:,}" for n in shape)


def without_layer_number(name: str) -> str:
    """Return a parameter name with `*` for the layer number."""
    return ".".join("*" if word.isdigit() else word for word in name.split("."))


def group_alike(parts: list[ChangedPart]) -> list[ChangedPart]:
    """Combine the parts that are equal in all layers, keeping their largest change."""
    groups: dict[tuple[Any, ...], list[ChangedPart]] = {}
    for part in parts:
        key = (
            without_layer_number(part.name),
            part.before,
            part.after,
            part.scale_before,
            part.scale_after,
        )
        groups.setdefault(key, []).append(part)
    lines = []
    for (kind, *_), alike in groups.items():
        changes = [part.change for part in alike if part.change is not None]
        first = alike[0]
        lines.append(
            ChangedPart(
                kind if len(alike) > 1 else first.name,
                first.before,
                first.after,
                first.scale_before,
                first.scale_after,
                max(changes, default=None),
            )
        )
    return lines
