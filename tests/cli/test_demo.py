"""The demo as a newcomer runs it."""

import json
import subprocess
import sys

import pytest


def demo(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tokenformer", "demo", *map(str, arguments)],
        capture_output=True,
        text=True,
    )


def test_demo_keeps_a_model_that_transformers_can_load(tmp_path):
    out = tmp_path / "kept"
    done = demo("--steps", 3, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "def " in done.stdout

    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert {"step", "tokens", "flops", "seconds", "loss", "lr"} <= rows[0].keys()
    assert {"val_loss", "val_bpb"} <= rows[-1].keys()
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    assert type(model).__name__ == "TokenformerForCausalLM"
    written = model.generate(**tokenizer("import ", return_tensors="pt"), max_new_tokens=4)
    assert tokenizer.decode(written[0]).startswith("import ")


def test_demo_refuses_a_folder_in_use(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    done = demo("--steps", 1, "--out", tmp_path)
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


def test_demo_refuses_a_path_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    done = demo("--steps", 1, "--out", tmp_path / "file" / "below")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_whole_demo_learns(tmp_path):
    done = demo("--out", tmp_path / "kept")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "kept" / "metrics.jsonl").open()]
    assert rows[-1]["val_bpb"] < 3.0 < rows[0]["loss"]
