"""Preparing examples: jsonl of prompts with completions, or of chats, to token ids with a mask.

    {split}-00000.bin     token ids, one example after the other, as in every corpus
    {split}-starts.bin    the offset of each example, and the end of the last: int64 [N + 1]
    {split}-trained.bin   1 for each token with a loss, 0 for the others: uint8 [tokens]

All rows are read and checked before anything is written. The index is written last; a preparation
that was killed starts over.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tokenformer.data.corpus import FORMAT, INDEX, TOKENIZER, UNFINISHED, TokenIds, dtype_for
from tokenformer.data.example_rows import (
    MESSAGES,
    ChatTemplate,
    Example,
    example_rows,
    to_example,
)
from tokenformer.data.examples import EXAMPLES, FLAG, OFFSET
from tokenformer.data.shards import ShardWriter, write_json
from tokenformer.data.sources import SPLITS, Source
from tokenformer.data.splits import DEFAULT_FRACTION, HashSplit
from tokenformer.data.tokenizer import BPE, CorpusTokenizer, load_tokenizer
from tokenformer.errors import DataError
from tokenformer.files import fsync, sha256, write_atomic

BATCH = 256
TEMPLATE_FILE = "chat_template.jinja"


class EncodedExample(NamedTuple):
    ids: TokenIds
    trained: np.ndarray  # uint8
    trained_bytes: int
    all_bytes: int


class ExampleEncoder:
    """Turns examples into token ids, part by part, so that a prompt has the ids that it has when
    the model is used."""

    def __init__(self, tokenizer: CorpusTokenizer, template: ChatTemplate) -> None:
        self.tokenizer, self.template = tokenizer, template
        self.backend = tokenizer.backend
        self.backend.no_truncation()
        self.backend.no_padding()
        self.end = tokenizer.end_of_text_id
        pretrained = tokenizer.pretrained
        first = None if pretrained is None else pretrained.bos_token_id
        self.start = self.end if first is None else int(first)
        self.dtype = dtype_for(tokenizer.vocab_size)

    def __call__(self, example: Example) -> EncodedExample:
        ids: list[int] = []
        trained: list[int] = []
        # Prompts and completions that spell a special token are text; a template writes tokens.
        self.backend.encode_special_tokens = not example.rendered
        for part in example.parts:
            starts = not example.rendered and not part.trained
            found = self.backend.encode(part.text, add_special_tokens=starts).ids
            if not ids and not found:
                found = [self.start]  # of an empty prompt
            ids += found
            trained += [int(part.trained)] * len(found)
        if ids[-1] != self.end:  # a template may have written it
            ids.append(self.end)
            trained.append(1)
        sizes = [
            (len(part.text.encode("utf-8", "replace")), part.trained) for part in example.parts
        ]
        return EncodedExample(
            np.array(ids, dtype=self.dtype),
            np.array(trained, dtype=FLAG),
            sum(size for size, counts in sizes if counts),
            sum(size for size, _ in sizes),
        )


class ExampleWriter:
    """Writes one split."""

    def __init__(self, out: Path, split: str, dtype: np.dtype[Any], shard_tokens: int) -> None:
        self.out, self.split = out, split
        self.shards = ShardWriter(out, split, dtype, shard_tokens, {})
        self.flags: list[np.ndarray] = []
        self.starts = [0]
        self.trained_bytes = 0

    def write(self, example: EncodedExample) -> None:
        self.shards.write(example.ids)
        self.shards.documents += 1
        self.shards.bytes += example.all_bytes
        self.flags.append(example.trained)
        self.starts.append(self.starts[-1] + len(example.ids))
        self.trained_bytes += example.trained_bytes

    def finish(self) -> dict[str, Any]:
        """Finish the files and return the split's entry in the index."""
        entry = self.shards.finish()
        flags = np.concatenate(self.flags)
        return entry | {
            EXAMPLES: {
                "count": len(self.starts) - 1,
                "trained_tokens": int(flags.sum()),
                "trained_bytes": self.trained_bytes,
                "starts": self.save("starts", np.array(self.starts, dtype=OFFSET)),
                "trained": self.save("trained", flags),
            }
        }

    def save(self, name: str, numbers: np.ndarray) -> dict[str, str]:
        path = self.out / f"{self.split}-{name}.bin"
        numbers.tofile(path)
        fsync(path)
        return {"file": path.name, "sha256": sha256(path)}


