"""A training run on disk: a recipe trained in a folder, resumed after any interruption.

    runs/NAME/  config.yaml  metrics.jsonl  checkpoints/step-00000500/  model/  loss.png

Checkpoints are written atomically, and metrics are truncated to the checkpoint that a run resumes
from, so a run killed at any moment ends with the same results as an uninterrupted one.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from tokenformer.errors import CheckpointError, DivergedError, TrainingError
from tokenformer.growth.growth_report import GrowthReport
from tokenformer.models.loading import device
from tokenformer.train import checkpoint
from tokenformer.train.checkpoint.async_saver import AsyncSaver
from tokenformer.train.loop import Loop
from tokenformer.train.loss_plot import draw_loss
from tokenformer.train.metrics import (
    Row,
    cut_metrics,
    disk_errors,
    metrics_writer,
    read_metrics,
)
from tokenformer.train.model_growth import stage_configs
from tokenformer.train.options import Recipe
from tokenformer.train.parallel.distribute import max_over_ranks
from tokenformer.train.parallel.ranks import Ranks
from tokenformer.train.recipe import RecipeError
from tokenformer.train.reporters import Report, check_reporters, reporter
from tokenformer.train.run_record import (
    CHECKPOINTS,
    LOSS_PLOT,
    METRICS,
    Record,
    check_folder,
)
from tokenformer.train.stages import Stage, plan
from tokenformer.train.thread_count import fastest_thread_count
from tokenformer.train.training_state import TrainingState, resume_loop
from tokenformer.train.workload import Workload, make_workload

MAX_PROBLEMS = 10
"""Bad steps in a row after which a run gives up."""
REQUIRED_STATE = {
    "step": int,
    "stage": int,
    "config": dict,
    "progress": dict,
    "best": object,
    "recent": list,
    "scaler": dict,
    "threads": int,
}
"""Keys, with their types, that a checkpoint's state must have to resume from it."""


