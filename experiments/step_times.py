"""What the arms of an exhibit cost: FLOPs, and seconds by the time of a step of every model.

    job = step_times(arms, scale)               # to be computed once per exhibit
    cost_table(arms, job, results)              # FLOPs and seconds of every arm

Seconds that runs record depend on what else the machine did. Here the steps of all models are
timed in turns, so that their ratios hold on a shared machine.
"""

import statistics
from dataclasses import dataclass, replace
from typing import Any

from experiments.exhibit import Arms, Scale, Table
from experiments.job import Job, Result, Results
from experiments.workspace import Workspace


@dataclass(frozen=True)
class StepTimes(Job):
    """Seconds of a training step of several runs, measured in turns: the load of a shared machine
    changes over time, but hardly within a round."""

    runs: tuple[Any, ...]
    """From scratch, of one stage, each with a `loop`."""
    rounds: int = 40

    @property
    def data(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for run in self.runs for name in run.data))

    @property
    def flops(self) -> float:
        steps = [sum(count for count, _ in run.stages()) for run in self.runs]
        costs = [run.flops / count for run, count in zip(self.runs, steps, strict=True)]
        return (self.rounds + 1) * sum(costs)

    def reduced(self) -> "StepTimes":
        return replace(self, runs=tuple(run.reduced() for run in self.runs), rounds=2)

    def run(self, workspace: Workspace) -> Result:
        from benchmarks.harness import ratio, time_interleaved

        loops = [run.loop(workspace) for run in self.runs]
        for loop in loops:
            loop.run.validate_every = 0
        times = time_interleaved({str(n): loop.step for n, loop in enumerate(loops)}, self.rounds)
        first, *_ = times.values()
        return {
            "seconds": round(sum(sum(values) for values in times.values()), 1),
            "step_seconds": [round(statistics.median(values), 5) for values in times.values()],
            "times_first": [[round(x, 3) for x in ratio(v, first)] for v in times.values()],
        }


def step_times(arms: Arms, scale: Scale) -> StepTimes:
    """Return the job that times a step of every model of the arms."""
    found: dict[str, Any] = {}
    for chain in arms.values():
        for run in chain:
            for _, timed in run.stages():
                found.setdefault(timed.key, timed)
    return StepTimes(tuple(found.values()), 2 if scale.name == "smoke" else StepTimes.rounds)


def cost_table(arms: Arms, job: StepTimes, results: Results) -> Table:
    seconds = dict(zip((r.key for r in job.runs), results[job]["step_seconds"], strict=True))
    rows = [["cost of training", "steps", "FLOPs", "seconds on one core"]]
    for title, chain in arms.items():
        stages = [stage for run in chain for stage in run.stages()]
        steps = " + ".join(f"{count:,}" for count, _ in stages)
        total = sum(count * seconds[timed.key] for count, timed in stages)
        flops = sum(run.flops for run in chain)
        rows.append([title, steps, f"{flops:.2e}", f"{total:.0f}"])
    return Table(
        rows,
        "Seconds are the steps times the median time of a step, without validation; the steps of "
        f"all models of this table were timed in turns, {job.rounds} each.",
    )
