"""A training run on disk: what a recipe becomes, and goes on as after any interruption.

    runs/NAME/  config.yaml  metrics.jsonl  checkpoints/step-00000500/  model/  loss.png

Every checkpoint is complete or absent, and metrics are cut back to the one a run goes on from, so a
run that was killed at any moment ends as if it had not been.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from tokenformer.errors import CheckpointError, TrainingError
from tokenformer.growth.growth_report import GrowthReport
from tokenformer.train import checkpoint
from tokenformer.train.checkpoint.async_saver import AsyncSaver
from tokenformer.train.export import export
from tokenformer.train.loop import Loop, Progress
from tokenformer.train.loss_plot import draw_loss
from tokenformer.train.metrics import (
    Row,
    cut_metrics,
    disk_errors,
    metrics_writer,
    read_metrics,
)
from tokenformer.train.options import Recipe
from tokenformer.train.parallel.distribute import largest
from tokenformer.train.parallel.ranks import Ranks
from tokenformer.train.recipe import RecipeError
from tokenformer.train.reporters import check_reporters, reporter
from tokenformer.train.run_record import CHECKPOINTS, METRICS, MODEL, PICTURE, Record, check_folder
from tokenformer.train.scale_anneal import ScaleAnneal
from tokenformer.train.stages import plan
from tokenformer.train.training_state import (
    check_growth,
    grow_checkpoint,
    load_checkpoint,
    make_loop,
    saved_model,
)
from tokenformer.train.workload import Workload, workload_of

MOST_PROBLEMS = 10
NEEDED = {
    "step": int,
    "stage": int,
    "config": dict,
    "progress": dict,
    "best": object,
    "recent": list,
    "scaler": dict,
    "threads": int,
}
"""What a run needs of the state in a checkpoint to resume from it."""


class StoppedError(Exception):
    """A signal asked the run to stop; it has been saved."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"{signal.Signals(number).name} at step {step}; saved")
        self.number = number


