"""`tokenformer train`: train a model from a recipe, in one process or under torchrun."""

import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tokenformer.data.augmentation_options import AugmentationOptions
from tokenformer.errors import InputError, one_line
from tokenformer.train.options import (
    AdapterOptions,
    DataOptions,
    ModelOptions,
    OptimizerOptions,
    Recipe,
    RunOptions,
    ScheduleOptions,
    StageOptions,
)
from tokenformer.train.stages import shortened

if TYPE_CHECKING:
    from tokenformer.train.run import Run
    from tokenformer.train.run_record import Change, Record


def train(
    recipe: Path,
    out: Path | None = None,
    max_steps: int | None = None,
    override: bool = False,
    dry_run: bool = False,
    model: ModelOptions = ModelOptions(),  # noqa: B008
    data: DataOptions = DataOptions(),  # noqa: B008
    optimizer: OptimizerOptions = OptimizerOptions(),  # noqa: B008
    schedule: ScheduleOptions = ScheduleOptions(),  # noqa: B008
    run: RunOptions = RunOptions(),  # noqa: B008
    stages: list[StageOptions] = [],  # noqa: B006
    augmentation: AugmentationOptions = AugmentationOptions(),  # noqa: B008
    adapter: AdapterOptions = AdapterOptions(),  # noqa: B008
) -> None:
    """Train a model from a recipe; options override those of the recipe.

    RECIPE is a name (see --list) or a YAML file with the sections model, data, augmentation,
    optimizer, schedule, run, stages and adapter.

    Args:
        recipe: The recipe's file.
        out: The run folder; by default runs/RECIPE. An existing run resumes from its last
            checkpoint.
        stages: Parts of the run between which the model grows.
        max_steps: Train at most this many steps, with the schedule and warm-up fitted to them.
        override: Resume an existing run with changed options, or extend a finished one with a
            larger run.steps. Changes are recorded in config-history.yaml.
        dry_run: Check the recipe and print parameters, steps, FLOPs, learning rate and memory of
            every stage; train and write nothing. The data may be missing.
    """
    folder = out or Path("runs") / recipe.stem
    options = Recipe(model, data, optimizer, schedule, run, stages, augmentation, adapter)
    if max_steps is not None:
        if max_steps < 1:
            raise InputError(f"--max_steps {max_steps} must be at least 1")
        options = shortened(options, max_steps)
    try:
        job = checked(Job(recipe, folder, options, override), needs_data=not dry_run)
    except (ValueError, OSError) as error:
        raise InputError(one_line(error)) from None
    if not dry_run:
        train_job(job)
        return
    if job.recipe.adapter.method is not None:
        raise InputError(
            f"--dry_run estimates the training of whole models, not adapter.method="
            f"{job.recipe.adapter.method}"
        )
    assert job.file is not None
    from tokenformer.cli.dry_run import show_run
    from tokenformer.train.run_record import newest_step

    show_run(job.file, job.recipe, job.notes, job.folder, newest_step(job.folder))


@dataclass
class Job:
    """A recipe to train and its run folder."""

    file: Path | None
    """The recipe's file; None if a command has made the recipe, with absolute paths."""
    folder: Path
    recipe: Recipe
    override: bool
    notes: tuple[str, ...] = ()
    """Lines to print before training starts."""


def checked(job: Job, needs_data: bool = True) -> Job:
    """Return the job with absolute paths, after all checks that do not need torch."""
    from tokenformer.train.recipe_inputs import check_inputs, resolve_paths
    from tokenformer.train.run_record import ADAPTER, MODEL, Record, check_folder, newest_step

    record, step = Record(job.folder), newest_step(job.folder)
    apart = job.recipe.adapter.is_saved_apart
    check_folder(job.folder, ADAPTER if apart else MODEL)
    notes: list[str] = []
    recipe = job.recipe
    if job.file is not None:
        recipe = resolve_paths(recipe, job.file, record.values, notes.append)
    check_inputs(recipe, begun=step > 0, needs_data=needs_data)
    record.check(recipe, step, job.override)
    return Job(job.file, job.folder, recipe, job.override, tuple(notes))


