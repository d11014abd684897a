"""Preparing a corpus: read it, split it, encode it and write token shards; resumable.

    prepare(PrepareOptions(corpus="enwik8.zip"), Path("data/enwik8"))

While `prepare` runs, the folder holds a resume journal, `unfinished.json`. `index.json` is written
last and makes the folder a corpus (`corpus.Corpus`). The result depends only on the corpus and the
settings, not on the number of processes or on interruptions.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenformer.data.compression import read_errors
from tokenformer.data.corpus import FORMAT, INDEX, TOKENIZER, UNFINISHED, dtype_for, read_index
from tokenformer.data.corpus_reader import CorpusReader
from tokenformer.data.documents import Position
from tokenformer.data.example_preparation import prepare_examples
from tokenformer.data.example_rows import holds_examples
from tokenformer.data.interrupts import reraise_lost_interrupts
from tokenformer.data.journal import (
    Journal,
    check_unmodified,
    modified_sources,
    open_journal,
    remove_if_empty,
)
from tokenformer.data.shards import ShardWriter, write_json
from tokenformer.data.sources import SPLITS, Source, find_sources, is_binary
from tokenformer.data.text_encoding import DEFAULT_READ_OPTIONS, RAW, NotTextError, ReadOptions
from tokenformer.data.tokenization import ByteEncoder, Encoder, TokenizerEncoder, encode_chunks
from tokenformer.data.tokenizer import BPE, BYTES, check_tokenizer, load_tokenizer, train_bpe
from tokenformer.errors import DataError
from tokenformer.files import fsync, lock_folder, sha256
from tokenformer.paths import exists, expand_user

SYNC_SECONDS = 1.0  # of work that a kill may lose
BPE_SAMPLE = 1 << 30  # bytes of text to train a BPE on; its memory grows with them


@dataclass(frozen=True)
class PrepareOptions:
    corpus: str
    """A file, a folder or the name of a dataset."""
    tokenizer: str = BYTES
    """bytes, bpe, a tokenizer.json, a tokenizer folder or a hub name."""
    vocab_size: int | None = None
    """Size of the BPE to train."""
    end_of_text: str | None = None
    """The token that ends a document, if the tokenizer does not name one."""
    text_field: str = "text"
    """The field with the text in jsonl, parquet or a dataset."""
    subset: str | None = None
    """The subset (configuration) of a dataset."""
    validation: float | None = None
    """Fraction of documents to hold out. By default the standard split of the corpus, or 0.05."""
    seed: int = 0
    """Seed of the split by document."""
    documents: int | None = None
    """Largest number of documents to read."""
    shard_tokens: int = 1 << 28
    read_options: ReadOptions = DEFAULT_READ_OPTIONS

    def check(self) -> None:
        if self.validation is not None and not 0 <= self.validation < 1:
            raise DataError(f"--validation {self.validation} must be at least 0 and below 1")
        if not 0 <= self.seed < 2**63:
            raise DataError(f"--seed {self.seed} must be from 0 to {2**63 - 1}")
        if self.documents is not None and self.documents < 1:
            raise DataError(f"--documents {self.documents} must be at least 1")
        if self.shard_tokens < 1:
            raise DataError(f"--shard_tokens {self.shard_tokens} must be at least 1")
        self.read_options.check()
        if self.read_options.encoding == RAW and self.tokenizer != BYTES:
            raise DataError(f"--encoding {RAW} needs --tokenizer {BYTES}, not {self.tokenizer}")
        check_tokenizer(self.tokenizer, self.vocab_size)

    def settings(self, sources: list[Source]) -> dict[str, Any]:
        """Return everything that the result depends on. A run resumes only with the same
        settings."""
        settings: dict[str, Any] = {"tokenizer": self.tokenizer}
        path = expand_user(self.tokenizer)
        if self.tokenizer == BPE:
            settings["vocab_size"] = self.vocab_size
        elif self.tokenizer != BYTES and exists(path):
            file = path / "tokenizer.json" if path.is_dir() else path
            settings["tokenizer"] = path.resolve().name
            with read_errors(str(file)):
                settings["tokenizer_sha256"] = sha256(file) if file.exists() else None
        errors = self.read_options.errors
        return settings | {
            "end_of_text": self.end_of_text,
            "text_field": self.text_field,
            "validation": self.validation,
            "seed": self.seed,
            "documents": self.documents,
            "encoding": self.read_options.encoding,
            "encoding_errors": None if errors == "strict" else errors,
            "shard_tokens": self.shard_tokens,
            "sources": [source.identity() for source in sources],
        }


@dataclass(frozen=True)
class PrepareProgress:
    bytes_read: int
    """Bytes of the corpus's files read so far."""
    total_bytes: int
    """Bytes of all files; 0 if unknown."""
    text_bytes: int
    """Bytes of text encoded by this run."""
    tokens: int
    """Tokens written by this run."""


