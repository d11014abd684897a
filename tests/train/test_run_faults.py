"""Runs on damaged folders and full disks."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import forge
from tests.support.training import make_run, poison
from tokenformer.cli import main
from tokenformer.errors import CheckpointError, TrainingError
from tokenformer.train import checkpoint
from tokenformer.train.checkpoint import directory
from tokenformer.train.metrics import cut_metrics, metrics_writer, read_metrics
from tokenformer.train.parallel.ranks import Ranks
from tokenformer.train.run import Run


@pytest.fixture(scope="module")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with two checkpoints."""
    out = tmp_path_factory.mktemp("finished") / "run"
    make_run(corpus, out, [], steps=6, checkpoint_every=3).train(lambda row: None)
    return out


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def again(corpus: Path, out: Path, reports: list[str] | None = None, **options: Any) -> Run:
    options = {"steps": 6, "checkpoint_every": 3, **options}
    return make_run(corpus, out, [] if reports is None else reports, **options)


def contents(folder: Path) -> dict[Path, tuple[int, bytes]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in files}


def test_where_all_checkpoints_are_damaged_nothing_changes(recipe, tmp_path, capsys):
    out = tmp_path / "run"
    options = ["--out", str(out), "--run.steps", "6", "--run.checkpoint_every", "3"]
    main(["train", str(recipe), *options])
    for path in (out / "checkpoints").iterdir():
        (path / "state.json").write_text("{}\n")
    before = contents(out)
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["train", str(recipe), *options])
    assert end.value.code == 1
    message = capsys.readouterr().err
    assert message.startswith(f"tokenformer train: no valid checkpoint in {out / 'checkpoints'}, 2")
    assert "remove the run folder or choose another --out" in message
    assert message.count("\n") == 1
    assert contents(out) == before

    shutil.rmtree(out / "checkpoints")  # which it was not told to do
    before = contents(out)
    with pytest.raises(SystemExit) as end:
        main(["train", str(recipe), *options])
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert (
        f"{out} holds a run without checkpoints; training would overwrite it; remove the" in message
    )
    assert contents(out) == before
    shutil.rmtree(out)  # as the message says: it starts over
    main(["train", str(recipe), *options])
    assert [row["step"] for row in read_metrics(out / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_a_folder_that_is_not_a_run_is_left_as_it_is(recipe, tmp_path, capsys):
    out = tmp_path / "project"
    (out / "model").mkdir(parents=True)
    (out / "model" / "net.py").write_text("code")
    before = contents(out)
    words = ["train", str(recipe), "--out", str(out), "--run.steps", "2", "--run.log_to", "[]"]
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    message = (
        f"{out} holds model and is not a run; training would overwrite it; remove the folder or"
    )
    assert message in capsys.readouterr().err
    assert contents(out) == before

    shutil.rmtree(out / "model")
    (out / "log.txt").write_text("of the user, and left alone")  # it begins
    main(words)
    shutil.rmtree(out / "checkpoints")
    shutil.rmtree(out / "model")
    (out / "loss.png").unlink()  # as if killed before the first checkpoint: it begins again
    main(words)
    assert [row["step"] for row in read_metrics(out / "metrics.jsonl")] == [1, 2]


def test_the_first_export_comes_after_the_first_checkpoint(corpus, tmp_path, monkeypatch):
    """A run killed between the two could not be told from another's folder."""
    run = again(corpus, tmp_path / "run", log_to=[])
    export, seen = run.export, []

    def look() -> None:
        seen.append(directory.steps(run.checkpoints))
        export()

    monkeypatch.setattr(run, "export", look)
    run.train(lambda row: None)
    assert 3 in seen[0]


@pytest.mark.parametrize("stop", [4, 5])
def test_the_checkpoint_resumed_from_outlives_a_damaged_newer_one(corpus, copy, stop):
    """Its size is right, so only its hash tells."""
    newest = copy / "checkpoints" / "step-00000006"
    shard = next(newest.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    run = again(corpus, copy, steps=8, checkpoint_every=1, keep_last=1, log_to=[])

    with pytest.raises(CheckpointError, match="holds a NaN"):  # a save that fails
        run.train(poison(run, at=stop))
    good = checkpoint.latest(copy / "checkpoints", report=lambda line: None)
    assert good == copy / "checkpoints" / f"step-{stop - 1:08d}"
    again(corpus, copy, steps=8, checkpoint_every=1, keep_last=1, log_to=[]).train(lambda row: None)
    assert [row["step"] for row in read_metrics(copy / "metrics.jsonl")] == list(range(1, 9))


def test_a_checkpoint_that_no_run_wrote_is_named(corpus, copy):
    newest = max((copy / "checkpoints").iterdir())
    document = json.loads((newest / "state.json").read_text())
    for name in document["state"].keys() - {"step", "scales_began"}:
        kept = {key: value for key, value in document["state"].items() if key != name}
        forge(json.dumps({**document, "state": kept}).encode())(newest / "state.json")
        with pytest.raises(CheckpointError, match=f"{newest.name} .* has no '{name}'"):
            again(corpus, copy)
    document["state"]["config"] = {"model_type": "nothing"}
    forge(json.dumps(document).encode())(newest / "state.json")
    with pytest.raises(CheckpointError, match=f"{newest.name} has no valid model config"):
        again(corpus, copy)


@pytest.mark.parametrize("command", ["convert", "grow"])
@pytest.mark.parametrize("text", [b"{}", b"null", b'{"state": {"step": 1}, "optimizer": null}'])
def test_commands_name_a_malformed_checkpoint(copy, tmp_path, capsys, command, text):
    newest = max((copy / "checkpoints").iterdir())
    forge(text)(newest / "state.json")
    with pytest.raises(SystemExit) as end:
        main([command, str(newest), "--out", str(tmp_path / "new")])
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert f"{newest} cannot be read: " in message
    assert "state.json" in message
    assert message.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_what_a_killed_prune_left_goes_when_the_run_is_opened(corpus, copy):
    leftover = copy / "checkpoints" / ".step-00000001.deleted-0011aabb"
    leftover.mkdir()
    (leftover / "shard").write_bytes(b"x")
    again(corpus, copy)
    assert not leftover.exists()


def damage(metrics: Path) -> list[dict[str, Any]]:
    """Damaged lines among the rows of a run; the rows."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    bad = [b"garbage", b'{"loss": 3.0}', b'{"step": "2"}', b"[1]", b"\x00\xff\x00", b"[" * 100_000]
    lines = [json.dumps(row).encode() for row in rows]
    metrics.write_bytes(b"\n".join([lines[0], *bad, b"", *lines[1:], b'{"step": 7, "lo']))
    return rows


def test_a_damaged_line_of_metrics_is_left_out_alone(copy):
    metrics = copy / "metrics.jsonl"
    rows = damage(metrics)
    reports: list[str] = []
    assert read_metrics(metrics, reports.append) == rows
    assert reports == [f"{metrics}: skipping 7 lines, the first 2: not a row of metrics"]
    cut_metrics(metrics, 4, reports.append)
    assert len(reports) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_metrics(metrics) == rows[:4]
    assert read_metrics(copy / "absent") == []


def test_a_run_goes_on_with_damaged_metrics(corpus, copy, finished):
    rows = damage(copy / "metrics.jsonl")
    reports: list[str] = []
    again(corpus, copy, reports, steps=8).train(lambda row: None)
    assert len([line for line in reports if "metrics.jsonl" in line]) == 1
    found = read_metrics(copy / "metrics.jsonl")
    assert found[:6] == rows
    assert [row["step"] for row in found] == list(range(1, 9))


def fill(disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        (disk / "filler").write_bytes(b"x" * (4 << 20))


def test_a_row_that_does_not_fit_on_the_disk(small_disk):
    metrics = small_disk / "metrics.jsonl"
    message = rf"{metrics} cannot be written: No space left on device$"
    with metrics_writer(metrics, Ranks()) as write:
        write({"step": 1})
        fill(small_disk)
        with pytest.raises(TrainingError, match=message):
            write({"step": 2, "note": "x" * 8192})
    assert read_metrics(metrics, lambda line: None)[0] == {"step": 1}
    with pytest.raises(TrainingError, match=message):
        cut_metrics(metrics, 10_000, lambda line: None)


def test_a_disk_that_fills_up_ends_a_run_with_one_line(corpus, small_disk):
    out = small_disk / "run"
    run = again(corpus, out, steps=12, log_to=[])

    def on_step(row: dict[str, Any]) -> None:
        if row["step"] == 7:
            fill(small_disk)

    with pytest.raises((CheckpointError, TrainingError), match="cannot be written: No space left"):
        run.train(on_step)
    path = checkpoint.latest(out / "checkpoints")
    assert path == out / "checkpoints" / "step-00000006"

    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(out / "model")
    (small_disk / "filler").unlink()
    again(corpus, out, steps=12, log_to=[]).train(lambda row: None)
    assert [row["step"] for row in read_metrics(out / "metrics.jsonl")] == list(range(1, 13))
