"""Text as it is generated: whole characters only, and nothing lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tokenformer.data.byte_tokenizer import END_OF_TEXT, byte_tokenizer
from tokenformer.data.text_stream import TextStream
from tokenformer.data.tokenizer import load_tokenizer, train_bpe

TEXT = "naïve 日本語のテキスト 👩‍👩‍👧 🇯🇵 🙂 done.\n"
BYTES = byte_tokenizer()


def streamed(tokenizer, ids) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.add(token) for token in ids), stream.end()]


@pytest.fixture(scope="module", params=["bytes", "bpe", "tokenizer/20B_tokenizer.json"])
def tokenizer(request, real_data):
    if request.param == "bytes":
        return BYTES
    if request.param == "bpe":  # so few merges that most characters are several tokens
        found = train_bpe(iter([TEXT] * 3), 280)
    else:
        found = load_tokenizer(str(real_data(request.param)), None)
    return PreTrainedTokenizerFast(tokenizer_object=found.backend)


def test_pieces_are_whole_characters_and_the_whole_text(tokenizer):
    pieces = streamed(tokenizer, tokenizer(TEXT).input_ids)
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == ""
    assert sum(piece != "" for piece in pieces) > 10, "it does not wait for the end"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=30))
def test_any_bytes_give_what_decoding_them_at_once_gives(ids):
    assert "".join(streamed(BYTES, ids)) == BYTES.decode(ids)


def test_a_broken_character_at_the_end_is_shown_as_such():
    ids = [*"a日".encode()][:-1]
    assert streamed(BYTES, ids) == ["a", "", "", "\ufffd"]


def test_end_of_text_is_no_text():
    assert streamed(BYTES, [97, END_OF_TEXT, 98]) == ["a", "", "b", ""]
