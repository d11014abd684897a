"""The tokenizer that belongs to a model, wherever it can be had."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenformer.convert.hub import fetch_tokenizer
from tokenformer.data.tokenizer import END_OF_TEXT_SYMBOLS, tokenizer_of_file, tokenizer_of_folder
from tokenformer.errors import ConversionError, DataError

TOKENIZER = "tokenizer.json"
NEOX = "EleutherAI/gpt-neox-20b"
NEOX_VOCABULARY = 50304
"""That of the released models: the tokenizer's 50277 ids, padded."""


@dataclass(frozen=True)
class FoundTokenizer:
    tokenizer: Any
    origin: str

    @property
    def ends(self) -> dict[str, Any]:
        """Where texts begin and end, as options of a configuration, if it says."""
        if self.tokenizer.eos_token_id is None:
            return {}
        return {
            "bos_token_id": self.tokenizer.bos_token_id,
            "eos_token_id": self.tokenizer.eos_token_id,
        }


def find_tokenizer(given: str | None, folder: Path, vocab_size: int) -> FoundTokenizer | None:
    """The one that is given (a tokenizer.json, a folder or a hub name), or that of the folder, or,
    for the vocabulary of the released models, GPT-NeoX's from the hub; None if none can be had."""
    if given is not None:
        return checked(FoundTokenizer(load(given), given), vocab_size)
    if (folder / TOKENIZER).exists():
        return checked(FoundTokenizer(load(str(folder)), str(folder / TOKENIZER)), vocab_size)
    if vocab_size != NEOX_VOCABULARY:
        return None
    try:
        return FoundTokenizer(load(str(fetch_tokenizer(NEOX))), f"the hub, {NEOX}")
    except ConversionError:
        return None


def load(name: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    try:
        if Path(name).is_file():
            backend = tokenizer_of_file(Path(name))
            tokenizer = PreTrainedTokenizerFast(
                tokenizer_object=backend, clean_up_tokenization_spaces=False
            )
        else:
            folder = name if Path(name).is_dir() else str(fetch_tokenizer(name))
            tokenizer = tokenizer_of_folder(folder)
    except DataError as error:
        raise ConversionError(str(error)) from None
    if tokenizer.eos_token is None:  # a bare tokenizer.json does not say
        known = tokenizer.get_vocab()
        end = next((symbol for symbol in END_OF_TEXT_SYMBOLS if symbol in known), None)
        tokenizer.eos_token, tokenizer.bos_token = end, tokenizer.bos_token or end
    return tokenizer


def checked(found: FoundTokenizer, vocab_size: int) -> FoundTokenizer:
    if len(found.tokenizer) > vocab_size:
        raise ConversionError(
            f"the tokenizer of {found.origin} has {len(found.tokenizer)} ids, the model a "
            f"vocabulary of {vocab_size}; name another by --tokenizer"
        )
    return found
