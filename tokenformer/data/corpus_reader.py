"""A corpus read in chunks for the encoder, with every block of text assigned to a split."""

from collections.abc import Callable, Iterator

from tokenformer.data.documents import Position, TextBlock, read_blocks
from tokenformer.data.journal import Journal
from tokenformer.data.sources import Source
from tokenformer.data.splits import DEFAULT_FRACTION, Boundaries, HashSplit, text_boundaries
from tokenformer.data.tokenization import Chunk

CHUNK_BYTES = 1 << 20  # bytes of text that a worker encodes at once


class CorpusReader:
    """Reads from any position. Its splits are those of the journal, once that has them."""

    def __init__(
        self,
        sources: list[Source],
        journal: Journal,
        *,
        text_field: str,
        validation: float | None,
        seed: int,
        max_documents: int | None,
        check_interrupt: Callable[[], None],
    ) -> None:
        self.sources = sources
        self.journal = journal
        self.text_field = text_field
        self.max_documents = max_documents
        self.check_interrupt = check_interrupt
        fraction = DEFAULT_FRACTION if validation is None else validation
        self.hash_split = HashSplit.from_fraction(fraction, seed)
        self.has_validation = any(source.split == "validation" for source in sources)
        self.boundaries = self.find_boundaries(validation)

    def find_boundaries(self, validation: float | None) -> dict[int, Boundaries]:
        """Return the splits of a single training text, which is split by position, not by
        document."""
        training = [n for n, s in enumerate(self.sources) if s.split in (None, "train")]
        if len(training) != 1 or self.sources[training[0]].kind != "text" or self.has_validation:
            return {}
        if "parts" not in self.journal:
            if self.journal["position"] is not None:  # an older version split by document
                return {}
            self.journal["parts"] = text_boundaries(
                self.sources[training[0]], validation, standard=len(self.sources) == 1
            )
        return {training[0]: tuple((split, end) for split, end in self.journal["parts"])}

    def chunks(self, after: Position | None, split: str) -> Iterator[Chunk]:
        """Yield the corpus after a position in chunks; `split` is that of the block before it."""
        offsets, total = [], 0
        for source in self.sources:
            offsets.append(total)
            total += source.size
        chunk = Chunk()
        for block in self.blocks(after):
            if block.starts:
                split = block.split or self.split_of(block)
            chunk.add(block.text, block.ends, split)
            chunk.position = block.position
            chunk.bytes_read = offsets[block.position.source] + block.bytes_read
            if chunk.size >= CHUNK_BYTES:
                self.check_interrupt()
                yield chunk
                chunk = Chunk()
        if chunk.texts:
            yield chunk

    def blocks(self, after: Position | None) -> Iterator[TextBlock]:
        """Yield the corpus after a position, up to `max_documents` in all."""
        left = self.max_documents
        if left is not None and after is not None:
            left -= sum(state["documents"] for state in self.journal["splits"].values())
        for block in read_blocks(self.sources, self.text_field, self.boundaries, after):
            if left is not None and left <= 0:
                return
            yield block
            if left is not None:
                left -= block.ends

    def split_of(self, block: TextBlock) -> str:
        split = self.sources[block.position.source].split or "train"
        if split != "train" or self.has_validation:
            return split
        return "validation" if self.hash_split.is_held_out(block.text) else "train"

    @property
    def splits_by_hash(self) -> bool:
        return not self.has_validation and not self.boundaries and self.hash_split.threshold > 0

    def one_document_threshold(self) -> int:
        """Return the threshold that holds out only the document with the smallest hash, or 0 if
        there is a single document."""
        hashes = {
            self.hash_split.hash(block.text)
            for block in self.blocks(None)
            if block.starts and self.sources[block.position.source].split in (None, "train")
        }
        return min(hashes) + 1 if len(hashes) > 1 else 0
