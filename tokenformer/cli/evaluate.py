"""`tokenformer evaluate`: what a model is worth, in numbers that compare."""

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenformer.cli.model import check_bits, load_classifier, load_model, resolve_model
from tokenformer.cli.samples import check_samples
from tokenformer.errors import InputError
from tokenformer.installation import install_hint
from tokenformer.paths import exists, expand_user, missing_message

if TYPE_CHECKING:
    from rich.console import Console

ALL_SIX = "paper"
MEASURES = ("tasks", "perplexity", "images")
BELONGS_TO = {
    "data": "tasks",
    "split": "perplexity",
    "length": "perplexity",
    "stride": "perplexity",
    "confusion": "images",
    "labels_by_index": "images",
}
SIZES = ("length", "stride", "batch_size", "limit")
PATHS = ("data", "perplexity")
SECONDS_BETWEEN_LINES = 10.0
LENGTH_WITHOUT_LIMIT = 1024
"""Tokens in a window of a model that was made for any number."""

Finding = tuple[dict[str, Any], str]
"""What one measurement found: for programs, and for people."""
Show = Callable[[str, int, int], None]
"""Called with what is counted, how many are done, and of how many."""


def evaluate(
    model: str,
    tasks: str | None = None,
    data: Path | None = None,
    perplexity: Path | None = None,
    split: str | None = None,
    length: int | None = None,
    stride: int | None = None,
    images: str | None = None,
    confusion: Path | None = None,
    labels_by_index: bool = False,
    batch_size: int | None = None,
    limit: int | None = None,
    bits: int | None = None,
    no_verify: bool = False,
    json: bool = False,
) -> None:
    """Measure a model: benchmarks beside the paper's figures, perplexity, accuracy on images.

    Args:
        model: A model folder, a run folder or a hub name of any causal language model or, for
            --images, of any image classifier.
        tasks: Tasks of lm-evaluation-harness with commas between, or paper for the six of the
            paper's table. A run that was broken off goes on when it is started again.
        data: A folder of jsonl files to read the six tasks from, instead of the hub.
        perplexity: Text to measure perplexity on: a folder made by `tokenformer prepare`, or a
            text file.
        split: The split of a prepared corpus; by default test, where it has one, or validation.
        length: Tokens in a window; by default as many as the model was made for.
        stride: Tokens from one window to the next; by default half the length.
        images: Images to measure top-1 and top-5 accuracy on: a folder of images by class, of IDX
            or of CIFAR files, a Hugging Face dataset, or digits.
        confusion: A file for the picture of which classes are taken for which.
        labels_by_index: Match classes of the images and of the model by number, not by name.
        batch_size: Windows, requests or images at a time; by default what fits.
        limit: Measure on so many items of each task, tokens of the text, or images, at the
            beginning.
        bits: 8 rounds a TokenFormer's numbers to int8 as it is loaded; not with --images.
        no_verify: Do not check the weights against checksums.json, nor for NaN and inf.
        json: Print one JSON document.
    """
    check(
        tasks=tasks,
        data=data,
        perplexity=perplexity,
        split=split,
        length=length,
        stride=stride,
        images=images,
        confusion=confusion,
        labels_by_index=labels_by_index or None,
        batch_size=batch_size,
        limit=limit,
    )
    check_bits(bits)
    if bits is not None and images is not None:
        raise InputError("--bits is for language models, not with --images")
    resolve_model(model, "a language model" if images is None else "an image classifier")
    names = None if tasks is None else task_names(tasks)
    data, perplexity = (None if path is None else expand_user(path) for path in (data, perplexity))

    from rich.console import Console

    from tokenformer.errors import DataError

    # Bound to its stream: while lm-eval works, what it prints is kept from ours.
    console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
    found: dict[str, Finding] = {}
    try:
        loaded_tasks = None if names is None else load_named_tasks(names, data)
        if images is not None:
            found["images"] = measure_images(
                model, images, confusion, labels_by_index, batch_size, limit, no_verify, console
            )
        else:
            loaded, tokenizer = load_model(model, bits, verify=not no_verify)
        if perplexity is not None:
            found["perplexity"] = measure_text(
                loaded, tokenizer, perplexity, split, length, stride, batch_size, limit, console
            )
        if loaded_tasks is not None:
            found["tasks"] = measure_tasks(
                loaded, tokenizer, loaded_tasks, batch_size, limit, console
            )
    except DataError as error:
        raise InputError(str(error)) from None
    if json:
        report = {"model": model, **{name: facts for name, (facts, _) in found.items()}}
        text = dumps(report, indent=2)
    else:
        text = "\n\n".join(told for _, told in found.values())
    sys.stdout.write(text + "\n")


def check(**given: Any) -> None:
    """The options as they were given; None stands for one that was not."""
    if all(given[name] is None for name in MEASURES):
        raise InputError(
            "nothing to measure; give --tasks NAMES, --perplexity DATA or --images DATA"
        )
    if given["images"] is not None:
        for name in ("tasks", "perplexity"):
            if given[name] is not None:
                raise InputError(
                    f"--images is for an image classifier, --{name} for a language model; give one"
                )
    for name in SIZES:
        if given[name] is not None and given[name] < 1:
            raise InputError(f"--{name} {given[name]} must be at least 1")
    for name, measure in BELONGS_TO.items():
        if given[name] is not None and given[measure] is None:
            raise InputError(f"--{name} {given[name]} is for --{measure}")
    for name in PATHS:
        if given[name] is not None and not exists(expand_user(given[name])):
            raise InputError(f"--{name}: {missing_message(given[name])}")
    check_samples(images=given["images"])
    confusion = given["confusion"]
    if confusion is not None and not (exists(confusion.parent) and confusion.parent.is_dir()):
        raise InputError(f"--confusion: {missing_message(given['confusion'].parent)}")


