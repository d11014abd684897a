"""Bytes as tokens: 256 ids, one a byte value, and end of text.

`byte_tokenizer()` is an ordinary Hugging Face tokenizer; saved beside a model it makes
AutoTokenizer, pipelines and evaluation harnesses work with nothing of ours.
"""

from typing import Any

END_OF_TEXT = 256
END_OF_TEXT_SYMBOL = "<|endoftext|>"
VOCAB_SIZE = 257


def byte_tokenizer() -> Any:
    """A `PreTrainedTokenizerFast` that maps text to its UTF-8 bytes and back."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level(),
        bos_token=END_OF_TEXT_SYMBOL,
        eos_token=END_OF_TEXT_SYMBOL,
        pad_token=END_OF_TEXT_SYMBOL,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def byte_level() -> Any:
    """The same as a `tokenizers.Tokenizer`: transformers takes seconds to import."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # A BPE without merges over the byte alphabet; ids are moved to be the byte values themselves.
    vocabulary = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    vocabulary[END_OF_TEXT_SYMBOL] = END_OF_TEXT
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT_SYMBOL, special=True)])
    return tokenizer


def byte_symbols() -> list[str]:
    """The printable character by which byte-level tokenizers write each byte value: itself where
    it is printable Latin-1, else the next free character from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, spare = [], 0x100
    for byte in range(256):
        if byte in printable:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(spare))
            spare += 1
    return symbols
