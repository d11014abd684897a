"""Train models side by side: on the same text and batches, with the same optimizer.

    comparison = Comparison(tokens, held_out, 256, 2, OptimizerOptions(1e-3))
    small = comparison.start(model, steps=1000, schedule="constant")
    train(small, on_step)
    grown, growth = comparison.grow(small, 500, GrowthOptions(sizes={"ffn_tokens": 2048}))
    assert abs(growth.loss_after - growth.loss_before) < 1e-6  # with the default init

Everything stays in memory. A run that must survive its process grows in stages, see `stages`.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from tokenformer.data.corpus import TokenSequence
from tokenformer.growth.growth_report import GrowthReport
from tokenformer.models.accounting import training_flops
from tokenformer.models.configuration import LanguageConfig
from tokenformer.train.loop import Loop
from tokenformer.train.options import (
    GrowthOptions,
    OptimizerOptions,
    RunOptions,
    ScheduleOptions,
)
from tokenformer.train.stages import Stage
from tokenformer.train.task import LanguageTask
from tokenformer.train.training_state import TrainingState

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class GrowthStep:
    """The growth of a model, with its loss on the same held-out samples before and after."""

    step: int
    """The last training step before growth."""
    report: GrowthReport
    loss_before: float
    loss_after: float


@dataclass
class Comparison:
    """The data and options that the compared models share."""

    tokens: TokenSequence
    held_out: TokenSequence
    length: int
    batch_size: int
    optimizer: OptimizerOptions
    warmup_steps: int = 50
    decay: float = 0.3
    """Share of a run's compute over which the learning rate falls, at the end."""
    floor: float = 0.05
    """Final learning rate, as a fraction of the peak."""
    validation_sequences: int = 32
    seed: int = 0

    def start(
        self,
        model: "PreTrainedModel",
        steps: int,
        *,
        measurements: int = 10,
        schedule: Literal["wsd", "constant"] = "wsd",
    ) -> Loop:
        """Return a loop that starts at the first sample and validates `measurements` times."""
        run = RunOptions(
            steps=steps,
            batch_size=self.batch_size,
            validate_every=math.ceil(steps / measurements),
            validation_sequences=self.validation_sequences,
        )
        warmup = min(self.warmup_steps, steps)
        # A schedule counts its share without the warm-up.
        decay = min(1.0, self.decay * steps / max(1, steps - warmup))
        options = ScheduleOptions(schedule, warmup, self.floor, decay)
        stage = Stage(0, 0, self.optimizer, options, run)
        return Loop.from_stage(self.task(model), stage)

    def grow(
        self, before: Loop, steps: int, growth: GrowthOptions, *, measurements: int = 10
    ) -> tuple[Loop, GrowthStep]:
        """Return a loop that continues `before` with a grown model, the optimizer state and the
        next samples. The learning rate falls over the same share of the whole run's compute as
        that of a model from scratch."""
        grown, report = TrainingState.from_loop(before).grow(growth)
        first = before.progress.step
        run = replace(before.run, steps=steps, validate_every=math.ceil(steps / measurements))
        cost = steps * self.step_flops(grown.model.config)
        decay = min(1.0, self.decay * (before.progress.flops + cost) / cost)
        schedule = ScheduleOptions("wsd", 0, self.floor, decay)
        stage = Stage(1, first, self.optimizer, schedule, run, growth)
        after = grown.make_loop(self.task(grown.model), stage)
        return after, GrowthStep(first, report, before.validate(), after.validate())

    def task(self, model: "PreTrainedModel") -> LanguageTask:
        return LanguageTask(model, self.tokens, self.held_out, length=self.length, seed=self.seed)

    def step_flops(self, config: LanguageConfig) -> int:
        return self.batch_size * sum(training_flops(config, self.length).values())
