"""Train a model that no recipe describes: through the training loop, without a run folder.

    stage = plan(run.recipe(workspace))[0]
    loop = Loop.from_stage(workload.task(model), stage)
    rows = train_in_memory(loop)
    result = summarize_rows(rows)

Such a job trains on the batches and with the schedule of the `LanguageRun` that made its recipe. It
takes a few minutes and starts again if it was interrupted.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from experiments.job import Job, Result
from experiments.language import LanguageRun

if TYPE_CHECKING:
    from typing_extensions import Self

    from tokenformer.train.loop import Loop

Row = dict[str, Any]


@dataclass(frozen=True)
class InMemoryRun(Job):
    """A language run with another model or optimizer. A sweep can vary its rate and seed."""

    base: LanguageRun

    @property
    def rate(self) -> float:
        return self.base.rate

    @property
    def data(self) -> tuple[str, ...]:
        return self.base.data

    @property
    def flops(self) -> float:
        return self.base.flops

    def reduced(self) -> "Self":
        return replace(self, base=self.base.reduced())

    def with_seed(self, seed: int) -> "Self":
        return replace(self, base=self.base.with_seed(seed))

    def stages(self) -> "list[tuple[int, Self]]":
        """Return the steps, with a run whose steps take as long."""
        return [(count, replace(self, base=base)) for count, base in self.base.stages()]


def train_in_memory(loop: "Loop", on_row: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """Train to the last step; return the rows of all steps, after one of the initial weights. Steps
    with a problem are skipped, as in a `LanguageRun`, which also gives up after as many in a row.
    `on_row` is called after every step."""
    from tokenformer.errors import DivergedError
    from tokenformer.train.run import MAX_PROBLEMS

    loss, problems = loop.validate(), 0
    rows: list[Row] = [
        {"step": 0, "flops": 0, "val_loss": loss, **loop.task.describe(loss)},
    ]
    on_row(rows[0])
    for row in loop.steps():
        rows.append(row)
        on_row(row)
        problems = problems + 1 if "problem" in row else 0
        if problems > MAX_PROBLEMS:
            raise DivergedError(f"step {row['step']}: {row['problem']}; {problems} such steps")
    return rows


def summarize_rows(rows: list[Row]) -> Result:
    """Return the figures that a `LanguageRun` records."""
    validated = [row for row in rows if "val_loss" in row]
    last = validated[-1]
    return {
        "bits_per_byte": round(last["val_bpb"], 5),
        "loss": round(last["val_loss"], 5),
        "start_bits_per_byte": round(rows[0]["val_bpb"], 5),
        "flops": last["flops"],
        "tokens": last["tokens"],
        "seconds": round(rows[-1]["seconds"], 1),
        "skipped": sum("problem" in row for row in rows),
        "curve": [[row["step"], row["flops"], round(row["val_bpb"], 5)] for row in validated],
    }
