"""`tokenformer evaluate`: benchmarks, perplexity, image accuracy and captions."""

import importlib.util
import sys
from functools import partial
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tokenformer.cli.model import (
    adapter_folders,
    check_bits,
    load_classifier,
    load_image_text,
    load_model,
    resolve_model,
)
from tokenformer.cli.progress import ShowProgress, progress
from tokenformer.cli.samples import check_samples
from tokenformer.errors import DataError, InputError
from tokenformer.installation import install_hint
from tokenformer.paths import exists, expand_user, is_local, missing_message

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ALL_SIX = "paper"
MEASURES = ("tasks", "perplexity", "images", "captions")
KINDS = {"images": "an image classifier", "captions": "a vision-language model"}
"""What these measure, instead of a language model."""
REQUIRES = {
    "data": "tasks",
    "split": "perplexity",
    "length": "perplexity",
    "stride": "perplexity",
    "confusion": "images",
    "labels_by_index": "images",
    "on_corrupt": "captions",
}
SIZES = ("length", "stride", "batch_size", "limit")
PATHS = ("data", "perplexity")
DEFAULT_LENGTH = 1024
"""Tokens per window for a model without a context limit."""

Result = tuple[dict[str, Any], str]
"""The result of a measurement as JSON values and as text."""


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
    captions: str | None = None,
    on_corrupt: Literal["refuse", "skip"] | None = None,
    batch_size: int | None = None,
    limit: int | None = None,
    adapter: tuple[str, ...] = (),
    bits: int | None = None,
    no_verify: bool = False,
    json: bool = False,
) -> None:
    """Evaluate a model: benchmarks beside the paper's figures, perplexity, image accuracy,
    captions.

    Args:
        model: A model folder, a run folder or a hub name of any causal language model or, for
            --images, of any image classifier; for --captions a vision-language model.
        tasks: Comma-separated tasks of lm-evaluation-harness, or paper for the six of the paper's
            table. Run the same command again to resume after an interruption.
        data: A folder of jsonl files to read the six tasks from, instead of the hub.
        perplexity: Text to measure perplexity on: a folder made by `tokenformer prepare`, or a
            text file.
        split: The split of a prepared corpus; by default test if there is one, else validation.
        length: Tokens per window; by default the model's context length.
        stride: Tokens between the starts of two windows; by default half the length.
        images: Images to measure top-1 and top-5 accuracy on: a folder of images by class, of IDX
            or of CIFAR files, a Hugging Face dataset, or digits.
        confusion: Save a plot of the confusion matrix to this file.
        labels_by_index: Match classes of the images and of the model by index, not by name.
        captions: Images with captions, to measure perplexity with the right image, another and
            none, BLEU and CIDEr of generated captions, and retrieval on: a folder of parquet files,
            of JSON lines or of images with text files, or a Hugging Face dataset.
        on_corrupt: What to do at an image of --captions that cannot be decoded: refuse stops with
            an error, the default; skip leaves it out.
        batch_size: Windows, requests or images per batch; by default as many as fit.
        limit: Use only the first items of each task, tokens of the text, or images.
        adapter: An adapter to use, a folder or NAME=DIR; several, or the option again, are active
            together.
        bits: 8 or 4 quantizes the weights of a TokenFormer; not with --images or --captions.
        no_verify: Skip verifying the weights (checksums.json, NaN, inf).
        json: Print one JSON document.
    """
    check_options(
        tasks=tasks,
        data=data,
        perplexity=perplexity,
        split=split,
        length=length,
        stride=stride,
        images=images,
        confusion=confusion,
        labels_by_index=labels_by_index or None,
        captions=captions,
        on_corrupt=on_corrupt,
        batch_size=batch_size,
        limit=limit,
    )
    check_bits(bits)
    special = next((n for n in KINDS if {"images": images, "captions": captions}[n]), None)
    if bits is not None and special is not None:
        raise InputError(f"--bits is for language models; it cannot be used with --{special}")
    resolve_model(model, KINDS.get(special or "", "a language model"))
    adapters = adapter_folders(adapter)
    if adapters and captions is not None:
        raise InputError("--adapter cannot be used with --captions")
    names = None if tasks is None else task_names(tasks)
    data, perplexity = (None if path is None else expand_user(path) for path in (data, perplexity))

    from rich.console import Console

    # Keeps the real stderr: `silence_lm_eval` redirects `sys.stderr` while lm-eval runs.
    console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
    results: dict[str, Result] = {}
    loaded_tasks = None if names is None else load_named_tasks(names, data)
    if images is not None:
        results["images"] = measure_images(
            model,
            adapters,
            images,
            confusion,
            labels_by_index,
            batch_size,
            limit,
            no_verify,
            console,
        )
    elif captions is not None:
        results["captions"] = measure_image_captions(
            model, captions, on_corrupt or "refuse", batch_size, limit, no_verify, console
        )
    else:
        loaded, tokenizer = load_model(model, bits, verify=not no_verify, adapters=adapters)
    if perplexity is not None:
        results["perplexity"] = measure_text(
            loaded, tokenizer, perplexity, split, length, stride, batch_size, limit, console
        )
    if loaded_tasks is not None:
        results["tasks"] = measure_tasks(
            loaded, tokenizer, loaded_tasks, batch_size, limit, console
        )
    if json:
        report: dict[str, Any] = {"model": model}
        report |= {"adapters": list(adapter)} if adapter else {}
        report |= {name: values for name, (values, _) in results.items()}
        output = dumps(report, indent=2)
    else:
        output = "\n\n".join(text for _, text in results.values())
    sys.stdout.write(output + "\n")


