"""Token ids as text that a person can read.

vocabulary = Vocabulary(tokenizer)
vocabulary.pieces([72, 226, 130, 172])      # ["H", "", "", "€"]: joined, they are the text
vocabulary.label(226)                       # "\\xe2": one id on its own
"""

from typing import TYPE_CHECKING, Any

from tokenformer.data.byte_tokenizer import byte_symbols

if TYPE_CHECKING:
    from collections.abc import Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8."""
BYTES = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
"""The byte of each symbol of byte-level tokenizers."""
SENTENCEPIECE_SPACE = "\u2581"


class Vocabulary:
    """Turns ids into text, by a tokenizer of transformers; without one, as numbers."""

    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer
        self.labels: dict[int, str] = {}
        self.texts: dict[int, str] = {}

    def decode(self, ids: "Sequence[int]") -> str:
        if self.tokenizer is None:
            return " ".join(map(str, ids))
        text: str = self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        first = self.tokenizer.convert_ids_to_tokens(ids[0]) if len(ids) else ""
        return f" {text}" if str(first).startswith(SENTENCEPIECE_SPACE) else text

    def pieces(self, ids: "Sequence[int]") -> list[str]:
        """Return the text of each id; joined they are the text of all. Where several ids make one
        character, the last has it and the others are empty."""
        if self.tokenizer is None:
            return [f"{each} " for each in ids]
        pieces, waiting = list[str](), list[int]()
        for each in ids:
            waiting.append(int(each))
            text = self.single(waiting[0]) if len(waiting) == 1 else self.decode(waiting)
            incomplete = text.endswith(REPLACEMENT) and len(waiting) < LONGEST_CHARACTER
            pieces.append("" if incomplete else text)
            waiting = waiting if incomplete else []
        if waiting:
            pieces[-1] = REPLACEMENT
        return pieces

    def single(self, index: int) -> str:
        if index not in self.texts:
            self.texts[index] = self.decode([index])
        return self.texts[index]

    def label(self, index: int) -> str:
        """Return one id as text, with escapes for bytes that are no character and for white space
        other than the space."""
        if index not in self.labels:
            self.labels[index] = self._label(index)
        return self.labels[index]

    def _label(self, index: int) -> str:
        if self.tokenizer is None:
            return str(index)
        text = self.decode([index])
        if REPLACEMENT in text or not text:
            symbols = str(self.tokenizer.convert_ids_to_tokens(index) or index)
            if all(symbol in BYTES for symbol in symbols):
                return "".join(f"\\x{BYTES[symbol]:02x}" for symbol in symbols)
            return symbols
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
