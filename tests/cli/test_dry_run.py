"""`tokenformer train --dry_run`: what a run would do, checked against real runs."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import error_line
from tests.support.corpora import prepare_small_corpus
from tests.support.training import SECTIONS, SIZES
from tokenformer.cli import main
from tokenformer.models.accounting import training_flops
from tokenformer.models.configuration import TokenformerConfig
from tokenformer.train.metrics import read_metrics
from tokenformer.train.options import RunOptions
from tokenformer.train.run_estimate import process_state_bytes

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
STAGES = [{"steps": 2}, {"steps": 1, "batch_size": 8, "grow": {"sizes": SIZES}}]


def growing(growth: dict[str, Any], family: str = "tokenformer") -> list[str]:
    """Options of a run whose second stage grows."""
    stages = [{"steps": 1}, {"steps": 1, "grow": growth}]
    return ["--model.family", family, "--stages", json.dumps(stages)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_small_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def staged(corpus: Path, tmp_path: Path) -> Path:
    """A recipe that grows, in a folder with its data."""
    shutil.copytree(corpus, tmp_path / "data" / "text")
    path = tmp_path / "staged.yaml"
    sections = {**SECTIONS, "data": {"length": 32, "corpus": str(tmp_path / "data" / "text")}}
    path.write_text(json.dumps({**sections, "stages": STAGES}))
    return path


def dry_run(capsys: Any, *words: object) -> str:
    capsys.readouterr()
    main(["train", *map(str, words), "--dry_run"])
    out, err = capsys.readouterr()
    assert err == ""
    return str(out)


def rows_of(out: str) -> dict[str, list[str]]:
    """Return the cells of the table by stage; 60.0 G and 1.98 GB are one cell each."""
    rows = [re.sub(r"(?<=\d) (?=[kMGTP]?B?\b)", "", line).split() for line in out.splitlines()]
    return {row[0]: row[1:] for row in rows if row and (row[0].isdigit() or row[0] == "total")}


def flops_of(out: str) -> list[float]:
    """Return the FLOPs of the stages; the last are the total."""
    return [float(number) for number in re.findall(r"\d\.\d\de\+\d\d", out)]


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_recipe_without_its_data(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "recipes", tmp_path / "copies")  # away from the data of this clone
    out = dry_run(capsys, tmp_path / "copies" / path.parent.name / path.name)
    cost = re.search(r"([\d.]+e\d+) FLOPs", path.read_text())
    guessed = "images of" in out or ("vocabulary of" in out and "--tokenizer" in out)
    if cost is not None and not guessed:
        assert flops_of(out)[-1] == pytest.approx(float(cost[1]), rel=0.06), "the cost it claims"
    if "digits" not in path.name:
        assert re.search(r"^data/\S+ is not there yet: ", out, re.MULTILINE)
    assert [p.name for p in tmp_path.iterdir()] == ["copies"]


def test_it_predicts_what_a_run_records(staged, tmp_path, capsys):
    out = tmp_path / "run"
    said = dry_run(capsys, staged, "--out", out)
    assert not out.exists()
    assert f"{tmp_path}/data/text: " in said
    assert "Batches of 4, then 8 sequences of 32 tokens" in said
    main(["train", str(staged), "--out", str(out), "--run.log_to", "[]"])
    trained = capsys.readouterr().out
    rows, metrics = rows_of(said), read_metrics(out / "metrics.jsonl")
    assert flops_of(said)[-1] == pytest.approx(metrics[-1]["flops"], rel=5e-3)
    assert rows["total"][:2] == ["3", str(metrics[-1]["tokens"])]
    assert f"{rows['1'][0]} parameters" in trained
    grown = json.loads((out / "growth-2.json").read_text())
    assert rows["2"][0] == f"{grown['parameters_after']:,}"
    # Of a run that exists it says where it is, and checks the options against its record.
    assert "is at step 3, 0 steps are left" in dry_run(capsys, staged, "--out", out)
    changed = ["train", staged, "--out", out, "--data.length", 16, "--dry_run"]
    assert "was not trained with these options: data.length" in error_line(changed, capsys)


def test_overrides_and_fewer_steps(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    grown = dry_run(capsys, "progressive", "--max_steps", 100, "--run.batch_size", 8)
    rows = rows_of(grown)
    assert [rows[n][0] for n in "1234"] == [
        "123,569,664",
        "354,190,848",
        "753,796,608",
        "1,309,705,728",
    ]
    assert [rows[n][1] for n in "1234"] == ["40", "19", "19", "19"]
    flops = sum(training_flops(TokenformerConfig.from_preset("1.4b"), 1024).values())
    assert flops_of(grown)[3] == pytest.approx(19 * 8 * flops, rel=5e-3)
    other = ["--optimizer.learning_rate", "0.01", "--schedule.kind", "constant"]
    assert "Learning rate: 0.01; 2,000 warm-up steps, then constant" in dry_run(
        capsys, "transformer-124m", *other
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--run.steps", "0"], "steps=0 must be at least 1"),
        (["--max_steps", "0"], "--max_steps 0"),
        (["--model.options.ffn_tokens", "-1"], "ffn_tokens"),
        (["--model.options.fnn_tokens", "1"], "fnn_tokens"),
        (["--model.preset", "125m"], "preset '125m' is unknown"),
        (["--optimizer.rates", '{"nothing.*": 0}'], "no parameter matches 'nothing.*'"),
        (["--optimizer.rates", '{"*": 0}'], "freeze every parameter"),
        (["--stages", '[{"steps": 1}, {"steps": 1, "grow": null}]'], "stage 2 lacks `grow`"),
        (
            ["--stages", '[{"steps": 1}, {"steps": 1, "grow": {"sizes": {"ffn_tokens": 4}}}]'],
            "stage 2 cannot grow: ffn of layer 0 has 128 tokens, more than 4",
        ),
        (
            growing({"sizes": {"ffn_tokens": 256}, "init": "shrink", "old_rate": 0}),
            "stage 2 cannot grow: some tokens are frozen",
        ),
        (
            growing({"sizes": {"hidden_size": "wide"}}, family="transformer"),
            "stage 2 cannot grow: hidden_size='wide' must be a whole number",
        ),
        (
            growing({"sizes": {"hidden_size": 64, "nois": 1}}, family="transformer"),
            "stage 2 cannot grow: 'nois' is not an option of net2net",
        ),
        (
            growing({"sizes": {"hidden_size": 64}, "method": "net3net"}, family="transformer"),
            "stage 2 cannot grow: method='net3net' is unknown",
        ),
        (["--data.length", "100000"], "one sequence needs 100,001"),
        (["--model.options.vocab_size", "9"], "has a vocabulary of 257, the model one of 9"),
        (["--model.start_from", "./absent"], "model.start_from: no ./absent"),
        (
            ["--model.family", "transformer", "--run.tensor_parallel", "2", "--stages", "[]"],
            "tensor_parallel=2 shards parameter tokens",
        ),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_bad_input_is_refused_as_by_a_run(words, named, staged, capsys):
    assert named in error_line(["train", staged, "--dry_run", *words], capsys)


def test_a_run_refuses_sizes_that_are_no_numbers(staged, tmp_path, capsys):
    words = growing({"sizes": {"hidden_size": "wide"}}, family="transformer")
    line = error_line(["train", staged, "--out", tmp_path / "run", *words], capsys)
    assert "hidden_size='wide' must be a whole number" in line


def test_under_torchrun(staged, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "on each process" in dry_run(capsys, staged), "a run without RANK has one process"
    monkeypatch.setenv("RANK", "0")
    assert "on each of 4 processes" in dry_run(capsys, staged)
    monkeypatch.setenv("RANK", "1")
    assert dry_run(capsys, staged) == ""
    monkeypatch.setenv("WORLD_SIZE", "3")
    err = error_line(["train", staged, "--dry_run"], capsys)
    assert "batch_size=4 must be a multiple of the 3 processes" in err


def test_memory_of_a_process():
    config = TokenformerConfig.from_preset("124m")
    whole, tokens = 123_569_664, 84_934_656
    assert process_state_bytes(config, RunOptions(), 8) == 16 * whole
    assert process_state_bytes(config, RunOptions(ema=0.9), 8) == 20 * whole
    assert process_state_bytes(config, RunOptions(parallel="fsdp"), 8) == 2 * whole
    both = process_state_bytes(config, RunOptions(tensor_parallel=4), 2)
    assert both == 8 * (whole - tokens + tokens // 4)


def test_a_missing_corpus_may_be_a_misspelled_one(staged, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    out = dry_run(capsys, staged, "--data.corpus", "data/texts")
    assert "data/texts is not there yet: make it with `tokenformer prepare`; or did you" in out
    assert "Counted with a vocabulary of 257" in out


def test_images_that_were_not_opened(staged, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sections = json.loads(staged.read_text()) | {"model": {"preset": "base"}, "stages": []}
    staged.write_text(json.dumps(sections | {"data": {"images": "digits"}}))
    assert "Counted with 1,000 classes; the data may have others" in dry_run(capsys, staged)
    staged.write_text(json.dumps(sections | {"data": {"images": "./pictures"}}))
    assert "./pictures is not there yet: add it\n" in dry_run(capsys, staged)
    staged.write_text(json.dumps(sections | {"data": {"images": "owner/pictures"}}))
    assert "owner/pictures is not there yet: a run looks for it" in dry_run(capsys, staged)


def test_mistakes_are_found_before_torch_is_imported(tmp_path):
    code = (
        "import sys\nfrom tokenformer.cli import main\n"
        "try: main(['train', 'text', '--dry_run', '--run.log_to', 'nothing'])\n"
        "except SystemExit as end: assert end.code == 2\n"
        "sys.exit(','.join({'torch', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "nothing" in done.stderr
