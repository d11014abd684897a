"""Models trained side by side: the same text, the same batches, the same optimizer.

    setting = Setting(tokens, held_out, length=256, batch_size=2, learning_rate=1e-3)
    small = setting.start(model, steps=1000, schedule="constant")
    train(small, on_step)
    grown, seam = setting.grow(small, steps=500, ffn_tokens=2048)
    assert abs(seam.loss_after - seam.loss_before) < 1e-6

All of it is in memory; a run that must survive its process grows in stages, see `train/stages.py`.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from tokenformer.data.token_ids import TokenSequence
from tokenformer.growth.grow import grow
from tokenformer.growth.grown_optimizer import grow_optimizer
from tokenformer.growth.growth_report import GrowthReport
from tokenformer.models.accounting import training_flops
from tokenformer.models.configuration import LanguageConfig
from tokenformer.train.loop import Loop
from tokenformer.train.options import OptimizerOptions, RunOptions, ScheduleOptions
from tokenformer.train.task import LanguageTask


@dataclass
class Seam:
    """Where a model has grown, and its loss on the same held-out windows before and after."""

    step: int
    """The last one before growth."""
    report: GrowthReport
    loss_before: float
    loss_after: float


@dataclass
class Setting:
    """What compared runs share."""

    tokens: TokenSequence
    held_out: TokenSequence
    length: int
    batch_size: int
    learning_rate: float
    warmup_steps: int = 50
    validation_sequences: int = 32
    seed: int = 0

    def start(
        self,
        model: Any,
        steps: int,
        *,
        measurements: int = 10,
        schedule: Literal["cosine", "constant"] = "cosine",
    ) -> Loop:
        """A training from the first sample on; its held-out loss is measured now and then."""
        task = LanguageTask(model, self.tokens, self.held_out, length=self.length, seed=self.seed)
        warmup_steps = min(self.warmup_steps, steps)
        return Loop(
            task,
            OptimizerOptions(learning_rate=self.learning_rate),
            ScheduleOptions(kind=schedule, warmup_steps=warmup_steps),
            RunOptions(
                steps=steps,
                batch_size=self.batch_size,
                validate_every=math.ceil(steps / measurements),
                validation_sequences=self.validation_sequences,
            ),
        )

    def grow(
        self, before: Loop, steps: int, *, measurements: int = 10, **sizes: Any
    ) -> tuple[Loop, Seam]:
        """The grown model's training, from where `before` stands: the next samples, the optimizer
        with what it knows, and a rate that begins where it is and falls."""
        larger, report = grow(before.task.model, init="zero", seed=self.seed, **sizes)
        first = before.progress.step
        after = Loop(
            LanguageTask(larger, self.tokens, self.held_out, length=self.length, seed=self.seed),
            OptimizerOptions(learning_rate=self.learning_rate),
            ScheduleOptions(kind="cosine", warmup_steps=0),
            replace(before.run, steps=steps, validate_every=math.ceil(steps / measurements)),
            first_step=first,
        )
        after.optimizer = grow_optimizer(before.optimizer, report)
        after.progress = replace(before.progress)
        return after, Seam(first, report, before.validate(), after.validate())

    def step_flops(self, config: LanguageConfig) -> int:
        return self.batch_size * sum(training_flops(config, self.length).values())
