"""From a corpus to a folder of token shards: read, divide, encode, write, and go on after a kill.

    prepare(Request(corpus="enwik8.zip"), Path("data/enwik8"))

The folder holds `unfinished.json` while the work lasts: the settings and how far the shards on
disk reach. `index.json` comes last, and only then is there a corpus (`corpus.Corpus`). The result
depends on the corpus and the settings alone, not on the number of processes or on interruptions.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenformer.data.corpus import FORMAT, INDEX, TOKENIZER, UNFINISHED, read_index
from tokenformer.data.documents import (
    DEFAULT_FRACTION,
    Division,
    Parts,
    Piece,
    Position,
    parts_of,
    read_pieces,
)
from tokenformer.data.encoding import ByteEncoder, Chunk, Encoder, TokenizerEncoder, encoded
from tokenformer.data.interrupts import kept_interrupts
from tokenformer.data.journal import (
    Journal,
    abandon,
    check_unmodified,
    modified_since,
    open_journal,
)
from tokenformer.data.out_folder import check_apart, claimed, writable
from tokenformer.data.packaging import readable
from tokenformer.data.reading import RAW, USUAL, NotTextError, Reading
from tokenformer.data.shards import SplitWriter, write_json
from tokenformer.data.sources import SPLITS, Source, find_sources, is_binary
from tokenformer.data.token_ids import dtype_for
from tokenformer.data.tokenizer import (
    BPE,
    BYTES,
    check_tokenizer,
    load_tokenizer,
    train_bpe,
)
from tokenformer.errors import DataError
from tokenformer.files import fsync, sha256
from tokenformer.paths import exists, expand_user

CHUNK = 1 << 20  # bytes of text handed to a process at once
SYNC_SECONDS = 1.0  # of work that a kill may cost
BPE_SAMPLE = 1 << 30  # bytes of training text that a BPE is trained on; its memory grows with them


@dataclass(frozen=True)
class Request:
    corpus: str
    """A file, a folder or the name of a dataset."""
    tokenizer: str = BYTES
    """bytes, bpe, a tokenizer.json, a tokenizer folder or a hub name."""
    vocab_size: int | None = None
    """Of a bpe."""
    end_of_text: str | None = None
    """The token that ends a document, where the tokenizer does not say."""
    text_field: str = "text"
    """Of a row of jsonl, parquet or a dataset."""
    subset: str | None = None
    """Of a dataset."""
    validation: float | None = None
    """Fraction of the documents to hold out; None: as is standard for the corpus, else 0.05."""
    seed: int = 0
    """Of the division."""
    documents: int | None = None
    """Read no more than so many."""
    shard_tokens: int = 1 << 28
    reading: Reading = USUAL
    """The encoding of text files, and limits on what files may hold."""

    def check(self) -> None:
        if self.validation is not None and not 0 <= self.validation < 1:
            raise DataError(f"--validation {self.validation} must be at least 0 and below 1")
        if not 0 <= self.seed < 2**63:
            raise DataError(f"--seed {self.seed} must be a whole number from 0 to {2**63 - 1}")
        if self.documents is not None and self.documents < 1:
            raise DataError(f"--documents {self.documents} must be at least 1")
        if self.shard_tokens < 1:
            raise DataError(f"--shard_tokens {self.shard_tokens} must be at least 1")
        self.reading.check()
        if self.reading.encoding == RAW and self.tokenizer != BYTES:
            raise DataError(f"--encoding {RAW} needs --tokenizer {BYTES}, not {self.tokenizer}")
        check_tokenizer(self.tokenizer, self.vocab_size)


@dataclass(frozen=True)
class Standing:
    """How far a preparation has come."""

    read: int
    """Bytes of the corpus's files."""
    total: int
    """Of these; 0 if it is not known."""
    bytes: int
    """Of text."""
    tokens: int


def prepare(
    request: Request,
    out: Path,
    *,
    workers: int = 1,
    on_standing: Callable[[Standing], None] = lambda standing: None,
    on_note: Callable[[str], None] = lambda note: None,
) -> dict[str, Any]:
    """Fill `out`, continue filling it, or find it finished. Returns its index."""
    request.check()
    if workers < 1:
        raise DataError(f"--workers {workers} must be at least 1")
    check_apart(request.corpus, out)
    found = find_sources(request.corpus, request.subset, request.reading)
    sources = [source for source in found if len(found) == 1 or not is_binary(source)]
    if left_out := [source.name for source in found if source not in sources]:
        more = ", ..." if len(left_out) > 5 else ""
        on_note(f"left out, since not text: {', '.join(left_out[:5])}{more} ({len(left_out)})")
    if not sources:
        raise DataError(f"{request.corpus} holds no text, jsonl or parquet file")
    if request.validation is not None and any(s.split == "validation" for s in sources):
        raise DataError(
            f"--validation {request.validation} is not needed: {request.corpus} has a validation "
            "split of its own"
        )
    settings = settings_of(request, sources)
    stamps = [source.stamp() for source in sources]
    with claimed(out), writable(out), kept_interrupts() as check_interrupt:
        journal = open_journal(out, settings, sources, stamps)
        if journal is None:
            on_note(f"{out} is prepared already")
            index = read_index(out)
            for source in modified_since(index.get("stamps"), sources):
                on_note(
                    f"{source.name} was modified after {out} was prepared; remove {out} to "
                    "prepare it again"
                )
            return index
        if journal["position"]:
            on_note(f"going on with {out}")
        try:
            preparation = Preparation(request, out, sources, journal, on_note, check_interrupt)
            return preparation.run(workers, on_standing)
        except NotTextError as error:
            if abandon(out):
                raise
            kept = f"{out} holds what was read until there; remove it first if you change"
            raise NotTextError(f"{error} ({kept} --encoding)") from None
        except DataError:
            abandon(out)
            raise


