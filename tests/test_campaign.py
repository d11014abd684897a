"""A short fault campaign of every part, and checks that it finds planted faults."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.campaign import damage
from tests.campaign.runs import Reference, differences

ROOT = Path(__file__).parent.parent
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the campaign forks and reads /proc")
SECONDS = 1200


def campaign(out: Path, *options: str, before: str = "") -> tuple[int, dict, str]:
    """Return exit code, summary and output of a campaign, in an interpreter that ran `before`."""
    code = f"{before}\nfrom tests.campaign.__main__ import main\nmain()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--out", str(out), *options],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    summary = out / "summary.json"
    found = json.loads(summary.read_text()) if summary.exists() else {}
    return done.returncode, found, done.stdout + done.stderr


@pytest.fixture
def reference(tmp_path: Path) -> Reference:
    """The files of a run, without training."""
    run = tmp_path / "reference"
    checkpoint = run / "checkpoints" / "step-00000002"
    for folder in (checkpoint, run / "model"):
        folder.mkdir(parents=True)
        header = b'{"weight":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
        data = len(header).to_bytes(8, "little") + header + bytes(8)
        (folder / "x.safetensors").write_bytes(data)
    rows = [{"step": step, "loss": 1 / step, "seconds": step * 0.1} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Reference(tmp_path / "recipe.yaml", run, {}, 1.0)


def test_equal_runs_differ_in_nothing_but_time(reference, tmp_path):
    run = shutil.copytree(reference.run, tmp_path / "run")
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"seconds": 0.2', '"seconds": 9.9'))
    assert differences(run, reference) == []


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (lambda run: edit(run / "metrics.jsonl", "0.5", "0.5000000000000001"), "step 2: loss is"),
        (lambda run: edit(run / "metrics.jsonl", '"step": 2', '"step": 3'), "has the steps [1, 3]"),
        (lambda run: edit(run / "metrics.jsonl", "}\n", "\n"), "cannot be read"),
        (lambda run: flip(run / "model" / "x.safetensors"), "model: weight differs"),
        (lambda run: flip(run / "checkpoints/step-00000002/x.safetensors"), "weight differs"),
        (lambda run: shutil.rmtree(run / "model"), "model/x.safetensors is missing"),
        (
            lambda run: shutil.copytree(
                run / "model", run / "checkpoints" / ".step-00000001.deleted-ab"
            ),
            "deleted-ab/x.safetensors is left over",
        ),
    ],
)
def test_a_planted_difference_is_found(reference, tmp_path, plant, expected):
    run = shutil.copytree(reference.run, tmp_path / "run")
    plant(run)
    assert expected in "; ".join(differences(run, reference))


def edit(file: Path, old: str, new: str) -> None:
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


PARTS = """
import sys, time
from pathlib import Path
from tests.campaign import __main__ as command, trials
from tests.campaign.trials import Outcome

class Planted:
    name, wanted = "kills", 5
    def planned(self):
        return 5
    def trial(self, index, chance, place):
        if index == 1:
            return Outcome(False, "differs", ["step"], "planted")
        if index == 2:
            raise OSError("the trial's own mistake")
        if index == 3:
            time.sleep(60)
        (place / "large").write_bytes(bytes(1 << 20))
        return Outcome(True, "bit-equal", ["step"])

trials.TRIAL_SECONDS = 6
command.preload = lambda: None
command.parts = lambda options, references: [Planted()]
"""


@LINUX
def test_failed_trials_are_listed_and_finished_ones_not_repeated(tmp_path):
    code, summary, output = campaign(tmp_path, "--kills", "5", "--seed", "7", before=PARTS)
    assert code == 1, output
    assert summary["totals"] == {"kills": {"trials": 5, "faults": 3, "failed": 3}}
    assert "--seed 7 --only kills:1" in output
    for word in ("planted", "the trial's own mistake", "out of time"):
        assert word in output
    assert not [*(tmp_path / "trials").iterdir()], "every trial's folder is removed"
    assert len([*(tmp_path / "failed").iterdir()]) == 3
    lines = (tmp_path / "results.jsonl").read_text()
    assert len(lines.splitlines()) == 5
    again, _, output = campaign(tmp_path, "--kills", "5", "--seed", "7", before=PARTS)
    assert again == 1
    assert (tmp_path / "results.jsonl").read_text() == lines, "nothing is done twice"
    table = campaign(tmp_path, "--table", before=PARTS)[2]
    assert "| kills | step | 3 | 2 bit-equal, 1 differs | 1 |" in table


@LINUX
def test_time_and_disk_are_bounded(tmp_path):
    code, summary, output = campaign(tmp_path, "--kills", "5", "--max_seconds", "0", before=PARTS)
    assert (code, summary["totals"]) == (3, {}), output
    assert "--max_seconds are over" in output
    (tmp_path / "large").write_bytes(bytes(1 << 20))
    output = campaign(tmp_path, "--kills", "5", "--max_disk", "1MB", before=PARTS)[2]
    assert "--max_disk is reached" in output


def test_every_damage_changes_its_file(tmp_path):
    import random

    for word, harm in (damage.ANY | damage.JSON_ONLY).items():
        folder = tmp_path / word
        folder.mkdir()
        for name in ("one.json", "other.json"):
            (folder / name).write_text(json.dumps({name: list(range(300))}))
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        harm(folder / "one.json", random.Random(1))
        after = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        assert before != after, word


@LINUX
@pytest.mark.slow
def test_a_short_campaign_of_every_part(tmp_path):
    counts = ("--kills", "6", "--rank_kills", "3", "--corruptions", "10", "--hostile", "12")
    code, summary, output = campaign(
        tmp_path, *counts, "--signals", "6", "--recipes", "plain", "stages", "images"
    )
    assert summary["failures"] == [], output
    assert code == 0
    found = {part: row["faults"] for part, row in summary["totals"].items()}
    wanted = {"kills": 6, "rank_kills": 3, "corruptions": 10, "hostile": 12, "signals": 6}
    assert found.keys() == wanted.keys()
    assert all(found[part] >= count for part, count in wanted.items())


@LINUX
@pytest.mark.slow
def test_a_run_that_resumes_wrongly_is_found(tmp_path):
    # Rows of steps that are made again would stay in the metrics.
    planted = "import tokenformer.train.run as run\nrun.cut_metrics = lambda *given: None\n"
    options = ("--kills", "30", "--recipes", "plain")
    code, summary, output = campaign(tmp_path, *options, before=planted)
    assert code == 1, output
    assert "metrics.jsonl has the steps" in " ".join(summary["failures"])
