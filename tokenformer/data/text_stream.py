"""Streaming detokenization that never returns part of a character.

    stream = TextStream(tokenizer)
    for token in ids:
        sys.stdout.write(stream.add(token))
    sys.stdout.write(stream.end())

A byte-level token may end inside a UTF-8 character; its text is held back until the character is
complete. The returned strings join to what the tokenizer decodes from all ids at once, up to the
first stop sequence. Text that may be the beginning of a stop sequence is held back too.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextStream:
    """Works with any tokenizer of transformers. A fast one decodes each id once; a Python one (such
    as ByT5's) decodes all ids again for each new one."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        from tokenizers.decoders import DecodeStream

        if "" in stop:
            raise ValueError("stop='' is not valid; a stop sequence has at least one character")
        fast = getattr(tokenizer, "backend_tokenizer", None)
        self.tokenizer: Any = tokenizer if fast is None else fast
        self.skip_special_tokens = skip_special_tokens
        self.stream = (
            None if fast is None else DecodeStream(skip_special_tokens=skip_special_tokens)
        )
        self.ids: list[int] = []
        self.decoded = 0
        self.stop = tuple(stop)
        self.stopped = False
        self.held_back = ""

    def add(self, token: int) -> str:
        """Add a token and return the new text; empty while a character is incomplete."""
        self.ids.append(token)
        if self.stream is not None:
            text = self.stream.step(self.tokenizer, token) or ""
        else:
            text = self._decode()[self.decoded :]
            text = "" if text.endswith("\N{REPLACEMENT CHARACTER}") else text
        self.decoded += len(text)
        return self._until_stop(text)

    def end(self) -> str:
        """Return the remaining text, with U+FFFD for an incomplete character."""
        text = self._until_stop(self._decode()[self.decoded :]) + self.held_back
        self.held_back = ""
        return text

    def _decode(self) -> str:
        return str(self.tokenizer.decode(self.ids, skip_special_tokens=self.skip_special_tokens))

    def _until_stop(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self.held_back + text
        found = [place for stop in self.stop if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self.held_back = True, ""
            return text[: min(found)]
        partial_stops = (
            n
            for stop in self.stop
            for n in range(1, min(len(stop), len(text) + 1))
            if text.endswith(stop[:n])
        )
        size = len(text) - max(partial_stops, default=0)
        self.held_back = text[size:]
        return text[:size]
