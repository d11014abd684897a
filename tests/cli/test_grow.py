"""`tokenformer grow`: real folders in, real folders out, or one line and nothing."""

import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
)

import tokenformer
from tests.support.commands import error_line
from tests.support.growth import trained_tokenformer, trained_transformer
from tests.support.image_text import make_joint, make_processor, pictures, train_new_tokens
from tokenformer.cli import main
from tokenformer.data.byte_tokenizer import VOCAB_SIZE, byte_tokenizer
from tokenformer.train import checkpoint


@pytest.fixture
def folder(tmp_path, make_config):
    model, _ = trained_tokenformer(make_config, vocab_size=VOCAB_SIZE)
    model.save_pretrained(tmp_path / "small")
    byte_tokenizer().save_pretrained(tmp_path / "small")
    return tmp_path / "small"


def logits(path):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path)(input_ids=torch.arange(40)[None]).logits


@pytest.mark.parametrize("shard", ["1KB", "5GB"])
def test_a_folder_grows_exactly_with_its_tokenizer(folder, tmp_path, capsys, shard):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "sharded", max_shard_size=shard)
    byte_tokenizer().save_pretrained(tmp_path / "sharded")
    out = tmp_path / "large"
    sizes = ["--qkv_tokens", "90", "--output_tokens", "90", "--ffn_tokens", "360"]
    main(["grow", str(tmp_path / "sharded"), *sizes, "--out", str(out)])
    assert "Saved to" in capsys.readouterr().out
    assert torch.allclose(logits(out), logits(folder), atol=1e-5)
    assert AutoTokenizer.from_pretrained(out)("grow")["input_ids"] == list(b"grow")
    report = json.loads((out / "growth.json").read_text())
    assert report["max_layer_change"] < 1e-5
    assert report["max_output_change"] is None
    grown, _ = tokenformer.grow(model, qkv_tokens=90, output_tokens=90, ffn_tokens=360)
    stored = AutoModelForCausalLM.from_pretrained(out)
    for name, parameter in grown.named_parameters():
        assert torch.equal(parameter, stored.get_parameter(name)), "in memory as on disk"
    again = tmp_path / "larger"
    main(
        ["grow", str(out), "--ffn_tokens", "720", "--init", "clone", "--out", str(again), "--json"]
    )
    assert json.loads(capsys.readouterr().out)["init"] == "clone"
    assert torch.allclose(logits(again), logits(folder), atol=1e-5)


def test_to_the_size_of_another_model(folder, tmp_path):
    main(["grow", str(folder), "--ffn_tokens", "200", "--out", str(tmp_path / "one")])
    main(["grow", str(folder), "--to", str(tmp_path / "one"), "--out", str(tmp_path / "two")])
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "two").config.ffn_tokens == 200


def test_a_half_precision_model_stays_one(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder).bfloat16()
    model.save_pretrained(tmp_path / "half")
    main(["grow", str(tmp_path / "half"), "--ffn_tokens", "200", "--out", str(tmp_path / "out")])
    grown = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert grown.dtype == torch.bfloat16
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "half"))


