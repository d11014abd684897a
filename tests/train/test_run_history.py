"""The training history in the model card of a run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenformer
from tokenformer.train.options import DataOptions, ModelOptions, Recipe
from tokenformer.train.run_history import run_history
from tokenformer.train.run_record import Record

ROWS: list[Any] = [
    {"step": 1, "loss": 3.0},
    {"step": 2, "loss": 2.0, "val_loss": 2.5, "val_bpb": 3.6},
    {"step": 3, "loss": 2.0},
    {"step": 4, "problem": "NaN", "val_loss": 1.0},
    {"no": "step"},
    "a word",
]


def test_data_results_and_growth(make_config: Callable[..., Any], tmp_path: Path) -> None:
    run, start = tmp_path / "run", tmp_path / "runs" / "first" / "model"
    model = tokenformer.TokenformerForCausalLM(make_config("tokenformer"))
    model.save_pretrained(start)
    data = DataOptions(corpus=str(tmp_path / "private" / "books"), length=32)
    Record(run).write(Recipe(model=ModelOptions(start_from=str(start)), data=data), step=0)
    for stage in (10, 2):
        _, report = tokenformer.grow(model, ffn_tokens=40 + 10 * stage)
        report.save(run / f"growth-{stage}.json")
    lines = [json.dumps(row) for row in ROWS] + ['{"step": 5, "lo']
    (run / "metrics.jsonl").write_text("\n".join(lines))
    started, second, tenth, trained = run_history(run)
    assert started == "Started from first"
    assert second.startswith("Grown by tokens (init zero, scale frozen): ")
    assert "ffn 44 to 60" in second
    assert "ffn 44 to 140" in tenth
    assert trained == (
        "Trained on books: batches of 32 of length 32, seed 0; 3 steps; "
        "held-out loss 2.5000, 3.6000 bits per byte at step 2"
    )


def test_a_folder_that_is_no_run_has_none(tmp_path: Path) -> None:
    assert run_history(tmp_path) == []
    for text in ("", "null", "model: 3", "model: ["):
        (tmp_path / "config.yaml").write_text(text)
        assert run_history(tmp_path) == []
