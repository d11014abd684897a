"""Training runs as real processes that are killed, stopped and resumed."""

import json
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests.support.processes import LIMIT, started, wait_until
from tests.support.training import (
    close,
    command,
    finish,
    losses,
    make_run,
    modification_times,
    poison,
    two_ranks,
)
from tokenformer.cli import main
from tokenformer.errors import TrainingError


def test_a_whole_run_leaves_what_is_promised(recipe, tmp_path):
    out = tmp_path / "run"
    done = finish(recipe, out)
    assert done.returncode == 0, done.stderr
    assert {p.name for p in out.iterdir()} == {
        "checkpoints",
        "config.yaml",
        "loss.png",
        "metrics.jsonl",
        "model",
        "tensorboard",
    }
    steps = [step for step, _, _ in losses(out)]
    assert steps == list(range(1, 25))
    assert len(list((out / "checkpoints").iterdir())) in (2, 3)  # the last two, and the best

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(out / "model")
    assert model.config.hidden_size == 32
    assert AutoTokenizer.from_pretrained(out / "model")("a").input_ids == [97]

    # Again: there is nothing left to do, and no file changes.
    before = modification_times(out)
    done = finish(recipe, out)
    assert done.returncode == 0
    assert "is finished: it is at step 24" in done.stdout
    assert modification_times(out) == before


