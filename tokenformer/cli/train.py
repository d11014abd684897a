"""`tokenformer train`: a recipe file becomes a run, on one core or under torchrun."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

from tokenformer.cli.errors import InputError
from tokenformer.data.augmentation_options import AugmentationOptions
from tokenformer.train.options import (
    DataOptions,
    ModelOptions,
    OptimizerOptions,
    Recipe,
    RunOptions,
    ScheduleOptions,
    StageOptions,
)
from tokenformer.train.stages import shortened


def train(
    recipe: list[Path],
    out: Path | None = None,
    max_steps: int | None = None,
    model: ModelOptions = ModelOptions(),  # noqa: B008
    data: DataOptions = DataOptions(),  # noqa: B008
    optimizer: OptimizerOptions = OptimizerOptions(),  # noqa: B008
    schedule: ScheduleOptions = ScheduleOptions(),  # noqa: B008
    run: RunOptions = RunOptions(),  # noqa: B008
    stages: list[StageOptions] = [],  # noqa: B006
    augmentation: AugmentationOptions = AugmentationOptions(),  # noqa: B008
) -> None:
    """Train a model as a recipe file says; any option of it can be changed on the command line.

    Args:
        recipe: A YAML file with the sections model, data, augmentation, optimizer, schedule, run
            and stages.
        out: The folder of the run, by default runs/RECIPE. A run that is there goes on from its
            last checkpoint.
        stages: Parts of the run, between which the model grows.
        max_steps: A shorter run: so many steps, with the schedule and warm-up fitted to them.
    """
    folder = out or Path("runs") / recipe[0].stem
    whole = Recipe(model, data, optimizer, schedule, run, stages, augmentation)
    if max_steps is not None:
        if max_steps < 1:
            raise InputError(f"--max_steps {max_steps} must be at least 1")
        whole = shortened(whole, max_steps)

    import torch
    from rich.console import Console

    from tokenformer.data.errors import DataError
    from tokenformer.data.lock import locked
    from tokenformer.train.distribution import process_group
    from tokenformer.train.loop import PRECISIONS
    from tokenformer.train.materials import materials_of
    from tokenformer.train.peak import matmul_peak
    from tokenformer.train.progress import progress
    from tokenformer.train.ranks import CheckpointError
    from tokenformer.train.recipe import check_record, record
    from tokenformer.train.run import Run, StoppedError
    from tokenformer.train.spikes import TrainingError

    with ExitStack() as stack:
        ranks = stack.enter_context(process_group())
        torch.manual_seed(run.seed)
        console = Console(highlight=False, quiet=not ranks.first)
        try:
            if ranks.first:
                stack.enter_context(locked(folder))
                check_record(whole, folder)
            materials = materials_of(whole)
            job = Run(folder, whole, materials, lambda line: console.print(line, soft_wrap=True))
            if ranks.first:
                record(whole, folder)
        except BlockingIOError:
            raise InputError(
                f"another process is training in {folder}; wait for it, or name another --out"
            ) from None
        except (DataError, ValueError, OSError) as error:
            raise InputError(" ".join(str(error).split())) from None
        except CheckpointError as error:
            fail(error)
        console.print(
            f"{job.loop.task.model.num_parameters():,} parameters, {len(materials.train):,} "
            f"{materials.unit} to train on, "
            f"{ranks.count} process{'es' if ranks.count > 1 else ''}; the run is in {folder}"
        )
        try:
            peak = matmul_peak(job.loop.device, PRECISIONS.get(run.precision, torch.float32))
            with progress(
                console, job.stages[-1].last_step, ranks.count * peak, materials.unit
            ) as show:
                job.go(show)
        except StoppedError as stopped:
            console.print(f"{stopped}. To go on: tokenformer {' '.join(sys.argv[1:])}")
            raise SystemExit(128 + stopped.number) from None
        except DataError as error:  # such as an image that cannot be decoded
            raise InputError(str(error)) from None
        except (TrainingError, CheckpointError) as error:
            fail(error)
        console.print(f"Done: {folder}/model, metrics.jsonl, loss.png")


def fail(error: Exception) -> NoReturn:
    sys.stderr.write(f"tokenformer train: {error}\n")
    raise SystemExit(1) from None
