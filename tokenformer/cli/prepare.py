"""`tokenformer prepare`: any corpus to shards of token ids, once and for all."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenformer.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from tokenformer.data.preparation import Standing

SECONDS_BETWEEN_LINES = 10.0


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
    workers: int | None = None,
    json: bool = False,
) -> None:
    """Turn text, jsonl, parquet, enwik8 or a dataset into shards of token ids.

    Run the same command again to continue after an interruption.

    Args:
        corpus: A file or a folder of text, jsonl or parquet, also as gz, bz2, xz, zst or zip; or
            the name of a dataset (owner/name, or datasets:NAME), which is streamed.
        out: The folder for the shards, their index.json and the tokenizer; it must be given.
        tokenizer: bytes, a tokenizer.json, a tokenizer folder, a hub name, or bpe to train one on
            the corpus.
        vocab_size: Size of the bpe to train.
        end_of_text: The token that ends a document, if the tokenizer does not say.
        text_field: The field that holds the text in jsonl, parquet or a dataset.
        subset: The subset (configuration) of a dataset.
        validation: Fraction of the training documents to hold out; by default 0.05, for enwik8
            and text8 the standard split, and none if the corpus has a validation split. With 0
            there is no validation split; train with --run.validate_every 0.
        seed: Seed of the division into splits.
        documents: Read no more than so many documents, for a small part of a large corpus.
        encoding: Encoding of text and jsonl files without a byte order mark, such as latin-1; by
            default utf-8. raw keeps all bytes as they are (with --tokenizer bytes).
        encoding_errors: strict refuses bytes that are not text in the encoding and zero bytes;
            replace turns them into U+FFFD.
        max_ratio: Refuse a file that unpacks to more than this many times its size (and more than
            16 MiB); 0 for no limit.
        max_row_bytes: Refuse a line of jsonl, or the text of a row, longer than this.
        shard_tokens: Tokens in a shard.
        workers: Processes that encode; by default one a core.
        json: Print the index as JSON.
    """
    if out is None:
        raise InputError("--out is missing; name the folder to keep the shards in")
    from rich.console import Console

    from tokenformer.data.preparation import Request
    from tokenformer.data.preparation import prepare as run
    from tokenformer.data.reading import Reading

    request = Request(
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
        reading=Reading(encoding, encoding_errors, max_ratio, max_row_bytes),
    )
    console = Console(highlight=False, stderr=json, soft_wrap=True)
    with progress(console) as show:
        index = run(
            request,
            out,
            workers=cores() if workers is None else workers,
            on_standing=show,
            on_note=lambda note: console.print(note, markup=False),
        )
    if json:
        sys.stdout.write(dumps(index, indent=2) + "\n")
    else:
        summarise(console, index, out)
    if "validation" not in index["splits"]:
        console.print(without_validation(index["settings"]["validation"]), markup=False)


def without_validation(asked: float | None) -> str:
    if asked == 0:
        other = "or prepare it in another folder with --validation 0.05"
    else:
        other = "since there are too few documents to hold one out"
    return f"No validation split: train with --run.validate_every 0, {other}"


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def summarise(console: "Console", index: dict[str, Any], out: Path) -> None:
    for split, entry in index["splits"].items():
        console.print(
            f"{split}: {entry['tokens']:,} tokens, {entry['documents']:,} documents, "
            f"{entry['bytes']:,} bytes"
        )
    console.print(f"Kept in {out}", markup=False)


@contextmanager
def progress(console: "Console") -> "Iterator[Callable[[Standing], None]]":
    """A bar on a terminal; elsewhere a line every ten seconds."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    started = time.monotonic()

    def described(standing: "Standing") -> str:
        speed = standing.bytes / max(1e-9, time.monotonic() - started) / 1e6
        return (
            f"{standing.bytes / 1e6:,.0f} MB of text  {standing.tokens / 1e6:,.1f}M tokens  "
            f"{speed:,.1f} MB/s"
        )

    if not console.is_terminal:
        printed = started

        def show_line(standing: "Standing") -> None:
            nonlocal printed
            if time.monotonic() - printed >= SECONDS_BETWEEN_LINES:
                printed = time.monotonic()
                share = f"{standing.read / standing.total:.0%}  " if standing.total else ""
                console.print(share + described(standing))

        yield show_line
        return
    columns = (BarColumn(bar_width=None), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading", total=None)

        def show_bar(standing: "Standing") -> None:
            bar.update(
                task,
                completed=standing.read,
                total=standing.total or None,
                description=described(standing),
            )

        yield show_bar
