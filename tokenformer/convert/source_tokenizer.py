"""Finding the tokenizer of a source model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenformer.convert.hub import fetch_tokenizer
from tokenformer.data.tokenizer import (
    END_OF_TEXT_SYMBOLS,
    tokenizer_from_file,
    tokenizer_from_pretrained,
)
from tokenformer.errors import ConversionError, DataError

TOKENIZER = "tokenizer.json"
NEOX = "EleutherAI/gpt-neox-20b"
NEOX_VOCABULARY = 50304
"""Vocabulary size of the released models: the tokenizer's 50277 ids, padded."""


@dataclass(frozen=True)
class SourceTokenizer:
    tokenizer: Any
    location: str
    """Where it was found."""

    @property
    def special_ids(self) -> dict[str, Any]:
        """The ids that begin and end a text, as options of a configuration, if defined."""
        if self.tokenizer.eos_token_id is None:
            return {}
        return {
            "bos_token_id": self.tokenizer.bos_token_id,
            "eos_token_id": self.tokenizer.eos_token_id,
        }


def find_tokenizer(given: str | None, folder: Path, vocab_size: int) -> SourceTokenizer | None:
    """Return the given tokenizer (a tokenizer.json, a folder or a hub name), or that of the folder,
    or, for the vocabulary of the released models, GPT-NeoX's from the hub; else None."""
    if given is not None:
        return check_vocabulary(SourceTokenizer(load(given), given), vocab_size)
    if (folder / TOKENIZER).exists():
        return check_vocabulary(
            SourceTokenizer(load(str(folder)), str(folder / TOKENIZER)), vocab_size
        )
    if vocab_size != NEOX_VOCABULARY:
        return None
    try:
        return SourceTokenizer(load(str(fetch_tokenizer(NEOX))), f"the hub, {NEOX}")
    except ConversionError:
        return None


def load(name: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    try:
        if Path(name).is_file():
            backend = tokenizer_from_file(Path(name))
            tokenizer = PreTrainedTokenizerFast(
                tokenizer_object=backend, clean_up_tokenization_spaces=False
            )
        else:
            folder = name if Path(name).is_dir() else str(fetch_tokenizer(name))
            tokenizer = tokenizer_from_pretrained(folder)
    except DataError as error:
        raise ConversionError(str(error)) from None
    if tokenizer.eos_token is None:  # a tokenizer.json alone does not define it
        known = tokenizer.get_vocab()
        end = next((symbol for symbol in END_OF_TEXT_SYMBOLS if symbol in known), None)
        tokenizer.eos_token, tokenizer.bos_token = end, tokenizer.bos_token or end
    return tokenizer


def check_vocabulary(found: SourceTokenizer, vocab_size: int) -> SourceTokenizer:
    if len(found.tokenizer) > vocab_size:
        raise ConversionError(
            f"the tokenizer of {found.location} has {len(found.tokenizer)} ids, the model a "
            f"vocabulary of {vocab_size}; give another with --tokenizer"
        )
    return found
