"""The training loop: takes a task and options, trains the model, yields a row of metrics per step.

Each step takes the next `batch_size` samples by index. Each rank processes its slice of them in
micro-batches. Losses are summed over the whole batch and divided once, so they do not depend on the
number of ranks or micro-batches. `state_dict` and the tensors of model, optimizer and EMA are all
that a resumed loop needs; `run` saves and restores them between steps.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from tokenformer.models.loading import device
from tokenformer.train.ema import WeightEMA
from tokenformer.train.loss_spikes import SpikeDetector
from tokenformer.train.memory import check_memory, explained_memory
from tokenformer.train.metrics import Row
from tokenformer.train.nested_dropout import NestedDropout
from tokenformer.train.optimizer import clip_gradients, freeze, make_optimizer, set_rate
from tokenformer.train.options import OptimizerOptions, RunOptions, ScheduleOptions
from tokenformer.train.parallel.distribute import (
    distribute,
    gradient_sync,
    max_over_ranks,
    reshard,
    sum_over_ranks,
)
from tokenformer.train.parallel.mesh import check_batch_size, make_mesh
from tokenformer.train.router_balance import RouterBalance
from tokenformer.train.row_rates import RowRates
from tokenformer.train.scale_anneal import ScaleAnneal
from tokenformer.train.schedule import rate_factor
from tokenformer.train.stages import Stage
from tokenformer.train.task import Batch, Task

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Progress:
    """Counters of a run over all its stages. Samples are counted separately from steps because a
    skipped or rolled-back step consumes samples too."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    flops: int = 0
    seconds: float = 0.0


