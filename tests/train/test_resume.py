"""Resuming runs: finished, past their last step, with changed options, in another stage."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.training import SIZES, language_model, losses, modification_times
from tokenformer.cli import main
from tokenformer.train.checkpoint import has_extra, read_document

SHORT = ["--run.steps", "6", "--run.checkpoint_every", "3", "--run.log_to", "[]"]


@pytest.fixture
def train(recipe: Path, tmp_path: Path) -> Any:
    """train(*options) trains in tmp_path/run and returns what is there."""

    def start(*options: str) -> Path:
        main(["train", str(recipe), "--out", str(tmp_path / "run"), *options])
        return tmp_path / "run"

    return start


def refused(train: Any, capsys: Any, *options: str) -> str:
    with pytest.raises(SystemExit) as end:
        train(*options)
    assert end.value.code == 2
    said: str = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_a_run_past_its_end_says_so_and_stops(train: Any, capsys: Any) -> None:
    out = train(*SHORT)
    before = modification_times(out)
    capsys.readouterr()
    train(*SHORT, "--max_steps", "4")
    assert (
        f"{out} is past step 4, the last one requested: it is at step 6; nothing was changed; "
        "to extend it: --run.steps 12 --override\n"
    ) == capsys.readouterr().out
    train(*SHORT)
    assert f"{out} is finished: it is at step 6; nothing was changed" in capsys.readouterr().out
    said = refused(train, capsys, *SHORT, "--optimizer.learning_rate", "0.5")
    assert "was not trained with these options: optimizer.learning_rate 0.01 -> 0.5" in said
    train(*SHORT, "--optimizer.learning_rate", "0.5", "--override")
    assert "is finished: it is at step 6; nothing was changed" in capsys.readouterr().out
    assert modification_times(out) == before

    assert "run.steps 6 -> 9; --override" in refused(train, capsys, *SHORT, "--run.steps", "9")
    assert modification_times(out) == before
    train(*SHORT, "--run.steps", "9", "--override")
    said = capsys.readouterr().out
    assert f"Resuming from step 6: {out}/checkpoints/step-00000006\n" in said
    assert "From step 6 on: run.steps 6 -> 9\n" in said
    assert "Learning rate: 1.00e-03 at step 6, 3.25e-03 at step 7\n" in said
    assert [step for step, *_ in losses(out)] == list(range(1, 10))
    record = yaml.safe_load((out / "config.yaml").read_text())
    assert record["run"]["steps"] == 9
    (row,) = yaml.safe_load((out / "config-history.yaml").read_text())["changes"]
    assert row == {"from_step": 6, "options": {"run.steps": {"before": 6, "after": 9}}}

    before = modification_times(out)
    train(*SHORT)  # the first command again
    assert "is past step 6, the last one requested: it is at step 9" in capsys.readouterr().out
    assert modification_times(out) == before


def test_an_unfinished_run_takes_changes_only_when_told(train: Any, capsys: Any) -> None:
    out = train(*SHORT)
    shutil.rmtree(out / "checkpoints" / "step-00000006")
    before = modification_times(out)
    said = refused(train, capsys, *SHORT, "--optimizer.learning_rate", "0.5")
    assert "at step 3 with other options: optimizer.learning_rate 0.01 -> 0.5" in said
    assert "run.steps 6 -> 12" in refused(train, capsys, *SHORT, "--run.steps", "12")
    assert modification_times(out) == before
    # At step 3 of 6, of which 2 are asked for: nothing to do, and how to go on.
    train(*SHORT, "--max_steps", "2")
    assert "it was started with 6 steps: to resume it, set --run.steps 6" in capsys.readouterr().out
    assert modification_times(out) == before
    train(*SHORT, "--optimizer.learning_rate", "0.02", "--run.keep_last", "5", "--override")
    said = capsys.readouterr().out
    assert "From step 3 on: optimizer.learning_rate 0.01 -> 0.02\n" in said
    assert "From step 3 on: run.keep_last 2 -> 5\n" in said
    record = yaml.safe_load((out / "config.yaml").read_text())
    assert (record["optimizer"]["learning_rate"], record["run"]["keep_last"]) == (0.02, 5)


def test_killed_before_the_export_a_finished_run_still_exports(train: Any) -> None:
    out = train(*SHORT)
    weights = (out / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(out / "model")
    (out / "loss.png").unlink()
    train(*SHORT)
    assert (out / "model" / "model.safetensors").read_bytes() == weights
    assert (out / "loss.png").exists()
    # A picture from before the last checkpoint: the export may be from before it too.
    newest = max((out / "checkpoints").iterdir())
    shutil.copytree(newest, out / "copy")
    shutil.rmtree(newest)
    shutil.move(out / "copy", newest)
    (newest / "manifest.json").touch()
    (newest / "x").touch()
    (newest / "x").unlink()
    before = (out / "loss.png").stat().st_mtime_ns
    train(*SHORT)
    assert (out / "loss.png").stat().st_mtime_ns > before


def test_a_run_in_stages_ends_and_is_extended_by_a_stage(recipe: Path, tmp_path: Path, capsys: Any):
    out = tmp_path / "run"
    sections = json.loads(recipe.read_text())
    sections["stages"] = [{"steps": 3}, {"steps": 3, "grow": {"sizes": SIZES}}]
    recipe.write_text(json.dumps(sections))
    words = ["train", str(recipe), "--out", str(out), "--run.log_to", "[]"]
    main(words)
    before = modification_times(out)
    capsys.readouterr()
    main([*words, "--max_steps", "4"])
    assert "is past step 4, the last one requested: it is at step 6" in capsys.readouterr().out
    main(words)
    assert "is finished: it is at step 6" in capsys.readouterr().out
    assert modification_times(out) == before
    sections["stages"].append({"steps": 2, "grow": {"sizes": {"ffn_tokens": 220}}})
    recipe.write_text(json.dumps(sections))
    with pytest.raises(SystemExit):
        main(words)
    assert "stages 2 -> 3; --override" in capsys.readouterr().err
    main([*words, "--override"])
    assert [step for step, *_ in losses(out)] == list(range(1, 9))
    assert json.loads((out / "model" / "config.json").read_text())["ffn_tokens"] == 220
    sections["stages"] = sections["stages"][:2]  # the stage before the last
    recipe.write_text(json.dumps(sections))
    before = modification_times(out)
    capsys.readouterr()
    main(words)
    assert "is past step 6, the last one requested: it is at step 8" in capsys.readouterr().out
    assert modification_times(out) == before


def options_of(checkpoint: Path) -> list[dict[str, Any]]:
    return [group["options"] for group in read_document(checkpoint)["optimizer"]]


def test_changed_options_of_the_optimizer_hold(train: Any) -> None:
    out = train(*SHORT)
    rates = ["--optimizer.rates", '{"*.key_tokens": 0.5}']
    other = ["--optimizer.betas", "[0.8, 0.9]", "--optimizer.eps", "1e-6"]
    other += ["--optimizer.weight_decay", "0.5"]
    train(*SHORT, "--run.steps", "7", *other, *rates, "--override")
    groups = options_of(out / "checkpoints" / "step-00000007")
    assert {(*group["betas"], group["eps"]) for group in groups} == {(0.8, 0.9, 1e-6)}
    assert {group["weight_decay"] for group in groups} == {0.5, 0.0}
    assert {group["rate_factor"] for group in groups} == {0.5, 1.0}
    train(*SHORT, "--run.steps", "8", "--override")  # the groups that differed are one again
    groups = options_of(out / "checkpoints" / "step-00000008")
    assert {(*group["betas"], group["eps"]) for group in groups} == {(0.9, 0.95, 1e-8)}
    assert {group["rate_factor"] for group in groups} == {1.0}


def test_a_run_takes_up_another_precision_and_an_average(train: Any) -> None:
    out = train(*SHORT)
    assert not has_extra(out / "checkpoints" / "step-00000006")
    train(*SHORT, "--run.steps", "8", "--run.precision", "fp16", "--run.ema", "0.5", "--override")
    assert [step for step, *_ in losses(out)] == list(range(1, 9))
    assert has_extra(out / "checkpoints" / "step-00000008")


def staged(recipe: Path, *steps: int) -> None:
    """Make a recipe one in two stages."""
    sections = json.loads(recipe.read_text())
    sections["stages"] = [{"steps": steps[0]}, {"steps": steps[1], "grow": {"sizes": SIZES}}]
    recipe.write_text(json.dumps(sections))


def back_to(out: Path, step: int) -> None:
    """A run as it was at a checkpoint."""
    for path in (out / "checkpoints").iterdir():
        if path.name > f"step-{step:08d}":
            shutil.rmtree(path)
    (out / "loss.png").unlink()
    (out / "growth-2.json").unlink()


def test_a_run_that_is_asked_for_fewer_steps_does_not_grow(recipe: Path, train: Any, capsys: Any):
    staged(recipe, 2, 2)
    options = ["--run.log_to", "[]", "--run.keep_last", "9"]
    out = train(*options)
    whole = losses(out)
    back_to(out, 2)
    capsys.readouterr()
    train(*options, "--max_steps", "2")
    said = capsys.readouterr().out
    assert f"{out} is finished: it is at step 2; no step was trained; it was started with 4" in said
    assert "stage 2" not in said
    assert not (out / "growth-2.json").exists()
    size = json.loads((out / "model" / "config.json").read_text())["ffn_tokens"]
    assert size != SIZES["ffn_tokens"]
    train(*options)
    assert losses(out) == whole
    assert (out / "growth-2.json").exists()


def test_a_stage_does_not_end_before_the_step_that_the_run_is_at(
    recipe: Path, train: Any, capsys: Any
) -> None:
    options = ["--run.log_to", "[]", "--run.keep_last", "9", "--run.checkpoint_every", "3"]
    staged(recipe, 4, 2)
    out = train(*options)
    back_to(out, 3)
    before = modification_times(out)
    staged(recipe, 2, 3)
    capsys.readouterr()
    said = refused(train, capsys, *options, "--override")
    assert f"{out} is at step 3, in stage 1, which ends at step 2 in this recipe; give" in said
    assert modification_times(out) == before


def test_a_begun_run_does_not_need_its_source(train: Any, tmp_path: Path, capsys: Any) -> None:
    language_model(tmp_path / "runA" / "model")
    language_model(tmp_path / "runB" / "model")
    options = [*SHORT, "--model.options", "{}", "--model.start_from"]
    out = train(*options, str(tmp_path / "runA"))
    shutil.rmtree(out / "checkpoints" / "step-00000006")
    shutil.rmtree(tmp_path / "runA")
    capsys.readouterr()
    said = refused(train, capsys, *options, str(tmp_path / "runB"))
    assert "cannot change model.start_from" in said
    train(*options, str(tmp_path / "runA"))
    assert [step for step, *_ in losses(out)] == list(range(1, 7))
    assert "start_from" not in capsys.readouterr().out
