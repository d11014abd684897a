"""Between two stages: the model of the last checkpoint grows, and all that belongs to it follows.

It is always the checkpoint that grows, never what happens to be in memory, so that a run that is
interrupted here goes on as one that is not. Every process holds the whole model for a moment, and
then its part of the larger one.
"""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tokenformer.data.batches import sample_batch
from tokenformer.errors import CheckpointError, TrainingError
from tokenformer.growth.grow import grow
from tokenformer.growth.grown_optimizer import grow_average, grow_optimizer
from tokenformer.growth.growth_report import GrowthReport
from tokenformer.growth.model_folder import REPORT
from tokenformer.growth.tokens.token_counts import config_with_tokens, target_sizes
from tokenformer.models.catalogue import blank
from tokenformer.models.configuration import TokenConfig
from tokenformer.train import checkpoint
from tokenformer.train.checkpoint import manifest
from tokenformer.train.ema import WeightEMA
from tokenformer.train.loop import Loop
from tokenformer.train.optimizer import make_optimizer
from tokenformer.train.options import GrowthOptions
from tokenformer.train.parallel.meta_init import draw_weights, part_of
from tokenformer.train.parallel.ranks import reason
from tokenformer.train.stages import Stage
from tokenformer.train.text_workload import TextWorkload
from tokenformer.train.workload import Workload


def grow_checkpoint(
    path: Path, config: dict[str, Any], before: Stage, after: Stage, workload: Workload
) -> tuple[Loop, GrowthReport]:
    """The loop of the stage `after`, with the model, optimizer and average of `before`, grown."""
    assert after.grow is not None
    model = saved_model(path, config)
    draw_weights(model, 0, torch.device("cpu"))  # memory for what is loaded
    optimizer = make_optimizer(model, before.optimizer)
    average = WeightEMA(model, before.run.ema) if before.run.ema is not None else None
    load_checkpoint(path, model, optimizer, average)
    try:
        larger, report = grow_as_told(model, after.grow, workload)
    except (ValueError, TypeError) as error:
        raise TrainingError(f"stage {after.index + 1} cannot grow: {error}") from None
    grown = grow_optimizer(optimizer, report, state=after.grow.optimizer_state)
    states = {name: grown.state.get(parameter, {}) for name, parameter in report.new.items()}
    averages = {
        name: grow_average(
            average.tensors[source], report.old[source], parameter, report.origins[name]
        )
        for name, parameter in report.new.items()
        if average is not None and (source := report.origins[name].name) is not None
    }
    loop = make_loop(after, larger, workload)
    for name, parameter in larger.named_parameters():
        if parameter.requires_grad and states[name]:
            loop.optimizer.state[parameter] = {
                key: follow(value, parameter) for key, value in states[name].items()
            }
        if loop.average is not None and name in averages:
            loop.average.tensors[name] = follow(averages[name], parameter)
    return loop, report


def load_checkpoint(
    path: Path, model: Any, optimizer: torch.optim.Optimizer, average: WeightEMA | None
) -> None:
    """Fill all three from a checkpoint that was verified. The optimizer keeps its hyperparameters,
    which are the recipe's; an average that the checkpoint lacks starts at the loaded weights."""
    saved = average is not None and checkpoint.has_extra(path)
    extra = average.stored() if average is not None and saved else {}
    checkpoint.load(
        path, model=model, optimizer=optimizer, extra=extra, hashes=False, hyperparameters=False
    )
    if average is not None and not saved:
        average.restart()


def grow_saved(path: Path, out: Path, options: GrowthOptions) -> GrowthReport:
    """A checkpoint of a run, grown with its optimizer and average, as the first checkpoint of a run
    in the folder `out`: `tokenformer train RECIPE --out OUT` goes on with the larger model."""
    manifest.verify(path, hashes=True)
    state = checkpoint.read_state(path, {"config": dict})
    groups = checkpoint.read_document(path)["optimizer"]
    if groups is None:
        raise CheckpointError(f"checkpoint {path} has no optimizer state; grow the model folder")
    model = saved_model(path, state["config"])
    draw_weights(model, 0, torch.device("cpu"))
    optimizer = saved_optimizer(model, groups)
    _, extra = checkpoint.load(path, model=model, optimizer=optimizer, hashes=False)
    larger, report = grow_as_told(model, options)
    grown = grow_optimizer(optimizer, report, state=options.optimizer_state)
    averages = {
        f"ema.{name}": grow_average(
            extra[f"ema.{source}"], report.old[source], parameter, report.origins[name]
        )
        for name, parameter in report.new.items()
        if extra and (source := report.origins[name].name) is not None
    }
    checkpoint.save(
        out / "checkpoints",
        model=larger,
        optimizer=grown,
        state={
            **state,
            "config": larger.config.to_dict(),
            "scales_began": None,
            "best": None,
            "recent": [],
        },
        extra=averages,
    )
    report.save(out / REPORT)
    return report


def saved_model(path: Path, config: dict[str, Any]) -> Any:
    """The model of a checkpoint, on the meta device."""
    try:
        return blank(config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {path} has no valid model config: {type(error).__name__}: {reason(error)}"
        ) from None


def saved_optimizer(model: Any, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """An optimizer with the groups of a checkpoint, to load its state into."""
    parameters = dict(model.named_parameters())
    return torch.optim.AdamW(
        [
            {**group["options"], "params": [parameters[name] for name in group["parameters"]]}
            for group in groups
        ],
        fused=True,
    )


def check_growth(config: Any, stages: list[Stage]) -> None:
    """Refuse at the start of a run what a later stage could not do."""
    for stage in stages:
        if stage.grow is not None and isinstance(config, TokenConfig):
            sizes = target_sizes(config, stage.grow.to, stage.grow.sizes)
            config = config_with_tokens(config, sizes)


def make_loop(stage: Stage, model: Any, workload: Workload) -> Loop:
    return Loop(
        workload.task(model),
        stage.optimizer,
        stage.schedule,
        stage.run,
        first_step=stage.first_step,
    )


def grow_as_told(
    model: Any, options: GrowthOptions, workload: Workload | None = None
) -> tuple[Any, GrowthReport]:
    """`workload`: of a run, whose text LiGO learns on."""
    if options.method not in (None, "tokens"):
        sizes = dict(options.sizes)
        if options.method == "ligo" and isinstance(workload, TextWorkload):
            sizes["batches"] = text_of(workload)
        return grow(model, options.to, method=options.method, seed=options.seed, **sizes)
    return grow(
        model,
        options.to,
        init=options.init,
        scale=options.scale,
        seed=options.seed,
        old_rate=options.old_rate,
        **options.sizes,
    )


def text_of(workload: TextWorkload) -> Iterator[Tensor]:
    """Token ids [B, T]: the samples that the run began with."""
    data, run = workload.recipe.data, workload.recipe.run
    for first in count(0, run.batch_size):
        yield sample_batch(
            workload.train,
            length=data.length,
            seed=run.seed,
            first_sample=first,
            count=run.batch_size,
            mode=data.order,
        )[:, :-1]


def follow(value: Any, parameter: Tensor) -> Any:
    """What belongs to a parameter, where and as the parameter is."""
    if not isinstance(value, Tensor) or value.ndim == 0:  # the step count
        return value
    value = value.to(parameter.device)
    return part_of(value, parameter) if isinstance(parameter, DTensor) else value
