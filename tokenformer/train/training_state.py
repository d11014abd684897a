"""The state of a training run: model, optimizer, EMA weights and loop counters. It can grow.

    state, report = TrainingState.load(checkpoint).grow(options)
    state.save(run / "checkpoints")                     # the first checkpoint of a new run
    loop = state.make_loop(task, stage)                 # or train on at once

Between two stages a run grows its last checkpoint, never the state in memory, so that an
interrupted run grows the same model. Each rank holds the whole model while it grows.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tokenformer.errors import CheckpointError, TokenformerError
from tokenformer.growth.grown_optimizer import grow_average, grow_optimizer
from tokenformer.growth.growth_report import GrowthReport
from tokenformer.growth.model_folder import REPORT
from tokenformer.models.model_classes import build_on_meta
from tokenformer.train import checkpoint
from tokenformer.train.checkpoint import manifest
from tokenformer.train.loop import Loop
from tokenformer.train.model_growth import grow_model
from tokenformer.train.options import GrowthOptions
from tokenformer.train.parallel.meta_init import init_weights, shard_like
from tokenformer.train.parallel.ranks import reason
from tokenformer.train.stages import Stage
from tokenformer.train.task import Task
from tokenformer.train.workload import Workload

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EMA = "ema."
"""Prefix of the EMA tensors in a checkpoint."""


@dataclass
class TrainingState:
    """Everything on one device, not sharded."""

    model: "PreTrainedModel"
    optimizer: Optimizer
    ema: dict[str, Tensor]
    """EMA weights by parameter name; empty if the run has none."""
    loop_state: dict[str, Any]
    """`Loop.state_dict()`, and what the run saves beside it."""

    @classmethod
    def load(cls, path: Path) -> "TrainingState":
        """Load a checkpoint that was verified, and restore the random number generators."""
        state = checkpoint.read_state(path, {"config": dict})
        groups = checkpoint.read_document(path)["optimizer"]
        if groups is None:
            raise CheckpointError(
                f"checkpoint {path} has no optimizer state; grow a model folder instead"
            )
        model = build_saved_model(path, state)
        init_weights(model, 0, torch.device("cpu"))  # allocates the tensors to load into
        optimizer = build_saved_optimizer(model, groups)
        _, extra = checkpoint.load(path, model=model, optimizer=optimizer, hashes=False)
        ema = {name.removeprefix(EMA): tensor for name, tensor in extra.items()}
        return cls(model, optimizer, ema, state)

    @classmethod
    def from_loop(cls, loop: Loop) -> "TrainingState":
        ema = {} if loop.ema is None else dict(loop.ema.tensors)
        return cls(loop.task.model, loop.optimizer, ema, loop.state_dict())

    def grow(
        self, options: GrowthOptions, batches: Iterable[Tensor] | None = None
    ) -> tuple["TrainingState", GrowthReport]:
        """Return the state with a larger model, and a report. LiGO learns on `batches`."""
        model, report = grow_model(self.model, options, batches)
        optimizer = grow_optimizer(self.optimizer, report, state=options.optimizer_state)
        ema = {}
        for name, parameter in report.new.items() if self.ema else ():
            mapping = report.mappings[name]
            ema[name] = (
                parameter.detach().clone()
                if mapping.source is None
                else grow_average(
                    self.ema[mapping.source], report.old[mapping.source], parameter, mapping
                )
            )
        # The loss may change at growth, and scales are annealed from their values after it.
        loop_state = {
            **self.loop_state,
            "config": model.config.to_dict(),
            "recent": [],
            "scales_began": None,
        }
        return TrainingState(model, optimizer, ema, loop_state), report

    def make_loop(self, task: Task, stage: Stage) -> Loop:
        """Return the loop of `stage` that continues from here; `task` trains `self.model`."""
        # Taken before the loop may shard the model, which replaces its parameters.
        states = {name: self.optimizer.state.get(p) for name, p in self.model.named_parameters()}
        loop = Loop.from_stage(task, stage)
        for name, parameter in task.model.named_parameters():
            if parameter.requires_grad and (state := states[name]):
                loop.optimizer.state[parameter] = {
                    key: place_like(value, parameter) for key, value in state.items()
                }
            if loop.ema is not None and name in self.ema:
                loop.ema.tensors[name] = place_like(self.ema[name], parameter)
        loop.load_state_dict(self.loop_state)
        return loop

    def save(self, folder: Path) -> Path:
        """Write a checkpoint to `folder`, as the first of a new run."""
        return checkpoint.save(
            folder,
            model=self.model,
            optimizer=self.optimizer,
            state={**self.loop_state, "best": None},
            extra={f"{EMA}{name}": tensor for name, tensor in self.ema.items()},
        )


def grow_checkpoint(
    path: Path, run: Path, options: GrowthOptions, batches: Iterable[Tensor] | None = None
) -> GrowthReport:
    """Grow a checkpoint into the first checkpoint of a new run folder `run`, which
    `tokenformer train RECIPE --out RUN` then continues."""
    manifest.verify(path)
    state, report = TrainingState.load(path).grow(options, batches)
    state.save(run / "checkpoints")
    report.save(run / REPORT)
    return report


def resume_loop(path: Path, state: dict[str, Any], stage: Stage, workload: Workload) -> Loop:
    """Return the loop that continues from a checkpoint that was verified. Each rank loads its
    shards. Hyperparameters are those of `stage`; an EMA that the checkpoint lacks starts at the
    loaded weights."""
    model = build_saved_model(path, state, workload.saved_model)
    loop = Loop.from_stage(workload.task(model), stage)
    has_ema = loop.ema is not None and checkpoint.has_extra(path)
    checkpoint.load(
        path,
        model=loop.trained,
        optimizer=loop.optimizer,
        extra=loop.ema.state_dict() if loop.ema is not None and has_ema else {},
        hashes=False,
        hyperparameters=False,
    )
    if loop.ema is not None and not has_ema:
        loop.ema.reset()
    loop.load_state_dict(state)
    return loop


def build_saved_model(
    path: Path,
    state: dict[str, Any],
    build: "Callable[[dict[str, Any]], PreTrainedModel] | None" = None,
) -> "PreTrainedModel":
    """Build the model of a checkpoint, by default on the meta device."""
    if build is None and state.get("base") is not None:
        raise CheckpointError(
            f"checkpoint {path} holds only what was trained on a frozen base; use the folder "
            "adapter or model of its run"
        )
    try:
        return build_on_meta(state["config"]) if build is None else build(state)
    except TokenformerError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {path} has no valid model config: {type(error).__name__}: {reason(error)}"
        ) from None


def build_saved_optimizer(model: "PreTrainedModel", groups: list[dict[str, Any]]) -> Optimizer:
    """Build an optimizer with the parameter groups of a checkpoint, without their state."""
    parameters = dict(model.named_parameters())
    return torch.optim.AdamW(
        [
            {**group["options"], "params": [parameters[name] for name in group["parameters"]]}
            for group in groups
        ],
        fused=True,
    )


def place_like(value: Any, parameter: Tensor) -> Any:
    """Move a parameter's optimizer state or average to its device, sharded like it."""
    if not isinstance(value, Tensor) or value.ndim == 0:  # the step count
        return value
    value = value.to(parameter.device)
    return shard_like(value, parameter) if isinstance(parameter, DTensor) else value
