"""Training models with routed tokens: metrics, balance, resuming, several ranks."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.support.training import (
    MODEL,
    close,
    finish,
    losses,
    make_loop,
    make_run,
    two_ranks,
)
from tokenformer.layers.router import routers
from tokenformer.train.loop import train
from tokenformer.train.metrics import read_metrics

ROUTED = {
    "active_groups": {"ffn": 4, "q": 2},
    "group_size": 8,
    "balance_rate": 0.03,
    "router": "centroid",
}
LEARNED = {**ROUTED, "router": "learned", "theta_norm": "chosen"}


def rows_of(**options: Any) -> list[dict[str, Any]]:
    model_options = options.pop("model_options", ROUTED)
    return train(make_loop(model_options=model_options, **options), lambda row: None)


@pytest.mark.parametrize("model_options", [ROUTED, LEARNED], ids=["centroid", "learned"])
def test_a_routed_model_learns_and_reports_its_load(model_options):
    rows = rows_of(model_options=model_options)
    assert rows[-1]["val_loss"] < 0.6 * rows[0]["loss"]
    groups = 2 * (128 // 8 + 32 // 8)
    assert all(0 <= row["dead_groups"] < groups for row in rows)
    assert all(row["peak_load"] >= 1 for row in rows)


def test_dense_models_have_no_load():
    assert "dead_groups" not in rows_of(model_options={}, steps=1)[0]


@pytest.mark.parametrize(
    "option", [pytest.param("compile", marks=pytest.mark.slow), "activation_checkpointing"]
)
def test_what_saves_time_or_memory_changes_nothing(option, monkeypatch):
    if option == "compile":
        compile = torch.compile
        monkeypatch.setattr(torch, "compile", lambda m: compile(m, backend="aot_eager"))
    found, expected = rows_of(**{option: True}, steps=5), rows_of(steps=5)
    for name in ("loss", "dead_groups", "peak_load"):
        assert [row[name] for row in found] == pytest.approx(
            [row[name] for row in expected], abs=1e-5
        )


@pytest.mark.parametrize("micro", [1, 3])
def test_load_and_losses_do_not_depend_on_accumulation(micro):
    found, expected = rows_of(micro_batch_size=micro, steps=10), rows_of(steps=10)
    for name in ("loss", "dead_groups", "peak_load"):
        assert [row[name] for row in found] == pytest.approx(
            [row[name] for row in expected], abs=1e-4
        )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision(precision):
    found, expected = rows_of(precision=precision, steps=10), rows_of(steps=10)
    assert [row["loss"] for row in found] == pytest.approx(
        [row["loss"] for row in expected], rel=0.05
    )


def test_a_step_that_is_not_taken_moves_no_bias():
    loop = make_loop(model_options=ROUTED)
    loop.step()
    biases = [router.bias.clone() for router in routers(loop.task.model)]
    assert all(bias.any() for bias in biases)
    with torch.no_grad():
        loop.task.model.model.norm.weight[0] = torch.nan
    assert "problem" in loop.step()
    for router, bias in zip(routers(loop.task.model), biases, strict=True):
        assert torch.equal(router.bias, bias)


@pytest.fixture
def routed_recipe(recipe: Path) -> Callable[..., Path]:
    def write(**options: Any) -> Path:
        sections = json.loads(recipe.read_text())
        sections["model"]["options"] = {**MODEL, **options}
        recipe.write_text(json.dumps(sections))
        return recipe

    return write


def test_checkpoints_hold_the_biases(corpus, tmp_path, monkeypatch):
    for name, value in LEARNED.items():
        monkeypatch.setitem(MODEL, name, value)
    reports: list[str] = []
    whole = make_run(corpus, tmp_path / "whole", reports, steps=12)
    whole.train(lambda row: None)
    # Back to an earlier checkpoint: the same losses and loads follow, bit for bit.
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "whole", again)
    for newest in sorted((again / "checkpoints").iterdir())[1:]:
        shutil.rmtree(newest)
    resumed = make_run(corpus, again, reports, steps=12)
    resumed.train(lambda row: None)
    for row, other in zip(
        read_metrics(tmp_path / "whole" / "metrics.jsonl"),
        read_metrics(again / "metrics.jsonl"),
        strict=True,
    ):
        same = row.keys() - {"seconds"}
        assert {name: row[name] for name in same} == {name: other[name] for name in same}
    for folder in (tmp_path / "whole", again):
        with safe_open(folder / "model" / "model.safetensors", "pt") as file:
            bias = file.get_tensor("model.layers.0.ffn.router.bias")
            assert torch.equal(bias, whole.loop.task.model.model.layers[0].ffn.router.bias)
            assert bias.any()


@pytest.mark.slow
def test_a_run_grows_between_stages(routed_recipe, tmp_path):
    """Twice the groups, as many active ones, the same FLOPs per token but for the router."""
    recipe = routed_recipe(**LEARNED)
    sections = json.loads(recipe.read_text())
    sections["run"]["ema"] = 0.9
    sections["stages"] = [{"steps": 6}, {"steps": 6, "grow": {"sizes": {"ffn_tokens": 256}}}]
    recipe.write_text(json.dumps(sections))
    done = finish(recipe, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert rows[6]["loss"] == pytest.approx(rows[5]["loss"], rel=0.1)
    flops = [rows[step]["flops"] - rows[step - 1]["flops"] for step in (5, 7)]
    assert flops[0] < flops[1] < 1.1 * flops[0]
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["ffn_tokens"] == 256
    assert config["active_groups"] == LEARNED["active_groups"]
    report = json.loads((tmp_path / "run" / "growth-2.json").read_text())
    assert report["max_output_change"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "options"), [("ddp", LEARNED), ("fsdp", ROUTED)])
def test_two_ranks_give_the_losses_of_one(routed_recipe, tmp_path, parallel, options):
    recipe = routed_recipe(**options)
    alone, together = tmp_path / "alone", tmp_path / "together"
    assert finish(recipe, alone).returncode == 0
    done = two_ranks(recipe, together, parallel)
    assert done.returncode == 0, done.stderr
    assert close(losses(together), losses(alone))
    loads = [
        [row["dead_groups"] for row in read_metrics(out / "metrics.jsonl")]
        for out in (alone, together)
    ]
    assert loads[0] == loads[1]
    # One rank goes on with what two have saved.
    shutil.rmtree(max((together / "checkpoints").iterdir()))
    assert finish(recipe, together).returncode == 0
    assert close(losses(together), losses(alone))
