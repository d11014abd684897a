"""The byte-level tokenizer, as an ordinary Hugging Face tokenizer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tokenformer.data.byte_tokenizer import (
    END_OF_TEXT,
    END_OF_TEXT_SYMBOL,
    VOCAB_SIZE,
    byte_tokenizer,
)

TOKENIZER = byte_tokenizer()


@settings(max_examples=200, deadline=None)
@given(st.text().filter(lambda text: END_OF_TEXT_SYMBOL not in text))
def test_ids_are_the_utf8_bytes_and_decode_back(text):
    ids = TOKENIZER(text).input_ids
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_end_of_text_is_one_token():
    assert TOKENIZER("a<|endoftext|>b").input_ids == [97, END_OF_TEXT, 98]
    assert TOKENIZER.eos_token_id == END_OF_TEXT
    assert len(TOKENIZER) == VOCAB_SIZE


def test_every_byte_has_an_id_of_its_own():
    vocabulary = TOKENIZER.get_vocab()
    assert sorted(vocabulary.values()) == list(range(VOCAB_SIZE))


@pytest.mark.parametrize("text", ["naïve  \t\n日本語\r\n", " leading and trailing "])
def test_saved_and_loaded_by_auto_tokenizer(tmp_path, text):
    TOKENIZER.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(text).input_ids == list(text.encode())
    assert again.decode(again(text).input_ids) == text


def test_pads_on_the_left_for_generation():
    batch = TOKENIZER(["ab", "a"], padding=True)
    assert batch.input_ids == [[97, 98], [END_OF_TEXT, 97]]
    assert batch.attention_mask == [[1, 1], [0, 1]]
