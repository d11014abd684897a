"""The training loop: a task and options in, a trained model and a row of metrics per step out.

Each step takes the next `batch_size` samples by their number. A rank takes its slice of them, in
micro-batches; losses are summed over all and divided once, so they do not depend on how many ranks
or micro-batches there were. What must outlive the process is in `Progress` and the tensors of model
and optimizer; `run` saves and restores them between steps.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from tokenformer.growth.tokens.prefix import set_active_share
from tokenformer.train.ema import WeightEMA
from tokenformer.train.loss_spikes import SpikeDetector
from tokenformer.train.memory import check_memory, explained_memory
from tokenformer.train.metrics import Row
from tokenformer.train.nested_dropout import NestedDropout
from tokenformer.train.optimizer import clip_gradients, make_optimizer, set_rate
from tokenformer.train.options import OptimizerOptions, RunOptions, ScheduleOptions
from tokenformer.train.parallel.distribute import (
    device,
    distribute,
    gather_anew,
    hold_gradients,
    largest,
    total,
)
from tokenformer.train.parallel.mesh import make_mesh
from tokenformer.train.row_rates import RowRates
from tokenformer.train.schedule import rate_factor
from tokenformer.train.task import Task

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Progress:
    """How far a run is, over all its stages. Samples are counted apart from steps, since a skipped
    or rolled-back step uses samples up."""

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
    ) -> None:
        """`first_step`: steps of earlier stages; `progress` counts them, the schedule does not."""
        self.task, self.run, self.schedule = task, run, schedule
        self.first_step, self.last_step = first_step, first_step + run.steps
        self.peak_rate, self.clip_norm = optimizer.learning_rate, optimizer.clip_norm
        self.device = device()
        self.mesh = make_mesh(run.tensor_parallel, self.device.type)
        self.ranks = self.mesh.data
        if run.batch_size % self.ranks.count:
            raise ValueError(
                f"batch_size={run.batch_size} must be a multiple of the {self.ranks.count} "
                "processes that share it"
            )
        if run.activation_checkpointing:
            task.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.module = distribute(task.model, task.module, run.parallel, run.seed, self.mesh)
        self.optimizer = make_optimizer(task.model, optimizer)
        self.rows = RowRates(task.model)
        self.average = WeightEMA(task.model, run.ema) if run.ema is not None else None
        self.call = torch.compile(self.module) if run.compile else self.module
        # fp16 gradients underflow; they are computed of a loss made larger, and divided again.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=run.precision == "fp16")
        self.watch = SpikeDetector(run.spike_factor, least=task.chance_loss / 2)
        self.progress = Progress(step=first_step)
        self.nested = None if run.nested is None else NestedDropout(tuple(run.nested), run.seed)
        self.before_step: list[Callable[[int], None]] = []
        """Called with the number of the step, counted from 1 in this stage, before it is made."""
        share = run.batch_size // self.ranks.count
        self.micro_batch_size = min(run.micro_batch_size or share, share)
        check_memory(task.least_activation_bytes, self.micro_batch_size, run, self.device)
        self.held_out = (
            task.validation(self.micro_batch_size, run.validation_sequences)
            if run.validate_every
            else []
        )

    def steps(self) -> Iterator[Row]:
        """Train from where `progress` stands to the last step, yielding a row after each.

        A row with a `problem` was not stepped: the weights are as before, the samples used up.
        """
        self.task.model.train()
        while self.progress.step < self.last_step:
            yield self.step()

    def step(self) -> Row:
        start = time.perf_counter()
        step = self.progress.step + 1
        for prepare in self.before_step:
            prepare(step - self.first_step)
        rate = self.rate(step)
        set_rate(self.optimizer, rate)
        if self.nested is not None:
            self.nested.apply(self.task.model, step)
        with explained_memory(self.micro_batch_size, self.device):
            loss, norm = self.gradients()
        if self.nested is not None:
            set_active_share(self.task.model, None)
        self.progress.samples += self.run.batch_size
        self.progress.tokens += self.run.batch_size * self.task.tokens_per_sample
        self.progress.flops += self.run.batch_size * self.task.flops_per_sample
        row: Row = {"step": step, "loss": loss, "lr": rate, "gradient_norm": norm}
        problem = self.watch.problem(loss, norm)
        if problem is None:
            with self.rows.at_their_rates():
                self.scaler.step(self.optimizer)
            self.scaler.update()
            self.progress.step = step
            if self.average is not None:
                self.average.update(step)
        else:
            row["problem"] = problem
        self.optimizer.zero_grad()
        row["tokens"], row["flops"] = self.progress.tokens, self.progress.flops
        if problem is None and self.is_validated(step):
            with explained_memory(self.micro_batch_size, self.device):
                means = self.measure()
            row["val_loss"] = means[0]
            row |= self.task.describe(*means)
        self.progress.seconds += time.perf_counter() - start
        row["seconds"] = self.progress.seconds
        return row

    def rate(self, step: int) -> float:
        """The learning rate of a step of the run."""
        return self.peak_rate * rate_factor(step - self.first_step, self.run.steps, self.schedule)

    def is_validated(self, step: int) -> bool:
        every = self.run.validate_every
        return every > 0 and (step % every == 0 or step == self.last_step)

    def gradients(self) -> tuple[float, float]:
        """Clipped gradients of the next global batch; returns its loss and their norm before."""
        while True:
            loss = self.accumulate(self.progress.samples)
            self.scaler.unscale_(self.optimizer)
            self.rows.mask_gradients()
            norm = self.clip()
            # In fp16 a norm that is not finite means that the loss was made too large: less, then.
            too_large = self.scaler.is_enabled() and self.scaler.get_scale() > 1
            if math.isfinite(norm) or not (too_large and math.isfinite(loss)):
                return loss, norm
            self.scaler.step(self.optimizer)  # which it skips
            self.scaler.update()
            self.optimizer.zero_grad()

    def accumulate(self, first_sample: int) -> float:
        """Gradients of the mean loss of the global batch; returns that loss."""
        share = self.run.batch_size // self.ranks.count
        begin = first_sample + self.ranks.index * share
        tokens = self.run.batch_size * self.task.tokens_per_sample
        summed = 0.0
        for offset in range(0, share, self.micro_batch_size):
            count = min(self.micro_batch_size, share - offset)
            batch = self.task.batch(begin + offset, count).to(self.device)
            self.expect(begin, offset + count, share)
            with hold_gradients(self.module, hold=offset + count < share):
                with self.autocast():
                    loss: Tensor = self.call(batch)
                # DDP and FSDP average over the ranks; the mean over the batch needs their sum.
                self.scaler.scale(loss * (self.ranks.count / tokens)).backward()
            summed += loss.item()
        return self.agreed(total(summed, self.ranks) / tokens)

    def agreed(self, number: float) -> float:
        """The same for all that share tokens: what it decides, they decide together, and on a GPU
        their own may differ in the last digits."""
        shared = self.mesh.tensor
        return number if shared is None else shared.share(number)

    def expect(self, begin: int, done: int, share: int) -> None:
        """Tell the task what comes after `done` samples of this rank's share of a batch."""
        if done < share:
            self.task.expect(begin + done, min(self.micro_batch_size, share - done))
        else:
            self.task.expect(begin + self.run.batch_size, min(self.micro_batch_size, share))

    def clip(self) -> float:
        limit = self.clip_norm if self.clip_norm is not None else float("inf")
        return self.agreed(clip_gradients(self.task.model, limit))

    def validate(self) -> float:
        """Mean loss over the held-out samples."""
        return self.measure()[0]

    @torch.no_grad()
    def measure(self) -> list[float]:
        """Mean loss over the held-out samples, and the other means of the task, if any. The ranks
        share the work."""
        self.task.model.eval()
        sums: list[float] = []
        samples = sum(len(batch) for batch in self.held_out)
        with self.averaged():
            for place, batch in enumerate(self.held_out):
                # Every rank calls the model equally often: sharded models wait for each other.
                mine = place % self.ranks.count == self.ranks.index
                if mine or isinstance(self.module, FSDPModule):
                    with self.autocast():
                        found = self.module(batch.to(self.device)).reshape(-1).tolist()
                    if mine:
                        before = sums or [0.0] * len(found)
                        sums = [a + b for a, b in zip(before, found, strict=True)]
        self.task.model.train()
        sums += [0.0] * (largest(len(sums)) - len(sums))  # of a rank that had nothing to do
        count = samples * self.task.tokens_per_sample
        return [total(one, self.ranks) / count for one in sums]

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model as it is validated and exported: with the average of its weights, if any."""
        if self.average is None:
            yield
            return
        with self.average.in_place():
            gather_anew(self.module)
            yield
        gather_anew(self.module)

    def autocast(self) -> AbstractContextManager[None]:
        dtype = PRECISIONS.get(self.run.precision)
        return torch.autocast(self.device.type, dtype=dtype) if dtype else nullcontext()


def train(loop: Loop, on_step: Callable[[Row], None]) -> list[Row]:
    """Run a loop to its end, with nothing kept on disk; a problem stops it."""
    rows = []
    for row in loop.steps():
        if "problem" in row:
            raise FloatingPointError(f"step {row['step']}: {row['problem']}")
        rows.append(row)
        on_step(row)
    loop.task.model.eval()
    return rows
