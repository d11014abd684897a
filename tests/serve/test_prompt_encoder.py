"""Prompts are tokenized outside of the event loop, and those that cannot fit are not tokenized."""

import asyncio

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from tokenformer.data.byte_tokenizer import byte_level, byte_symbols, byte_tokenizer
from tokenformer.serve.limits import Limits
from tokenformer.serve.prompt import PromptError
from tokenformer.serve.prompt_encoder import PromptEncoder, longest_token

LIMITS = Limits()


def fast(tokenizer):
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def normalized():
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Strip()
    return fast(tokenizer)


def test_the_event_loop_goes_on_while_a_long_prompt_is_tokenized():
    text = "some words " * 40_000
    encoder = PromptEncoder(normalized(), 10**9, LIMITS)

    async def encode():
        task = asyncio.create_task(encoder.encode(text))
        turns = 0
        while not task.done():
            turns += 1
            await asyncio.sleep(0.01)
        return turns, await task

    turns, inputs = asyncio.run(asyncio.wait_for(encode(), 90))
    assert inputs["input_ids"].shape == (1, len(text.strip()))
    assert turns >= 3  # the first turn is before tokenizing begins; blocked, the second is after it


def test_a_prompt_that_cannot_fit_is_refused_untokenized():
    tokenizer = byte_tokenizer()
    longest = longest_token(tokenizer)
    assert longest == len("<|endoftext|>")
    encoder = PromptEncoder(tokenizer, 8, LIMITS)
    encoder.closed = True  # tokenizing would raise RuntimeError
    with pytest.raises(PromptError, match="at least 8 tokens, the model's context 8"):
        asyncio.run(encoder.encode("é" * (8 * longest // 2)))
    with pytest.raises(RuntimeError):
        asyncio.run(encoder.encode("é" * (8 * longest // 2 - 1)))


def test_the_bound_holds_for_merges_of_several_bytes():
    vocabulary = {symbol: index for index, symbol in enumerate(byte_symbols())}
    vocabulary |= {"ab": 256, "abab": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b"), ("ab", "ab")]))
    split = pre_tokenizers.Split(" ", "isolated")
    byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte])
    assert longest_token(fast(tokenizer)) == 4
    assert len(tokenizer.encode("abab" * 9).ids) == 9


def test_a_tokenizer_in_python_is_served():
    tokenizer = ByT5Tokenizer()
    assert longest_token(tokenizer) is None
    encoder = PromptEncoder(tokenizer, 8, LIMITS)
    inputs = asyncio.run(encoder.encode("hé"))
    assert inputs["input_ids"].tolist() == [tokenizer("hé")["input_ids"]]
    encoder.close()
    encoder.wait()


def unknown_words():
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return fast(tokenizer)


def removed_spaces():
    tokenizer = byte_level()
    split = pre_tokenizers.Split(" ", "removed")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
    return fast(tokenizer)


@pytest.mark.parametrize(
    ("make", "text"),
    [(normalized, " " * 1000), (unknown_words, "b" * 1000), (removed_spaces, " " * 1000)],
)
def test_no_bound_where_one_token_can_stand_for_any_length(make, text):
    tokenizer = make()
    assert len(tokenizer(text)["input_ids"]) <= 1
    assert longest_token(tokenizer) is None
