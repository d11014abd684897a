"""Runs in stages: real processes, stopped in every stage and between stages."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.training import (
    MODEL,
    SECTIONS,
    SIZES,
    close,
    finish,
    losses,
    rates_by_name,
    two_ranks,
)
from tokenformer.cli import main
from tokenformer.errors import TrainingError
from tokenformer.models.language import TokenformerForCausalLM
from tokenformer.train import checkpoint
from tokenformer.train.metrics import read_metrics
from tokenformer.train.options import (
    GrowthOptions,
    OptimizerOptions,
    Recipe,
    ScheduleOptions,
    StageOptions,
)
from tokenformer.train.run import Run
from tokenformer.train.stages import plan, shortened
from tokenformer.train.text_workload import TextWorkload

STAGES: list[dict[str, Any]] = [
    {"steps": 8, "schedule": {"kind": "constant", "warmup_steps": 2}},
    {"steps": 9, "grow": {"sizes": SIZES}, "schedule": {"warmup_steps": 0}, "batch_size": 6},
    {"steps": 4, "grow": {"sizes": {"ffn_tokens": 300}, "init": "clone", "scale": "anneal"}},
]


@pytest.fixture
def staged(corpus: Path, tmp_path: Path) -> Path:
    path = tmp_path / "staged.yaml"
    sections = {**SECTIONS, "data": {**SECTIONS["data"], "corpus": str(corpus)}, "stages": STAGES}
    sections["optimizer"] = {**SECTIONS["optimizer"], "rate_law": "tokens"}
    path.write_text(json.dumps(sections))
    return path


def test_one_run_through_all_stages(staged, tmp_path):
    out = tmp_path / "run"
    done = finish(staged, out)
    assert done.returncode == 0, done.stderr
    rows = read_metrics(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 22))
    assert [row["stage"] for row in rows] == [1] * 8 + [2] * 9 + [3] * 4
    assert [row["tokens"] for row in rows][-1] == 32 * (8 * 4 + 9 * 6 + 4 * 4)
    flops = [b["flops"] - a["flops"] for a, b in itertools.pairwise(rows)]
    assert flops[6] < flops[8], "a larger model, a larger batch"
    config = json.loads((out / "model" / "config.json").read_text())
    assert config["ffn_tokens"] == 300
    assert json.loads((out / "growth-2.json").read_text())["max_output_change"] < 1e-5
    assert json.loads((out / "growth-3.json").read_text())["init"] == "clone"
    # The first loss after growth is close to the last one before.
    assert rows[8]["loss"] == pytest.approx(rows[7]["loss"], rel=0.1)


@pytest.mark.slow
def test_stopped_in_or_between_stages_it_ends_the_same(staged, tmp_path):
    whole = tmp_path / "whole"
    assert finish(staged, whole, "--run.ema", "0.9", "--run.keep_last", "20").returncode == 0
    kept = sorted((whole / "checkpoints").iterdir())
    assert [path.name for path in kept] == [f"step-{s:08d}" for s in (5, 8, 10, 15, 17, 20, 21)]
    for last in (5, 8, 10, 17, 20):
        out = tmp_path / f"from-{last}"
        shutil.copytree(whole, out)
        shutil.rmtree(out / "model")
        for path in (out / "checkpoints").iterdir():
            if int(path.name.removeprefix("step-")) > last:
                shutil.rmtree(path)
        assert finish(staged, out, "--run.ema", "0.9").returncode == 0
        assert losses(out) == losses(whole)
        assert weights(out) == weights(whole)


def weights(out: Path) -> bytes:
    return (out / "model" / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_grow_as_one_does(staged, tmp_path, parallel):
    alone, together = tmp_path / "alone", tmp_path / "together"
    assert finish(staged, alone).returncode == 0
    done = two_ranks(staged, together, parallel)
    assert done.returncode == 0, done.stderr
    assert close(losses(together), losses(alone))


def make_run(
    corpus: Path,
    folder: Path,
    *stages: StageOptions,
    optimizer: OptimizerOptions | None = None,
    **run: Any,
) -> Run:
    recipe = Recipe(stages=list(stages))
    recipe.model.options = dict(MODEL)
    recipe.data.corpus, recipe.data.length = str(corpus), 32
    recipe.optimizer = optimizer or OptimizerOptions(learning_rate=0.01)
    recipe.schedule = ScheduleOptions(warmup_steps=0)
    options = {**SECTIONS["run"], "checkpoint_every": 100, **run}
    for name, value in options.items():
        setattr(recipe.run, name, value)
    return Run(folder, recipe, TextWorkload(recipe), lambda line: None)


def tokens(run: Run) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().clone()
        for name, parameter in run.loop.task.model.named_parameters()
        if name.endswith("_tokens")
    }


def test_the_rate_law_follows_the_tokens_through_growth(corpus, tmp_path):
    """The rates after growth are those of a new run with as many tokens, per projection."""
    first = StageOptions(steps=2, schedule=ScheduleOptions(kind="constant", warmup_steps=0))
    second = StageOptions(steps=2, schedule=first.schedule, grow=GrowthOptions(sizes=SIZES))
    law = OptimizerOptions(learning_rate=0.01, rate_law="tokens", reference_tokens=50)
    run = make_run(corpus, tmp_path / "grown", first, second, optimizer=law)
    run.train(lambda row: None)
    sizes, rates = MODEL | SIZES, rates_by_name(run.loop.optimizer, run.loop.task.model)
    for name, rate in rates.items():
        count = sizes["ffn_tokens"] if ".ffn." in name else sizes["qkv_tokens"]
        if ".o." in name:
            count = sizes["output_tokens"]
        expected = {"value_tokens": 50 / count, "key_tokens": (50 / count) ** 0.5}
        assert rate == pytest.approx(0.01 * expected.get(name.rpartition(".")[2], 1.0)), name
    resumed = make_run(corpus, tmp_path / "grown", first, second, optimizer=law)
    resumed.loop.step()
    assert rates_by_name(resumed.loop.optimizer, resumed.loop.task.model) == rates


def test_frozen_tokens_are_the_same_to_the_bit_and_slow_ones_are_slow(corpus, tmp_path):
    grow = {"sizes": SIZES, "optimizer_state": "reset"}
    for rate in (0.0, 0.01):
        folder = tmp_path / str(rate)
        first, second = StageOptions(steps=5), StageOptions(steps=5)
        second.grow = GrowthOptions(**grow, old_rate=rate)
        make_run(corpus, folder, first).train(lambda row: None)
        small = tokens(make_run(corpus, folder, first))
        run = make_run(corpus, folder, first, second)
        run.train(lambda row: None)
        for name, after in tokens(run).items():
            before = small[name]
            old, new = after[: len(before)], after[len(before) :]
            assert not torch.equal(new, torch.zeros_like(new))
            if rate == 0:
                assert torch.equal(old, before), "weight decay included"
            else:
                assert 0 < (old - before).abs().max() < 0.02 * (new.abs().max())
        config = run.loop.task.model.config
        assert config.row_rates("ffn", 1) == [rate] * 128 + [1.0] * 72
    # What is frozen stays so in a third stage, and after saving.
    third = StageOptions(steps=2, grow=GrowthOptions(sizes={"ffn_tokens": 220}))
    folder = tmp_path / "0.0"
    second.grow = GrowthOptions(**grow, old_rate=0.0)
    run = make_run(corpus, folder, first, second, third)
    run.train(lambda row: None)
    for name, after in tokens(run).items():
        if ".ffn." in name:
            assert len(after) == 220
        before = small[name]
        assert after.shape[1:] == before.shape[1:]
    exported = json.loads((folder / "model" / "config.json").read_text())
    assert exported["token_rates"]["ffn"][0] == [[128, 0.0], [92, 1.0]]


def test_a_clone_of_frozen_tokens_is_refused(corpus, tmp_path):
    stages = [
        StageOptions(steps=1),
        StageOptions(steps=1, grow=GrowthOptions(sizes=SIZES, old_rate=0.0)),
        StageOptions(steps=1, grow=GrowthOptions(sizes={"ffn_tokens": 400}, init="clone")),
    ]
    with pytest.raises(TrainingError, match="stage 3 cannot grow: some tokens are frozen"):
        make_run(corpus, tmp_path / "run", *stages).train(lambda row: None)


def test_an_annealed_scale_ends_at_the_number_of_tokens(corpus, tmp_path):
    grow = GrowthOptions(sizes=SIZES, scale="anneal", anneal_steps=4)
    stages = [StageOptions(steps=2), StageOptions(steps=6, grow=grow)]
    run = make_run(corpus, tmp_path / "run", *stages)
    scales = []

    def note(row: dict[str, float]) -> None:
        scales.append(float(run.loop.task.model.model.layers[0].ffn.scale_tokens))

    run.train(note)
    assert scales == [128.0, 128.0, 146.0, 164.0, 182.0, 200.0, 200.0, 200.0]
    exported = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert exported["scale_tokens"] is None  # each is its number of tokens
    state = checkpoint.read_state(max((tmp_path / "run" / "checkpoints").iterdir()))
    assert state["config"]["scale_tokens"] is None


def test_what_is_saved_while_the_scale_moves_has_the_scale_it_had(corpus, tmp_path):
    grow = GrowthOptions(sizes=SIZES, scale="anneal", anneal_steps=4)
    stages = [StageOptions(steps=2), StageOptions(steps=6, grow=grow)]
    run = make_run(corpus, tmp_path / "run", *stages, checkpoint_every=3)

    def interrupt(row: dict[str, float]) -> None:
        if row["step"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.train(interrupt)
    exported = TokenformerForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert exported.model.layers[0].ffn.scale_tokens == 146.0  # a quarter of the way
    state = checkpoint.read_state(tmp_path / "run" / "checkpoints" / "step-00000003")
    assert state["config"]["scale_tokens"]["ffn"][0] == 146.0
    scales = []
    run = make_run(corpus, tmp_path / "run", *stages, checkpoint_every=3)
    run.train(
        lambda row: scales.append(float(run.loop.task.model.model.layers[0].ffn.scale_tokens))
    )
    assert scales == [164.0, 182.0, 200.0, 200.0, 200.0]


def test_a_transformer_grows_by_ligo_on_the_text_of_the_run(corpus, tmp_path):
    sizes = {"hidden_size": 64, "steps": 3}
    grow = GrowthOptions(sizes=sizes, method="ligo", optimizer_state="reset")
    stages = [StageOptions(steps=2), StageOptions(steps=2, grow=grow)]
    recipe = Recipe(stages=stages)
    recipe.model.family = "transformer"
    recipe.model.options = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    recipe.data.corpus, recipe.data.length = str(corpus), 32
    for name, value in SECTIONS["run"].items():
        setattr(recipe.run, name, value)
    Run(tmp_path / "run", recipe, TextWorkload(recipe), lambda line: None).train(lambda row: None)
    assert json.loads((tmp_path / "run" / "growth-2.json").read_text())["method"] == "ligo"
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["hidden_size"] == 64


def test_plan_and_shortened():
    recipe = Recipe(
        stages=[StageOptions(steps=100), StageOptions(steps=300, grow=GrowthOptions(to="354m"))]
    )
    first, second = plan(shortened(recipe, 8))
    assert (first.first_step, first.last_step, second.last_step) == (0, 2, 8)
    assert second.schedule.warmup_steps == 0
    assert plan(Recipe())[0].last_step == 1000
    with pytest.raises(ValueError, match="stage 1 has `grow`"):
        plan(Recipe(stages=[StageOptions(grow=GrowthOptions())]))
    with pytest.raises(ValueError, match="stage 2 lacks `grow`"):
        plan(Recipe(stages=[StageOptions(), StageOptions()]))


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"grow": {"sizes": {"ffn_tokens": 4}}}, "cannot shrink"),
        ({"grow": {"inits": "zero"}}, "inits"),
        ({"grow": {"init": "zeros"}}, "init"),
        ({"stepz": 3}, "stepz"),
    ],
)
def test_a_mistaken_stage_is_named(staged, tmp_path, stage, message):
    sections = json.loads(staged.read_text())
    sections["stages"] = [{"steps": 2}, {"steps": 2, **stage}]
    staged.write_text(json.dumps(sections))
    done = finish(staged, tmp_path / "run")
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_checkpoint_grows_with_its_optimizer_into_a_run_that_goes_on(recipe, tmp_path, capsys):
    small, large = tmp_path / "small", tmp_path / "large"
    assert finish(recipe, small, "--run.steps", "10", "--run.ema", "0.9").returncode == 0
    path = small / "checkpoints" / "step-00000010"
    sizes = ["--qkv_tokens", "48", "--ffn_tokens", "200"]
    main(["grow", str(path), *sizes, "--optimizer_state", "mean", "--out", str(large)])
    assert "Saved to" in capsys.readouterr().out
    done = finish(recipe, large, "--run.steps", "14", "--run.ema", "0.9")
    assert done.returncode == 0, done.stderr
    assert [step for step, *_ in losses(large)] == [11, 12, 13, 14]
    assert losses(large)[0][1] == pytest.approx(losses(small)[-1][1], rel=0.1)
    assert json.loads((large / "model" / "config.json").read_text())["ffn_tokens"] == 200
    # It goes on as a second stage with the same growth does.
    sections = json.loads(recipe.read_text())
    grow = {"sizes": {"qkv_tokens": 48, "ffn_tokens": 200}, "optimizer_state": "mean"}
    sections["stages"] = [{"steps": 10}, {"steps": 4, "grow": grow}]
    recipe.write_text(json.dumps(sections))
    staged = tmp_path / "stages"
    assert finish(recipe, staged, "--run.ema", "0.9").returncode == 0
    assert losses(staged)[10][1] == losses(large)[0][1]

    main(["grow", str(small), *sizes, "--out", str(tmp_path / "model")])
    assert (tmp_path / "model" / "tokenizer.json").exists()
    for arguments in (["--optimizer_state", "mean"], ["--old_rate", "-1"]):
        source = small if arguments[0] == "--optimizer_state" else path
        with pytest.raises(SystemExit) as end:
            main(["grow", str(source), *sizes, *arguments, "--out", str(tmp_path / "none")])
        assert end.value.code == 2
    (path / "state.json").write_text("torn")
    with pytest.raises(SystemExit):
        main(["grow", str(path), *sizes, "--out", str(tmp_path / "none")])
    assert "state.json" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