def prepare_examples(
    sources: list[Source],
    out: Path,
    *,
    settings: dict[str, Any],
    tokenizer_name: str,
    end_of_text: str | None,
    validation: float | None,
    seed: int,
    documents: int | None,
    shard_tokens: int,
    on_progress: Callable[[int, int, int], None],
) -> dict[str, Any]:
    """Write examples to a folder that holds nothing else; return the index. `on_progress` is called
    with the bytes read, the bytes of text and the tokens written."""
    if tokenizer_name == BPE:
        raise DataError(
            f"--tokenizer {BPE} is trained on text, not on examples; use the model's tokenizer"
        )
    tokenizer = load_tokenizer(tokenizer_name, end_of_text)
    template = chat_template(tokenizer)
    rows = list(islice(split_hashes(sources, template, seed), documents))
    splits = choose_splits(rows, validation)
    tokenizer.save(out / TOKENIZER)
    if any(row.is_chat for row in rows) and template.template != own_template(tokenizer):
        write_atomic(out / TOKENIZER / TEMPLATE_FILE, template.template)
    encode = ExampleEncoder(tokenizer, template)
    writers: dict[str, ExampleWriter] = {}
    tokens, read, text = 0, 0, 0
    for number, (row, split) in enumerate(zip(example_rows(sources), splits, strict=False)):
        if split not in writers:
            writers[split] = ExampleWriter(out, split, encode.dtype, shard_tokens)
        found = encode(to_example(row, template))
        writers[split].write(found)
        tokens, read, text = tokens + len(found.ids), read + len(row.line), text + found.all_bytes
        if number % BATCH == 0:
            on_progress(read, text, tokens)
    index = {
        "format": FORMAT,
        "tokenizer": {
            "name": settings["tokenizer"],
            "sha256": sha256(out / TOKENIZER / "tokenizer.json"),
            "vocab_size": tokenizer.vocab_size,
            "end_of_text": tokenizer.end_of_text_id,
        },
        "vocab_size": tokenizer.vocab_size,
        "dtype": encode.dtype.name,
        "splits": {split: writers[split].finish() for split in SPLITS if split in writers},
        "settings": settings,
    }
    fsync(out)
    write_json(out / INDEX, index)
    (out / UNFINISHED).unlink(missing_ok=True)
    return index


class HashedRow(NamedTuple):
    split: str | None
    hash: int
    is_chat: bool


def split_hashes(sources: list[Source], template: ChatTemplate, seed: int) -> Iterator[HashedRow]:
    """Check every row; yield its own split, if its file names one, and its hash."""
    hashes = HashSplit(seed, 0)
    for row in example_rows(sources):
        to_example(row, template)
        yield HashedRow(row.split, hashes.hash(row.line), MESSAGES in row.row)


def choose_splits(rows: list[HashedRow], validation: float | None) -> list[str]:
    """Return the split of every row: that of its file or, unless a file is for validation, by hash.
    At least one row is held out if there are two."""
    if not rows:
        raise DataError("there is no example; a file of examples has one JSON object per line")
    fraction = DEFAULT_FRACTION if validation is None else validation
    named = any(row.split == "validation" for row in rows)
    free = sorted(row.hash for row in rows if row.split in (None, "train"))
    threshold = int(fraction * 2**64)
    if named or not fraction or len(free) < 2:
        threshold = 0
    elif free[0] >= threshold:
        threshold = free[0] + 1
    elif free[-1] < threshold:
        threshold = free[-1]
    return [
        "validation"
        if row.split in (None, "train") and row.hash < threshold
        else (row.split or "train")
        for row in rows
    ]


def own_template(tokenizer: CorpusTokenizer) -> str | None:
    template = None if tokenizer.pretrained is None else tokenizer.pretrained.chat_template
    return template if isinstance(template, str) else None


def chat_template(tokenizer: CorpusTokenizer) -> ChatTemplate:
    special: dict[str, Any] = {"eos_token": tokenizer.end_of_text}
    if tokenizer.pretrained is not None:
        special = {**tokenizer.pretrained.special_tokens_map, **special}
    return ChatTemplate(own_template(tokenizer), special)