def test_stopped_by_a_signal_it_goes_on_to_the_same_losses(recipe, tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert finish(recipe, whole).returncode == 0
    with started(command(recipe, stopped), stdout=subprocess.PIPE, text=True) as running:
        wait_until(lambda: len(losses(stopped)) >= 2, running)
        running.send_signal(signal.SIGTERM)
        output = running.communicate(timeout=LIMIT)[0]
    assert running.returncode == 128 + signal.SIGTERM
    assert "To resume: tokenformer train" in output
    made = len(losses(stopped))
    assert 2 <= made < 24
    done = finish(recipe, stopped)
    assert done.returncode == 0
    assert f"Resuming from step {made}: {stopped}/checkpoints/step-{made:08d}" in done.stdout
    assert losses(stopped) == losses(whole)


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_with_the_same_losses(recipe, tmp_path):
    check_kills(recipe, tmp_path, kills=2)


@pytest.mark.slow
def test_killed_ten_times_and_thrice_inside_a_save(recipe, tmp_path):
    # A save every step, of a model large enough that writing takes a while.
    options = ("--run.checkpoint_every", "1", "--model.options.hidden_size", "512")
    check_kills(recipe, tmp_path, kills=10, inside_saves=3, options=options)


def check_kills(
    recipe: Path,
    tmp_path: Path,
    kills: int,
    inside_saves: int = 0,
    options: tuple[str, ...] = (),
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert finish(recipe, whole, *options).returncode == 0
    chance = random.Random(1)
    torn = 0
    for _ in range(60):
        seen = len(losses(killed))
        with started(command(recipe, killed, *options), stdout=subprocess.DEVNULL) as running:
            wait_until(lambda seen=seen: len(losses(killed)) > seen, running)
            if torn < inside_saves:
                wait_until(lambda: unfinished(killed), running)
            else:
                time.sleep(chance.random() * 0.3)
        torn += unfinished(killed)
        kills -= 1
        if kills <= 0 and torn >= inside_saves:
            break
        if len(losses(killed)) >= 23:  # almost through: start afresh
            shutil.rmtree(killed)
    assert kills <= 0
    assert torn >= inside_saves
    assert finish(recipe, killed, *options).returncode == 0
    assert losses(killed) == losses(whole)


def unfinished(out: Path) -> bool:
    return any((out / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(recipe, tmp_path):
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    assert finish(recipe, whole).returncode == 0
    shutil.copytree(whole, torn)
    newest = max((torn / "checkpoints").iterdir())
    shard = next(newest.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-7])
    done = finish(recipe, torn)
    assert done.returncode == 0, done.stderr
    assert shard.name in done.stdout.replace("\n", "")
    assert losses(torn) == losses(whole)


@pytest.mark.slow
def test_a_moving_average_survives_an_interruption_and_is_what_is_exported(recipe, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert finish(recipe, whole, "--run.ema", "0.9").returncode == 0
    shutil.copytree(whole, broken)
    shutil.rmtree(max((broken / "checkpoints").iterdir()))
    shutil.rmtree(broken / "model")
    assert finish(recipe, broken, "--run.ema", "0.9").returncode == 0
    assert losses(broken) == losses(whole)
    weights = [(out / "model" / "model.safetensors").read_bytes() for out in (whole, broken)]
    assert weights[0] == weights[1]
    plain = tmp_path / "plain"
    assert finish(recipe, plain).returncode == 0
    assert [row[1] for row in losses(plain)] == [row[1] for row in losses(whole)]
    assert (plain / "model" / "model.safetensors").read_bytes() != weights[0]
    done = finish(recipe, plain, "--run.ema", "0.9", "--run.steps", "30", "--override")
    assert done.returncode == 0, done.stderr
    assert (plain / "model" / "model.safetensors").read_bytes() != weights[0]


@pytest.mark.slow
def test_a_run_that_is_under_way_is_not_begun_again(recipe, tmp_path):
    from tokenformer.files import lock_folder

    with lock_folder(tmp_path / "run"):
        done = finish(recipe, tmp_path / "run")
    assert done.returncode == 2
    assert "another process is training in" in done.stderr
    assert finish(recipe, tmp_path / "run", "--run.steps", "2").returncode == 0


def test_the_model_can_be_loaded_while_the_run_goes_on(corpus, tmp_path):
    from transformers import AutoModelForCausalLM

    run = make_run(corpus, tmp_path / "run", [])
    held_out = {}

    def look(row):
        if row["step"] == 9:  # the last export is that of the checkpoint at step 5
            model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
            held_out[5] = model.model.norm.weight.detach().clone()
        if row["step"] == 5:
            held_out["live"] = run.loop.task.model.model.norm.weight.detach().clone()

    run.train(look)
    assert torch.equal(held_out[5], held_out["live"])


def test_another_recipe_in_the_same_folder_is_refused(recipe, tmp_path):
    out = tmp_path / "run"
    assert finish(recipe, out, "--max_steps", "2").returncode == 0
    done = finish(recipe, out, "--data.length", "16")
    assert done.returncode == 2
    assert "at step 2 that cannot change data.length 32 -> 16; name another --out" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--run.stepz", "3"], "--run.stepz is not an option; did you mean --run.steps?"),
        (["--run.steps", "0"], "steps=0 must be at least 1"),
        (["--run.precision", "fp8"], "--run.precision fp8"),
        (["--data.corpus", "nowhere"], "data.corpus: no nowhere; make it with `tokenformer prep"),
        (["--model.options.hidden_size", "33"], "hidden_size=33 must be a multiple"),
        (["--model.preset", "125m"], "preset '125m' is unknown"),
        (["--optimizer.rates", '{"*.nothing": 0}'], "no parameter matches '*.nothing'"),
        (["--max_steps", "0"], "--max_steps 0"),
        (["--run.log_to", "nowhere"], "run.log_to: 'nowhere' is unknown; choose from tensorboard"),
        (["--run.log_to", "wandb"], "run.log_to: wandb is not installed; pip install wandb"),
        (["--model.start_from", "./nowhere"], "model.start_from: no ./nowhere"),
        (["--model.options.ffn_tokenz", "3"], "did you mean 'ffn_tokens'?"),
        (["--model.options.foo", "3"], "model.options.foo is not an option of TokenformerConfig"),
        (["--data.length", "30000"], "split validation of "),
    ],
    ids=" ".join,
)
def test_bad_options_are_one_line_and_exit_code_2(recipe, tmp_path, capfd, options, message):
    with pytest.raises(SystemExit) as end:
        main(["train", str(recipe), "--out", str(tmp_path / "run"), *options])
    assert end.value.code == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_a_nan_stops_the_run_and_names_the_step_and_its_samples(corpus, tmp_path):
    run = make_run(corpus, tmp_path / "run", [])
    with pytest.raises(TrainingError, match="step 8, samples 28 to 31: the loss is nan"):
        run.train(poison(run, at=7))
    steps = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert steps == ["step-00000005"]


def test_rollback_goes_back_to_the_last_checkpoint_and_on_with_other_samples(corpus, tmp_path):
    reports: list[str] = []
    run = make_run(corpus, tmp_path / "run", reports, on_spike="rollback")
    run.train(poison(run, at=7))
    assert reports == ["step 8, samples 28 to 31: the loss is nan; rolled back to step 5"]
    assert run.loop.progress.step == 24
    assert run.loop.progress.samples == (24 + 3) * 4  # steps 6 to 8 were made again, with new ones
    assert all(p.isfinite().all() for p in run.loop.task.model.parameters())


def test_skipping_for_ever_is_given_up(corpus, tmp_path):
    reports: list[str] = []
    run = make_run(corpus, tmp_path / "run", reports, on_spike="skip")
    with pytest.raises(TrainingError, match="11 such steps in a row"):
        run.train(poison(run, at=2))
    assert len(reports) == 10
    assert reports[0].endswith("the loss is nan; skipped")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_give_the_losses_of_one_and_resume_each_other(recipe, tmp_path, parallel):
    sections = json.loads(recipe.read_text())
    sections["run"]["ema"] = 0.9  # its validation must leave no trace in the weights trained
    recipe.write_text(json.dumps(sections))
    alone = tmp_path / "alone"
    assert finish(recipe, alone).returncode == 0
    expected = losses(alone)

    together = tmp_path / "together"
    done = two_ranks(recipe, together, parallel)
    assert done.returncode == 0, done.stderr
    assert close(losses(together), expected)

    # One rank goes on with what two have saved, and the other way round.
    for first, second in (("two", "one"), ("one", "two"), ("two", "two")):
        out = tmp_path / f"{first}-{second}"
        shutil.copytree(together if first == "two" else alone, out)
        shutil.rmtree(max((out / "checkpoints").iterdir()))  # back to an earlier one
        done = finish(recipe, out) if second == "one" else two_ranks(recipe, out, parallel)
        assert done.returncode == 0, done.stderr
        assert close(losses(out), expected)
