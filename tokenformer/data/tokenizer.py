"""The tokenizer of a corpus: bytes, a file, a folder, a hub name, or a BPE trained on the spot.

Whatever it was, it is saved as a folder that AutoTokenizer loads, and encoding reads that folder's
`tokenizer.json`: what a model is trained on is what its users will get.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenformer.data.byte_tokenizer import END_OF_TEXT_SYMBOL, byte_level
from tokenformer.data.shards import write_json
from tokenformer.data.sources import one_line
from tokenformer.errors import DataError
from tokenformer.files import fsync, write_atomic
from tokenformer.paths import (
    NameNotFoundError,
    check_hub,
    exists,
    expand_user,
    is_local,
    missing_message,
)

BYTES = "bytes"
BPE = "bpe"
# How published tokenizers spell the end of a text, where a bare tokenizer.json does not say.
END_OF_TEXT_SYMBOLS = (END_OF_TEXT_SYMBOL, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>")
SMALLEST_BPE = 257  # every byte and the end of text


@dataclass(frozen=True)
class CorpusTokenizer:
    backend: Any
    """A `tokenizers.Tokenizer`."""
    end_of_text: str
    hub: Any = None
    """The `PreTrainedTokenizerFast` it came in, if it did."""

    @property
    def vocab_size(self) -> int:
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def end_of_text_id(self) -> int:
        return int(self.backend.token_to_id(self.end_of_text))

    def save(self, folder: Path) -> None:
        """For AutoTokenizer, in the place of what an interrupted run may have left."""
        shutil.rmtree(folder, ignore_errors=True)
        if self.hub is not None:
            try:
                self.hub.save_pretrained(folder)
            except Exception as error:  # the library raises bare Exception where a disk is full
                raise OSError(f"{folder}: {one_line(error)}") from None
        else:
            folder.mkdir()
            write_atomic(folder / "tokenizer.json", self.backend.to_str(pretty=True))
            # Written here, since importing transformers takes longer than a small corpus.
            config = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": self.end_of_text,
                "eos_token": self.end_of_text,
                "pad_token": self.end_of_text,
                "padding_side": "left",
                "clean_up_tokenization_spaces": False,
            }
            write_json(folder / "tokenizer_config.json", config)
        for path in folder.iterdir():
            fsync(path)


def check_tokenizer(name: str, vocab_size: int | None) -> None:
    if name != BPE:
        if vocab_size is not None:
            raise DataError(
                f"--vocab_size {vocab_size} is the size of a BPE; add --tokenizer {BPE}"
            )
        if name != BYTES:
            check_tokenizer_name(name)
        return
    if vocab_size is None:
        raise DataError(f"--tokenizer {BPE} needs a size, for example --vocab_size 4096")
    if not SMALLEST_BPE <= vocab_size <= 2**31:
        raise DataError(f"--vocab_size {vocab_size} must be at least {SMALLEST_BPE}")


def check_tokenizer_name(name: str) -> None:
    """Refuse at once what is neither here nor on the hub, which is asked once."""
    choices = f"give {BYTES}, {BPE}, a tokenizer.json, a tokenizer folder or a hub name"
    if is_local(name) or name.endswith(".json"):
        if not exists(expand_user(name)):
            raise DataError(f"--tokenizer: {missing_message(name)} ({choices})")
        return
    try:
        check_hub(name)
    except NameNotFoundError as error:
        raise DataError(f"--tokenizer: {error} ({choices})") from None


def load_tokenizer(name: str, end_of_text: str | None) -> CorpusTokenizer:
    if name == BYTES:
        return CorpusTokenizer(byte_level(), END_OF_TEXT_SYMBOL)
    path, hub = expand_user(name), None
    if exists(path) and path.is_file():
        backend = tokenizer_of_file(path)
    else:
        hub = tokenizer_of_folder(name)
        backend = hub.backend_tokenizer
        end_of_text = end_of_text or hub.eos_token
    known = backend.get_vocab(with_added_tokens=True)
    if end_of_text is None:
        end_of_text = next((symbol for symbol in END_OF_TEXT_SYMBOLS if symbol in known), None)
        if end_of_text is None:
            raise DataError(
                f"{name} does not say which token ends a text; name it by --end_of_text"
            )
    if end_of_text not in known:
        raise DataError(f"--end_of_text {end_of_text} is not a token of {name}")
    if hub is not None:
        hub.eos_token = end_of_text
        hub.pad_token = hub.pad_token or end_of_text
    return CorpusTokenizer(backend, end_of_text, hub)


def tokenizer_of_file(path: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"--tokenizer {path} is not a tokenizer.json: {one_line(error)}") from None


def tokenizer_of_folder(name: str | Path) -> Any:
    """Of a folder or from the hub. Code that a repository may bring along is never run."""
    check_tokenizer_name(str(name))
    from transformers import AutoTokenizer

    try:
        known = str(expand_user(name)) if is_local(str(name)) else name
        tokenizer = AutoTokenizer.from_pretrained(known, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"--tokenizer {name} is not {BYTES}, {BPE}, a tokenizer.json, a tokenizer folder or a "
            f"hub name that can be reached: {one_line(error)}"
        ) from None
    if not tokenizer.is_fast:
        raise DataError(f"--tokenizer {name} has no tokenizer.json, which is needed here")
    return tokenizer


def train_bpe(texts: Iterator[str], vocab_size: int) -> CorpusTokenizer:
    """A byte-level BPE, split into words as GPT-2's, trained on `texts`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT_SYMBOL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return CorpusTokenizer(tokenizer, END_OF_TEXT_SYMBOL)
