"""A checkpoint of a run converts to the same model that the run exports."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.training import SECTIONS
from tokenformer.cli import main
from tokenformer.train.checkpoint import save

RUN = {**SECTIONS["run"], "steps": 4, "checkpoint_every": 2, "validate_every": 4, "keep_last": 2}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus and two runs of four steps, one with a moving average of the weights:
    `plain` and `averaged`."""
    home = tmp_path_factory.mktemp("home")
    (home / "text.txt").write_text("tokens attend to tokens, and parameters are tokens too\n" * 200)
    main(["prepare", str(home / "text.txt"), "--out", str(home / "corpus"), "--validation", "0.3"])
    for name, ema in (("plain", None), ("averaged", 0.9)):
        sections: dict[str, Any] = {
            **SECTIONS,
            "data": {**SECTIONS["data"], "corpus": str(home / "corpus")},
            "run": {**RUN, "ema": ema},
        }
        (home / f"{name}.yaml").write_text(json.dumps(sections))  # JSON is YAML
        main(["train", str(home / f"{name}.yaml"), "--out", str(home / name)])
    return home


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("run", ["plain", "averaged"])
def test_the_last_checkpoint_is_the_export(home, tmp_path, capsys, run):
    step = home / run / "checkpoints" / "step-00000004"
    main(["convert", str(step), "--out", str(tmp_path / "new")])
    assert f"tokenizer from {home / run / 'model'}" in capsys.readouterr().out
    exported = home / run / "model"
    assert same(weights(tmp_path / "new"), weights(exported))
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert json.loads((tmp_path / "new" / name).read_text()) == json.loads(
            (exported / name).read_text()
        ), name
    ids = torch.arange(20)[None]
    ours, theirs = (AutoModelForCausalLM.from_pretrained(p) for p in (tmp_path / "new", exported))
    assert torch.equal(ours(ids).logits, theirs(ids).logits)


def test_a_checkpoint_of_a_run_on_images(tmp_path, capsys):
    """With the image processor of the run's export, or else of its recipe, or else of its size."""
    model = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
    sections = {
        **SECTIONS,
        "model": {"options": model},
        "data": {"images": "digits", "crop_share": 0.5},
        "run": {**RUN, "steps": 2},
    }
    run, recipe = tmp_path / "run", tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(sections))
    main(["train", str(recipe), "--out", str(run)])
    step = run / "checkpoints" / "step-00000002"
    with pytest.raises(SystemExit):
        main(["convert", str(step), "--out", str(tmp_path / "x"), "--tokenizer", "bytes.json"])
    assert "--tokenizer bytes.json does not apply to an image classifier" in capsys.readouterr().err
    main(["convert", str(step), "--out", str(tmp_path / "beside")])
    assert f"image processor from {run / 'model' / 'preprocessor_c'}" in capsys.readouterr().out
    (run / "model").rename(tmp_path / "exported")
    main(["convert", str(step), "--out", str(tmp_path / "recipe")])
    assert f"image processor from {run / 'config.yaml'}" in capsys.readouterr().out
    for found in (tmp_path / "beside", tmp_path / "recipe"):
        assert same(weights(found), weights(tmp_path / "exported"))
        for name in ("config.json", "preprocessor_config.json"):
            kept, exported = ((f / name).read_text() for f in (found, tmp_path / "exported"))
            assert json.loads(kept) == json.loads(exported), name
    (run / "config.yaml").unlink()
    main(["convert", str(step), "--out", str(tmp_path / "alone")])
    processor = json.loads((tmp_path / "alone" / "preprocessor_config.json").read_text())
    assert processor["size"] == {"height": 8, "width": 8}


def test_the_last_weights_instead_of_the_average(home, tmp_path):
    step = home / "averaged" / "checkpoints" / "step-00000004"
    main(["convert", str(step), "--weights", "last", "--out", str(tmp_path / "last")])
    main(["convert", str(step), "--weights", "average", "--out", str(tmp_path / "average")])
    assert not same(weights(tmp_path / "last"), weights(tmp_path / "average"))
    # The same recipe without an average has trained the same weights.
    assert same(weights(tmp_path / "last"), weights(home / "plain" / "model"))


def test_an_earlier_step_and_the_tokenizer_of_the_corpus(home, tmp_path):
    shutil.copytree(home / "plain", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    step = tmp_path / "run" / "checkpoints" / "step-00000002"
    main(["convert", str(step), "--out", str(tmp_path / "new")])
    assert not same(weights(tmp_path / "new"), weights(home / "plain" / "model"))
    assert AutoTokenizer.from_pretrained(tmp_path / "new")("a").input_ids == [97]


def test_a_checkpoint_away_from_its_run_has_no_tokenizer(home, tmp_path, capsys):
    step = home / "plain" / "checkpoints" / "step-00000004"
    shutil.copytree(step, tmp_path / "step")
    main(["convert", str(tmp_path / "step"), "--out", str(tmp_path / "new")])
    assert "no tokenizer found: give --tokenizer FILE" in capsys.readouterr().out
    assert same(weights(tmp_path / "new"), weights(home / "plain" / "model"))
    file = str(home / "corpus" / "tokenizer" / "tokenizer.json")
    new = str(tmp_path / "with")
    main(["convert", str(tmp_path / "step"), "--out", new, "--tokenizer", file])
    assert AutoTokenizer.from_pretrained(new)("a").input_ids == [97]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--weights", "average"], "--weights average: the run has no moving average"),
        (["--weights", "first"], "--weights first is unknown; choose average or last"),
        (
            ["--num_attention_heads", "4"],
            "--num_attention_heads 4 does not apply to a source of kind",
        ),
        (["--to", "released"], "--to released does not apply to a source of kind checkpoint"),
    ],
)
def test_options_that_do_not_fit_are_told(home, tmp_path, capsys, options, message):
    step = home / "plain" / "checkpoints" / "step-00000004"
    with pytest.raises(SystemExit) as end:
        main(["convert", str(step), "--out", str(tmp_path / "new"), *options])
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert error.count("\n") == 1
    assert message in error
    assert not any(tmp_path.iterdir())


def test_a_torn_checkpoint_and_one_of_no_known_model_are_told(home, tmp_path, capsys, make_model):
    shutil.copytree(home / "plain" / "checkpoints" / "step-00000004", tmp_path / "torn")
    shard = next((tmp_path / "torn").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    other = save(tmp_path, model=make_model("tokenformer"), state={"step": 1})
    for path, message in ((tmp_path / "torn", "bytes"), (other, "has no 'config'")):
        with pytest.raises(SystemExit) as end:
            main(["convert", str(path), "--out", str(tmp_path / "new")])
        assert end.value.code == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "new").exists()