def check_options(**given: Any) -> None:
    """Check the options before anything slow is imported or loaded; None is an option not given."""
    if all(given[name] is None for name in MEASURES):
        raise InputError(
            "nothing to evaluate; pass --tasks NAMES, --perplexity DATA, --images DATA or "
            "--captions DATA"
        )
    for special, kind in KINDS.items():
        for name in MEASURES:
            if given[special] is not None and name != special and given[name] is not None:
                other = KINDS.get(name, "a language model")
                raise InputError(f"--{special} is for {kind}, --{name} for {other}; use one")
    for name in SIZES:
        if given[name] is not None and given[name] < 1:
            raise InputError(f"--{name} {given[name]} must be at least 1")
    for name, measure in REQUIRES.items():
        if given[name] is not None and given[measure] is None:
            raise InputError(f"--{name} {given[name]} needs --{measure}")
    for name in PATHS:
        if given[name] is not None and not exists(expand_user(given[name])):
            raise InputError(f"--{name}: {missing_message(given[name])}")
    check_samples(images=given["images"])
    captions = given["captions"]
    if captions is not None and is_local(captions) and not exists(expand_user(captions)):
        raise InputError(f"--captions: {missing_message(captions)}")
    confusion = given["confusion"]
    if confusion is not None and not (exists(confusion.parent) and confusion.parent.is_dir()):
        raise InputError(f"--confusion: {missing_message(given['confusion'].parent)}")


def task_names(tasks: str) -> list[str]:
    """Split a comma-separated list and remove duplicates."""
    from tokenformer.evaluate.benchmarks import BENCHMARKS

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise InputError(f"--tasks is empty; pass {','.join(BENCHMARKS)} or others of lm-eval")
    expanded = [task for name in names for task in (BENCHMARKS if name == ALL_SIX else [name])]
    return list(dict.fromkeys(expanded))


def load_named_tasks(names: list[str], data: Path | None) -> dict[str, Any]:
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError(f"--tasks needs lm-evaluation-harness: {install_hint('eval')}")

    from tokenformer.evaluate.tasks import load_tasks

    try:
        return load_tasks(names, data)
    except DataError as error:
        raise InputError(f"--tasks {','.join(names)}: {error}") from None


def measure_tasks(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    tasks: dict[str, Any],
    batch_size: int | None,
    limit: int | None,
    console: "Console",
) -> Result:
    from tokenformer.evaluate.harness_model import HarnessModel
    from tokenformer.evaluate.response_cache import response_cache_folder
    from tokenformer.evaluate.scores import Scores
    from tokenformer.evaluate.tasks import score_task

    folder = Path("~/.cache")
    try:
        folder = response_cache_folder()
        harness_model = HarnessModel(model, tokenizer, folder, batch_size=batch_size)
    except OSError as error:
        raise InputError(
            f"the response cache {folder} cannot be used: {error.strerror}; set XDG_CACHE_HOME to "
            "another folder"
        ) from None
    if harness_model.cache.batches:
        console.print(f"Resuming with {len(harness_model.cache.batches)} cached batches.")
    scores = []
    with progress(console) as show:
        for name, task in tasks.items():
            harness_model.on_requests = partial(show_requests, show, name)
            scores += score_task(task, harness_model, limit)
    harness_model.cache.delete()
    result = Scores(model.num_parameters(), scores, harness_model.truncated)
    return {**result.asdict(), "limit": limit}, str(result)


