"""`tokenformer generate` with a trained TokenFormer and a GPT-NeoX."""

import io
import json
import os
import shutil
import sys
from types import SimpleNamespace

import pytest

from tests.support.parrot import SENTENCE
from tokenformer.cli import COMMANDS, load, main
from tokenformer.cli.parser import parse


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


def tokens_of(text):
    return [*text.encode()]


def greedy_in_windows(folder, ids, new, context, kept):
    """By hand, without a cache: each token from the whole of the window it is in."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    added, window = [], ids
    while len(added) < new:
        if len(window) >= context:
            window = window[-max(kept, context - (new - len(added))) :]
        with torch.no_grad():
            added.append(model(torch.tensor([window])).logits[0, -1].argmax().item())
        window = [*window, added[-1]]
    return added


@pytest.mark.parametrize("prompt", ["Say 日", SENTENCE * 8], ids=["short", "longer than context"])
def test_beyond_the_context_the_window_slides(prompt, parrot, monkeypatch, capsys):
    arguments = ["--prompt", prompt, "--greedy", "--max_new_tokens", 220]
    [said] = json.loads("".join(generate(monkeypatch, parrot, *arguments, "--json")))
    err = capsys.readouterr().err
    expected = greedy_in_windows(parrot, tokens_of(prompt), 220, context=128, kept=64)
    assert said["added"] == bytes(expected).decode(errors="replace")
    assert err.count("\n") == 1, "said once"
    assert "the model's context is 128 tokens" in err
    assert ("the prompt has 280" in err) == (len(prompt) > 100)
    streamed = "".join(generate(monkeypatch, parrot, *arguments))
    assert streamed == prompt + said["added"] + "\n"


def test_a_stop_text_is_found_across_two_windows(parrot, monkeypatch):
    arguments = ["--prompt", "Say 日", "--greedy", "--max_new_tokens", 400]
    whole = "".join(generate(monkeypatch, parrot, *arguments))
    window = whole.encode()[:128].decode(errors="ignore")
    stop = whole[len(window) - 2 : len(window) + 3]
    before = whole.encode()[: whole.encode().find(stop.encode())].decode()
    stopped = "".join(generate(monkeypatch, parrot, *arguments, "--stop", stop))
    assert stopped == before + "\n"


def test_a_model_without_a_context_limit_is_given_the_whole_text(tmp_path, monkeypatch, capsys):
    from transformers import MambaConfig, MambaForCausalLM

    from tokenformer.data.byte_tokenizer import byte_tokenizer

    config = MambaConfig(
        vocab_size=257, hidden_size=16, num_hidden_layers=1, state_size=4, eos_token_id=None
    )
    MambaForCausalLM(config).save_pretrained(tmp_path / "mamba")
    byte_tokenizer().save_pretrained(tmp_path / "mamba")
    arguments = ["--prompt", "x" * 300, "--max_new_tokens", 5, "--json"]
    capsys.readouterr()
    generate(monkeypatch, tmp_path / "mamba", *arguments)
    assert "context" not in capsys.readouterr().err


def test_every_window_begins_with_the_tokenizers_own_beginning():
    import torch

    from tokenformer.serve.sliding_window import next_window

    ids, start = torch.arange(40)[None], torch.tensor([[0]])
    assert next_window(ids, 99, 40, start).tolist() == [[0, *range(21, 40)]]
    assert next_window(ids, 5, 40, start).tolist() == [[0, *range(6, 40)]], "room for five"
    assert next_window(ids, 99, 41, start).tolist() == ids.tolist(), "room for one"
    assert next_window(ids, 99, 1, start[:, :0]).tolist() == [[39]]
    assert next_window(ids, 99, None, start) is ids


def test_temperature_0_is_greedy(parrot, monkeypatch):
    arguments = [parrot, "--prompt", "Say 日", "--max_new_tokens", 20]
    greedy = generate(monkeypatch, *arguments, "--greedy")
    assert generate(monkeypatch, *arguments, "--temperature", 0) == greedy


def test_a_prompt_from_the_standard_input(parrot, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Say 日本".encode())))
    pieces = generate(monkeypatch, parrot, "--prompt", "-", "--greedy", "--stop", "\n")
    assert "".join(pieces) == SENTENCE


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
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
        (parrot, 3, "--bits 3 is not supported; use 4 or 8, or leave it out"),
        (neox, 8, "GPTNeoXForCausalLM has no tokens to quantize"),
    ):
        with pytest.raises(SystemExit) as end:
            generate(monkeypatch, model, "--prompt", "So", "--bits", bits)
        assert end.value.code == 2
        assert reason in capsys.readouterr().err


@pytest.mark.parametrize("text", ["null", "~", "# a", "Null"])
def test_a_prompt_and_a_stop_text_are_taken_literally(text, parrot, monkeypatch):
    arguments = ["--greedy", "--max_new_tokens", 3, "--json", f"--stop={text}"]
    for words in ([f"--prompt={text}"], ["--prompt", text]):
        [said] = json.loads("".join(generate(monkeypatch, parrot, *words, *arguments)))
        assert said["prompt"] == text
    stopped = parse("generate", load(COMMANDS["generate"]), ["m", "--stop", text], "")
    assert stopped["stop"] == text


def test_json_on_a_stream_that_lacks_characters(parrot, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    words = ["--prompt", "Say 日", "--greedy", "--max_new_tokens", "6", "--json"]
    main(["generate", str(parrot), *words])
    [said] = json.loads(raw.getvalue().decode("ascii"))
    assert said == {"prompt": "Say 日", "added": "本語"}


@pytest.fixture
def settings(parrot, tmp_path):
    """Writes generation_config.json into a copy of the parrot."""
    folder = shutil.copytree(parrot, tmp_path / "settled")

    def write(**values):
        file = folder / "generation_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
        return folder

    return write


def test_generation_settings_of_the_model_do_not_break_it(settings, parrot, monkeypatch, capsys):
    arguments = ["--prompt", "Say 日", "--greedy", "--max_new_tokens", 220]
    plain = generate(monkeypatch, parrot, *arguments)
    capsys.readouterr()
    folder = settings(return_dict_in_generate=True, max_length=7, output_scores=True)
    assert generate(monkeypatch, folder, *arguments) == plain
    assert capsys.readouterr().err.count("\n") == 1, "that the window slides"
    folder = settings(stop_strings=["naïve"])
    assert "".join(generate(monkeypatch, folder, *arguments)) == "Say 日本語, naïve\n"


def test_minimum_lengths_hold_for_the_whole_text(settings, monkeypatch):
    end = ord("!")  # the parrot's sentence ends with it
    arguments = ["--prompt", "Say 日", "--greedy", "--max_new_tokens", 300, "--json"]
    sizes = {}
    for least in (None, 3, 150):
        folder = settings(eos_token_id=end, min_new_tokens=least)
        [said] = json.loads("".join(generate(monkeypatch, folder, *arguments)))
        sizes[least] = len(said["added"].encode())
    assert sizes[None] == sizes[3] < len(SENTENCE.encode())
    assert 150 <= sizes[150] < 300, "not begun anew in the second window"

    from transformers import GenerationConfig

    from tokenformer.serve.sliding_window import min_new_tokens

    model = SimpleNamespace(generation_config=GenerationConfig(min_length=9))
    assert min_new_tokens(model, 4) == 5
    assert min_new_tokens(model, 40) == 0
