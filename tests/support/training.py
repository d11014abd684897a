"""Small models, recipes and runs for tests of training."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.processes import run as run_command
from tokenformer import TokenformerConfig, TokenformerForCausalLM
from tokenformer.data.byte_tokenizer import VOCAB_SIZE
from tokenformer.train.loop import Loop
from tokenformer.train.metrics import read_metrics
from tokenformer.train.options import (
    DataOptions,
    ModelOptions,
    OptimizerOptions,
    Recipe,
    RunOptions,
    ScheduleOptions,
)
from tokenformer.train.run import Run
from tokenformer.train.task import LanguageTask
from tokenformer.train.text_workload import TextWorkload

MODEL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "rotary_fraction": 0.5,
}
SECTIONS: dict[str, Any] = {
    "model": {"options": MODEL},
    "data": {"length": 32},
    "optimizer": {"learning_rate": 0.01},
    "schedule": {"warmup_steps": 3},
    "run": {
        "steps": 24,
        "batch_size": 4,
        "micro_batch_size": 1,  # two ranks of a batch of four then accumulate twice
        "checkpoint_every": 5,
        "validate_every": 8,
        "validation_sequences": 6,
    },
}
"""The sections of a recipe, without a corpus."""
SIZES = {"qkv_tokens": 48, "output_tokens": 48, "ffn_tokens": 200}
"""More tokens than MODEL has."""
TEXT = np.frombuffer(b"abracadabra" * 200, dtype=np.uint8).astype(np.uint16)
"""A text that is easy to learn: the same eleven bytes repeated."""
RUN = {"steps": 30, "batch_size": 4, "validate_every": 10, "validation_sequences": 6}


def command(recipe: Path, out: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "tokenformer", "train", str(recipe), "--out", str(out), *options]


def finish(recipe: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return run_command(command(recipe, out, *options))


def two_ranks(recipe: Path, out: Path, parallel: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    options = ["--standalone", "-m", "tokenformer", "train", str(recipe), "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return run_command([*launcher, *options, "--run.parallel", parallel], env=environment)


def modification_times(out: Path) -> dict[Path, int]:
    """Return every file of a run with its modification time."""
    return {path: path.stat().st_mtime_ns for path in out.rglob("*")}


def losses(out: Path) -> list[tuple[int, float, float | None]]:
    return [(r["step"], r["loss"], r.get("val_loss")) for r in read_metrics(out / "metrics.jsonl")]


def close(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(
        ours[0] == theirs[0]
        and ours[1] == pytest.approx(theirs[1], rel=1e-5, abs=1e-5)
        and (ours[2] is None or ours[2] == pytest.approx(theirs[2], rel=1e-5, abs=1e-5))
        for ours, theirs in zip(found, expected, strict=True)
    )


def make_run(corpus: Path, folder: Path, reports: list[str], **run: Any) -> Run:
    recipe = Recipe(
        ModelOptions(options=MODEL),
        DataOptions(corpus=str(corpus), length=32),
        OptimizerOptions(learning_rate=0.01),
        ScheduleOptions(warmup_steps=3),
        RunOptions(**{**SECTIONS["run"], **run}),
    )
    return Run(folder, recipe, TextWorkload(recipe), reports.append)


def rates_by_name(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module
) -> dict[str, float | None]:
    """The learning rate of every parameter; None for those that the optimizer does not have."""
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    return {name: rates.get(id(p)) for name, p in model.named_parameters()}


def poison(run: Run, at: int) -> Any:
    """Return a callback that once, after step `at`, puts a NaN into the weights."""
    done = []

    def on_step(row: dict[str, Any]) -> None:
        if row["step"] == at and not done:
            done.append(at)
            with torch.no_grad():
                run.loop.task.model.model.norm.weight[0] = math.nan

    return on_step


def make_loop(
    *,
    rates: dict[str, float] | None = None,
    model_options: dict[str, Any] | None = None,
    **run: object,
) -> Loop:
    torch.manual_seed(0)
    model = TokenformerForCausalLM(
        TokenformerConfig(
            vocab_size=257,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            rotary_fraction=0.5,
            **(model_options or {}),
        )
    )
    return Loop(
        LanguageTask(model, TEXT, TEXT, length=16),
        OptimizerOptions(learning_rate=5e-3, rates=rates or {}),
        ScheduleOptions(warmup_steps=5),
        RunOptions(**{**RUN, **run}),
    )


def language_model(folder: Path, vocab_size: int = VOCAB_SIZE) -> TokenformerForCausalLM:
    torch.manual_seed(1)
    config = TokenformerConfig(
        vocab_size=vocab_size, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = TokenformerForCausalLM(config).half()
    model.save_pretrained(folder)
    return model
