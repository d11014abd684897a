"""The runner: jobs by key, needs before dependents, plans that grow, failures, resuming."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from experiments.job import Job, Result, Results, best_of, summarize, with_needs
from experiments.runner import Outcome, missing_jobs, run_jobs
from experiments.workspace import Workspace
from tests.support.processes import wait_until
from tokenformer.errors import DivergedError

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Square(Job):
    """Writes the order of the jobs to a file and returns a square."""

    number: int = 0
    start: "Square | None" = None
    fails: bool = False

    @property
    def needs(self) -> tuple[Job, ...]:
        return () if self.start is None else (self.start,)

    def run(self, workspace: Workspace) -> Result:
        with (workspace.folder / "order.txt").open("a") as file:
            file.write(f"{self.number}\n")
        if self.fails:
            raise ValueError(f"no square of {self.number}")
        workspace.model(self).mkdir(parents=True, exist_ok=True)
        return {"loss": self.number**2}


def run(plan, folder: Path, workers: int = 1):
    results = Results(folder / "results.jsonl")
    lines: list[str] = []
    outcome = run_jobs(plan, results, Workspace(folder), workers, lines.append)
    return results, outcome, lines


def order(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "order.txt").read_text().split()]


def test_a_key_names_what_differs_from_the_defaults():
    assert json.loads(Square().key) == {"job": "Square"}
    nested = Square(2, start=Square(1))
    assert json.loads(nested.key) == {
        "job": "Square",
        "number": 2,
        "start": {"job": "Square", "number": 1},
    }
    assert with_needs([nested, Square(1)]) == [Square(1), nested]


def test_jobs_run_once_and_needed_ones_first(tmp_path):
    jobs = [Square(3, start=Square(2, start=Square(1))), Square(1)]
    results, outcome, lines = run(lambda results: jobs, tmp_path)
    assert order(tmp_path) == [1, 2, 3]
    assert results[jobs[0]]["loss"] == 9
    assert len(outcome.finished) == len(lines) == 3
    again, outcome, _ = run(lambda results: jobs, tmp_path)
    assert order(tmp_path) == [1, 2, 3], "finished jobs are not repeated"
    assert not outcome.finished
    assert again.rows == results.rows


def test_a_plan_may_depend_on_results(tmp_path):
    sweep = [Square(n) for n in (3, 1, 2)]

    def plan(results):
        best = best_of(sweep, results)
        return sweep if best is None else [*sweep, Square(best.number + 10)]

    results, _, _ = run(plan, tmp_path, workers=2)
    assert sorted(order(tmp_path)) == [1, 2, 3, 11]
    assert results[Square(11)]["loss"] == 121


def test_a_failed_job_leaves_the_others_alone(tmp_path):
    bad = Square(1, fails=True)
    jobs = [bad, Square(2, start=bad), Square(3)]
    results, outcome, lines = run(lambda results: jobs, tmp_path)
    assert order(tmp_path) == [1, 3], "what needs a failed job does not run"
    assert "no square of 1" in outcome.failed[bad.key]
    assert any("no square of 1" in line for line in lines)
    assert Square(3) in results
    assert bad not in results


class StoppedError(Exception):
    """Like that of a run stopped by a signal: its arguments are not those of its constructor."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"signal {number} at step {step}")


@dataclass(frozen=True)
class Stopped(Job):
    def run(self, workspace: Workspace) -> Result:
        raise StoppedError(15, 3)


def test_an_exception_that_cannot_be_unpickled_leaves_the_others_alone(tmp_path):
    results, outcome, _ = run(lambda results: [Stopped(), Square(3)], tmp_path)
    assert "signal 15 at step 3" in outcome.failed[Stopped().key]
    assert Square(3) in results


@dataclass(frozen=True)
class Diverging(Square):
    def run(self, workspace: Workspace) -> Result:
        raise DivergedError("step 3: loss nan")


def test_a_diverged_run_does_not_stop_its_sweep(tmp_path):
    sweep = [Diverging(1), Square(5), Diverging(3)]
    results, outcome, _ = run(lambda results: sweep, tmp_path)
    assert not outcome.failed
    assert results[sweep[0]]["diverged"] == "step 3: loss nan"
    assert best_of(sweep, results) == Square(5)


def test_a_needed_job_without_its_model_is_computed_again(tmp_path):
    """Results may have been recorded on another machine."""
    results, workspace = Results(tmp_path / "results.jsonl"), Workspace(tmp_path)
    first, second = Square(1), Square(2, start=Square(1))
    results.add(first, {"loss": 1})
    assert missing_jobs([first, second], results, workspace, Outcome()) == [first, second]
    computed = Outcome(finished={first.key})
    assert missing_jobs([first, second], results, workspace, computed) == [second], "only once"
    results.add(second, {"loss": 4})
    assert missing_jobs([first, second], results, workspace, Outcome()) == []
    assert missing_jobs([first], results, workspace, Outcome()) == []


def test_results_survive_half_a_line(tmp_path):
    file = tmp_path / "results.jsonl"
    results = Results(file)
    results.add(Square(1), {"loss": 1})
    with file.open("a") as stream:
        stream.write('{"key": "half')
    results = Results(file)
    assert Square(1) in results
    results.add(Square(2), {"loss": 4})
    assert Results(file).rows.keys() == {Square(1).key, Square(2).key}


def test_summary_has_mean_and_largest_deviation(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    for number in (1, 2, 6):
        results.add(Square(number), {"loss": float(number)})
    summary = summarize([Square(n) for n in (1, 2, 6)], results, "loss")
    assert summary.format() == "3.000 ± 3.000"
    assert best_of([Square(1), Square(9)], results) is None


SLEEPER = """
import os, sys, time
from dataclasses import dataclass
from pathlib import Path
from experiments.job import Job, Results
from experiments.runner import run_jobs
from experiments.workspace import Workspace

@dataclass(frozen=True)
class Sleep(Job):
    def run(self, workspace):
        (workspace.folder / "pid").write_text(str(os.getpid()))
        time.sleep(120)
        return {}

folder = Path(sys.argv[1])
run_jobs(lambda results: [Sleep()], Results(folder / "results.jsonl"), Workspace(folder), 1, print)
"""


@pytest.mark.slow
def test_workers_end_with_a_killed_runner(tmp_path):
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    runner = subprocess.Popen([sys.executable, "sleeper.py", "."], cwd=tmp_path, env=environment)
    try:
        assert wait_until(lambda: read(tmp_path / "pid"), runner)
        worker = int(read(tmp_path / "pid"))
        os.kill(runner.pid, signal.SIGKILL)
        runner.wait(10)
        assert wait_until(lambda: not is_running(worker))
    finally:
        runner.kill()


def read(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()