@pytest.fixture
def transformer(tmp_path, make_config):
    model, _ = trained_transformer(make_config, vocab_size=VOCAB_SIZE)
    model.save_pretrained(tmp_path / "plain")
    byte_tokenizer().save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        (["--hidden_size", "64"], (64, 2, 80)),
        (["--hidden_size", "48", "--num_hidden_layers", "3", "--method", "lemon"], (48, 3, 60)),
        (["--num_attention_heads", "12", "--method", "hypercloning"], (96, 2, 120)),
        (["--intermediate_size", "50"], (32, 2, 50)),
    ],
    ids=str,
)
def test_a_transformer_grows_exactly_with_its_tokenizer(
    transformer, tmp_path, capsys, arguments, sizes
):
    out = tmp_path / "large"
    main(["grow", str(transformer), *arguments, "--out", str(out), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((out / "growth.json").read_text())
    assert report["exact"] is True
    assert report["max_output_change"] < 1e-5
    config = AutoModelForCausalLM.from_pretrained(out).config
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == sizes
    assert torch.allclose(logits(out), logits(transformer), atol=1e-4)
    assert AutoTokenizer.from_pretrained(out)("grow")["input_ids"] == list(b"grow")
    again = tmp_path / "larger"
    main(["grow", str(transformer), "--to", str(out), "--method", "lemon", "--out", str(again)])
    assert "lemon, exact" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(again).config.hidden_size == sizes[0]


def test_a_transformer_in_half_precision_stays_one(transformer, tmp_path):
    AutoModelForCausalLM.from_pretrained(transformer).bfloat16().save_pretrained(tmp_path / "half")
    out = str(tmp_path / "out")
    arguments = ["--num_hidden_layers", "4", "--method", "stacking", "--out", out]
    main(["grow", str(tmp_path / "half"), *arguments])
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16


def test_ligo_learns_on_a_corpus(transformer, tmp_path, capsys):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("to be grown is to be taught " * 400)
    main(["prepare", str(tmp_path / "text"), "--out", str(tmp_path / "data")])
    out = tmp_path / "large"
    main(["grow", str(transformer), "--hidden_size", "64", "--method", "ligo", "--steps", "3",
          "--data", str(tmp_path / "data"), "--out", str(out)])  # fmt: skip
    assert "ligo" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(out).config.hidden_size == 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hidden_size", "64", "--steps", "3"], "--steps 3 is for --method ligo"),
        (["--hidden_size", "64", "--method", "ligo", "--data", "none"], "none"),
        (["--ffn_tokens", "50"], "--ffn_tokens 50 does not apply to a Transformer"),
        (["--init", "zero", "--hidden_size", "64"], "--init zero does not apply to a Tr"),
        (["--hidden_size", "64", "--method", "ligo"], "ligo is trained on data"),
        (["--hidden_size", "64", "--method", "nil"], "method='nil' is unknown"),
        (["--to", "354m"], "head size of 64"),
        (["--hidden_size", "30"], "multiple of 8"),
        ([], "give either a size"),
    ],
    ids=str,
)
def test_refusals_of_a_transformer(transformer, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(transformer.parent)
    with pytest.raises(SystemExit) as end:
        main(["grow", "plain", *arguments, "--out", "new"])
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert error.count("\n") == 1
    assert message in error
    assert [path.name for path in transformer.parent.iterdir()] == ["plain"]


def test_a_model_of_another_kind_is_named(tmp_path, capsys):
    from transformers import GPT2Config

    GPT2Config().save_pretrained(tmp_path / "other")
    with pytest.raises(SystemExit):
        main(["grow", str(tmp_path / "other"), "--to", "354m", "--out", str(tmp_path / "new")])
    assert "holds a model of another kind, gpt2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--hidden_size", "64", "--out", "new"],
            "--hidden_size 64 does not apply to a TokenFormer; its sizes are --qkv_tokens",
        ),
        (["--ffn_tokens", "50", "--out", "new"], "cannot shrink"),
        (["--to", "354m", "--out", "new"], "cannot change hidden_size from 32 to 768"),
        (["--ffn_tokens", "200"], "--out is missing"),
        (["--ffn_tokens", "200", "--out", "small"], "already exists"),
        (["--out", "new"], "give either a size"),
        (["--ffn_tokens", "200", "--init", "nil", "--out", "new"], "init='nil' is unknown"),
        (["--to", "huge", "--out", "new"], "preset 'huge' is unknown"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_refusals_are_one_line_and_leave_nothing(folder, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(folder.parent)
    with pytest.raises(SystemExit) as end:
        main(["grow", "small", *arguments])
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert error.count("\n") == 1
    assert message in error
    assert [path.name for path in folder.parent.iterdir()] == ["small"]


def test_what_is_no_model_is_named(tmp_path, folder, capsys):
    (tmp_path / "empty").mkdir()
    for source, message in (
        ("empty", "has no config.json"),
        ("absent", f"no {tmp_path / 'absent'}"),
    ):
        with pytest.raises(SystemExit):
            main(
                ["grow", str(tmp_path / source), "--ffn_tokens", "9", "--out", str(tmp_path / "x")]
            )
        assert message in capsys.readouterr().err
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(SystemExit) as end:
        main(["grow", str(folder), "--ffn_tokens", "200", "--out", str(tmp_path / "x")])
    assert end.value.code == 2
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("file", ["state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_refused_and_leaves_nothing(tmp_path, make_config, capsys, file):
    model, optimizer = trained_tokenformer(make_config, vocab_size=VOCAB_SIZE)
    state = {"step": 3, "config": model.config.to_dict()}
    path = checkpoint.save(tmp_path / "checkpoints", model=model, optimizer=optimizer, state=state)
    (path / file).write_text("{")
    with pytest.raises(SystemExit) as end:
        main(["grow", str(path), "--ffn_tokens", "200", "--out", str(tmp_path / "larger")])
    assert end.value.code == 2
    errors = capsys.readouterr().err
    assert file in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "larger").exists()


@pytest.mark.parametrize("mode", ["routed", "shared"])
def test_a_vision_language_model_grows_by_new_tokens(mode, tmp_path, capsys):
    joint = train_new_tokens(make_joint(mode, torch.float32))
    source, out = tmp_path / "joint", tmp_path / "grown"
    joint.save_pretrained(source)
    make_processor(joint).save_pretrained(source)
    main(["grow", str(source), "--new_tokens", "19", "--old_rate", "0", "--out", str(out)])
    assert "largest change of the logits" in capsys.readouterr().out
    grown = AutoModelForImageTextToText.from_pretrained(out).eval()
    processor = AutoProcessor.from_pretrained(out)
    assert grown.config.new_tokens == 19
    assert grown.config.row_rates("q", 0) == [0.0] * 27 + [1.0] * 12 + [0.0] * 24
    batch = processor(text="<image>a", images=pictures(1), return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(grown(**batch).logits, joint(**batch).logits)
    wanted, _ = tokenformer.grow(joint, new_tokens=19, old_rate=0)
    for name, parameter in wanted.named_parameters():
        assert torch.equal(parameter, grown.get_parameter(name)), "in memory as on disk"


def test_growth_that_does_not_fit_a_vision_language_model_is_refused(folder, tmp_path, capsys):
    for mode in ("routed", "projector"):
        make_joint(mode, torch.float32).save_pretrained(tmp_path / mode)
    out = ["--out", tmp_path / "out"]
    for model, options, line in (
        ("routed", ["--ffn_tokens", 99], "--ffn_tokens 99 does not apply to a vision-language"),
        ("routed", ["--to", "354m"], "--to 354m does not apply to a vision-language model"),
        ("routed", ["--init", "clone"], "its sizes are --new_tokens"),
        ("routed", ["--new_tokens", 3], "more than new_tokens=3; growth cannot remove tokens"),
        ("routed", [], "give the number of new tokens after growth"),
        ("projector", ["--new_tokens", 9], "has no tokens for alignment to grow"),
    ):
        assert line in error_line(["grow", tmp_path / model, *options, *out], capsys)
    line = error_line(["grow", folder, "--new_tokens", 9, *out], capsys)
    assert "--new_tokens 9 does not apply to a TokenFormer" in line
    assert not (tmp_path / "out").exists()
