"""The tokenizer of a corpus: bytes, a file, a folder, a hub name, or a BPE trained on the corpus.

It is always saved as a folder that AutoTokenizer loads. Encoding reads that folder's
`tokenizer.json`, so a model is trained with the tokenizer that its users get.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenformer.data.byte_tokenizer import END_OF_TEXT_SYMBOL, byte_level
from tokenformer.errors import DataError, one_line
from tokenformer.files import fsync, write_atomic
from tokenformer.paths import (
    NameNotFoundError,
    check_hub,
    exists,
    expand_user,
    is_local,
    missing_message,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

BYTES = "bytes"
BPE = "bpe"
# End-of-text tokens of published tokenizers, for a tokenizer.json that does not name its own.
END_OF_TEXT_SYMBOLS = (END_OF_TEXT_SYMBOL, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>")
SMALLEST_BPE = 257  # every byte and the end of text


@dataclass(frozen=True)
class CorpusTokenizer:
    backend: "Tokenizer"
    end_of_text: str
    pretrained: "PreTrainedTokenizerFast | None" = None
    """The transformers tokenizer that it was loaded from, if any."""

    @property
    def vocab_size(self) -> int:
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def end_of_text_id(self) -> int:
        return self.backend.get_vocab(with_added_tokens=True)[self.end_of_text]

    def save(self, folder: Path) -> None:
        """Save for AutoTokenizer, replacing the leftovers of an interrupted run."""
        shutil.rmtree(folder, ignore_errors=True)
        if self.pretrained is not None:
            try:
                self.pretrained.save_pretrained(folder)
            except Exception as error:  # the library raises a bare Exception if the disk is full
                raise OSError(f"{folder}: {one_line(error)}") from None
        else:
            folder.mkdir()
            write_atomic(folder / "tokenizer.json", self.backend.to_str(pretty=True))
            # Not saved by transformers, whose import takes longer than preparing a small corpus.
            config = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": self.end_of_text,
                "eos_token": self.end_of_text,
                "pad_token": self.end_of_text,
                "padding_side": "left",
                "clean_up_tokenization_spaces": False,
            }
            write_atomic(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")
        for path in folder.iterdir():
            fsync(path)


def check_tokenizer(name: str, vocab_size: int | None) -> None:
    if name != BPE:
        if vocab_size is not None:
            raise DataError(f"--vocab_size {vocab_size} is for a new BPE; add --tokenizer {BPE}")
        if name != BYTES:
            check_tokenizer_name(name)
        return
    if vocab_size is None:
        raise DataError(f"--tokenizer {BPE} needs a size, for example --vocab_size 4096")
    if not SMALLEST_BPE <= vocab_size <= 2**31:
        raise DataError(f"--vocab_size {vocab_size} must be at least {SMALLEST_BPE}")


def check_tokenizer_name(name: str) -> None:
    """Raise DataError for a tokenizer that exists neither here nor on the hub, before any slow
    import or retry."""
    choices = f"pass {BYTES}, {BPE}, a tokenizer.json, a tokenizer folder or a hub name"
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
    path, pretrained = expand_user(name), None
    if exists(path) and path.is_file():
        backend = tokenizer_from_file(path)
    else:
        pretrained = tokenizer_from_pretrained(name)
        backend = pretrained.backend_tokenizer
        end_of_text = end_of_text or pretrained.eos_token
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if end_of_text is None:
        end_of_text = next((symbol for symbol in END_OF_TEXT_SYMBOLS if symbol in vocabulary), None)
        if end_of_text is None:
            raise DataError(
                f"{name} does not say which token ends a text; name it with --end_of_text"
            )
    if end_of_text not in vocabulary:
        raise DataError(f"--end_of_text {end_of_text} is not a token of {name}")
    if pretrained is not None:
        pretrained.eos_token = end_of_text
        pretrained.pad_token = pretrained.pad_token or end_of_text
    return CorpusTokenizer(backend, end_of_text, pretrained)


def tokenizer_from_file(path: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise DataError(f"--tokenizer {path} is not a tokenizer.json: {one_line(error)}") from None


def tokenizer_from_pretrained(name: str | Path) -> "PreTrainedTokenizerFast":
    """Load a tokenizer from a folder or the hub, without running code that it contains."""
    check_tokenizer_name(str(name))
    from transformers import AutoTokenizer

    try:
        location = str(expand_user(name)) if is_local(str(name)) else name
        tokenizer = AutoTokenizer.from_pretrained(location, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"--tokenizer {name} cannot be loaded: {one_line(error)} (pass {BYTES}, {BPE}, a "
            "tokenizer.json, a tokenizer folder or a hub name)"
        ) from None
    if not tokenizer.is_fast:
        raise DataError(f"--tokenizer {name} has no tokenizer.json; use a fast tokenizer")
    return tokenizer


def is_byte_tokenizer(folder: Path) -> bool:
    """Whether the tokenizer in a folder has the ids of `bytes` and no chat template of its own."""
    try:
        found = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        templates = [*folder.glob("chat_template*"), *folder.glob("additional_chat_templates*")]
        own = json.loads(byte_level().to_str())
        parts = ("model", "normalizer", "pre_tokenizer", "added_tokens", "post_processor")
        same = all(found[part] == own[part] for part in parts)
        return same and "chat_template" not in config and not templates
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def train_bpe(texts: Iterator[str], vocab_size: int) -> CorpusTokenizer:
    """Train a byte-level BPE with GPT-2's pre-tokenization."""
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
