"""The report of a Transformer conversion: size and error of every projection and of the model."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenformer.growth.growth_report import without_layer_number

REPORT = "conversion.json"


@dataclass(frozen=True)
class ProjectionReport:
    """One Pattention layer and the projection it replaces."""

    name: str
    form: str
    """How its tokens were constructed: pair, shift, own rows or fitted."""
    tokens: int
    scale: float
    parameters_before: int
    parameters_after: int
    error: float
    """||ours - source|| / ||source|| of its output, on inputs of the source."""


@dataclass(frozen=True)
class Comparison:
    """The converted model against its source on the same tokens, in nats per token."""

    tokens: int
    source_loss: float
    loss: float
    divergence: float
    """KL divergence of our next-token distribution from the source's."""
    agreement: float
    """Share of tokens with the same most likely next token."""
    logit_error: float
    """||ours - source|| / ||source||, with the mean subtracted from each row of logits."""

    def __str__(self) -> str:
        return (
            f"on {self.tokens:,} tokens: perplexity {perplexity(self.source_loss)} -> "
            f"{perplexity(self.loss)}, divergence {self.divergence:.2e} nats, same top token "
            f"{self.agreement:.2%}, error of the logits {self.logit_error:.1e}"
        )


@dataclass(frozen=True)
class DistillationResult:
    """The comparison after distillation from the source."""

    steps: int
    comparison: Comparison


def perplexity(loss: float) -> str:
    return f"{math.exp(min(loss, 700)):,.4f}"


@dataclass
class ConversionReport:
    source: str
    """The `model_type` of the source, such as gpt2."""
    linear: str
    parameters_before: int
    parameters_after: int
    maps: list[ProjectionReport]
    measured_on: str
    """`text`, or `random tokens` if no data was given."""
    comparison: Comparison
    distilled: DistillationResult | None = None
    tokenizer: str | None = None
    """Where the tokenizer was found."""

    @property
    def max_error(self) -> float:
        return max(part.error for part in self.maps)

    def asdict(self) -> dict[str, Any]:
        return asdict(self) | {"max_error": self.max_error}

    def save(self, path: Path | str) -> None:
        Path(path).write_text(json.dumps(self.asdict(), indent=2) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        lines = [
            f"{self.source}: {self.parameters_before:,} -> {self.parameters_after:,} parameters, "
            f"errors on {self.measured_on}"
        ]
        rows: list[tuple[str, ...]] = [
            ("", "form", "tokens", "parameters", "error, mean", "largest")
        ]
        rows += [cells(kind, parts) for kind, parts in group_by_projection(self.maps).items()]
        widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
        for row in rows:
            first, *others = (
                cell.rjust(width) if place > 1 else cell.ljust(width)
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            lines.append("  ".join([first, *others]).rstrip())
        lines.append(str(self.comparison))
        if self.distilled is not None:
            lines.append(f"distilled for {self.distilled.steps} steps, {self.distilled.comparison}")
        return "\n".join(lines)


def group_by_projection(maps: list[ProjectionReport]) -> dict[str, list[ProjectionReport]]:
    """Group the reports of the same projection in all layers."""
    groups: dict[str, list[ProjectionReport]] = {}
    for part in maps:
        groups.setdefault(without_layer_number(part.name), []).append(part)
    return groups


def cells(kind: str, parts: list[ProjectionReport]) -> tuple[str, ...]:
    first, errors = parts[0], [part.error for part in parts]
    return (
        kind if len(parts) > 1 else first.name,
        first.form,
        f"{first.tokens:,}",
        f"{first.parameters_before:,} -> {first.parameters_after:,}",
        f"{sum(errors) / len(errors):.1e}",
        f"{max(errors):.1e}",
    )
