"""Compute jobs in worker processes, one core each, and record their results.

The plan of an exhibit is a function of the results so far: a sweep of learning rates comes first,
then the seeds at the best one. The runner asks for the plan after every finished job and starts
those that are ready, in order.
"""

import os
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field

from experiments.job import Job, Result, Results, with_needs
from experiments.workspace import Workspace

Plan = Callable[[Results], list[Job]]


@dataclass
class Outcome:
    finished: set[str] = field(default_factory=set)
    """Keys of the jobs that were computed."""
    failed: dict[str, str] = field(default_factory=dict)
    """Tracebacks of the jobs that raised, by key."""


def run_jobs(
    plan: Plan, results: Results, workspace: Workspace, workers: int, log: Callable[[str], None]
) -> Outcome:
    """Compute what is missing of a plan. A failed job is reported, and those that need it are left
    out; the others go on."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the workers' libraries
    outcome, start = Outcome(), time.perf_counter()
    running: dict[Future[Result], Job] = {}
    done_flops = 0.0
    with ProcessPoolExecutor(workers, initializer=start_worker, initargs=(os.getpid(),)) as pool:
        try:
            while True:
                missing = missing_jobs(with_needs(plan(results)), results, workspace, outcome)
                workspace.prepare_data({name for job in missing for name in job.data})
                for job in ready_jobs(missing, outcome, running):
                    if len(running) == workers:
                        break
                    running[pool.submit(compute, job, workspace)] = job
                if not running:
                    return outcome
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    job = running.pop(future)
                    try:
                        result = future.result()
                    except Exception:
                        outcome.failed[job.key] = traceback.format_exc()
                        log(f"failed: {job.key}\n{outcome.failed[job.key]}")
                        continue
                    results.add(job, result)
                    outcome.finished.add(job.key)
                    done_flops += job.flops
                    left = sum(other.flops for other in missing if other not in results)
                    seconds = time.perf_counter() - start
                    log(progress_line(job, result, len(missing) - 1, seconds, done_flops, left))
        except KeyboardInterrupt:
            pool.shutdown(wait=True, cancel_futures=True)  # runs save a checkpoint at the signal
            raise


def missing_jobs(
    jobs: list[Job], results: Results, workspace: Workspace, outcome: Outcome
) -> list[Job]:
    """Return the jobs that are not finished. One that another job needs must have its model too:
    results may have been recorded elsewhere."""
    missing, needed = [], set()
    for job in reversed(jobs):  # what is needed comes first in `jobs`
        absent = job.key in needed and not workspace.model(job).exists()
        if job not in results or (absent and job.key not in outcome.finished):
            missing.append(job)
            needed.update(other.key for other in job.needs)
    return missing[::-1]


def ready_jobs(
    missing: list[Job], outcome: Outcome, running: dict[Future[Result], Job]
) -> list[Job]:
    busy = {job.key for job in running.values()} | outcome.failed.keys()
    waiting = {job.key for job in missing}
    return [
        job
        for job in missing
        if job.key not in busy and not any(other.key in waiting for other in job.needs)
    ]


def start_worker(parent: int) -> None:
    """Use one thread, without progress bars, and end with the runner: a worker would finish its
    job without it."""
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def compute(job: Job, workspace: Workspace) -> Result:
    """Run a job in a worker. A run that diverges, as one of a sweep may, has no loss. Another
    exception is passed on as text: one that cannot be unpickled, like that of a run stopped by a
    signal, breaks the pool and ends the other workers."""
    from tokenformer.errors import DivergedError

    try:
        return job.run(workspace)
    except DivergedError as error:
        return {"diverged": str(error)}
    except Exception:
        raise RuntimeError(traceback.format_exc()) from None


def progress_line(
    job: Job, result: Result, left: int, seconds: float, done: float, left_flops: float
) -> str:
    clock = f"{seconds / 60:.0f} min"
    if done:
        clock += f", about {seconds * left_flops / done / 60:.0f} min left"
    figures = {name: result[name] for name in ("bits_per_byte", "accuracy") if name in result}
    shown = "  ".join(f"{value:.4f}" for value in figures.values())
    return f"[{clock}, {left} jobs left]  {shown}  {job.key}"