class Preparation:
    """One run of `prepare`: what is being read, divided and written, and its journal."""

    def __init__(
        self,
        request: Request,
        out: Path,
        sources: list[Source],
        journal: Journal,
        on_note: Callable[[str], None],
        check_interrupt: Callable[[], None] = lambda: None,
    ) -> None:
        self.request = request
        self.out = out
        self.sources = sources
        self.journal = journal
        self.on_note = on_note
        self.check_interrupt = check_interrupt
        fraction = DEFAULT_FRACTION if request.validation is None else request.validation
        self.division = Division.of_fraction(fraction, request.seed)
        self.divided = not any(source.split == "validation" for source in sources)
        self.parts = self.find_parts()
        self.writers: dict[str, SplitWriter] = {}

    def find_parts(self) -> dict[int, Parts]:
        """If all there is to train on is one text, it is divided by place, not by document."""
        training = [n for n, s in enumerate(self.sources) if s.split in (None, "train")]
        if len(training) != 1 or self.sources[training[0]].kind != "text" or not self.divided:
            return {}
        if "parts" not in self.journal:
            if self.journal["position"] is not None:  # an older version divided by document
                return {}
            self.journal["parts"] = parts_of(
                self.sources[training[0]],
                self.request.validation,
                standard=len(self.sources) == 1,
            )
        return {training[0]: tuple((split, end) for split, end in self.journal["parts"])}

    def run(self, workers: int, on_standing: Callable[[Standing], None]) -> dict[str, Any]:
        try:
            while True:
                if self.journal["threshold"] is not None:
                    self.division.threshold = self.journal["threshold"]
                encoder = self.make_encoder()
                for split, state in self.journal["splits"].items():
                    self.writers[split] = self.writer(split, encoder, state)
                self.write_all(encoder, workers, on_standing)
                check_unmodified(self.out, self.journal, self.sources)
                if not self.one_side_is_empty():
                    return self.finish()
                self.start_anew()
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
        known = self.journal["tokenizer"]
        dtype = dtype_for(known["vocab_size"])
        if self.request.tokenizer == BYTES:
            return ByteEncoder(dtype)
        return TokenizerEncoder(
            self.out / TOKENIZER / "tokenizer.json", known["end_of_text"], dtype
        )

    def make_tokenizer(self, folder: Path) -> dict[str, Any]:
        """Save the tokenizer; what the index says of it."""
        request = self.request
        if request.tokenizer == BPE and request.vocab_size is not None:
            self.on_note(f"training a BPE of {request.vocab_size} tokens")
            tokenizer = train_bpe(self.training_texts(), request.vocab_size)
        else:
            tokenizer = load_tokenizer(request.tokenizer, request.end_of_text)
        tokenizer.save(folder)
        return {
            "name": self.journal["settings"]["tokenizer"],
            "sha256": sha256(folder / "tokenizer.json"),
            "vocab_size": tokenizer.vocab_size,
            "end_of_text": tokenizer.end_of_text_id,
        }

    def training_texts(self) -> Iterator[str]:
        size = 0
        for chunk in self.chunks(None, "train"):
            for split, text in zip(chunk.splits, chunk.texts, strict=True):
                if split == "train":
                    yield text.decode("utf-8", errors="replace")
                    size += len(text)
            if size >= BPE_SAMPLE:
                return

    def writer(self, split: str, encoder: Encoder, state: dict[str, Any]) -> SplitWriter:
        return SplitWriter(self.out, split, encoder.dtype, self.request.shard_tokens, state)

    def chunks(self, after: Position | None, split: str) -> Iterator[Chunk]:
        """The corpus after a position, in chunks; `split` is that of the piece before."""
        before, total = [], 0
        for source in self.sources:
            before.append(total)
            total += source.size
        chunk = Chunk()
        for piece in self.pieces(after):
            if piece.starts:
                split = piece.split or self.split_of(piece.position.source, piece.text)
            chunk.add(piece.text, piece.ends, split)
            chunk.position = piece.position
            chunk.read = before[piece.position.source] + piece.read
            if chunk.size >= CHUNK:
                self.check_interrupt()
                yield chunk
                chunk = Chunk()
        if chunk.texts:
            yield chunk

    def pieces(self, after: Position | None) -> Iterator[Piece]:
        """The corpus after a position, up to as many documents as are asked for."""
        left = self.request.documents
        if left is not None and after is not None:
            left -= sum(state["documents"] for state in self.journal["splits"].values())
        for piece in read_pieces(self.sources, self.request.text_field, self.parts, after):
            if left is not None and left <= 0:
                return
            yield piece
            if left is not None:
                left -= piece.ends

    def split_of(self, source: int, text: bytes) -> str:
        split = self.sources[source].split or "train"
        if split != "train" or not self.divided:
            return split
        hashed = self.division.hash_of(text)
        return "validation" if hashed < self.division.threshold else "train"

    def write_all(
        self, encoder: Encoder, workers: int, on_standing: Callable[[Standing], None]
    ) -> None:
        after = Position(*self.journal["position"]) if self.journal["position"] else None
        total = sum(source.size for source in self.sources)
        size, tokens = 0, 0
        synced = time.monotonic()
        chunks = self.chunks(after, self.journal["split"])
        for chunk, ids_by_split in encoded(chunks, encoder, workers):
            for split, ids in ids_by_split.items():
                if split not in self.writers:
                    self.writers[split] = self.writer(split, encoder, {})
                self.writers[split].write(ids)
                tokens += len(ids)
            for split, text, ends in zip(chunk.splits, chunk.texts, chunk.ends, strict=True):
                self.writers[split].bytes += len(text)
                self.writers[split].documents += ends
            size += chunk.size
            self.journal |= {"position": chunk.position, "split": chunk.splits[-1]}
            if time.monotonic() - synced > SYNC_SECONDS:
                self.sync()
                synced = time.monotonic()
            on_standing(Standing(chunk.read, total, size, tokens))

    def sync(self) -> None:
        """Shards first, then the journal that vouches for them."""
        for writer in self.writers.values():
            writer.sync()
        self.journal["splits"] = {split: w.state() for split, w in self.writers.items()}
        write_json(self.out / UNFINISHED, self.journal)

    def one_side_is_empty(self) -> bool:
        """Whether chance left nothing to train on, or nothing to hold out of a few documents."""
        if self.journal["threshold"] is not None or self.division.threshold == 0:
            return False
        if not self.divided or self.parts:
            return False
        return not {"train", "validation"} <= self.writers.keys()

    def start_anew(self) -> None:
        """Hold out the one document whose hash is the smallest; of a single document, nothing."""
        hashes = {
            self.division.hash_of(piece.text)
            for piece in self.pieces(None)
            if piece.starts and self.sources[piece.position.source].split in (None, "train")
        }
        self.close()
        self.journal |= {
            "position": None,
            "split": "train",
            "splits": {},
            "threshold": min(hashes) + 1 if len(hashes) > 1 else 0,
        }
        if self.request.tokenizer == BPE:  # it has learnt from what is now held out
            del self.journal["tokenizer"]
        write_json(self.out / UNFINISHED, self.journal)

    def finish(self) -> dict[str, Any]:
        if not self.writers:
            raise DataError(f"{self.request.corpus} holds no text")
        dtype = next(iter(self.writers.values())).dtype
        splits = {s: self.writers[s].entry() for s in SPLITS if s in self.writers}
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
            if path.name not in listed:  # of a first division that held out nothing
                path.unlink()
        fsync(self.out)
        self.check_interrupt()
        write_json(self.out / INDEX, index)
        (self.out / UNFINISHED).unlink(missing_ok=True)
        return index


def settings_of(request: Request, sources: list[Source]) -> dict[str, Any]:
    """All that the result depends on. A later run continues only if it has the same."""
    settings: dict[str, Any] = {"tokenizer": request.tokenizer}
    path = expand_user(request.tokenizer)
    if request.tokenizer == BPE:
        settings["vocab_size"] = request.vocab_size
    elif request.tokenizer != BYTES and exists(path):
        file = path / "tokenizer.json" if path.is_dir() else path
        settings["tokenizer"] = path.resolve().name
        with readable(str(file)):
            settings["tokenizer_sha256"] = sha256(file) if file.exists() else None
    return settings | {
        "end_of_text": request.end_of_text,
        "text_field": request.text_field,
        "validation": request.validation,
        "seed": request.seed,
        "documents": request.documents,
        "encoding": request.reading.encoding,
        "encoding_errors": None if request.reading.errors == "strict" else request.reading.errors,
        "shard_tokens": request.shard_tokens,
        "sources": [source.identity() for source in sources],
    }
