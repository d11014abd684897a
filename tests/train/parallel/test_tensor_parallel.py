"""Training with the tokens sharded over processes gives the results of one process."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.processes import run_processes
from tests.support.training import MODEL, close, losses
from tokenformer.cli import main
from tokenformer.train.metrics import read_metrics
from tokenformer.train.options import (
    DataOptions,
    GrowthOptions,
    ModelOptions,
    OptimizerOptions,
    Recipe,
    RunOptions,
    ScheduleOptions,
    StageOptions,
)
from tokenformer.train.parallel.mesh import make_mesh
from tokenformer.train.run import Run
from tokenformer.train.text_workload import TextWorkload


def make_recipe(corpus: Path, *, stages: list[StageOptions] = [], **run: Any) -> Recipe:  # noqa: B006
    tokens = {"qkv_tokens": 23, "output_tokens": 20, "ffn_tokens": 45, "learned_scale": True}
    return Recipe(
        ModelOptions(options={**MODEL, **tokens}),
        DataOptions(corpus=str(corpus), length=16),
        OptimizerOptions(learning_rate=0.01),
        ScheduleOptions(warmup_steps=2),
        RunOptions(
            **{
                "steps": 8,
                "batch_size": 4,
                "micro_batch_size": 1,
                "checkpoint_every": 3,
                "validate_every": 4,
                "validation_sequences": 3,
                "ema": 0.9,
                "nested": [0.5, 1.0],
                "log_to": [],
                **run,
            }
        ),
        stages,
    )


def train(recipe: Recipe, out: Path) -> None:
    torch.manual_seed(0)
    Run(out, recipe, TextWorkload(recipe), lambda line: None).train(lambda row: None)


def train_and_go_on(recipe: Recipe, folder: Path) -> None:
    train(recipe, folder / "two")
    train(recipe, folder / "one-two")


def interrupted(out: Path, to: Path) -> Path:
    """A copy of a run, back at an earlier checkpoint."""
    shutil.copytree(out, to)
    shutil.rmtree(max((to / "checkpoints").iterdir()))
    return to


def assert_same_model(found: Path, expected: Path) -> None:
    ours, theirs = (load_file(out / "model" / "model.safetensors") for out in (found, expected))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        # As a whole: where a gradient is nearly zero, AdamW turns its rounding, which differs from
        # CPU to CPU, into a step of up to the learning rate.
        assert (ours[name] - tensor).norm() < 1e-4 * tensor.norm(), name


@pytest.mark.slow
def test_two_processes_train_as_one_and_go_on_with_each_others_checkpoints(corpus, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    train(make_recipe(corpus), one)
    interrupted(one, tmp_path / "one-two")
    run_processes(2, train_and_go_on, tmp_path, make_recipe(corpus, tensor_parallel=2), tmp_path)
    train(make_recipe(corpus), interrupted(two, tmp_path / "two-one"))
    for name in ("two", "one-two", "two-one"):
        assert close(losses(tmp_path / name), losses(one)), name
        assert_same_model(tmp_path / name, one)
    norms = [
        [row["gradient_norm"] for row in read_metrics(out / "metrics.jsonl")] for out in (one, two)
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)


@pytest.mark.slow
def test_tokens_and_batch_are_spread_over_a_grid_of_four(corpus, tmp_path):
    """Two by two, with FSDP2, and growth to an uneven number of tokens on the way."""
    stages = [
        StageOptions(steps=4),
        StageOptions(steps=4, grow=GrowthOptions(sizes={"ffn_tokens": 71, "qkv_tokens": 31})),
    ]
    train(make_recipe(corpus, stages=stages), tmp_path / "one")
    interrupted(tmp_path / "one", tmp_path / "one-two")
    recipe = make_recipe(corpus, stages=stages, tensor_parallel=2, activation_checkpointing=True)
    run_processes(4, train_and_go_on, tmp_path, recipe, tmp_path)
    for name in ("two", "one-two"):
        assert close(losses(tmp_path / name), losses(tmp_path / "one")), name
        assert_same_model(tmp_path / name, tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"precision": "bf16"}, 0.02),
        pytest.param({"compile": True}, 1e-5, marks=pytest.mark.slow),
    ],
)
def test_other_options_stay_near_one_process(corpus, tmp_path, options, tolerance):
    train(make_recipe(corpus, nested=None), tmp_path / "one")
    recipe = make_recipe(corpus, nested=None, tensor_parallel=2, **options)
    run_processes(2, train, tmp_path, recipe, tmp_path / "two")
    found, expected = losses(tmp_path / "two"), losses(tmp_path / "one")
    assert [row[1] for row in found] == pytest.approx([row[1] for row in expected], abs=tolerance)


def test_processes_that_do_not_divide_are_named():
    with pytest.raises(ValueError, match="tensor_parallel=2 must divide the number of processes"):
        make_mesh(2, "cpu")


@pytest.mark.parametrize(
    "options", [{"parallel": "ddp"}, {"precision": "fp16"}, {"tensor_parallel": 0}]
)
def test_what_does_not_go_with_it_is_refused(options):
    with pytest.raises(ValueError, match="tensor_parallel="):
        RunOptions(**{"tensor_parallel": 2, **options})


def test_the_command_refuses_in_a_line(recipe, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["train", str(recipe), "--out", str(tmp_path / "run"), "--run.tensor_parallel", "2"])
    assert stopped.value.code == 2
    assert "must divide the number of processes, which is 1" in capsys.readouterr().err


def refuse_models(corpus: Path, folder: Path) -> None:
    recipe = make_recipe(corpus, tensor_parallel=2)
    recipe.model.options["qkv_tokens"] = 1
    with pytest.raises(ValueError, match="leaves a process without any of the 1 tokens"):
        train(recipe, folder)
    recipe.model = ModelOptions(family="transformer", options=MODEL)
    with pytest.raises(ValueError, match="TransformerForCausalLM has none"):
        train(recipe, folder)


def test_models_that_cannot_be_spread_are_refused(corpus, tmp_path):
    run_processes(4, refuse_models, tmp_path, corpus, tmp_path / "run")


def draw_together() -> None:
    """Whatever the generators of two processes were, those that share tokens draw alike."""
    mesh = make_mesh(2, "cpu")
    assert mesh.tensor is not None
    assert (mesh.data.count, mesh.tensor.count) == (1, 2)
    torch.manual_seed(mesh.tensor.index)
    mesh.share_generators()
    first, second = mesh.tensor.gather(torch.rand(3).tolist())
    assert first == second


def test_processes_that_share_tokens_draw_the_same_random_numbers(tmp_path):
    run_processes(2, draw_together, tmp_path)
