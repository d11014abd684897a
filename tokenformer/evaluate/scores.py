"""What a model scored, printed as the paper's zero-shot table: its figures stand beside."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from tokenformer.evaluate.benchmarks import BENCHMARKS, PERPLEXITY
from tokenformer.evaluate.paper_tables import PaperModel, models_near

MISSING = "-"
TOO_LONG = 1e5


@dataclass(frozen=True)
class Score:
    task: str
    metric: str
    value: float
    """Accuracies in percent."""
    stderr: float | None
    items: int | None
    """None of a group of tasks."""

    @property
    def title(self) -> str:
        if self.task not in BENCHMARKS:
            return f"{self.task} {self.metric}"
        return BENCHMARKS[self.task].title + (" ppl" if self.metric == PERPLEXITY else "")

    @property
    def in_table(self) -> bool:
        """Of the benchmarks, what the paper reports; of other tasks everything."""
        if self.task not in BENCHMARKS:
            return True
        return self.metric in (PERPLEXITY, BENCHMARKS[self.task].metric)

    def asdict(self) -> dict[str, Any]:
        """As JSON holds it, which has no infinity and no NaN: None stands for them."""
        return {
            name: None if isinstance(fact, float) and not math.isfinite(fact) else fact
            for name, fact in asdict(self).items()
        }


@dataclass(frozen=True)
class Scores:
    parameters: int
    """Of the model, by which the paper's models to compare with are chosen."""
    scores: list[Score]
    too_long: int = 0
    """Requests that were longer than the model reads."""

    @property
    def average(self) -> Score | None:
        """As the paper's: of the six accuracies, where all were measured."""
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
            "too_long": self.too_long,
            "paper": [model.asdict() for model in models_near(self.parameters)],
        }

    def __str__(self) -> str:
        models = models_near(self.parameters)
        rows = [
            ["", "", "this", "", *(model.name for model in models)],
            ["", "items", "model", "chance", *(model.size for model in models)],
            *(cells(score, models) for score in self.scores if score.in_table),
        ]
        if self.average is not None:
            chance = sum(b.chance for b in BENCHMARKS.values()) / len(BENCHMARKS)
            figures = [chance, *(model.average for model in models)]
            rows.append(["Average", "", measured(self.average), *(f"{f:.1f}" for f in figures)])
        lines = aligned(rows)
        if self.too_long:
            lines.append(
                f"{self.too_long:,} requests were longer than the model reads: contexts lost their "
                "beginning."
            )
        return "\n".join(lines)


def cells(score: Score, models: list[PaperModel]) -> list[str]:
    """A row of the table."""
    is_accuracy = score.task in BENCHMARKS and score.metric != PERPLEXITY
    figures = [model.score(score.task, score.metric) for model in models]
    return [
        score.title,
        MISSING if score.items is None else f"{score.items:,}",
        measured(score),
        f"{BENCHMARKS[score.task].chance:.1f}" if is_accuracy else MISSING,
        *(MISSING if f is None else printed(f, score.metric) for f in figures),
    ]


def measured(score: Score) -> str:
    error = "" if score.stderr is None else f" ± {printed(score.stderr, score.metric)}"
    return printed(score.value, score.metric) + error


def printed(value: float, metric: str) -> str:
    """As the paper does, but for perplexities that nobody prints in full."""
    if metric == PERPLEXITY:
        return f"{value:,.2f}" if value < TOO_LONG else f"{value:.1e}"
    return f"{value:.1f}" if metric.startswith("acc") else f"{value:.4g}"


def aligned(rows: list[list[str]]) -> list[str]:
    """Columns two spaces apart, the first to the left and figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
