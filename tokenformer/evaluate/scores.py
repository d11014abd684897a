"""Scores of a model, printed as the paper's zero-shot table beside the paper's models."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from tokenformer.evaluate.benchmarks import BENCHMARKS, PERPLEXITY
from tokenformer.evaluate.paper_tables import PaperModel, models_near

MISSING = "-"
LARGEST_IN_FULL = 1e5
"""Larger perplexities are printed in scientific notation."""


@dataclass(frozen=True)
class Score:
    task: str
    metric: str
    value: float
    """Accuracies are in percent."""
    stderr: float | None
    items: int | None
    """None for a group of tasks."""

    @property
    def title(self) -> str:
        if self.task not in BENCHMARKS:
            return f"{self.task} {self.metric}"
        return BENCHMARKS[self.task].title + (" ppl" if self.metric == PERPLEXITY else "")

    @property
    def in_table(self) -> bool:
        """Whether the paper reports this metric; always True for other tasks."""
        if self.task not in BENCHMARKS:
            return True
        return self.metric in (PERPLEXITY, BENCHMARKS[self.task].metric)

    def asdict(self) -> dict[str, Any]:
        """Return the fields for JSON, with None for infinity and NaN."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }


@dataclass(frozen=True)
class Scores:
    parameters: int
    """Parameters of the model; selects the paper's models of similar size."""
    scores: list[Score]
    truncated: int = 0
    """Requests longer than the model's context."""

    @property
    def average(self) -> Score | None:
        """The mean of the paper's six accuracies, or None unless all were measured."""
        six = [s for s in self.scores if s.task in BENCHMARKS and s.metric != PERPLEXITY]
        six = [score for score in six if score.in_table]
        if len(six) < len(BENCHMARKS):
            return None
        errors = [score.stderr for score in six if score.stderr is not None]
        error = math.hypot(*errors) / len(six) if len(errors) == len(six) else None
        value = sum(score.value for score in six) / len(six)
        return Score("average", "acc", value, error, None)

    def asdict(self) -> dict[str, Any]:
        average = self.average
        return {
            "parameters": self.parameters,
            "scores": [score.asdict() for score in self.scores],
            "average": None if average is None else average.asdict(),
            "too_long": self.truncated,
            "paper": [model.asdict() for model in models_near(self.parameters)],
        }

    def __str__(self) -> str:
        models = models_near(self.parameters)
        rows = [
            ["", "", "this", "", *(model.name for model in models)],
            ["", "items", "model", "chance", *(model.size for model in models)],
            *(table_row(score, models) for score in self.scores if score.in_table),
        ]
        if self.average is not None:
            chance = sum(b.chance for b in BENCHMARKS.values()) / len(BENCHMARKS)
            figures = [chance, *(model.average for model in models)]
            rows.append(["Average", "", with_error(self.average), *(f"{f:.1f}" for f in figures)])
        lines = aligned(rows)
        if self.truncated:
            lines.append(
                f"{self.truncated:,} requests were longer than the model's context and lost their "
                "beginning."
            )
        return "\n".join(lines)


def table_row(score: Score, models: list[PaperModel]) -> list[str]:
    is_accuracy = score.task in BENCHMARKS and score.metric != PERPLEXITY
    figures = [model.score(score.task, score.metric) for model in models]
    return [
        score.title,
        MISSING if score.items is None else f"{score.items:,}",
        with_error(score),
        f"{BENCHMARKS[score.task].chance:.1f}" if is_accuracy else MISSING,
        *(MISSING if f is None else rounded(f, score.metric) for f in figures),
    ]


def with_error(score: Score) -> str:
    error = "" if score.stderr is None else f" ± {rounded(score.stderr, score.metric)}"
    return rounded(score.value, score.metric) + error


def rounded(value: float, metric: str) -> str:
    """Format a value with the paper's number of digits."""
    if metric == PERPLEXITY:
        return f"{value:,.2f}" if value < LARGEST_IN_FULL else f"{value:.1e}"
    return f"{value:.1f}" if metric.startswith("acc") else f"{value:.4g}"


def aligned(rows: list[list[str]]) -> list[str]:
    """Align columns two spaces apart, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
