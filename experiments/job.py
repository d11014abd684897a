"""Jobs: pieces of work that are identified by their options, computed once and recorded.

    results = Results(Path("runs/experiments/results.jsonl"))
    results.add(job, job.run(workspace))
    results[job]["bits_per_byte"]

A job is a frozen dataclass. Its key is the JSON of the options that differ from their defaults, so
exhibits that describe the same run share it, and a row of the results says how it was made.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from hashlib import sha256
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from experiments.workspace import Workspace

Result = dict[str, Any]
"""What a job found, as JSON: losses, curves, seconds."""


@dataclass(frozen=True)
class Job:
    @property
    def key(self) -> str:
        return json.dumps({"job": type(self).__name__, **given_options(self)})

    @property
    def digest(self) -> str:
        """A short name for folders."""
        return sha256(self.key.encode()).hexdigest()[:12]

    @property
    def needs(self) -> tuple["Job", ...]:
        """Jobs that must be finished before this one runs."""
        return ()

    @property
    def data(self) -> tuple[str, ...]:
        """The data that it reads; see `workspace.SOURCES`."""
        return ()

    @property
    def flops(self) -> float:
        """Estimated compute, for the cost and the time that is left."""
        return 0.0

    def run(self, workspace: "Workspace") -> Result:
        """Compute the result. Called in a worker process; resumes if it was interrupted."""
        raise NotImplementedError

    def reduced(self) -> "Job":
        """Return the same job with a few steps, for the scale `smoke`."""
        return self


def given_options(options: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults, as JSON values."""
    found = {}
    for field in fields(options):
        value = getattr(options, field.name)
        if value != field.default:
            found[field.name] = as_json(value)
    return found


def as_json(value: Any) -> Any:
    if is_dataclass(value):
        kind = {"job": type(value).__name__} if isinstance(value, Job) else {}
        return {**kind, **given_options(value)}
    if isinstance(value, tuple | list):
        return [as_json(part) for part in value]
    return value


def with_needs(jobs: Iterable[Job]) -> list[Job]:
    """Return the jobs and all that they need, each once, what is needed first."""
    found: dict[str, Job] = {}

    def add(job: Job) -> None:
        if job.key not in found:
            for needed in job.needs:
                add(needed)
            found[job.key] = job

    for job in jobs:
        add(job)
    return list(found.values())


class Results:
    """Finished jobs: a file with a row of JSON per job, and a lookup by job."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.rows: dict[str, Result] = {}
        for line in file.read_text().splitlines() if file.exists() else []:
            try:
                row = json.loads(line)
            except ValueError:  # a kill may leave half a line
                continue
            self.rows[row["key"]] = row

    def __contains__(self, job: Job) -> bool:
        return job.key in self.rows

    def __getitem__(self, job: Job) -> Result:
        return self.rows[job.key]

    def add(self, job: Job, result: Result) -> None:
        row = {"key": job.key, **result}
        self.rows[job.key] = row
        self.file.parent.mkdir(parents=True, exist_ok=True)
        text = self.file.read_text() if self.file.exists() else ""
        separator = "" if not text or text.endswith("\n") else "\n"  # after half a line
        with self.file.open("a") as file:
            file.write(f"{separator}{json.dumps(row)}\n")

    def has_all(self, jobs: Iterable[Job]) -> bool:
        return all(job in self for job in jobs)


J = TypeVar("J", bound=Job)


def best_of(candidates: Sequence[J], results: Results, metric: str = "loss") -> J | None:
    """Return the finished job with the lowest `metric`; None until all candidates are finished. A
    run that diverged has none and is never the best of several."""
    if not results.has_all(candidates):
        return None
    return min(candidates, key=lambda job: results[job].get(metric, math.inf))


@dataclass(frozen=True)
class Summary:
    """The values of one figure over several seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return mean(self.values)

    @property
    def spread(self) -> float:
        """The largest deviation from the mean."""
        return max(abs(value - self.mean) for value in self.values)

    def above(self, other: "Summary") -> bool:
        """Whether every seed is above every seed of another; by chance one time in twenty if three
        seeds of each are alike."""
        return min(self.values) > max(other.values)

    def format(self, digits: int = 3) -> str:
        if len(self.values) == 1:
            return f"{self.mean:.{digits}f}"
        return f"{self.mean:.{digits}f} ± {self.spread:.{digits}f}"


def summarize(jobs: Iterable[Job], results: Results, metric: str = "bits_per_byte") -> Summary:
    return Summary(tuple(results[job][metric] for job in jobs))
