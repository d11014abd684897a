"""The demo as a newcomer runs it."""

import contextlib
import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import COMMAND, run_command
from tests.support.processes import LIMIT, started, wait_until
from tokenformer.cli.demo import GROWN, PROMPT, SMALL, compare
from tokenformer.cli.terminal import printable
from tokenformer.errors import InputError
from tokenformer.files import new_folder


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What a short demo keeps, and what it prints."""
    out = tmp_path_factory.mktemp("demo") / "kept"
    # An ASCII terminal is the hardest: the untrained model's sample is full of other characters.
    done = run_command(
        "demo", "--steps", 2, "--out", out, environment={"PYTHONIOENCODING": "ascii"}
    )
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_demo_keeps_what_it_promises(kept):
    out, printed = kept
    assert {path.name for path in out.iterdir()} == {
        "growth.json",
        "growth.png",
        "metrics",
        "model",
        "small",
    }
    assert str(out / "growth.png") in printed
    assert (out / "growth.png").read_bytes().startswith(b"\x89PNG")
    for name in ("growing", "tokenformer", "transformer", "small"):
        rows = rows_of(out / "metrics" / f"{name}.jsonl")
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
        assert {"step", "tokens", "flops", "seconds", "loss", "lr"} <= rows[0].keys()
        assert {"val_loss", "val_bpb"} <= rows[-1].keys()


@pytest.mark.parametrize("name", ["model", "small"])
def test_transformers_can_load_what_the_demo_keeps(kept, name):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = kept[0] / name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "TokenformerForCausalLM"
    wanted = {"model": GROWN, "small": SMALL}[name]
    assert {option: getattr(model.config, option) for option in wanted} == wanted
    written = model.generate(**tokenizer("import ", return_tensors="pt"), max_new_tokens=4)
    assert tokenizer.decode(written[0]).startswith("import ")


def test_growth_is_reported_and_with_zero_keys_it_would_be_exact(kept):
    out, printed = kept
    growth = json.loads((out / "growth.json").read_text())
    before, after = growth["bits_per_byte_before"], growth["bits_per_byte_after"]
    assert growth["init"] == "shrink"
    assert growth["parameters_after"] > 2 * growth["parameters_before"]
    shown = re.findall(r"held-out loss (?:before|after) +(\S+) bits per byte", printed)
    assert [float(number) for number in shown] == pytest.approx([before, after], abs=1e-3)
    rows = rows_of(out / "metrics" / "growing.jsonl")
    assert rows[1]["val_bpb"] == pytest.approx(before, abs=1e-6)
    exact = growth["init_zero"]
    assert exact["max_output_change"] < 1e-6
    assert exact["sample_before"] == exact["sample_after"]
    assert exact["sample_before"].startswith(PROMPT)
    assert "the same text before and after" in printed


def test_the_table_says_what_each_model_cost(kept):
    out, printed = kept
    names = [
        "small, before growth",
        "grown, at the end",
        "TokenFormer from scratch",
        "Transformer from scratch",
        "small, never grown",
    ]
    lines = printed.replace("|", " ").splitlines()  # the columns' border in ASCII
    cells = [
        line.removeprefix(name).split()
        for name in names
        for line in lines
        if re.match(rf"{name} +[\d,]+ ", line)
    ]
    growing = rows_of(out / "metrics" / "growing.jsonl")
    ends = [
        growing[1],
        growing[-1],
        rows_of(out / "metrics" / "tokenformer.jsonl")[-1],
        rows_of(out / "metrics" / "transformer.jsonl")[-1],
        rows_of(out / "metrics" / "small.jsonl")[-1],
    ]
    assert [row[1] for row in cells] == [f"{end['tokens']:,}" for end in ends]
    assert [row[-1] for row in cells] == [f"{end['val_bpb']:.3f}" for end in ends]
    for scratch in ends[2:]:  # the same compute, to half a step
        assert scratch["flops"] == pytest.approx(ends[1]["flops"], abs=scratch["flops"] / 2)


@pytest.mark.slow
def test_without_out_the_demo_finds_a_folder_and_the_same_seed_gives_the_same_numbers(
    kept, tmp_path
):
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    done = run_command("demo", "--steps", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "runs" / "demo-2"
    assert "runs/demo-2/growth.png" in done.stdout
    for name in ("growing", "tokenformer", "transformer", "small"):
        before, after = (
            [(row["loss"], row.get("val_loss")) for row in rows_of(file)]
            for file in (kept[0] / "metrics" / f"{name}.jsonl", out / "metrics" / f"{name}.jsonl")
        )
        assert before == after


def test_demo_refuses_a_folder_in_use(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    done = run_command("demo", "--steps", 1, "--out", tmp_path)
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


def test_demo_refuses_a_path_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    done = run_command("demo", "--steps", 1, "--out", tmp_path / "file" / "below")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_an_interrupted_demo_says_so_and_leaves_nothing_behind(tmp_path):
    out = tmp_path / "kept"
    command = [*COMMAND, "demo", "--steps", "100000", "--out", str(out)]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with started(command, text=True, **pipes) as running:
        begun = ".kept.unfinished-*/metrics/growing.jsonl"
        assert wait_until(lambda: list(tmp_path.glob(begun)), running), "it works beside its name"
        running.send_signal(signal.SIGINT)
        assert running.communicate(timeout=LIMIT)[1].endswith("tokenformer demo: interrupted\n")
        assert running.returncode == 130
        assert list(tmp_path.iterdir()) == []


def test_a_folder_is_whole_or_absent(tmp_path):
    with new_folder("--out", tmp_path / "a" / "b") as unfinished:
        (unfinished / "file").write_text("x")
        assert not (tmp_path / "a" / "b").exists()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
    assert (tmp_path / "a" / "b" / "file").read_text() == "x"

    empty = tmp_path / "empty"
    empty.mkdir()
    with contextlib.suppress(RuntimeError), new_folder("--out", empty) as unfinished:
        (unfinished / "file").write_text("x")
        raise RuntimeError
    assert list(empty.iterdir()) == []
    with new_folder("--out", empty) as unfinished:
        (unfinished / "file").write_text("x")
    assert (empty / "file").exists()
    with pytest.raises(InputError, match="already exists"), new_folder("--out", empty):
        pass


def test_a_sample_cannot_steer_the_terminal():
    assert printable("a\x1b[2Jb\x9bc\td\n\x00", "utf-8") == "a\ufffd[2Jb\ufffdc\td\n\ufffd"
    assert printable("é\ufffd", "ascii") == "??"


def test_the_comparison_names_the_better_model():
    def run(*losses: float) -> list[dict[str, Any]]:
        return [{"flops": 10 * n, "val_bpb": bits} for n, bits in enumerate(losses, start=1)]

    growing = [*run(4.0, 3.0), {"flops": 25}, {"flops": 30, "val_bpb": 2.5}]
    assert compare(growing, "TokenFormer from scratch", run(5.0, 4.5, 3.0)) == (
        "Growing ended 0.500 bits per byte below the TokenFormer from scratch and reached its loss "
        "with 67% of the compute."
    )
    assert compare(growing, "Transformer from scratch", run(4.0, 3.0, 2.25)) == (
        "Growing ended 0.250 bits per byte above the Transformer from scratch."
    )


@pytest.mark.slow
def test_the_whole_demo_grows_and_learns(tmp_path):
    out = tmp_path / "kept"
    done = run_command("demo", "--out", out)
    assert done.returncode == 0, done.stderr
    growth = json.loads((out / "growth.json").read_text())
    assert growth["init_zero"]["sample_before"] == growth["init_zero"]["sample_after"]
    rows = rows_of(out / "metrics" / "growing.jsonl")
    assert rows[0]["loss"] > 5
    assert rows[-1]["val_bpb"] < growth["bits_per_byte_before"] - 0.1
    assert rows[-1]["val_bpb"] < 2.5
    for name in ("tokenformer", "small", "transformer"):
        baseline = rows_of(out / "metrics" / f"{name}.jsonl")
        # Threads and processors round differently, which moves a run by about 0.02.
        assert rows[-1]["val_bpb"] < baseline[-1]["val_bpb"] + 0.04