class Run:
    """One recipe in one folder. `go` trains to the end, from the last checkpoint if any."""

    def __init__(
        self, folder: Path, recipe: Recipe, workload: Workload, report: Callable[[str], None]
    ) -> None:
        self.folder, self.recipe, self.workload, self.report = folder, recipe, workload, report
        check_reporters(recipe.run.log_to)
        self.stages = plan(recipe)
        self.ranks = Ranks()
        self.checkpoints = folder / CHECKPOINTS
        self.best: tuple[float, int] | None = None
        self.growth: GrowthReport | None = None
        """Of a growth that `go` has yet to record."""
        self.newest: int | None = None
        """The step of the newest checkpoint that was verified or written."""
        self.resumed: Path | None = None
        """The checkpoint that the run continues from."""
        self.stop_signal = 0
        self.problems = 0
        self.loop = self.open()

    def go(self, on_step: Callable[[Row], None]) -> None:
        """Train to the end. A run at its end is left as it is, one past it too."""
        if self.is_concluded:
            return
        if self.ranks.first:
            self.folder.mkdir(parents=True, exist_ok=True)
            cut_metrics(self.folder / METRICS, self.loop.progress.step, self.report)
        with ExitStack() as stack:
            saver = stack.enter_context(AsyncSaver())
            stack.enter_context(self.signals())
            write = stack.enter_context(metrics_writer(self.folder / METRICS, self.ranks))
            reports = [stack.enter_context(context) for context in self.reporters()]
            start_loss = self.start_loss()
            while not self.finished:
                if self.stage_is_over:
                    saver.wait()
                    self.loop = self.open()
                self.record_growth()
                row = self.loop.step()
                if len(self.stages) > 1:
                    row["stage"] = self.stage.index + 1
                if "problem" in row:
                    self.handle(row, write)
                    continue
                self.problems = 0
                write(row)
                for report in (*reports, on_step):
                    report(row)
                self.remember(row)
                if start_loss is not None and "val_loss" in row:
                    self.compare_with_start(start_loss, row)
                    start_loss = None
                step = self.loop.progress.step
                stop = largest(self.stop_signal)
                if stop or self.is_kept(step):
                    self.save(saver)
                if stop:
                    saver.wait()
                    raise StoppedError(stop, step)
            saver.wait()
        self.prune()
        self.conclude()

    def start_loss(self) -> float | None:
        """The held-out loss of the model that the run starts from, if it was trained before."""
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

    def reporters(self) -> list[Any]:
        if not self.ranks.first:
            return []
        config, step = asdict(self.recipe), self.loop.progress.step + 1
        return [reporter(name, self.folder, config, step) for name in self.recipe.run.log_to]

    @property
    def stage_is_over(self) -> bool:
        return self.loop.progress.step >= self.stage.last_step

    @property
    def finished(self) -> bool:
        return self.loop.progress.step >= self.last_step

    @property
    def last_step(self) -> int:
        return self.stages[-1].last_step

    @property
    def is_concluded(self) -> bool:
        """Whether there is nothing left to do: the run is past its end, or at it with the last
        checkpoint exported and drawn, which a kill may have prevented."""
        if not self.finished or self.resumed is None:
            return False
        past = self.loop.progress.step > self.last_step
        drawn = self.folder / PICTURE
        exported = (self.folder / MODEL).is_dir() and drawn.exists()
        saved = self.resumed.stat().st_mtime_ns
        return self.ranks.share(past or (exported and drawn.stat().st_mtime_ns >= saved))

    def is_kept(self, step: int) -> bool:
        """Whether there is to be a checkpoint after this step."""
        return step % self.recipe.run.checkpoint_every == 0 or self.stage_is_over

    def open(self) -> Loop:
        """The loop that goes on from the last checkpoint, or begins. Where a stage is over and
        there are steps left to train, the model grows into the next. Writes nothing."""
        path = checkpoint.latest(self.checkpoints, report=self.report)
        checkpoint.sweep(self.checkpoints)
        if path is None:
            self.stage, self.anneal = self.stages[0], None
            model = self.workload.first_model()
            check_growth(model.config, self.stages)
            loop = make_loop(self.stage, model, self.workload)
            loop.task.model.train()
            return loop
        self.resumed = path
        state = checkpoint.read_state(path, NEEDED)
        self.newest = state["step"]
        before = self.stages[self.stage_of(state, path)]
        grows = before.last_step <= state["step"] < self.last_step
        self.stage = self.stages[before.index + grows]
        if self.stage is before:
            loop = make_loop(before, saved_model(path, state["config"]), self.workload)
            self.anneal = self.annealed(loop, state.get("scales_began"))
            load_checkpoint(path, loop.task.model, loop.optimizer, loop.average)
            loop.watch.recent.extend(state["recent"])
        else:
            loop, self.growth = grow_checkpoint(
                path, state["config"], before, self.stage, self.workload
            )
            self.anneal = self.annealed(loop)
            self.report(f"stage {self.stage.index + 1}: {self.growth}")
        loop.mesh.share_generators()
        loop.progress = Progress(**state["progress"])
        loop.task.model.train()
        self.best = None if state["best"] is None else (state["best"][0], state["best"][1])
        if loop.scaler.is_enabled() and state["scaler"]:  # empty if the run was not in fp16
            loop.scaler.load_state_dict(state["scaler"])
        threads = torch.get_num_threads()
        if state["threads"] != threads:
            self.report(
                f"{path.name} was made with {state['threads']} threads, this goes on with "
                f"{threads}: losses agree to rounding, not to the last bit"
            )
        return loop

    def record_growth(self) -> None:
        if self.growth is not None and self.ranks.first:
            self.growth.save(self.folder / f"growth-{self.stage.index + 1}.json")
        self.growth = None

    def stage_of(self, state: dict[str, Any], path: Path) -> int:
        stage, step = int(state["stage"]), state["step"]
        if step >= self.last_step:
            return min(stage, len(self.stages) - 1)  # nothing will be trained
        if stage >= len(self.stages):
            raise CheckpointError(
                f"{path} is of stage {stage + 1}; the recipe has {len(self.stages)}"
            )
        if step > (end := self.stages[stage].last_step):
            raise RecipeError(
                f"{self.folder} is at step {step}, in stage {stage + 1}, which ends at step {end} "
                f"in this recipe; give stage {stage + 1} at least {step - end} more steps"
            )
        return stage

    def annealed(self, loop: Loop, start: Any = None) -> ScaleAnneal | None:
        grow = self.stage.grow
        if grow is None or grow.scale != "anneal":
            return None
        anneal = ScaleAnneal(loop.task.model, grow.anneal_steps, start)
        loop.before_step.append(anneal)
        return anneal

    def save(self, saver: AsyncSaver) -> None:
        saver.wait()
        self.prune()
        if self.anneal is not None:
            self.anneal.settle() if self.stage_is_over else self.anneal.note()
        progress = self.loop.progress
        model, optimizer = self.loop.task.model, self.loop.optimizer
        state = {
            "step": progress.step,
            "stage": self.stage.index,
            "config": model.config.to_dict(),
            "scales_began": None if self.anneal is None else self.anneal.start,
            "progress": asdict(progress),
            "best": self.best,
            "recent": list(self.loop.watch.recent),
            "scaler": self.loop.scaler.state_dict(),
            "threads": torch.get_num_threads(),
        }
        extra = {} if self.loop.average is None else self.loop.average.stored()
        saver.save(self.checkpoints, model=model, optimizer=optimizer, state=state, extra=extra)
        if self.newest is None:
            saver.wait()  # an export without a checkpoint would look like another's model
        self.newest = progress.step
        if not self.finished:
            self.export()

    def prune(self) -> None:
        """Delete old checkpoints, once a save under way is written. Only sizes are checked here, so
        those newer than the one that the run continued from do not count: they are damaged."""
        best = None if self.best is None else self.best[1]
        keep_last = self.recipe.run.keep_last
        checkpoint.prune(self.checkpoints, keep_last=keep_last, best=best, newest=self.newest)

    def remember(self, row: Row) -> None:
        """The best step, among those that will have a checkpoint."""
        kept = self.is_kept(int(row["step"]))
        if kept and "val_loss" in row and (self.best is None or row["val_loss"] < self.best[0]):
            self.best = (row["val_loss"], row["step"])

    def handle(self, row: Row, write: Callable[[Row], None]) -> None:
        """A step that went wrong, by the policy `on_spike`. Its weights were not touched."""
        last = self.loop.progress.samples - 1
        first = last + 1 - self.recipe.run.batch_size
        where = f"step {row['step']}, samples {first} to {last}: {row['problem']}"
        policy = self.recipe.run.on_spike
        self.problems += 1
        if policy == "stop":
            raise TrainingError(f"{where}; --run.on_spike skip or rollback would go on")
        if self.problems > MOST_PROBLEMS:
            raise TrainingError(f"{where}; that is {self.problems} such steps in a row")
        if policy == "skip":
            self.report(f"{where}; skipped")
            write(row)
            return
        samples = self.loop.progress.samples
        if checkpoint.latest(self.checkpoints, report=self.report) is None:
            raise TrainingError(f"{where}; there is no checkpoint yet to roll back to")
        self.loop = self.open()
        self.loop.progress.samples = samples  # what was seen is not seen again
        self.report(f"{where}; rolled back to step {self.loop.progress.step}")
        write(row)

    def export(self) -> None:
        """The model as it is validated, for anyone to load while training goes on."""
        with self.loop.averaged():
            model = self.loop.task.model
            export(model, self.workload.preprocessor(model), self.folder / MODEL)

    def conclude(self) -> None:
        self.export()
        if self.ranks.first:
            rows = read_metrics(self.folder / METRICS, self.report)
            with disk_errors(self.folder / PICTURE):
                draw_loss(
                    [r for r in rows if "problem" not in r and r.keys() >= {"loss", "tokens"}],
                    self.folder / PICTURE,
                    self.folder.name,
                    self.workload.unit,
                )

    @contextmanager
    def signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT end the run after the step under way, with a checkpoint; a second one
        ends it at once."""

        def note(number: int, frame: FrameType | None) -> None:
            if self.stop_signal:
                raise KeyboardInterrupt
            self.stop_signal = number

        handlers = {
            number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def run_recipe(recipe: Recipe, folder: Path) -> None:
    """Train as `recipe` says, in `folder`, without a word; from where it was, if it was begun."""
    record = Record(folder)
    check_folder(folder)
    run = Run(folder, recipe, workload_of(recipe), lambda line: None)
    step = run.loop.progress.step
    record.check(recipe, step)
    if not run.finished:
        record.write(recipe, step)
    run.go(lambda row: None)
