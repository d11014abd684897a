"""The tokenizer of a corpus: bytes, a file, a folder, a hub name, or a BPE trained on the spot.

Whatever it was, it is saved as a folder that AutoTokenizer loads, and encoding reads that folder's
`tokenizer.json`: what a model is trained on is what its users will get.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenformer.data.byte_tokenizer import END_OF_TEXT_SYMBOL, byte_tokenizer
from tokenformer.data.errors import DataError
from tokenformer.data.shards import sync_path
from tokenformer.data.sources import exists, one_line

BYTES = "bytes"
BPE = "bpe"
# How published tokenizers spell the end of a text, where a bare tokenizer.json does not say.
END_OF_TEXT_SYMBOLS = (END_OF_TEXT_SYMBOL, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>")
SMALLEST_BPE = 257  # every byte and the end of text


def check_tokenizer(name: str, vocab_size: int | None) -> None:
    if name != BPE:
        if vocab_size is not None:
            raise DataError(
                f"--vocab_size {vocab_size} is the size of a BPE; add --tokenizer {BPE}"
            )
        return
    if vocab_size is None:
        raise DataError(f"--tokenizer {BPE} needs a size, for example --vocab_size 4096")
    if not SMALLEST_BPE <= vocab_size <= 2**31:
        raise DataError(f"--vocab_size {vocab_size} must be at least {SMALLEST_BPE}")


def load_tokenizer(name: str, end_of_text: str | None) -> Any:
    """A `PreTrainedTokenizerFast` with an end-of-text token. Code that a repository may bring
    along is never run."""
    if name == BYTES:
        return byte_tokenizer()
    path = Path(name)
    if exists(path) and path.is_file():
        tokenizer = tokenizer_of_file(path)
    else:
        tokenizer = tokenizer_of_folder(name)
    known = tokenizer.get_vocab()
    if end_of_text is not None:
        if end_of_text not in known:
            raise DataError(f"--end_of_text {end_of_text} is not a token of {name}")
        tokenizer.eos_token = end_of_text
    elif tokenizer.eos_token is None:
        found = [symbol for symbol in END_OF_TEXT_SYMBOLS if symbol in known]
        if not found:
            raise DataError(
                f"{name} does not say which token ends a text; name it by --end_of_text"
            )
        tokenizer.eos_token = found[0]
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def tokenizer_of_file(path: Path) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"--tokenizer {path} is not a tokenizer.json: {one_line(error)}") from None
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, padding_side="left"
    )


def tokenizer_of_folder(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"--tokenizer {name} is not {BYTES}, {BPE}, a tokenizer.json, a tokenizer folder or a "
            f"hub name that can be reached: {one_line(error)}"
        ) from None
    if not tokenizer.is_fast:
        raise DataError(f"--tokenizer {name} has no tokenizer.json, which is needed here")
    return tokenizer


def train_bpe(texts: Iterator[str], vocab_size: int) -> Any:
    """A byte-level BPE, split into words as GPT-2's, trained on `texts`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

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
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT_SYMBOL,
        eos_token=END_OF_TEXT_SYMBOL,
        pad_token=END_OF_TEXT_SYMBOL,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """In the place of one that an interrupted run may have left."""
    shutil.rmtree(folder, ignore_errors=True)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        sync_path(path)
