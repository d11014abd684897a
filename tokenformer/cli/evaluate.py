"""`tokenformer evaluate`: what a model is worth, in numbers that compare."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenformer.cli.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from tokenformer.evaluate.perplexity import Text

SECONDS_BETWEEN_LINES = 10.0


def evaluate(
    model: str,
    perplexity: Path | None = None,
    split: str | None = None,
    length: int | None = None,
    stride: int | None = None,
    batch_size: int | None = None,
    limit: int | None = None,
    json: bool = False,
) -> None:
    """Measure a model: perplexity and bits per byte on text it has not seen.

    Args:
        model: A folder or hub name of a causal language model, ours or any other.
        perplexity: What to measure on: a folder made by `tokenformer prepare`, or a text file.
        split: The split of a prepared corpus; by default test, where it has one, or validation.
        length: Tokens in a window; by default as many as the model was made for.
        stride: Tokens from one window to the next; by default half the length.
        batch_size: Windows at a time; by default what fits.
        limit: Measure on so many tokens at the beginning.
        json: Print one JSON document.
    """
    if perplexity is None:
        raise InputError("nothing to measure; give --perplexity DATA")
    options = {"length": length, "stride": stride, "batch_size": batch_size, "limit": limit}
    for name, value in options.items():
        if value is not None and value < 1:
            raise InputError(f"--{name} {value} must be at least 1")
    if not perplexity.exists():
        raise InputError(f"--perplexity {perplexity} does not exist")

    from rich.console import Console

    from tokenformer.cli.model import load_model
    from tokenformer.data.errors import DataError
    from tokenformer.evaluate.perplexity import measure_perplexity

    loaded, tokenizer = load_model(model)
    try:
        text, split = read(perplexity, split, limit, tokenizer, loaded.config.vocab_size)
    except DataError as error:
        raise InputError(str(error)) from None
    length = length or default_length(loaded.config)
    stride = stride or max(1, length // 2)
    if stride > length:
        raise InputError(f"--stride {stride} must not be above --length {length}")
    console = Console(highlight=False, stderr=json, soft_wrap=True)
    with progress(console, len(text.tokens)) as show:
        found = measure_perplexity(
            loaded,
            text,
            start=start_token(tokenizer),
            length=length,
            stride=stride,
            batch_size=batch_size,
            on_tokens=show,
        )
    report = {
        "model": model,
        "data": str(perplexity),
        "split": split,
        "length": length,
        "stride": stride,
        **found.asdict(),
    }
    if json:
        sys.stdout.write(dumps(report, indent=2) + "\n")
        return
    where = f"{perplexity}, {split}" if split else str(perplexity)
    console.print(
        f"{where}: {found.tokens:,} tokens, {found.words:,} words, {found.bytes:,} bytes, windows "
        f"of {length} every {stride}\n"
        f"bits per byte     {found.bits_per_byte:.4f}\n"
        f"token perplexity  {found.token_perplexity:,.3f}\n"
        f"word perplexity   {found.word_perplexity:,.1f}",
        markup=False,
    )


def read(
    path: Path, split: str | None, limit: int | None, tokenizer: Any, vocab_size: int
) -> "tuple[Text, str | None]":
    """The ids of a prepared split or of a text file, and the split's name."""
    from tokenformer.data.corpus import Corpus
    from tokenformer.evaluate.perplexity import Text, count_words

    if not path.is_dir():
        return read_file(path, split, limit, tokenizer), None
    corpus = Corpus(path)
    if corpus.vocab_size > vocab_size:
        raise InputError(
            f"--perplexity {path} has a vocabulary of {corpus.vocab_size}, the model one of "
            f"{vocab_size}; prepare the text with the model's tokenizer"
        )
    split = split or ("test" if "test" in corpus.splits else "validation")
    whole = corpus.split(split)
    tokens = whole[: min(limit or len(whole), len(whole))]
    size = whole.bytes
    if len(tokens) < len(whole):
        size = len(tokenizer.decode(tokens.tolist(), skip_special_tokens=True).encode())
    return Text(tokens, size, count_words(tokens, tokenizer)), split


def read_file(path: Path, split: str | None, limit: int | None, tokenizer: Any) -> "Text":
    import numpy as np

    from tokenformer.evaluate.perplexity import Text

    if split is not None:
        raise InputError(f"--split {split} is for a prepared corpus; {path} is a file")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"--perplexity {path} is not UTF-8 text") from None
    except OSError as error:
        raise InputError(f"--perplexity {path} cannot be read: {error.strerror}") from None
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if not ids:
        raise InputError(f"--perplexity {path} is empty")
    if limit is not None and limit < len(ids):
        ids = ids[:limit]
        text = tokenizer.decode(ids)
    return Text(np.array(ids), len(text.encode()), len(text.split()))


def default_length(config: Any) -> int:
    return int(getattr(config, "max_position_embeddings", None) or 1024)


def start_token(tokenizer: Any) -> int:
    """What a text begins after."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise InputError("the model's tokenizer has neither a beginning nor an end of text")


@contextmanager
def progress(console: "Console", total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; elsewhere a line every ten seconds."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    if not console.is_terminal:
        printed = time.monotonic()

        def show_line(tokens: int) -> None:
            nonlocal printed
            if time.monotonic() - printed >= SECONDS_BETWEEN_LINES:
                printed = time.monotonic()
                console.print(f"{tokens / total:.0%} of {total:,} tokens")

        yield show_line
        return
    columns = (BarColumn(bar_width=None), TextColumn("{task.percentage:.0f} %"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("scoring", total=total)
        yield lambda tokens: bar.update(task, completed=tokens)
