"""`tokenformer evaluate --perplexity` and `generate` with a small model."""

import json
import math

import pytest
import torch

from tokenformer.cli import main
from tokenformer.data.byte_tokenizer import END_OF_TEXT, VOCAB_SIZE, byte_tokenizer

TEXT = "The quick brown fox — naïve, perhaps — jumps over the lazy dog.\n" * 9


@pytest.fixture
def folder(tmp_path, make_config):
    import tokenformer

    torch.manual_seed(0)
    options = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 48}
    ids = {f"{name}_token_id": END_OF_TEXT for name in ("bos", "eos", "pad")}
    model = tokenformer.TokenformerForCausalLM(make_config("tokenformer", **options, **ids))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def answer(capsys, *arguments):
    main([str(word) for word in arguments])
    return capsys.readouterr().out


def perplexity(capsys, folder, data, *arguments):
    found = answer(capsys, "evaluate", folder, "--perplexity", data, *arguments, "--json")
    return json.loads(found)["perplexity"]


def test_a_file_and_its_prepared_split_give_the_same_bits(folder, text_file, tmp_path, capsys):
    found = perplexity(capsys, folder, text_file)
    assert found["tokens"] == found["bytes"] == len(TEXT.encode())
    assert found["words"] == len(TEXT.split())
    assert (found["length"], found["stride"]) == (48, 24)
    out = tmp_path / "prepared"
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "train.txt").write_text("something else\n")
    (tmp_path / "texts" / "validation.txt").write_text(TEXT)
    main(["prepare", str(tmp_path / "texts"), "--out", str(out)])
    capsys.readouterr()
    split = perplexity(capsys, folder, out)
    assert split["split"] == "validation"
    assert split["tokens"] == found["tokens"] + 1  # end of text
    # The windows are the same except for that token, so the sums differ by its loss.
    assert 0 < split["nats"] - found["nats"] < 40
    limited = perplexity(capsys, folder, text_file, "--limit", 10)
    assert limited["tokens"] == limited["bytes"] == 10


def test_bits_per_byte_equal_a_direct_computation(folder, text_file, capsys):
    from transformers import AutoModelForCausalLM

    arguments = ["--length", 24, "--stride", 24, "--limit", 24]
    found = perplexity(capsys, folder, text_file, *arguments)
    ids = torch.tensor([[END_OF_TEXT, *TEXT.encode()[:24]]])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids[:, :-1]).logits
    nats = torch.nn.functional.cross_entropy(logits[0].double(), ids[0, 1:], reduction="sum").item()
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / 24, rel=1e-6)


def test_text_output(folder, text_file, capsys):
    lines = answer(capsys, "evaluate", folder, "--perplexity", text_file).splitlines()
    assert [line.split("  ")[0] for line in lines[1:]] == [
        "bits per byte",
        "token perplexity",
        "word perplexity",
    ]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["evaluate", "MODEL"], "pass --tasks NAMES, --perplexity DATA, --images DATA"),
        (["evaluate", "MODEL", "--tasks", "piqa", "--length", "8"], "8 needs --perplexity"),
        (["evaluate", "MODEL", "--perplexity", "absent"], "--perplexity: no absent"),
        (["evaluate", "MODEL", "--perplexity", "FILEE"], "text.txt?"),
        (["evaluate", "MODEL", "--perplexity", "FILE", "--split", "test"], "--split test"),
        (["evaluate", "MODEL", "--perplexity", "FILE", "--length", "8", "--stride", "9"], "9"),
        (["evaluate", "MODEL", "--perplexity", "FILE", "--limit", "0"], "--limit 0"),
        (["evaluate", "MODEL", "--perplexity", "FOLDER"], "no prepared corpus"),
        (["evaluate", "FOLDER/nothing", "--perplexity", "FILE"], "empty/nothing"),
        (["evaluate", "FOLDER", "--perplexity", "FILE"], "has no config.json"),
        (["generate", "MODEL"], "give --prompt"),
        (["generate", "MODEL", "--prompt", "a", "--temperature", "-1"], "--temperature -1.0 must"),
        (["generate", "MODEL", "--prompt", "a", "--temperature", "1e-320"], "0, which is greedy"),
        (["generate", "MODEL", "--prompt", "a", "--temperature", "nan"], "--temperature nan"),
        (["generate", "MODEL", "--prompt", "a", "--top_p", "2"], "--top_p 2"),
        (["generate", "MODEL", "--prompts", "absent"], "--prompts: no absent"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_bad_input_is_one_line(arguments, named, folder, text_file, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    places = {"MODEL": folder, "FILE": text_file, "FOLDER": tmp_path / "empty"}
    for name, path in places.items():
        arguments = [word.replace(name, str(path)) for word in arguments]
    with pytest.raises(SystemExit) as end:
        main(arguments)
    captured = capsys.readouterr()
    assert end.value.code == 2
    assert captured.err.count("\n") == 1
    assert named in captured.err


def test_the_stream_equals_the_output_of_generate(folder, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = answer(
        capsys, "generate", folder, "--prompt", "The [fox], ", "--greedy", "--max_new_tokens", 20
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The [fox], ", return_tensors="pt")
    whole = tokenizer.decode(
        model.generate(**ids, max_new_tokens=20, do_sample=False)[0], skip_special_tokens=True
    )
    from tokenformer.cli.terminal import printable

    assert out == printable(whole, "utf-8") + "\n"


def test_prompts_from_a_file_and_the_same_seed_twice(folder, tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text("one, two\n\nthree\n")
    arguments = ["generate", folder, "--prompts", file, "--max_new_tokens", 8, "--json"]
    first = json.loads(answer(capsys, *arguments))
    assert [sample["prompt"] for sample in first] == ["one, two", "three"]
    assert json.loads(answer(capsys, *arguments)) == first
    assert json.loads(answer(capsys, *arguments, "--seed", 1)) != first


def test_perplexity_with_int8_weights(folder, text_file, capsys):
    whole, rounded = (perplexity(capsys, folder, text_file, *bits) for bits in ([], ["--bits", 8]))
    assert whole["tokens"] == rounded["tokens"]
    assert 0 < abs(whole["bits_per_byte"] - rounded["bits_per_byte"]) < 0.01
    with pytest.raises(SystemExit) as end:
        main(["evaluate", str(folder), "--images", "digits", "--bits", "8"])
    assert end.value.code == 2
    assert "cannot be used with --images" in capsys.readouterr().err
