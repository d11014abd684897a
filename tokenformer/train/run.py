"""A training run on disk: what a recipe becomes, and goes on as after any interruption.

    runs/NAME/  config.yaml  metrics.jsonl  checkpoints/step-00000500/  model/  loss.png

Every checkpoint is complete or absent, and metrics are cut back to the one a run goes on from, so a
run that was killed at any moment ends as if it had not been.
"""

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from tokenformer.data.shards import write_whole
from tokenformer.models.catalogue import blank
from tokenformer.train import checkpoint
from tokenformer.train.background import AsyncSaver
from tokenformer.train.curve import draw_loss
from tokenformer.train.distribution import largest
from tokenformer.train.export import export
from tokenformer.train.loop import Loop, Progress
from tokenformer.train.materials import Materials, materials_of
from tokenformer.train.metrics import Row
from tokenformer.train.options import Recipe
from tokenformer.train.ranks import CheckpointError, Ranks
from tokenformer.train.recipe import check_record, record
from tokenformer.train.reporters import check_reporters, reporter
from tokenformer.train.scale import ScaleAnneal
from tokenformer.train.seam import check_growth, grow_checkpoint, make_loop
from tokenformer.train.spikes import TrainingError
from tokenformer.train.stages import plan

METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
MODEL = "model"
MOST_PROBLEMS = 10


class StoppedError(Exception):
    """A signal asked the run to stop; it has been saved."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"{signal.Signals(number).name} at step {step}; saved")
        self.number = number


class Run:
    """One recipe in one folder. `go` trains to the end, from the last checkpoint if any."""

    def __init__(
        self, folder: Path, recipe: Recipe, materials: Materials, report: Callable[[str], None]
    ) -> None:
        self.folder, self.recipe, self.materials, self.report = folder, recipe, materials, report
        check_reporters(recipe.run.log_to)
        self.stages = plan(recipe)
        self.ranks = Ranks()
        self.checkpoints = folder / CHECKPOINTS
        self.best: tuple[float, int] | None = None
        self.stop_signal = 0
        self.problems = 0
        self.loop = self.open()

    def go(self, on_step: Callable[[Row], None]) -> None:
        if self.ranks.first:
            self.folder.mkdir(parents=True, exist_ok=True)
            cut_metrics(self.folder / METRICS, self.loop.progress.step)
        with ExitStack() as stack:
            saver = stack.enter_context(AsyncSaver())
            stack.enter_context(self.signals())
            write = stack.enter_context(metrics_writer(self.folder / METRICS, self.ranks))
            reports = [stack.enter_context(context) for context in self.reporters()]
            while not self.finished:
                if self.stage_is_over:
                    saver.wait()
                    self.loop = self.open()
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

    def reporters(self) -> list[Any]:
        if not self.ranks.first:
            return []
        config, step = asdict(self.recipe), self.loop.progress.step + 1
        return [reporter(name, self.folder, config, step) for name in self.recipe.run.log_to]

    @property
    def stage_is_over(self) -> bool:
        return self.loop.progress.step == self.stage.last_step

    @property
    def finished(self) -> bool:
        return self.loop.progress.step == self.stages[-1].last_step

    def is_kept(self, step: int) -> bool:
        """Whether there is to be a checkpoint after this step."""
        return step % self.recipe.run.checkpoint_every == 0 or self.stage_is_over

    def open(self) -> Loop:
        """The loop that goes on from the last checkpoint, or begins. Where a stage is over, the
        model grows into the next."""
        path = checkpoint.latest(self.checkpoints, report=self.report)
        if path is None:
            self.stage, self.anneal = self.stages[0], None
            model = self.materials.first_model()
            check_growth(model.config, self.stages)
            loop = make_loop(self.stage, model, self.materials)
            loop.task.model.train()
            return loop
        state = checkpoint.read_state(path)
        before = self.stages[self.stage_of(state, path)]
        over = state["step"] >= before.last_step
        self.stage = self.stages[min(before.index + over, len(self.stages) - 1)]
        if self.stage is before:
            loop = make_loop(before, blank(state["config"]), self.materials)
            self.anneal = self.annealed(loop, state.get("scales_began"))
            extra = {} if loop.average is None else loop.average.stored()
            model, optimizer = loop.task.model, loop.optimizer
            checkpoint.load(path, model=model, optimizer=optimizer, extra=extra, hashes=False)
            loop.watch.recent.extend(state["recent"])
        else:
            loop, report = grow_checkpoint(
                path, state["config"], before, self.stage, self.materials
            )
            self.anneal = self.annealed(loop)
            self.report(f"stage {self.stage.index + 1}: {report}")
            if self.ranks.first:
                report.save(self.folder / f"growth-{self.stage.index + 1}.json")
        loop.mesh.share_generators()
        loop.progress = Progress(**state["progress"])
        loop.task.model.train()
        self.best = None if state["best"] is None else (state["best"][0], state["best"][1])
        if loop.scaler.is_enabled():
            loop.scaler.load_state_dict(state["scaler"])
        threads = torch.get_num_threads()
        if state["threads"] != threads:
            self.report(
                f"{path.name} was made with {state['threads']} threads, this goes on with "
                f"{threads}: losses agree to rounding, not to the last bit"
            )
        return loop

    def stage_of(self, state: dict[str, Any], path: Path) -> int:
        if state["stage"] >= len(self.stages):
            raise CheckpointError(
                f"{path} is of stage {state['stage'] + 1}; the recipe has {len(self.stages)}"
            )
        return int(state["stage"])

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
        if not self.finished:
            self.export()

    def prune(self) -> None:
        best = None if self.best is None else self.best[1]
        checkpoint.prune(self.checkpoints, keep_last=self.recipe.run.keep_last, best=best)

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
            export(model, self.materials.preprocessor(model), self.folder / MODEL)

    def conclude(self) -> None:
        self.export()
        if self.ranks.first:
            rows = read_metrics(self.folder / METRICS)
            draw_loss(
                [r for r in rows if "problem" not in r],
                self.folder / "loss.png",
                self.folder.name,
                self.materials.unit,
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


@contextmanager
def metrics_writer(path: Path, ranks: Ranks) -> Iterator[Callable[[Row], None]]:
    if not ranks.first:
        yield lambda row: None
        return
    with path.open("a", buffering=1) as file:

        def write(row: Row) -> None:
            file.write(json.dumps(row) + "\n")

        yield write


def read_metrics(path: Path) -> list[Row]:
    """The rows, without a last line that a kill has torn."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def cut_metrics(path: Path, step: int) -> None:
    """Drop the rows of steps that will be made again."""
    kept = [row for row in read_metrics(path) if row["step"] <= step]
    write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))


def run_recipe(recipe: Recipe, folder: Path) -> None:
    """Train as `recipe` says, in `folder`, without a word; from where it was, if it was begun."""
    check_record(recipe, folder)
    run = Run(folder, recipe, materials_of(recipe), lambda line: None)
    record(recipe, folder)
    run.go(lambda row: None)
