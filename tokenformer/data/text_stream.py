"""Token ids to text as they come, never half a character.

    stream = TextStream(tokenizer)
    for token in ids:
        sys.stdout.write(stream.add(token))
    sys.stdout.write(stream.end())

A byte-level token may end inside a UTF-8 character; its text waits until the character is whole.
The pieces joined are what the tokenizer decodes of all ids at once.
"""

from typing import Any


class TextStream:
    """For any `PreTrainedTokenizerFast`, the byte tokenizer among them."""

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        from tokenizers.decoders import DecodeStream

        self.tokenizer = tokenizer.backend_tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self.ids: list[int] = []
        self.written = 0

    def add(self, token: int) -> str:
        """The text that is certain now; empty while a character is incomplete."""
        self.ids.append(token)
        text = self.stream.step(self.tokenizer, token) or ""
        self.written += len(text)
        return str(text)

    def end(self) -> str:
        """What is left when no more ids come: the replacement character for a broken one."""
        whole = self.tokenizer.decode(self.ids, skip_special_tokens=self.skip_special_tokens)
        return str(whole[self.written :])
