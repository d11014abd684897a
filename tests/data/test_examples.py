"""Prompts with completions and chats as a corpus of token ids with a mask."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.adaptation import sums, write_rows
from tokenformer.data.byte_tokenizer import END_OF_TEXT, byte_tokenizer
from tokenformer.data.corpus import Corpus
from tokenformer.data.example_rows import DEFAULT_TEMPLATE
from tokenformer.data.examples import PADDING, ExampleSplit
from tokenformer.data.preparation import PrepareOptions, prepare
from tokenformer.errors import DataError

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Ciao"},
]


def prepared(file: Path, out: Path, name: str = "train", **options: Any) -> ExampleSplit:
    prepare(PrepareOptions(str(file), **{"validation": 0, **options}), out)
    return ExampleSplit(Corpus(out), name)


def shown(row: np.ndarray) -> list[tuple[str, bool]]:
    """The runs of trained and other tokens of a row as text, the end of text as |."""
    parts: list[tuple[str, bool]] = []
    for number in row.tolist():
        token, trained = max(number, ~number), number >= 0
        text = "|" if token == END_OF_TEXT else chr(token)
        if parts and parts[-1][1] == trained:
            parts[-1] = (parts[-1][0] + text, trained)
        else:
            parts.append((text, trained))
    return parts


def test_only_the_completion_is_trained(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", [{"prompt": "2 + 2 =", "completion": " 4"}])
    examples = prepared(file, tmp_path / "out")
    assert shown(examples.row(0, 100)) == [("2 + 2 =", False), (" 4|", True)]
    assert (examples.trained_tokens, examples.trained_bytes, len(examples)) == (3, 2, 10)
    assert Corpus(tmp_path / "out").split("train").documents == 1


def test_an_empty_prompt_is_the_start_of_a_text(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", [{"prompt": "", "completion": "a<|endoftext|>"}])
    row = prepared(file, tmp_path / "out").row(0, 100)
    assert shown(row) == [("|", False), ("a<|endoftext|>|", True)]  # spelled out, it is text


def test_every_turn_of_the_assistant_is_trained(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", [{"messages": CHAT}])
    examples = prepared(file, tmp_path / "out")
    assert shown(examples.row(0, 200)) == [
        ("system: Be brief.\nuser: Hi\nassistant:", False),
        (" Hello|", True),
        ("\nuser: Bye\nassistant:", False),
        (" Ciao|", True),
    ]
    template = tmp_path / "out" / "tokenizer" / "chat_template.jinja"
    assert template.read_text() == DEFAULT_TEMPLATE


def test_the_chat_template_of_the_tokenizer_is_used(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role[0] }}>{{ m.content | trim }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    file = write_rows(tmp_path / "a.jsonl", [{"messages": CHAT[1:3]}])
    examples = prepared(file, tmp_path / "out", tokenizer=str(tmp_path / "tokenizer"))
    assert shown(examples.row(0, 200)) == [("<u>Hi|<a>", False), ("Hello|", True)]
    saved = (tmp_path / "out" / "tokenizer" / "chat_template.jinja").read_text()
    assert saved == tokenizer.chat_template


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    file = write_rows(tmp_path / "a.jsonl", [{"messages": CHAT[1:3]}])
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: the chat template .* changes earlier"):
        prepared(file, tmp_path / "out", tokenizer=str(tmp_path / "tokenizer"))


def test_a_long_example_loses_the_start_of_its_prompt_first(tmp_path: Path) -> None:
    rows = [{"prompt": "abcdef", "completion": "XY"}, {"prompt": "ab", "completion": "WXYZ" * 3}]
    examples = prepared(write_rows(tmp_path / "a.jsonl", rows), tmp_path / "out")
    assert shown(examples.row(0, 5)) == [("def", False), ("XY|", True)]
    assert shown(examples.row(1, 5)) == [("b", False), ("WXYZW", True)]
    assert examples.count_longer(5) == 2
    assert examples.count_longer(8) == 1


def test_a_batch_is_padded_and_a_function_of_seed_and_sample(tmp_path: Path) -> None:
    examples = prepared(write_rows(tmp_path / "a.jsonl", sums(40)), tmp_path / "out")
    whole = examples.batch(length=30, seed=1, first_sample=0, count=40)
    assert {len(set(map(tuple, whole)))} == {40}  # an epoch has every example once
    part = examples.batch(length=30, seed=1, first_sample=5, count=7)
    for row, expected in zip(part, whole[5:12], strict=True):
        assert row.tolist() == expected[: len(row)].tolist()
        assert set(expected[len(row) :].tolist()) <= {PADDING}
    assert not np.array_equal(whole, examples.batch(length=30, seed=2, first_sample=0, count=40))
    random = examples.batch(length=30, seed=1, first_sample=0, count=40, mode="random")
    assert len(set(map(tuple, random))) < 40


def test_examples_are_held_out_and_splits_of_files_kept(tmp_path: Path) -> None:
    index = prepare(PrepareOptions(str(write_rows(tmp_path / "a.jsonl", sums(3)))), tmp_path / "a")
    counts = {split: entry["examples"]["count"] for split, entry in index["splits"].items()}
    assert counts == {"train": 2, "validation": 1}  # 5 % of three would be none
    folder = tmp_path / "files"
    folder.mkdir()
    write_rows(folder / "train.jsonl", sums(5))
    write_rows(folder / "valid.jsonl", sums(4))
    index = prepare(PrepareOptions(str(folder)), tmp_path / "b")
    counts = {split: entry["examples"]["count"] for split, entry in index["splits"].items()}
    assert counts == {"train": 5, "validation": 4}


def test_preparing_again_finds_it_done_and_altered_files_are_noticed(tmp_path: Path) -> None:
    file, out = write_rows(tmp_path / "a.jsonl", sums(9)), tmp_path / "out"
    prepared(file, out, validation=None)
    before = (out / "index.json").read_bytes()
    messages: list[str] = []
    prepare(PrepareOptions(str(file)), out, on_message=messages.append)
    assert messages == [f"{out} is already prepared"]
    assert (out / "index.json").read_bytes() == before
    Corpus(out).verify()
    trained = out / "train-trained.bin"
    trained.write_bytes(bytes(len(trained.read_bytes())))
    with pytest.raises(DataError, match=r"train-trained\.bin has been altered"):
        Corpus(out).verify()


def test_a_killed_preparation_starts_over(tmp_path: Path) -> None:
    file, out = write_rows(tmp_path / "a.jsonl", sums(9)), tmp_path / "out"
    prepared(file, out)
    whole = {path.name: path.read_bytes() for path in out.glob("*.bin")}
    index = json.loads((out / "index.json").read_text())
    journal = {"settings": index["settings"], "stamps": [file_stamp(file)], "position": None}
    journal |= {"split": "train", "splits": {}, "threshold": None}
    (out / "index.json").unlink()
    (out / "unfinished.json").write_text(json.dumps(journal))
    (out / "train-starts.bin").write_bytes(b"half")
    prepared(file, out)
    assert {path.name: path.read_bytes() for path in out.glob("*.bin")} == whole
    assert not (out / "unfinished.json").exists()


def file_stamp(file: Path) -> list[int]:
    return [file.stat().st_size, file.stat().st_mtime_ns]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"prompt": "a", "completion": "b"}\n{"prompt": ', "line 2 is not JSON"),
        ('{"prompt": "a", "completion": "b"}\n[1]', "line 2 holds \\[1\\], not an object"),
        (
            '{"prompt": "a", "completion": "b"}\n\n{"prompt": "a"}',
            "line 3 has no field 'completion'",
        ),
        ('{"prompt": "a", "completion": 4}', "line 1: the field 'completion' holds int, not text"),
        ('{"prompt": "a", "completion": " "}', "line 1: the completion is empty"),
        ('{"messages": "hi"}', "line 1: 'messages' holds 'hi', not a list"),
        ('{"messages": [3]}', "line 1: a message is 3, not an object"),
        ('{"messages": [{"role": "user", "content": null}]}', "line 1: a message has the content"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "line 1 has no turn of the assistant"),
        (
            '{"messages": [{"role": "assistant", "content": ""}]}',
            "line 1: a turn of the assistant is empty",
        ),
    ],
)
def test_bad_rows_are_refused_by_line(lines: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines)
    with pytest.raises(DataError, match=f"a.jsonl, {message}"):
        prepare(PrepareOptions(str(tmp_path / "a.jsonl")), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_files_and_tokenizers_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    write_rows(folder / "a.jsonl", sums(2))
    (folder / "notes.txt").write_text("notes")
    with pytest.raises(DataError, match=r"notes\.txt is not jsonl"):
        prepare(PrepareOptions(str(folder)), tmp_path / "out")
    (folder / "notes.txt").unlink()
    with pytest.raises(DataError, match="--tokenizer bpe is trained on text"):
        prepare(PrepareOptions(str(folder), tokenizer="bpe", vocab_size=300), tmp_path / "out")


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("starts", {"file": "../x", "sha256": "0" * 64}, "expected a file name in this folder"),
        ("trained", None, "trained is None"),
        ("count", "9", "count is '9'"),
    ],
)
def test_a_damaged_index_is_refused(part: str, value: Any, message: str, tmp_path: Path) -> None:
    prepared(write_rows(tmp_path / "a.jsonl", sums(9)), tmp_path / "out")
    path = tmp_path / "out" / "index.json"
    index = json.loads(path.read_text())
    index["splits"]["train"]["examples"][part] = value
    path.write_text(json.dumps(index))
    with pytest.raises(DataError, match=message):
        ExampleSplit(Corpus(tmp_path / "out"), "train")
