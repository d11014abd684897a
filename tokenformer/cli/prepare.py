"""`tokenformer prepare`: tokenize a corpus into shards that training memory-maps, or check images
with text and write them to parquet files."""

import os
import sys
import time
from inspect import signature
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tokenformer.cli.progress import progress
from tokenformer.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from tokenformer.data.preparation import PrepareProgress

IMAGE_OPTIONS = ("image_size", "on_corrupt")
TEXT_OPTIONS = (
    *("tokenizer", "vocab_size", "end_of_text", "text_field", "subset", "documents"),
    *("encoding", "encoding_errors", "max_ratio", "max_row_bytes", "shard_tokens"),
)
"""Options that apply to one kind of source."""


def prepare(
    corpus: str,
    out: Path | None = None,
    tokenizer: str = "bytes",
    vocab_size: int | None = None,
    end_of_text: str | None = None,
    text_field: str = "text",
    subset: str | None = None,
    validation: float | None = None,
    seed: int = 0,
    documents: int | None = None,
    encoding: str | None = None,
    encoding_errors: str = "strict",
    max_ratio: float = 100.0,
    max_row_bytes: int = 1 << 28,
    shard_tokens: int = 1 << 28,
    image_size: int | None = None,
    on_corrupt: Literal["refuse", "skip"] | None = None,
    workers: int | None = None,
    json: bool = False,
) -> None:
    """Tokenize text, jsonl, parquet, enwik8 or a dataset into shards of token ids, or check images
    with captions or conversations and write them to parquet files.

    Run the same command again to resume after an interruption.

    Args:
        corpus: A file or folder of text, jsonl or parquet, also compressed as gz, bz2, xz, zst or
            zip; or the name of a dataset (owner/name or datasets:NAME), which is streamed. Or
            images with text: a folder of jsonl or parquet with a column of images, of images with
            text files, or a dataset.
        out: Folder for the shards, index.json and the tokenizer, or a new one for the parquet files
            (required).
        tokenizer: bytes, a tokenizer.json, a tokenizer folder, a hub name, or bpe to train one on
            the corpus.
        vocab_size: Vocabulary size of the bpe to train.
        end_of_text: The token that ends a document, if the tokenizer does not name one.
        text_field: The field with the text in jsonl, parquet or a dataset.
        subset: The subset (configuration) of a dataset.
        validation: Fraction of the training documents to hold out; by default 0.05, for enwik8
            and text8 the standard split, and none if the corpus has a validation split. With 0
            there is no validation split; train with --run.validate_every 0. Of images with text,
            the fraction of the images; by default 0.1.
        seed: Seed of the validation split.
        documents: Largest number of documents to read, for a small part of a large corpus.
        encoding: Encoding of text and jsonl files without a byte order mark, such as latin-1; by
            default utf-8. raw keeps all bytes (with --tokenizer bytes).
        encoding_errors: strict refuses invalid bytes and zero bytes; replace turns them into
            U+FFFD.
        max_ratio: Largest ratio of unpacked to compressed size, for files that unpack to more than
            16 MiB; 0 for no limit.
        max_row_bytes: Largest line of jsonl, or text of a row, in bytes.
        shard_tokens: Tokens per shard.
        image_size: Of images with text: fit larger images to this many pixels a side; by default
            their bytes are kept.
        on_corrupt: Of images with text: what to do at an image that cannot be decoded. refuse stops
            with an error, the default; skip leaves its rows out.
        workers: Number of encoding processes, or of threads that decode images; by default one per
            core.
        json: Print the index as JSON.
    """
    if out is None:
        raise InputError("--out is missing; name a folder for the shards")
    given = locals()

    from rich.console import Console

    from tokenformer.data.image_text_sources import holds_image_text
    from tokenformer.data.preparation import PrepareOptions
    from tokenformer.data.preparation import prepare as run
    from tokenformer.data.text_encoding import ReadOptions

    console = Console(highlight=False, stderr=json, soft_wrap=True)
    if holds_image_text(corpus):
        refuse(given, TEXT_OPTIONS, f"{corpus} holds images with text")
        prepare_images(given, console)
        return
    refuse(given, IMAGE_OPTIONS, f"{corpus} holds no images with text")
    options = PrepareOptions(
        corpus=corpus,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        end_of_text=end_of_text,
        text_field=text_field,
        subset=subset,
        validation=validation,
        seed=seed,
        documents=documents,
        shard_tokens=shard_tokens,
        read_options=ReadOptions(encoding, encoding_errors, max_ratio, max_row_bytes),
    )
    started = time.monotonic()
    with progress(console) as show:
        index = run(
            options,
            out,
            workers=cores() if workers is None else workers,
            on_progress=lambda done: show(
                described(done, time.monotonic() - started), done.bytes_read, done.total_bytes
            ),
            on_message=lambda message: console.print(message, markup=False),
        )
    if json:
        sys.stdout.write(dumps(index, indent=2) + "\n")
    else:
        print_summary(console, index, out)
    if "validation" not in index["splits"]:
        console.print(no_validation_message(index["settings"]["validation"]), markup=False)


def refuse(given: dict[str, Any], options: tuple[str, ...], reason: str) -> None:
    """Refuse options that do not apply, unless they are at their defaults."""
    defaults = signature(prepare).parameters
    for name in options:
        if given[name] != defaults[name].default:
            raise InputError(f"--{name} {given[name]} does not apply: {reason}")


def prepare_images(given: dict[str, Any], console: "Console") -> None:
    from tokenformer.data.image_text_preparation import ImageTextPreparation, prepare_image_text

    options = ImageTextPreparation(
        given["corpus"],
        given["image_size"],
        given["on_corrupt"] or "refuse",
        given["validation"],
        given["seed"],
    )
    with progress(console) as show:
        report = prepare_image_text(
            options,
            given["out"],
            workers=cores() if given["workers"] is None else given["workers"],
            on_progress=lambda what, done, total: show(
                f"{what}: {done:,} of {total:,} rows", done, total
            ),
            on_message=lambda message: console.print(message, markup=False),
        )
    if given["json"]:
        sys.stdout.write(dumps(report, indent=2) + "\n")
        return
    for split, counts in report["splits"].items():
        line = "{images:,} images, {samples:,} samples, {bytes:,} bytes".format(**counts)
        skipped = f", {counts['skipped']:,} rows skipped" if counts["skipped"] else ""
        console.print(f"{split}: {line}{skipped}")
    console.print(f"Saved to {given['out']}", markup=False)


def described(done: "PrepareProgress", seconds: float) -> str:
    speed = done.text_bytes / max(1e-9, seconds) / 1e6
    return (
        f"{done.text_bytes / 1e6:,.0f} MB of text  {done.tokens / 1e6:,.1f}M tokens  "
        f"{speed:,.1f} MB/s"
    )


def no_validation_message(fraction: float | None) -> str:
    if fraction == 0:
        advice = "or prepare it in another folder with --validation 0.05"
    else:
        advice = "because there are too few documents to hold one out"
    return f"No validation split: train with --run.validate_every 0, {advice}"


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def print_summary(console: "Console", index: dict[str, Any], out: Path) -> None:
    for split, entry in index["splits"].items():
        documents = f"{entry['documents']:,} document" + "s" * (entry["documents"] != 1)
        console.print(f"{split}: {entry['tokens']:,} tokens, {documents}, {entry['bytes']:,} bytes")
    console.print(f"Saved to {out}", markup=False)
