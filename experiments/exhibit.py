"""What a table or figure of the paper has to provide: its claim, a plan of jobs, and findings.

An exhibit is a module-level `EXHIBIT` in a folder of `experiments`. Everything in its findings is
computed from recorded results.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from experiments.job import Job, Results

Verdict = Literal["holds", "does not hold", "not at this scale", "beyond the paper"]


@dataclass(frozen=True)
class Scale:
    """smoke: a few steps each; laptop: two CPU cores; paper: the published sizes and budgets."""

    name: Literal["smoke", "laptop", "paper"]
    seeds: tuple[int, ...]

    def fit(self, job: Any) -> Any:
        """Return a job of the laptop scale with the steps of this one."""
        return job.reduced() if self.name == "smoke" else job

    def sweep(self, rates: Sequence[float]) -> Sequence[float]:
        """Return the learning rates to try; a smoke run tries one."""
        return rates[:1] if self.name == "smoke" else rates


SCALES = {
    "smoke": Scale("smoke", (0,)),
    "laptop": Scale("laptop", (0, 1, 2)),
    "paper": Scale("paper", (0,)),
}


@dataclass(frozen=True)
class Table:
    """A table of text; the first row is the header."""

    rows: list[list[str]]
    caption: str = ""

    def markdown(self) -> str:
        header, *rows = self.rows
        lines = [header, ["---"] * len(header), *rows]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"{self.caption}\n\n{text}" if self.caption else text


@dataclass(frozen=True)
class Plot:
    """A picture: its file name, what it shows, and the function that draws it to a path."""

    name: str
    caption: str
    draw: Callable[[Path], None]


@dataclass
class Findings:
    verdict: Verdict
    argument: str
    """Two sentences that argue the verdict from the figures."""
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Paragraphs or list items of Markdown about the setting, and about what the figures mean."""
    headline: str = ""
    """The figure for the list of all exhibits: ours and the paper's."""


Arms = Mapping[str, Sequence[Any]]
"""By title, the runs that lead to the model of an arm: those that it starts from, then itself."""


@dataclass(frozen=True)
class Exhibit:
    title: str
    source: str
    """The tables and figures of the paper."""
    claim: str
    setting: str
    """What is trained, on what, for how long, at the laptop scale."""
    plan: Callable[[Scale, Results], Sequence[Job]]
    """The jobs to compute, given the results so far; called again after every job."""
    report: Callable[[Scale, Results], Findings]
    """The findings; called when all jobs of the plan are finished."""
    page: str = ""
    """Of a study: the file in docs/results that is written from its findings, if any is."""
    arms: Callable[[Scale, Results], Arms] | None = None
    """The arms whose cost is reported in FLOPs and seconds; called when the plan is finished."""

    def jobs(self, scale: Scale, results: Results) -> list[Job]:
        """Return the plan and, when it is finished, the job that times a step of every arm."""
        jobs = list(self.plan(scale, results))
        if self.arms is not None and scale.name != "paper" and results.has_all(jobs):
            from experiments.step_times import step_times

            jobs.append(step_times(self.arms(scale, results), scale))
        return jobs


def complete(exhibit: Exhibit, scale: Scale, results: Results) -> bool:
    """Whether all jobs are finished. A plan that grows with the results names only finished jobs
    when it is complete."""
    return results.has_all(exhibit.jobs(scale, results))


def compute_of(jobs: Iterable[Job]) -> float:
    return sum(job.flops for job in jobs)
