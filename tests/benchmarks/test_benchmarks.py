"""Every benchmark runs on tiny shapes and writes its section; timings themselves are not judged."""

import importlib
import json
import math
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import plot, results
from benchmarks.__main__ import LOT
from benchmarks.measuring import compared, growth, interleaved, ratio
from benchmarks.resident import PeakMemory, alone

ROOT = Path(__file__).parent.parent.parent
MODEL = "--width 64 --layers 1 --vocab 96"
TINY = {
    "operator": "--shapes 8x16x24 8x16x48 12x16x24",
    "training": f"{MODEL} --tokens 16 --lengths 8 16 --ffn_tokens 24 --square 64",
    "decode": f"{MODEL} --sizes 27m --tokens 3 --contexts 4 --batches 1 2 --ffn_tokens 24",
    "growth": "--from tiny --to tiny-grown",
    "memory": f"{MODEL} --shapes 64x32x256 --backends streamed --lengths 16",
    "loading": "--sizes tiny",
    "loop": "--batch 1 --length 16",
    "loss": "--tokens 32 --width 16 --vocab 64",
}
NAMES = {
    "operator": {"released", "mlp", "reference", "direct", "streamed"},
    "training": {"auto", "released", "GPT-NeoX", "TransformerEncoder"},
    "decode": {"auto", "bf16", "int8", "released", "GPT-NeoX"},
    "growth": {"on disk", "in memory", "Net2Net"},
    "memory": {"released", "mlp", "streamed", "auto", "GPT-NeoX"},
    "loading": {"from_pretrained", "from_pretrained, read", "plain", "GPT-NeoX", "GPT-NeoX, read"},
    "loop": {"loop"},
    "loss": {"plain", "chunked"},
}


def rows_of(name: str, out: Path) -> list[results.Row]:
    module = importlib.import_module(f"benchmarks.{name}")
    module.main([*TINY[name].split(), "--rounds", "1", "--out", str(out)])
    return json.loads(out.read_text())[name]["rows"]


@pytest.mark.parametrize("name", LOT)
def test_a_benchmark_measures_all_its_rivals(name, tmp_path, capsys):
    out = tmp_path / "results.json"
    rows = rows_of(name, out)
    assert {row["name"] for row in rows} == NAMES[name]
    table = capsys.readouterr().out
    assert all(row["case"] in table for row in rows)
    plain = [value for row in rows for value in row.values() if isinstance(value, float)]
    assert plain
    assert all(map(math.isfinite, plain))
    if name in dict(plot.PANELS):
        plot.main([str(out)])
        assert out.with_suffix(".png").stat().st_size > 10_000
    else:
        with pytest.raises(ValueError, match="no section to draw"):
            plot.main([str(out)])


def test_a_benchmark_is_a_command(tmp_path):
    """As a command: `operator` is a benchmark and, beside it, the standard library's module."""
    out = tmp_path / "results.json"
    words = [sys.executable, "-m", "benchmarks.operator", "--json", "--rounds=1", f"--out={out}"]
    done = subprocess.run(
        [*words, "--shapes", "4x8x16"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    printed = json.loads(done.stdout)
    assert printed["operator"]["rows"][0]["rows"] == 4


def test_sections_share_a_file_and_name_no_host(tmp_path):
    out = tmp_path / "deep" / "results.json"
    results.keep(out, "a", {"rows": [{"share": 1 / 3}]})
    results.keep(out, "b", {"rows": []})
    found = json.loads(out.read_text())
    assert found.keys() == {"machine", "a", "b"}
    assert found["a"]["rows"] == [{"share": 0.33333}]
    assert not list(out.parent.glob("*.part"))
    assert platform.node() not in out.read_text()
    assert str(Path.home()) not in out.read_text()
    named = results.results_path().name
    assert f"-{found['machine']['threads']}t-torch" in named
    assert named.endswith(f"-tokenformer{found['machine']['tokenformer']}.json")


def test_shares_are_medians_of_the_same_round():
    taken = {"limit": [1.0, 2.0, 4.0], "ours": [2.0, 4.0, 4.0]}
    assert ratio(taken["limit"], taken["ours"])[0] == 0.5
    row = compared(taken, "limit", work=3, against=("ours",))["ours"]
    assert (row["share"], row["seconds"], row["times_ours"]) == (1.5, 4.0, 1.0)
    calls: list[str] = []
    functions = {name: lambda name=name: calls.append(name) for name in "ab"}
    assert {name: len(times) for name, times in interleaved(functions, 2).items()} == {
        "a": 2,
        "b": 2,
    }
    assert calls == ["a", "b"] * 3


def test_growth_is_the_power_along_one_axis_alone():
    rows = [
        {"name": "x", "n": n, "rows": r, "seconds": 3 * n * r**2} for n in (2, 4, 8) for r in (1, 5)
    ]
    found = growth(rows, ("n", "rows"), "seconds")
    powers = {(line["over"], *line["fixed"].values()): line["power"] for line in found}
    assert powers == pytest.approx(
        {("n", 1): 1, ("n", 5): 1, ("rows", 2): 2, ("rows", 4): 2, ("rows", 8): 2}
    )


def held_and_given_back() -> tuple[int, int]:
    """A peak beyond memory that is held before it, less than the process has held before that."""
    earlier = bytearray(b"x" * (96 << 20))
    del earlier
    with PeakMemory() as peak:
        block = bytearray(b"x" * (32 << 20))
        del block
    return peak.bytes, peak.own_bytes


def test_a_peak_is_that_of_what_was_measured():
    peak, own = alone(held_and_given_back)
    assert 60 << 20 < peak < 80 << 20  # the block and the bytes it was made of
    assert own <= peak