def show_requests(show: ShowProgress, task: str, done: int, total: int) -> None:
    show(f"{done:,} of {total:,} requests of {task}", done, total)


def measure_text(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    path: Path,
    split: str | None,
    length: int | None,
    stride: int | None,
    batch_size: int | None,
    limit: int | None,
    console: "Console",
) -> Result:
    from tokenformer.evaluate.perplexity import measure_perplexity
    from tokenformer.evaluate.tokenized_text import load_text
    from tokenformer.serve.prompt import context_length, start_token

    text, split = load_text(path, split, limit, tokenizer, model.config.vocab_size)
    length = length or context_length(model.config) or DEFAULT_LENGTH
    stride = stride or max(1, length // 2)
    if stride > length:
        raise InputError(f"--stride {stride} must not be above --length {length}")
    total = len(text.tokens)
    with progress(console) as show:
        result = measure_perplexity(
            model,
            text,
            start=start_token(tokenizer),
            length=length,
            stride=stride,
            batch_size=batch_size,
            on_tokens=lambda done: show(f"{done:,} of {total:,} tokens", done, total),
        )
    where = f"{path}, {split}" if split else str(path)
    summary = (
        f"{where}: {result.tokens:,} tokens, {result.words:,} words, {result.bytes:,} bytes, "
        f"windows of {length} every {stride}\n"
        f"bits per byte     {result.bits_per_byte:.4f}\n"
        f"token perplexity  {result.token_perplexity:,.3f}\n"
        f"word perplexity   {result.word_perplexity:,.1f}"
    )
    source = {"data": str(path), "split": split, "length": length, "stride": stride}
    return {**source, **result.asdict()}, summary


def measure_image_captions(
    model: str,
    source: str,
    on_corrupt: str,
    batch_size: int | None,
    limit: int | None,
    no_verify: bool,
    console: "Console",
) -> Result:
    from tokenformer.data.image_text_sources import load_captions
    from tokenformer.evaluate.captions import measure_captions

    found, split = load_captions(source, on_corrupt)
    loaded, processor = load_image_text(model, verify=not no_verify)
    with progress(console) as show:
        result = measure_captions(
            loaded,
            processor,
            found,
            limit=limit,
            batch_size=batch_size,
            on_images=lambda what, done, total: show(f"{what}: {done:,} of {total:,}", done, total),
        )
    source_ = {"data": source, "split": split}
    return {**source_, **result.asdict()}, f"{source}, {split}: {result}"


def measure_images(
    model: str,
    adapters: dict[str, Path],
    source: str,
    confusion: Path | None,
    labels_by_index: bool,
    batch_size: int | None,
    limit: int | None,
    no_verify: bool,
    console: "Console",
) -> Result:
    from tokenformer.data.image_sources import load_test_images
    from tokenformer.evaluate.classification import measure_accuracy, plot_confusion

    image_set, split = load_test_images(source)
    loaded, processor = load_classifier(model, verify=not no_verify, adapters=adapters)
    count = len(image_set) if limit is None else min(limit, len(image_set))
    with progress(console) as show:
        result = measure_accuracy(
            loaded,
            processor,
            image_set,
            batch_size=batch_size,
            limit=limit,
            labels_by_index=labels_by_index,
            on_images=lambda done: show(f"{done:,} of {count:,} images", done, count),
        )
    if confusion is not None:
        try:
            plot_confusion(result, confusion, f"{source}, {split}")
        except (OSError, ValueError) as error:
            raise InputError(f"--confusion {confusion} cannot be written: {error}") from None
    classes = len(result.classes)
    summary = f"{source}, {split}: {result.images:,} images, {classes} classes\n{result}"
    return {"data": source, "split": split, **result.asdict()}, summary
