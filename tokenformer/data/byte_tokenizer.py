"""A byte-level tokenizer: one id per byte value (0-255), and 256 for end of text.

`byte_tokenizer()` is an ordinary Hugging Face tokenizer. Saved beside a model, it works with
AutoTokenizer, pipelines and evaluation harnesses without this package.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = 256
END_OF_TEXT_SYMBOL = "<|endoftext|>"
VOCAB_SIZE = 257


def byte_tokenizer() -> "PreTrainedTokenizerFast":
    """Return a tokenizer that maps text to its UTF-8 bytes and back."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level(),
        bos_token=END_OF_TEXT_SYMBOL,
        eos_token=END_OF_TEXT_SYMBOL,
        pad_token=END_OF_TEXT_SYMBOL,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def byte_level() -> "Tokenizer":
    """Return the same tokenizer without transformers, which takes seconds to import."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # A BPE without merges over the byte alphabet, with each byte value as its own id.
    vocabulary = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    vocabulary[END_OF_TEXT_SYMBOL] = END_OF_TEXT
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT_SYMBOL, special=True)])
    return tokenizer


def byte_symbols() -> list[str]:
    """The printable character that byte-level tokenizers use for each byte value: the byte's own
    Latin-1 character if printable, else the next unused character from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, spare = [], 0x100
    for byte in range(256):
        if byte in printable:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(spare))
            spare += 1
    return symbols
