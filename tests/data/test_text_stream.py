"""Streaming detokenization: complete characters only, and nothing lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tokenformer.data.byte_tokenizer import END_OF_TEXT, byte_tokenizer
from tokenformer.data.text_stream import TextStream
from tokenformer.data.tokenizer import load_tokenizer, train_bpe

TEXT = "naïve 日本語のテキスト 👩‍👩‍👧 🇯🇵 🙂 done.\n"
BYTES = byte_tokenizer()


def streamed(tokenizer, ids, stop=()) -> list[str]:
    stream = TextStream(tokenizer, stop=stop)
    return [*(stream.add(token) for token in ids), stream.end()]


@pytest.fixture(scope="module", params=["bytes", "bpe", "tokenizer/20B_tokenizer.json"])
def tokenizer(request, real_data):
    if request.param == "bytes":
        return BYTES
    if request.param == "bpe":  # few merges, so that most characters are several tokens
        found = train_bpe(iter([TEXT] * 3), 280)
    else:
        found = load_tokenizer(str(real_data(request.param)), None)
    return PreTrainedTokenizerFast(tokenizer_object=found.backend)


def test_streamed_strings_are_whole_characters_and_join_to_the_text(tokenizer):
    pieces = streamed(tokenizer, tokenizer(TEXT).input_ids)
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == ""
    assert sum(piece != "" for piece in pieces) > 10, "streams before the end"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=30))
def test_any_bytes_equal_decoding_them_at_once(ids):
    assert "".join(streamed(BYTES, ids)) == BYTES.decode(ids)


def test_an_incomplete_character_at_the_end_is_replaced():
    ids = [*"a日".encode()][:-1]
    assert streamed(BYTES, ids) == ["a", "", "", "\ufffd"]


def test_a_python_tokenizer_streams_the_same_text():
    from transformers import ByT5Tokenizer

    tokenizer, text = ByT5Tokenizer(), "naïve 日本語"
    ids = tokenizer(text)["input_ids"]
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == text
    assert "ï" in pieces
    assert "".join(streamed(tokenizer, ids, stop=("日",))) == "naïve "


def test_end_of_text_is_skipped():
    assert streamed(BYTES, [97, END_OF_TEXT, 98]) == ["a", "", "b", ""]


def test_the_beginning_of_a_stop_sequence_is_held_back():
    pieces = streamed(BYTES, [*b"a--b-->c"], stop=["-->"])
    assert pieces == ["a", "", "", "--b", "", "", "", "", ""]
    assert streamed(BYTES, [*b"a--"], stop=["-->"]) == ["a", "", "", "--"]
    with pytest.raises(ValueError, match="at least one character"):
        TextStream(BYTES, stop=["", "a"])


@settings(max_examples=300, deadline=None)
@given(
    st.text("ab日🙂", max_size=30),
    st.lists(st.text("ab日🙂", min_size=1, max_size=4), max_size=3),
)
def test_text_ends_before_the_first_complete_stop_sequence(text, stops):
    """Against a search after each character; the longest of those that end together counts."""
    ends = [
        (end, start)
        for end in range(len(text) + 1)
        for start in range(end)
        if text[start:end] in stops
    ]
    kept = text[: min(ends)[1]] if ends else text
    assert "".join(streamed(BYTES, [*text.encode()], stops)) == kept


def test_a_long_stop_sequence_is_fast():
    """Comparing with all of the stop sequence would take minutes."""
    ids = BYTES("aab" * 30).input_ids
    assert "".join(streamed(BYTES, ids, stop=("a" * 1_000_000,))) == "aab" * 30