class Loop:
    def __init__(
        self,
        task: Task,
        optimizer: OptimizerOptions,
        schedule: ScheduleOptions,
        run: RunOptions,
        *,
        first_step: int = 0,
        anneal_steps: int | None = None,
    ) -> None:
        """
        Args:
            first_step: Steps of earlier stages; `progress` counts them, the schedule does not.
            anneal_steps: Steps over which the scales move to the numbers of tokens, if they do.
        """
        self.task, self.run, self.schedule = task, run, schedule
        self.first_step, self.last_step = first_step, first_step + run.steps
        self.peak_rate, self.clip_norm = optimizer.learning_rate, optimizer.clip_norm
        self.device = device()
        self.mesh = make_mesh(run.tensor_parallel, self.device.type)
        self.ranks = self.mesh.data
        check_batch_size(run.batch_size, self.ranks.count)
        if run.activation_checkpointing:
            task.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.trained = task.model if task.trained is None else task.trained
        freeze(self.trained, optimizer)
        self.module = distribute(task.model, task.module, run.parallel, run.seed, self.mesh)
        task.model.train()
        self.parameters = list(self.trained.parameters())  # listing them takes as long as clipping
        self.optimizer = make_optimizer(self.trained, optimizer)
        self.row_rates = RowRates(task.model, optimizer.part_rates)
        self.balance = RouterBalance(task.model, self.ranks, is_frozen=task.trained is not None)
        self.anneal = None if anneal_steps is None else ScaleAnneal(task.model, anneal_steps)
        self.ema = WeightEMA(self.trained, run.ema) if run.ema is not None else None
        self.compiled_module = torch.compile(self.module) if run.compile else self.module
        # fp16 gradients underflow: the loss is scaled up and the gradients are scaled back.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=run.precision == "fp16")
        self.spikes = SpikeDetector(run.spike_factor, min_loss=task.chance_loss / 2)
        self.progress = Progress(step=first_step)
        self.nested = None if run.nested is None else NestedDropout(tuple(run.nested), run.seed)
        share = run.batch_size // self.ranks.count
        self.micro_batch_size = min(run.micro_batch_size or share, share)
        check_memory(task.least_activation_bytes, self.micro_batch_size, run, self.device)
        self.held_out = self.validation_batches(task)
        self.kept = [] if task.kept is None else self.validation_batches(task.kept)

    def validation_batches(self, task: Task) -> Sequence[Batch]:
        if not self.run.validate_every:
            return []
        return task.validation(self.micro_batch_size, self.run.validation_sequences)

    @classmethod
    def from_stage(cls, task: Task, stage: Stage) -> "Loop":
        return cls(
            task,
            stage.optimizer,
            stage.schedule,
            stage.run,
            first_step=stage.first_step,
            anneal_steps=stage.anneal_steps,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return everything but tensors that a resumed loop needs, as JSON values."""
        return {
            "step": self.progress.step,
            "config": self.task.model.config.to_dict(),
            "progress": asdict(self.progress),
            "recent": list(self.spikes.recent),
            "scaler": self.scaler.state_dict(),
            "scales_began": None if self.anneal is None else self.anneal.start,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()` of a loop whose model has the same configuration."""
        self.progress = Progress(**state["progress"])
        self.spikes.recent.clear()
        self.spikes.recent.extend(state["recent"])
        if self.scaler.is_enabled() and state["scaler"]:  # empty unless saved by an fp16 run
            self.scaler.load_state_dict(state["scaler"])
        if self.anneal is not None and state.get("scales_began") is not None:
            self.anneal.start = state["scales_began"]

    def update_config(self) -> None:
        """Store annealed scales in the model's config and, after the last step, in its layers."""
        if self.anneal is not None:
            if self.progress.step >= self.last_step:
                self.anneal.finish()
            else:
                self.anneal.update_config()

    def steps(self) -> Iterator[Row]:
        """Train to the last step, yielding a row after each.

        A row with a `problem` is of a step that was not taken: the weights are unchanged, but its
        samples are consumed.
        """
        self.task.model.train()
        while self.progress.step < self.last_step:
            yield self.step()

    def step(self) -> Row:
        start = time.perf_counter()
        step = self.progress.step + 1
        if self.anneal is not None:
            self.anneal(step - self.first_step)
        rate = self.rate(step)
        set_rate(self.optimizer, rate)
        self.balance.start_step()
        nested = nullcontext() if self.nested is None else self.nested.active(self.task.model, step)
        with nested, explained_memory(self.micro_batch_size, self.device):
            loss, norm = self.compute_gradients()
        self.progress.samples += self.run.batch_size
        self.progress.tokens += self.run.batch_size * self.task.tokens_per_sample
        self.progress.flops += self.run.batch_size * self.task.flops_per_sample
        row: Row = {"step": step, "loss": loss, "lr": rate, "gradient_norm": norm}
        problem = self.spikes.problem(loss, norm)
        if problem is None:
            with self.row_rates.scale_update():
                self.scaler.step(self.optimizer)
            self.scaler.update()
            row |= self.balance.finish_step()
            self.progress.step = step
            if self.ema is not None:
                self.ema.update(step)
        else:
            row["problem"] = problem
        self.optimizer.zero_grad()
        row["tokens"], row["flops"] = self.progress.tokens, self.progress.flops
        if problem is None and self.should_validate(step):
            with explained_memory(self.micro_batch_size, self.device):
                row |= self.held_out_metrics()
        self.progress.seconds += time.perf_counter() - start
        row["seconds"] = self.progress.seconds
        return row

    def rate(self, step: int) -> float:
        """Return the learning rate of a step of the run."""
        return self.peak_rate * rate_factor(step - self.first_step, self.run.steps, self.schedule)

    def should_validate(self, step: int) -> bool:
        every = self.run.validate_every
        return every > 0 and (step % every == 0 or step == self.last_step)

    def compute_gradients(self) -> tuple[float, float]:
        """Compute and clip the gradients of the next global batch; return its loss and the norm
        before clipping."""
        while True:
            loss = self.accumulate(self.progress.samples)
            self.scaler.unscale_(self.optimizer)
            self.row_rates.mask_gradients()
            norm = self.clip()
            # In fp16 a norm that is not finite may come from a loss scale that is too large: retry
            # with a smaller one.
            too_large = self.scaler.is_enabled() and self.scaler.get_scale() > 1
            if math.isfinite(norm) or not (too_large and math.isfinite(loss)):
                return loss, norm
            self.scaler.step(self.optimizer)  # which it skips
            self.scaler.update()
            self.optimizer.zero_grad()

    def accumulate(self, first_sample: int) -> float:
        """Accumulate the gradients of the mean loss of the global batch; return that loss."""
        share = self.run.batch_size // self.ranks.count
        begin = first_sample + self.ranks.index * share
        tokens = self.task.count_losses(first_sample, self.run.batch_size)
        summed = 0.0
        for offset in range(0, share, self.micro_batch_size):
            count = min(self.micro_batch_size, share - offset)
            batch = self.task.batch(begin + offset, count).to(self.device)
            self.prefetch(begin, offset + count, share)
            with gradient_sync(self.module, enabled=offset + count == share):
                with self.autocast():
                    loss: Tensor = self.compiled_module(batch)
                # DDP and FSDP average over the ranks; the mean over the batch needs their sum.
                self.scaler.scale(loss * (self.ranks.count / tokens)).backward()
            summed += loss.item()
        return self.same_on_tensor_ranks(sum_over_ranks(summed, self.ranks) / tokens)

    def same_on_tensor_ranks(self, number: float) -> float:
        """Return the first rank's number on all ranks that share tokens, so that they decide alike:
        on a GPU their own results may differ in the last digits."""
        shared = self.mesh.tensor
        return number if shared is None else shared.share(number)

    def prefetch(self, begin: int, done: int, share: int) -> None:
        """Ask the task to prepare the micro-batch after `done` samples of this rank's share."""
        if done < share:
            self.task.prefetch(begin + done, min(self.micro_batch_size, share - done))
        else:
            self.task.prefetch(begin + self.run.batch_size, min(self.micro_batch_size, share))

    def clip(self) -> float:
        limit = self.clip_norm if self.clip_norm is not None else float("inf")
        return self.same_on_tensor_ranks(clip_gradients(self.parameters, limit))

    def validate(self) -> float:
        """Return the mean loss over the held-out samples."""
        return self.means_over(self.held_out)[0]

    def held_out_metrics(self) -> Row:
        """Return the loss and the task's metrics on the held-out samples, and on those of the kept
        data if there are any."""
        means = self.means_over(self.held_out)
        row: Row = {"val_loss": means[0], **self.task.describe(*means)}
        if self.task.kept is not None:
            means = self.means_over(self.kept)
            metrics = {"val_loss": means[0], **self.task.kept.describe(*means)}
            row |= {name.replace("val_", "keep_"): value for name, value in metrics.items()}
        return row

    @torch.no_grad()
    def means_over(self, batches: Sequence[Batch]) -> list[float]:
        """Return the mean loss over batches, then the task's other means, if any. The ranks share
        the work."""
        self.task.model.eval()
        sums: list[float] = []
        with self.ema_weights():
            for index, batch in enumerate(batches):
                # Every rank calls a sharded model equally often: the ranks wait for each other.
                mine = index % self.ranks.count == self.ranks.index
                if mine or isinstance(self.module, FSDPModule):
                    with self.autocast():
                        found = self.module(batch.to(self.device)).reshape(-1).tolist()
                    if mine:
                        before = sums or [0.0] * len(found)
                        sums = [a + b for a, b in zip(before, found, strict=True)]
        self.task.model.train()
        sums += [0.0] * (max_over_ranks(len(sums)) - len(sums))  # on a rank without batches
        count = sum(self.task.count_batch_losses(batch) for batch in batches)
        return [sum_over_ranks(one, self.ranks) / count for one in sums]

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Give the model its EMA weights, if there are any, for validation or export."""
        if self.ema is None:
            yield
            return
        with self.ema.applied():
            reshard(self.module)
            yield
        reshard(self.module)

    def autocast(self) -> AbstractContextManager[None]:
        dtype = PRECISIONS.get(self.run.precision)
        return torch.autocast(self.device.type, dtype=dtype) if dtype else nullcontext()


def train(loop: Loop, on_step: Callable[[Row], None]) -> list[Row]:
    """Run a loop to its last step without writing to disk; raise at a step with a problem."""
    rows = []
    for row in loop.steps():
        if "problem" in row:
            raise FloatingPointError(f"step {row['step']}: {row['problem']}")
        rows.append(row)
        on_step(row)
    loop.task.model.eval()
    return rows
