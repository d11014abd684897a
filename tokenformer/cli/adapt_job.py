"""The run of `tokenformer adapt`: prepare the data, train, and say what it did."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenformer.cli.inspect import new_table
from tokenformer.cli.train import Job, checked, remove_if_empty, train_job
from tokenformer.errors import DataError, InputError, TokenformerError, one_line
from tokenformer.paths import exists, expand_user, is_local
from tokenformer.train.options import Recipe

if TYPE_CHECKING:
    from tokenformer.train.run import Run


@dataclass
class AdaptJob:
    """The run of one command."""

    model: str
    data: str
    keep: str | None
    out: Path
    recipe: Recipe
    override: bool
    fits_length: bool
    """Whether the sequences may be shorter than in the recipe, if the data is."""

    def run(self, *, on_stderr: bool) -> "tuple[AdaptJob, Run]":
        """Prepare the data, train, and return the finished run."""
        self.check_out()

        from tokenformer.train.parallel.distribute import process_group

        with process_group() as ranks, no_loading_bars():
            problem = None
            if ranks.first:
                try:
                    self.prepare_data()
                except TokenformerError as error:
                    problem = str(error)
                    remove_if_empty(self.out)
            if problem := ranks.share(problem):  # on all ranks, or the others would wait
                raise InputError(problem)
            try:
                if self.fits_length:
                    self.recipe.data.length = self.fitting_length()
                job = checked(Job(None, self.out, self.recipe, self.override))
            except (ValueError, OSError) as error:
                raise InputError(one_line(error)) from None
            run = train_job(job, on_stderr=on_stderr)
            if not ranks.first:
                raise SystemExit(0)
            return self, run

    def check_out(self) -> None:
        """Refuse a folder that holds something else, before data is prepared in it."""
        from tokenformer.train.run_record import ADAPTER, MODEL, Record, check_folder, newest_step

        out = self.out
        try:
            if exists(out) and not out.is_dir():
                raise InputError(f"--out {out} is a file; name a folder for the run")
            if exists(out / "config.json") or exists(out / "adapter_config.json"):
                raise InputError(f"--out {out} holds a model or an adapter; name a new folder")
            check_folder(out, ADAPTER if self.recipe.adapter.is_saved_apart else MODEL)
            Record(out).check(self.recipe, newest_step(out), self.override)
        except (ValueError, OSError) as error:
            raise InputError(one_line(error)) from None

    def prepare_data(self) -> None:
        """Tokenize what is not prepared, with the model's tokenizer."""
        if self.recipe.data.images is not None:
            return
        places = (self.data, self.recipe.data.corpus), (self.keep, self.recipe.adapter.keep)
        for source, place in places:
            if source is not None and not is_prepared(expand_user(source)):
                assert place is not None
                prepare_text(source, Path(place), str(self.recipe.model.start_from))

    def fitting_length(self) -> int:
        """Return the length of the recipe or of the shortest split that is used."""
        from tokenformer.data.corpus import Corpus, Split
        from tokenformer.data.examples import open_split

        length, data = self.recipe.data.length, self.recipe.data
        for folder in filter(None, (data.corpus, self.recipe.adapter.keep)):
            if data.images is None and exists(Path(folder)):
                corpus = Corpus(folder)
                splits = [
                    open_split(corpus, n) for n in ("train", "validation") if n in corpus.splits
                ]
                sizes = [len(split) - 1 for split in splits if isinstance(split, Split)]
                length = max(1, min([length, *sizes]))
        return length


@contextmanager
def no_loading_bars() -> Iterator[None]:
    """Hide the progress bar of transformers, which fills at once."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def prepare_text(source: str, out: Path, base: str) -> None:
    from rich.console import Console

    from tokenformer.cli.prepare import TEXT_OPTIONS, cores, described
    from tokenformer.cli.progress import progress
    from tokenformer.data.preparation import PrepareOptions, PrepareProgress, prepare
    from tokenformer.data.tokenizer import BYTES, is_byte_tokenizer

    tokenizer = BYTES if is_local(base) and is_byte_tokenizer(Path(base)) else base
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    started = time.monotonic()
    with progress(console) as show:

        def on_progress(done: PrepareProgress) -> None:
            text = described(done, time.monotonic() - started)
            show(f"preparing {source}: {text}", done.bytes_read, done.total_bytes)

        try:
            prepare(
                PrepareOptions(corpus=source, tokenizer=tokenizer),
                out,
                workers=cores(),
                on_progress=on_progress,
                on_message=console.print,
            )
        except DataError as error:
            if not any(f"--{option}" in str(error) for option in TEXT_OPTIONS):
                raise
            raise DataError(f"{error} ({OF_PREPARE})") from None


OF_PREPARE = (
    "options of `tokenformer prepare`: run that first and give its folder; or give jsonl with "
    "prompt and completion, or with messages"
)


def is_prepared(folder: Path) -> bool:
    return any(exists(folder / name) for name in ("index.json", "unfinished.json"))


METRICS = {"loss": "loss", "bpb": "bits per byte", "accuracy": "accuracy"}


def result(job: AdaptJob, run: "Run") -> dict[str, Any]:
    """Return the result of a finished run as JSON values."""
    from tokenformer.train.metrics import read_metrics
    from tokenformer.train.run_record import METRICS as FILE

    rows = [row for row in read_metrics(run.folder / FILE) if "val_loss" in row]
    if len(rows) < 2:
        raise InputError(f"{run.folder / FILE} lacks the losses before and after; it was altered")
    before, after = rows[0], rows[-1]

    def measured(row: dict[str, Any], prefix: str) -> dict[str, float]:
        return {name: row[f"{prefix}_{name}"] for name in METRICS if f"{prefix}_{name}" in row}

    found: dict[str, Any] = {"model": job.model, "method": run.recipe.adapter.method}
    for name, prefix, source in (("data", "val", job.data), ("keep", "keep", job.keep)):
        if source is not None:
            found[name] = {
                "source": source,
                "before": measured(before, prefix),
                "after": measured(after, prefix),
            }
    model = run.loop.task.model
    weights = sum(file.stat().st_size for file in run.exported.glob("*.safetensors"))
    return found | {
        "trained_parameters": run.workload.trained_parameters(model),  # type: ignore[attr-defined]
        "parameters": model.num_parameters(),
        "steps": after["step"],
        "seconds": after["seconds"],
        "result": str(run.exported),
        "bytes": weights,
    }


def print_result(job: AdaptJob, run: "Run", *, as_json: bool) -> None:
    found = result(job, run)
    if as_json:
        sys.stdout.write(dumps(found, indent=2) + "\n")
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)
    table = new_table(["held out", "before", "after"])
    for name, title in (("data", "new data"), ("keep", "kept data")):
        if name in found:
            part = found[name]
            for metric, label in METRICS.items():
                if metric in part["before"]:
                    numbers = (f"{part[when][metric]:.4f}" for when in ("before", "after"))
                    table.add_row(f"{title}, {label}", *numbers)
    console.print(table)
    share = found["trained_parameters"] / found["parameters"]
    console.print(
        f"{found['trained_parameters']:,} trained parameters ({share:.2%}), "
        f"{found['steps']:,} steps, {found['seconds']:,.0f} s; "
        f"{found['result']} has {found['bytes'] / 1e6:,.2f} MB"
    )