def task_names(tasks: str) -> list[str]:
    """The names in a list with commas, each once."""
    from tokenformer.evaluate.benchmarks import BENCHMARKS

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise InputError(f"--tasks is empty; give {','.join(BENCHMARKS)} or others of lm-eval")
    every = [each for name in names for each in (BENCHMARKS if name == ALL_SIX else [name])]
    return list(dict.fromkeys(every))


def load_named_tasks(names: list[str], data: Path | None) -> dict[str, Any]:
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError(f"--tasks needs lm-evaluation-harness: {install_hint('eval')}")

    from tokenformer.errors import DataError
    from tokenformer.evaluate.tasks import load_tasks

    try:
        return load_tasks(names, data)
    except DataError as error:
        raise InputError(f"--tasks {','.join(names)}: {error}") from None


def measure_tasks(
    model: Any,
    tokenizer: Any,
    tasks: dict[str, Any],
    batch_size: int | None,
    limit: int | None,
    console: "Console",
) -> Finding:
    from tokenformer.evaluate.answers import answers_folder
    from tokenformer.evaluate.scorer import Scorer
    from tokenformer.evaluate.scores import Scores
    from tokenformer.evaluate.tasks import score_task

    folder = Path("a cache folder")
    try:
        folder = answers_folder()
        scorer = Scorer(model, tokenizer, folder, batch_size=batch_size)
    except OSError as error:
        raise InputError(
            f"{folder}, for answers until the run ends, cannot be used: {error.strerror}; "
            "XDG_CACHE_HOME names another place"
        ) from None
    if scorer.answers.known:
        console.print(f"Going on with {len(scorer.answers.known)} answered batches.")
    scores = []
    with progress(console) as show:
        for name, task in tasks.items():
            scorer.on_requests = partial(show, f"requests of {name}")
            scores += score_task(task, scorer, limit)
    scorer.answers.finish()
    result = Scores(model.num_parameters(), scores, scorer.too_long)
    return {**result.asdict(), "limit": limit}, str(result)


def measure_text(
    model: Any,
    tokenizer: Any,
    path: Path,
    split: str | None,
    length: int | None,
    stride: int | None,
    batch_size: int | None,
    limit: int | None,
    console: "Console",
) -> Finding:
    from tokenformer.evaluate.evaluation_text import read_text
    from tokenformer.evaluate.perplexity import measure_perplexity
    from tokenformer.serve.prompt import PromptError, context_length, start_token

    text, split = read_text(path, split, limit, tokenizer, model.config.vocab_size)
    length = length or context_length(model.config) or LENGTH_WITHOUT_LIMIT
    stride = stride or max(1, length // 2)
    if stride > length:
        raise InputError(f"--stride {stride} must not be above --length {length}")
    try:
        start = start_token(tokenizer)
    except PromptError as error:
        raise InputError(str(error)) from None
    with progress(console) as show:
        found = measure_perplexity(
            model,
            text,
            start=start,
            length=length,
            stride=stride,
            batch_size=batch_size,
            on_tokens=lambda done: show("tokens", done, len(text.tokens)),
        )
    where = f"{path}, {split}" if split else str(path)
    told = (
        f"{where}: {found.tokens:,} tokens, {found.words:,} words, {found.bytes:,} bytes, windows "
        f"of {length} every {stride}\n"
        f"bits per byte     {found.bits_per_byte:.4f}\n"
        f"token perplexity  {found.token_perplexity:,.3f}\n"
        f"word perplexity   {found.word_perplexity:,.1f}"
    )
    source = {"data": str(path), "split": split, "length": length, "stride": stride}
    return {**source, **found.asdict()}, told


def measure_images(
    model: str,
    source: str,
    confusion: Path | None,
    labels_by_index: bool,
    batch_size: int | None,
    limit: int | None,
    no_verify: bool,
    console: "Console",
) -> Finding:
    from tokenformer.data.image_sources import load_test_images
    from tokenformer.evaluate.classification import classify
    from tokenformer.evaluate.confusion_plot import draw_confusion

    pictures, split = load_test_images(source)
    loaded, processor = load_classifier(model, verify=not no_verify)
    count = len(pictures) if limit is None else min(limit, len(pictures))
    with progress(console) as show:
        found = classify(
            loaded,
            processor,
            pictures,
            batch_size=batch_size,
            limit=limit,
            labels_by_index=labels_by_index,
            on_images=lambda done: show("images", done, count),
        )
    if confusion is not None:
        try:
            draw_confusion(found, confusion, f"{source}, {split}")
        except (OSError, ValueError) as error:
            raise InputError(f"--confusion {confusion} cannot be written: {error}") from None
    told = f"{source}, {split}: {found.images:,} images, {len(found.classes)} classes\n{found}"
    return {"data": source, "split": split, **found.asdict()}, told


@contextmanager
def progress(console: "Console") -> Iterator[Show]:
    """A bar on a terminal; elsewhere a line every ten seconds."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    if not console.is_terminal:
        printed = time.monotonic()

        def show_line(what: str, done: int, total: int) -> None:
            nonlocal printed
            if time.monotonic() - printed >= SECONDS_BETWEEN_LINES:
                printed = time.monotonic()
                console.print(f"{done / total:.0%} of {total:,} {what}")

        yield show_line
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.percentage:.0f} %"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def show_bar(what: str, done: int, total: int) -> None:
            if bar.tasks[0].description != what:
                bar.reset(task, description=what, total=total)
            bar.update(task, completed=done)

        yield show_bar