def train_job(job: Job, *, on_stderr: bool = False) -> "Run":
    """Train with a progress display, on standard output unless that is for something else; return
    the finished run."""
    import torch
    from rich.console import Console

    from tokenformer.files import lock_folder
    from tokenformer.train.loop import PRECISIONS
    from tokenformer.train.matmul_peak import matmul_peak
    from tokenformer.train.parallel.distribute import process_group
    from tokenformer.train.progress_display import progress
    from tokenformer.train.run import Run, StoppedError
    from tokenformer.train.run_record import Record
    from tokenformer.train.workload import make_workload

    with ExitStack() as stack:
        ranks = stack.enter_context(process_group())
        torch.manual_seed(job.recipe.run.seed)
        # No markup: paths may contain brackets.
        console = Console(highlight=False, markup=False, quiet=not ranks.first, stderr=on_stderr)
        log = partial(console.print, soft_wrap=True)
        try:
            if ranks.first:
                stack.callback(remove_if_empty, job.folder)
                stack.enter_context(lock_folder(job.folder))
            record = Record(job.folder)
            for note in job.notes:
                log(note)
            workload = make_workload(job.recipe)
            run = Run(job.folder, job.recipe, workload, log)
            changes = record.check(job.recipe, run.loop.progress.step, job.override)
        except BlockingIOError:
            raise InputError(
                f"another process is training in {job.folder}; wait for it, or name another --out"
            ) from None
        except (ValueError, OSError) as error:
            raise InputError(one_line(error)) from None
        if run.is_complete:
            log(nothing_to_do(run, record, "nothing was changed"))
            return run
        log(
            f"{run.loop.task.model.num_parameters():,} parameters, {len(workload.train):,} "
            f"{workload.unit} to train on, "
            f"{ranks.count} process{'es' if ranks.count > 1 else ''}; the run is in {job.folder}"
        )
        for note in workload.notes(run.loop.task.model):
            log(note)
        log_start(run, changes, job, log)
        finished = run.at_last_step
        if ranks.first and not finished:
            record.write(job.recipe, run.loop.progress.step)
        try:
            peak = matmul_peak(
                run.loop.device, PRECISIONS.get(job.recipe.run.precision, torch.float32)
            )
            with progress(
                console,
                run.last_step,
                None if peak is None else ranks.count * peak,
                workload.unit,
                done=run.loop.progress.step,
                details=True,
            ) as show:
                run.train(show)
        except StoppedError as stopped:
            log(f"{stopped}. To resume: tokenformer {shlex.join(sys.argv[1:])}")
            raise SystemExit(128 + stopped.number) from None
        if finished:
            log(nothing_to_do(run, record, "no step was trained"))
        log(f"Done: {run.exported}, metrics.jsonl, loss.png")
        return run


def nothing_to_do(run: "Run", record: "Record", outcome: str) -> str:
    """Return the message for a run at or past its last step: where it is and how to extend it."""
    step, last, known = run.loop.progress.step, run.last_step, record.steps
    if known is not None and known > step:
        rest = f"it was started with {known} steps: to resume it, set --run.steps {known}"
    else:
        how = "more steps in a stage" if run.recipe.stages else f"--run.steps {2 * step}"
        rest = f"to extend it: {how} --override"
    state = "is finished" if step == last else f"is past step {last}, the last one requested"
    return f"{run.folder} {state}: it is at step {step}; {outcome}; {rest}"


def log_start(run: "Run", changes: "list[Change]", job: Job, log: Callable[[str], None]) -> None:
    """Log where the run resumes, changed options, and warnings about learning rate and dtype."""
    step, options = run.loop.progress.step, job.recipe
    if run.resumed is not None:
        log(f"Resuming from step {step}: {run.resumed}")
        for change in changes:
            log(f"From step {step} on: {change}")
        if changes and (line := rate_change(run)):
            log(line)
    elif options.model.start_from is not None and job.file is not None:
        from tokenformer.train.recipe_inputs import uses_rate_for_new_model
        from tokenformer.train.row_rates import trains_new_tokens_only

        is_adapted = options.adapter.method is not None
        adds = is_adapted or trains_new_tokens_only(run.loop.task.model, options.optimizer)
        if not adds and uses_rate_for_new_model(options, job.file):
            rate = options.optimizer.learning_rate
            log(
                f"Warning: the learning rate {rate:g} of {job.file} is meant for fresh weights and "
                f"may undo what {options.model.start_from} has learned; try "
                f"--optimizer.learning_rate {rate / 10:.1g} and a longer --schedule.warmup_steps"
            )
    if run.loop.device.type == "cpu" and options.run.precision != "fp32":
        log(f"Warning: run.precision {options.run.precision} is slow on most CPUs; fp32 is faster")


def rate_change(run: "Run") -> str | None:
    """Return a line about the learning rate before and after a change of options, which may jump:
    the schedule depends on the number of steps."""
    from tokenformer.train.metrics import read_metrics
    from tokenformer.train.run_record import METRICS

    step = run.loop.progress.step
    rows = read_metrics(run.folder / METRICS)
    rates = [row["lr"] for row in rows if row["step"] == step and "lr" in row]
    after = run.loop.rate(step + 1)
    if not rates or run.at_last_step:
        return None
    return f"Learning rate: {rates[-1]:.2e} at step {step}, {after:.2e} at step {step + 1}"


def remove_if_empty(folder: Path) -> None:
    """Remove the folder of a run that was refused before it wrote anything."""
    with suppress(OSError):
        folder.rmdir()