class StoppedError(Exception):
    """The run was stopped by a signal, after saving a checkpoint."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"{signal.Signals(number).name} at step {step}; saved")
        self.number = number


class Run:
    """One recipe in one folder; `train` continues from the last checkpoint, if there is one."""

    def __init__(
        self, folder: Path, recipe: Recipe, workload: Workload, report: Callable[[str], None]
    ) -> None:
        self.folder, self.recipe, self.workload, self.report = folder, recipe, workload, report
        check_reporters(recipe.run.log_to)
        self.stages = plan(recipe)
        self.ranks = Ranks()
        self.checkpoints = folder / CHECKPOINTS
        self.best: tuple[float, int] | None = None
        """The lowest held-out loss among the checkpoints, and its step."""
        self.growth: GrowthReport | None = None
        """Report of a growth that is not yet written to the run folder."""
        self.newest: int | None = None
        """Step of the newest checkpoint that was verified or written."""
        self.resumed: Path | None = None
        """The checkpoint that the run continues from."""
        self.stop_signal = 0
        self.problems = 0
        if isinstance(recipe.run.threads, int):
            torch.set_num_threads(recipe.run.threads)
        self.loop = self.load_loop()

    def train(self, on_step: Callable[[Row], None]) -> None:
        """Train to the last step. Does nothing if the run is complete."""
        if self.is_complete:
            return
        if self.ranks.first:
            self.folder.mkdir(parents=True, exist_ok=True)
            step = self.loop.progress.step if self.resumed is not None else -1
            cut_metrics(self.folder / METRICS, step, self.report)
        with ExitStack() as stack:
            saver = stack.enter_context(AsyncSaver())
            stack.enter_context(self.stop_on_signals())
            write = stack.enter_context(metrics_writer(self.folder / METRICS, self.ranks))
            reports = [stack.enter_context(context) for context in self.reporters()]
            self.choose_threads()
            self.measure_base(write)
            start_loss = self.start_loss()
            while not self.at_last_step:
                if self.at_stage_end:
                    saver.wait()
                    self.loop = self.load_loop()
                self.save_growth_report()
                row = self.loop.step()
                if len(self.stages) > 1:
                    row["stage"] = self.stage.index + 1
                if "problem" in row:
                    self.handle_problem(row, write)
                    continue
                self.problems = 0
                write(row)
                for report in (*reports, on_step):
                    report(row)
                self.update_best(row)
                if start_loss is not None and "val_loss" in row:
                    self.compare_with_start(start_loss, row)
                    start_loss = None
                step = self.loop.progress.step
                stop = max_over_ranks(self.stop_signal)
                if stop or self.should_checkpoint(step):
                    self.save(saver)
                if stop:
                    saver.wait()
                    raise StoppedError(stop, step)
            saver.wait()
        self.prune()
        self.finish()

    @property
    def measures_threads(self) -> bool:
        """Whether the thread count is measured; processes that share a machine would disturb each
        other."""
        on_cpu = self.ranks.count == 1 and device().type == "cpu"
        return self.recipe.run.threads == "auto" and on_cpu

    def choose_threads(self) -> None:
        if self.measures_threads and self.resumed is None:
            threads = fastest_thread_count(self.loop)
            torch.set_num_threads(threads)
            self.report(f"Training with {threads} thread{'s' if threads > 1 else ''}, the fastest")

    def measure_base(self, write: Callable[[Row], None]) -> None:
        """Write the held-out metrics of the model before it is adapted, as the row of step 0. A
        resumed run has them."""
        is_adapted = self.recipe.adapter.method is not None
        if not is_adapted or self.resumed is not None or not self.recipe.run.validate_every:
            return
        progress = self.loop.progress
        counters = {"tokens": progress.tokens, "flops": progress.flops, "seconds": 0.0}
        write({"step": progress.step, **counters, **self.loop.held_out_metrics()})

    def start_loss(self) -> float | None:
        """Return the held-out loss of the model in `start_from`, if this run starts from one."""
        if self.recipe.adapter.method is not None:
            return None  # its base is measured
        if self.resumed is not None or self.recipe.model.start_from is None:
            return None
        if not self.recipe.run.validate_every:
            return None
        loss = self.loop.validate()
        self.report(f"Held-out loss of {self.recipe.model.start_from}: {loss:.3f}")
        return loss

    def compare_with_start(self, loss: float, row: Row) -> None:
        if row["val_loss"] > loss:
            self.report(
                f"Warning: the held-out loss rose from {loss:.3f} to {row['val_loss']:.3f} in "
                f"{row['step']} steps; the learning rate may be too high for a trained model: "
                "lower optimizer.learning_rate or lengthen schedule.warmup_steps"
            )

    def reporters(self) -> list[AbstractContextManager[Report]]:
        if not self.ranks.first:
            return []
        config, step = asdict(self.recipe), self.loop.progress.step + 1
        return [reporter(name, self.folder, config, step) for name in self.recipe.run.log_to]

    @property
    def exported(self) -> Path:
        """The folder of the exported model or adapter."""
        return self.folder / self.workload.export_name

    @property
    def at_stage_end(self) -> bool:
        return self.loop.progress.step >= self.stage.last_step

    @property
    def at_last_step(self) -> bool:
        return self.loop.progress.step >= self.last_step

    @property
    def last_step(self) -> int:
        return self.stages[-1].last_step

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do: the run is past its last step, or at it with the model
        exported and the loss plotted, which a kill may have prevented."""
        if not self.at_last_step or self.resumed is None:
            return False
        past = self.loop.progress.step > self.last_step
        plot = self.folder / LOSS_PLOT
        exported = self.exported.is_dir() and plot.exists()
        saved = self.resumed.stat().st_mtime_ns
        return self.ranks.share(past or (exported and plot.stat().st_mtime_ns >= saved))

    def should_checkpoint(self, step: int) -> bool:
        return step % self.recipe.run.checkpoint_every == 0 or self.at_stage_end

    def load_loop(self) -> Loop:
        """Return the loop that continues from the last checkpoint, or a new one without any. At the
        end of a stage that is not the last, the model grows into the next. Writes nothing."""
        path = checkpoint.latest(self.checkpoints, report=self.report)
        checkpoint.sweep(self.checkpoints)
        if path is None:
            self.stage = self.stages[0]
            model = self.workload.first_model()
            stage_configs(model.config, self.stages)  # raises if a later stage could not grow
            return Loop.from_stage(self.workload.task(model), self.stage)
        self.resumed = path
        state = checkpoint.read_state(path, REQUIRED_STATE)
        self.newest = state["step"]
        self.best = None if state["best"] is None else (state["best"][0], state["best"][1])
        before = self.stages[self.saved_stage(state, path)]
        grows = before.last_step <= state["step"] < self.last_step
        self.stage = self.stages[before.index + grows]
        if grows:
            loop = self.grow(path, self.stage)
        else:
            loop = resume_loop(path, state, self.stage, self.workload)
        loop.mesh.share_generators()
        if self.measures_threads:
            torch.set_num_threads(state["threads"])
        threads = torch.get_num_threads()
        if state["threads"] != threads:
            self.report(
                f"{path.name} was saved with {state['threads']} threads, this process uses "
                f"{threads}: losses agree to rounding, not bit for bit"
            )
        return loop

    def grow(self, path: Path, stage: Stage) -> Loop:
        """Return the loop of `stage`, which starts by growing the checkpoint in `path`."""
        assert stage.grow is not None
        state = TrainingState.load(path)
        try:
            grown, self.growth = state.grow(stage.grow, self.workload.token_batches())
        except (ValueError, TypeError) as error:
            raise TrainingError(f"stage {stage.index + 1} cannot grow: {error}") from None
        self.report(f"stage {stage.index + 1}: {self.growth}")
        return grown.make_loop(self.workload.task(grown.model), stage)

    def save_growth_report(self) -> None:
        if self.growth is not None and self.ranks.first:
            self.growth.save(self.folder / f"growth-{self.stage.index + 1}.json")
        self.growth = None

    def saved_stage(self, state: dict[str, Any], path: Path) -> int:
        """Return the index of the stage that a checkpoint is in."""
        stage, step = int(state["stage"]), state["step"]
        if step >= self.last_step:
            return min(stage, len(self.stages) - 1)  # nothing will be trained
        if stage >= len(self.stages):
            raise CheckpointError(
                f"{path} is in stage {stage + 1}, but the recipe has {len(self.stages)}"
            )
        if step > (end := self.stages[stage].last_step):
            raise RecipeError(
                f"{self.folder} is at step {step}, in stage {stage + 1}, which ends at step {end} "
                f"in this recipe; give stage {stage + 1} at least {step - end} more steps"
            )
        return stage

    def save(self, saver: AsyncSaver) -> None:
        """Save a checkpoint in the background and export the model."""
        saver.wait()
        self.prune()
        self.loop.update_config()
        state = {
            **self.loop.state_dict(),
            **self.workload.state(),
            "stage": self.stage.index,
            "best": self.best,
            "threads": torch.get_num_threads(),
        }
        saver.save(
            self.checkpoints,
            model=self.loop.trained,
            optimizer=self.loop.optimizer,
            state=state,
            extra={} if self.loop.ema is None else self.loop.ema.state_dict(),
        )
        if self.newest is None:
            saver.wait()  # without a checkpoint, an export would look like another run's model
        self.newest = self.loop.progress.step
        if not self.at_last_step:
            self.export()

    def prune(self) -> None:
        """Delete old checkpoints. Only sizes are checked here, so checkpoints newer than the one
        that the run continued from do not count: they are damaged."""
        best = None if self.best is None else self.best[1]
        keep_last = self.recipe.run.keep_last
        checkpoint.prune(self.checkpoints, keep_last=keep_last, best=best, newest=self.newest)

    def update_best(self, row: Row) -> None:
        """Note a new lowest held-out loss, if its step will have a checkpoint."""
        kept = self.should_checkpoint(int(row["step"]))
        if kept and "val_loss" in row and (self.best is None or row["val_loss"] < self.best[0]):
            self.best = (row["val_loss"], row["step"])

    def handle_problem(self, row: Row, write: Callable[[Row], None]) -> None:
        """Stop, skip or roll back at a bad step, by `run.on_spike`. It did not change weights."""
        last = self.loop.progress.samples - 1
        first = last + 1 - self.recipe.run.batch_size
        where = f"step {row['step']}, samples {first} to {last}: {row['problem']}"
        policy = self.recipe.run.on_spike
        self.problems += 1
        if policy == "stop":
            raise TrainingError(f"{where}; to continue, use --run.on_spike skip or rollback")
        if self.problems > MAX_PROBLEMS:
            raise DivergedError(f"{where}; that is {self.problems} such steps in a row")
        if policy == "skip":
            self.report(f"{where}; skipped")
            write(row)
            return
        samples = self.loop.progress.samples
        if checkpoint.latest(self.checkpoints, report=self.report) is None:
            raise TrainingError(f"{where}; there is no checkpoint yet to roll back to")
        self.loop = self.load_loop()
        self.loop.progress.samples = samples  # do not repeat samples that were consumed
        self.report(f"{where}; rolled back to step {self.loop.progress.step}")
        write(row)

    def export(self) -> None:
        """Write the model or adapter, with EMA weights if there are any, to its folder."""
        with self.loop.ema_weights():
            self.workload.export(self.loop.task.model, self.exported)

    def finish(self) -> None:
        """Export the final model and plot the loss."""
        self.export()
        if self.ranks.first:
            rows = read_metrics(self.folder / METRICS, self.report)
            with disk_errors(self.folder / LOSS_PLOT):
                draw_loss(
                    [r for r in rows if "problem" not in r and r.keys() >= {"loss", "tokens"}],
                    self.folder / LOSS_PLOT,
                    self.folder.name,
                    self.workload.unit,
                )

    @contextmanager
    def stop_on_signals(self) -> Iterator[None]:
        """Stop at SIGTERM or SIGINT after the current step, with a checkpoint; at a second one,
        stop at once."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self.stop_signal:
                raise KeyboardInterrupt
            self.stop_signal = number

        handlers = {
            number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def run_recipe(recipe: Recipe, folder: Path) -> None:
    """Train a recipe in `folder` without output; resumes an existing run."""
    record = Record(folder)
    check_folder(folder)
    run = Run(folder, recipe, make_workload(recipe), lambda line: None)
    step = run.loop.progress.step
    record.check(recipe, step)
    if not run.at_last_step:
        record.write(recipe, step)
    run.train(lambda row: None)
