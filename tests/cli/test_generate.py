"""`tokenformer generate` on a model that speaks, and on another library's."""

import io
import json
import os
import sys

import pytest

from tests.cli.conftest import SENTENCE
from tokenformer.cli import main


class Pieces(io.StringIO):
    """A terminal that remembers what came together."""

    def __init__(self):
        super().__init__()
        self.pieces = []

    def write(self, text):
        self.pieces.append(text)
        return super().write(text)


def generate(monkeypatch, *arguments):
    terminal = Pieces()
    monkeypatch.setattr(sys, "stdout", terminal)
    main(["generate", *map(str, arguments)])
    return terminal.pieces


def test_text_comes_character_by_character(parrot, monkeypatch):
    arguments = ["--prompt", "Say 日", "--greedy", "--max_new_tokens", len(SENTENCE.encode()) - 7]
    pieces = generate(monkeypatch, parrot, *arguments)
    assert [piece for piece in pieces if piece] == ["Say 日", *SENTENCE[len("Say 日") :], "\n"]


def test_it_ends_before_the_stop_text(parrot, monkeypatch):
    arguments = ["--prompt", "Say 日", "--greedy", "--stop", "— or"]
    assert "".join(generate(monkeypatch, parrot, *arguments)) == "Say 日本語, naïve \n"


def test_another_librarys_model(neox, monkeypatch):
    import torch
    from transformers import AutoModelForCausalLM

    arguments = ["--greedy", "--max_new_tokens", 12, "--json"]
    [said] = json.loads("".join(generate(monkeypatch, neox, "--prompt", "So", *arguments)))
    model = AutoModelForCausalLM.from_pretrained(neox)
    ids = model.generate(torch.tensor([[*b"So"]]), max_new_tokens=12, do_sample=False)[0, 2:]
    assert said == {"prompt": "So", "added": bytes(ids.tolist()).decode()}
    [other] = json.loads(
        "".join(generate(monkeypatch, neox, "--prompt=So", *arguments, "--repetition_penalty=9"))
    )
    assert len(set(other["added"])) > len(set(said["added"]))


def test_a_full_context_ends_it_and_is_said(parrot, monkeypatch, capsys):
    arguments = ["--prompt", "x" * 120, "--max_new_tokens", 9, "--json"]
    [said] = json.loads("".join(generate(monkeypatch, parrot, *arguments)))
    assert len(said["added"].encode(errors="replace")) <= 8 * 3
    assert "the model's context of 128 is full" in capsys.readouterr().err


def test_a_prompt_from_the_standard_input(parrot, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Say 日本".encode())))
    pieces = generate(monkeypatch, parrot, "--prompt", "-", "--greedy", "--stop", "\n")
    assert "".join(pieces) == SENTENCE


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--prompt", "x" * 128], "the prompt has 128 tokens, the model's context 128"),
        (["--prompt", "a", "--stop", ""], "--stop"),
        (["--prompt", os.fsdecode(b"a\xff")], "--prompt is not UTF-8 text"),
        (["--prompt", "a", "--repetition_penalty", "0"], "--repetition_penalty 0"),
    ],
    ids=lambda value: ascii(value[-1][:9]) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(arguments, named, parrot, capsys):
    with pytest.raises(SystemExit) as end:
        main(["generate", str(parrot), *arguments])
    captured = capsys.readouterr()
    assert end.value.code == 2
    assert captured.err.count("\n") == 1
    assert named in captured.err
    assert captured.out == ""


def test_in_eight_bits_it_says_the_same(parrot, neox, monkeypatch, capsys):
    arguments = ["--prompt", "Say 日", "--greedy", "--bits", 8, "--max_new_tokens", 60]
    assert "".join(generate(monkeypatch, parrot, *arguments)).startswith(SENTENCE)
    for model, bits, reason in (
        (parrot, 4, "--bits 4: tokens are rounded to 8 bits or not at all"),
        (neox, 8, "GPTNeoXForCausalLM has no tokens to keep in int8"),
    ):
        with pytest.raises(SystemExit) as end:
            generate(monkeypatch, model, "--prompt", "So", "--bits", bits)
        assert end.value.code == 2
        assert reason in capsys.readouterr().err