def prepare(
    options: PrepareOptions,
    out: Path,
    *,
    workers: int = 1,
    on_progress: Callable[[PrepareProgress], None] = lambda progress: None,
    on_message: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Prepare a corpus in `out`, or resume an interrupted preparation. Return the index."""
    options.check()
    if workers < 1:
        raise DataError(f"--workers {workers} must be at least 1")
    check_outside(options.corpus, out)
    sources = find_text_sources(options, on_message)
    settings = options.settings(sources)
    stamps = [source.stamp() for source in sources]
    with output_folder(out), reraise_lost_interrupts() as check_interrupt:
        journal = open_journal(out, settings, sources, stamps)
        if journal is None:
            on_message(f"{out} is already prepared")
            index = read_index(out)
            for source in modified_sources(index.get("stamps"), sources):
                on_message(
                    f"{source.name} was modified after {out} was prepared; remove {out} to "
                    "prepare it again"
                )
            return index
        if holds_examples(sources, options.text_field):
            return run_examples(options, out, sources, journal, on_progress)
        if journal["position"]:
            on_message(f"resuming {out}")
        try:
            preparation = Preparation(options, out, sources, journal, on_message, check_interrupt)
            return preparation.run(workers, on_progress)
        except NotTextError as error:
            if remove_if_empty(out):
                raise
            kept = f"{out} holds the tokens up to there; remove it first if you change --encoding"
            raise NotTextError(f"{error} ({kept})") from None
        except DataError:
            remove_if_empty(out)
            raise


def run_examples(
    options: PrepareOptions,
    out: Path,
    sources: list[Source],
    journal: Journal,
    on_progress: Callable[[PrepareProgress], None],
) -> dict[str, Any]:
    """Prepare prompts with completions, or chats."""
    total = sum(source.size for source in sources)
    try:
        return prepare_examples(
            sources,
            out,
            settings=journal["settings"],
            tokenizer_name=options.tokenizer,
            end_of_text=options.end_of_text,
            validation=options.validation,
            seed=options.seed,
            documents=options.documents,
            shard_tokens=options.shard_tokens,
            on_progress=lambda read, text, tokens: on_progress(
                PrepareProgress(read, total, text, tokens)
            ),
        )
    except DataError:
        remove_if_empty(out)
        raise


def check_outside(corpus: str, out: Path) -> None:
    """Raise DataError if the output folder is inside the corpus."""
    folder = expand_user(corpus)
    if exists(folder) and folder.is_dir() and out.resolve().is_relative_to(folder.resolve()):
        raise DataError(f"--out {out} is inside the corpus {corpus}; use a folder outside of it")


def find_text_sources(options: PrepareOptions, on_message: Callable[[str], None]) -> list[Source]:
    """Return the sources of the corpus without binary files."""
    found = find_sources(options.corpus, options.subset, options.read_options)
    sources = [source for source in found if len(found) == 1 or not is_binary(source)]
    if skipped := [source.name for source in found if source not in sources]:
        more = ", ..." if len(skipped) > 5 else ""
        on_message(f"skipped binary files ({len(skipped)}): {', '.join(skipped[:5])}{more}")
    if not sources:
        raise DataError(f"{options.corpus} holds no text, jsonl or parquet file")
    if options.validation is not None and any(s.split == "validation" for s in sources):
        raise DataError(
            f"--validation {options.validation} cannot be used: {options.corpus} has a validation "
            "split of its own"
        )
    return sources


@contextmanager
def output_folder(out: Path) -> Iterator[None]:
    """Create and lock the output folder; raise errors of writing to it as DataError."""
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_folder(out))
        except BlockingIOError:
            raise DataError(f"--out {out} is in use by another process") from None
        except OSError as error:
            raise DataError(f"--out {out} cannot be created: {error.strerror}") from None
        try:
            yield
        except OSError as error:  # a full disk, for example; errors of reading are DataErrors
            raise DataError(
                f"--out {out} cannot be written: {error.strerror or error}; run the same command "
                "again to resume"
            ) from None


class Preparation:
    """One run of `prepare`, from the position in the journal to the index."""

    def __init__(
        self,
        options: PrepareOptions,
        out: Path,
        sources: list[Source],
        journal: Journal,
        on_message: Callable[[str], None],
        check_interrupt: Callable[[], None],
    ) -> None:
        self.options = options
        self.out = out
        self.sources = sources
        self.journal = journal
        self.on_message = on_message
        self.check_interrupt = check_interrupt
        self.reader = CorpusReader(
            sources,
            journal,
            text_field=options.text_field,
            validation=options.validation,
            seed=options.seed,
            max_documents=options.documents,
            check_interrupt=check_interrupt,
        )
        self.writers: dict[str, ShardWriter] = {}

    def run(self, workers: int, on_progress: Callable[[PrepareProgress], None]) -> dict[str, Any]:
        try:
            while True:
                if self.journal["threshold"] is not None:
                    self.reader.hash_split.threshold = self.journal["threshold"]
                encoder = self.make_encoder()
                for split, state in self.journal["splits"].items():
                    self.writers[split] = self.make_writer(split, encoder, state)
                self.write_all(encoder, workers, on_progress)
                check_unmodified(self.out, self.journal, self.sources)
                if not self.needs_new_split():
                    return self.finish()
                self.restart_with_one_document_held_out()
        finally:
            self.close()

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()
        self.writers = {}

    def make_encoder(self) -> Encoder:
        if "tokenizer" not in self.journal:
            self.journal["tokenizer"] = self.make_tokenizer(self.out / TOKENIZER)
            write_json(self.out / UNFINISHED, self.journal)
        tokenizer = self.journal["tokenizer"]
        dtype = dtype_for(tokenizer["vocab_size"])
        if self.options.tokenizer == BYTES:
            return ByteEncoder(dtype)
        file = self.out / TOKENIZER / "tokenizer.json"
        return TokenizerEncoder(file, tokenizer["end_of_text"], dtype)

    def make_tokenizer(self, folder: Path) -> dict[str, Any]:
        """Train or load the tokenizer, save it and return its entry in the index."""
        options = self.options
        if options.tokenizer == BPE and options.vocab_size is not None:
            self.on_message(f"training a BPE of {options.vocab_size} tokens")
            tokenizer = train_bpe(self.training_texts(), options.vocab_size)
        else:
            tokenizer = load_tokenizer(options.tokenizer, options.end_of_text)
        tokenizer.save(folder)
        return {
            "name": self.journal["settings"]["tokenizer"],
            "sha256": sha256(folder / "tokenizer.json"),
            "vocab_size": tokenizer.vocab_size,
            "end_of_text": tokenizer.end_of_text_id,
        }

    def training_texts(self) -> Iterator[str]:
        size = 0
        for chunk in self.reader.chunks(None, "train"):
            for split, text in zip(chunk.splits, chunk.texts, strict=True):
                if split == "train":
                    yield text.decode("utf-8", errors="replace")
                    size += len(text)
            if size >= BPE_SAMPLE:
                return

    def make_writer(self, split: str, encoder: Encoder, state: dict[str, Any]) -> ShardWriter:
        return ShardWriter(self.out, split, encoder.dtype, self.options.shard_tokens, state)

    def write_all(
        self, encoder: Encoder, workers: int, on_progress: Callable[[PrepareProgress], None]
    ) -> None:
        after = Position(*self.journal["position"]) if self.journal["position"] else None
        total = sum(source.size for source in self.sources)
        text_bytes, tokens = 0, 0
        synced = time.monotonic()
        chunks = self.reader.chunks(after, self.journal["split"])
        for chunk, ids_by_split in encode_chunks(chunks, encoder, workers):
            for split, ids in ids_by_split.items():
                if split not in self.writers:
                    self.writers[split] = self.make_writer(split, encoder, {})
                self.writers[split].write(ids)
                tokens += len(ids)
            for split, text, ends in zip(chunk.splits, chunk.texts, chunk.ends, strict=True):
                self.writers[split].bytes += len(text)
                self.writers[split].documents += ends
            text_bytes += chunk.size
            self.journal |= {"position": chunk.position, "split": chunk.splits[-1]}
            if time.monotonic() - synced > SYNC_SECONDS:
                self.sync()
                synced = time.monotonic()
            on_progress(PrepareProgress(chunk.bytes_read, total, text_bytes, tokens))

    def sync(self) -> None:
        """Write the shards to disk, and only then the journal that refers to them."""
        for writer in self.writers.values():
            writer.sync()
        self.journal["splits"] = {split: w.state() for split, w in self.writers.items()}
        write_json(self.out / UNFINISHED, self.journal)

    def needs_new_split(self) -> bool:
        """Whether the hashes of a few documents left one of the two splits empty."""
        if self.journal["threshold"] is not None or not self.reader.splits_by_hash:
            return False
        return not {"train", "validation"} <= self.writers.keys()

    def restart_with_one_document_held_out(self) -> None:
        """Start over, holding out one document, or none if there is only one."""
        threshold = self.reader.one_document_threshold()
        self.close()
        self.journal |= {"position": None, "split": "train", "splits": {}, "threshold": threshold}
        if self.options.tokenizer == BPE:  # it was trained on what is now held out
            del self.journal["tokenizer"]
        write_json(self.out / UNFINISHED, self.journal)

    def finish(self) -> dict[str, Any]:
        """Finish the shards, write the index and remove the journal."""
        if not self.writers:
            raise DataError(f"{self.options.corpus} holds no text")
        dtype = next(iter(self.writers.values())).dtype
        splits = {s: self.writers[s].finish() for s in SPLITS if s in self.writers}
        index = {
            "format": FORMAT,
            "tokenizer": self.journal["tokenizer"],
            "vocab_size": self.journal["tokenizer"]["vocab_size"],
            "dtype": dtype.name,
            "splits": splits,
            "settings": self.journal["settings"],
        }
        if "stamps" in self.journal:
            index["stamps"] = self.journal["stamps"]
        listed = {shard["file"] for entry in splits.values() for shard in entry["shards"]}
        for path in self.out.glob("*.bin"):
            if path.name not in listed:  # left from before a restart
                path.unlink()
        fsync(self.out)
        self.check_interrupt()
        write_json(self.out / INDEX, index)
        (self.out / UNFINISHED).unlink(missing_ok=True)
        return index
