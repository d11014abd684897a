"""Token ids to text as they come, never half a character.

    stream = TextStream(tokenizer)
    for token in ids:
        sys.stdout.write(stream.add(token))
    sys.stdout.write(stream.end())

A byte-level token may end inside a UTF-8 character; its text waits until the character is whole.
The pieces joined are what the tokenizer decodes of all ids at once, up to the first of the stop
sequences, if any are given: what may be the beginning of one waits too.
"""

from collections.abc import Sequence
from typing import Any


class TextStream:
    """For any tokenizer of transformers. A fast one decodes each id once; one in Python (ByT5's for
    example) decodes all ids again for each."""

    def __init__(
        self, tokenizer: Any, *, stop: Sequence[str] = (), skip_special_tokens: bool = True
    ) -> None:
        from tokenizers.decoders import DecodeStream

        if "" in stop:
            raise ValueError("stop='' must be a text of at least one character")
        fast = getattr(tokenizer, "backend_tokenizer", None)
        self.tokenizer = tokenizer if fast is None else fast
        self.skip_special_tokens = skip_special_tokens
        self.stream = (
            None if fast is None else DecodeStream(skip_special_tokens=skip_special_tokens)
        )
        self.ids: list[int] = []
        self.decoded = 0
        self.stop = tuple(stop)
        self.stopped = False
        self.waiting = ""

    def add(self, token: int) -> str:
        """The text that is certain now; empty while a character is incomplete."""
        self.ids.append(token)
        if self.stream is not None:
            text = self.stream.step(self.tokenizer, token) or ""
        else:
            text = self._decode()[self.decoded :]
            text = "" if text.endswith("\N{REPLACEMENT CHARACTER}") else text
        self.decoded += len(text)
        return self._until_stop(text)

    def end(self) -> str:
        """What is left when no more ids come: the replacement character for a broken one."""
        text = self._until_stop(self._decode()[self.decoded :]) + self.waiting
        self.waiting = ""
        return text

    def _decode(self) -> str:
        return str(self.tokenizer.decode(self.ids, skip_special_tokens=self.skip_special_tokens))

    def _until_stop(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self.waiting + text
        found = [place for stop in self.stop if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self.waiting = True, ""
            return text[: min(found)]
        begun = (
            n
            for stop in self.stop
            for n in range(1, min(len(stop), len(text) + 1))
            if text.endswith(stop[:n])
        )
        certain = len(text) - max(begun, default=0)
        self.waiting = text[certain:]
        return text[:certain]
