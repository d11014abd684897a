"""Every benchmark runs on tiny shapes and writes its section; timings are not checked."""

import importlib
import json
import math
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import plot, results
from benchmarks.__main__ import BENCHMARKS
from benchmarks.harness import compare, ratio, scaling_exponents, time_interleaved
from benchmarks.memory_usage import PeakMemory, in_new_process
from benchmarks.sparse_decoding import COPIES, FORMATS, ROUTED

ROOT = Path(__file__).parent.parent.parent
MODEL = "--width 64 --layers 1 --vocab 96"
TINY = {
    "operator": "--shapes 8x16x24 8x16x48 12x16x24",
    "narrow": "--cases text --width 16 --square 64",
    "sparse": "--rows 40 --training_width 16 --active 16 --group_size 8 --factors 1 2 --sizes 124m "
    "--width 64 --tokens 12 --layers 1 --new_tokens 3 --decoding_group_sizes 8",
    "training": f"{MODEL} --tokens 16 --lengths 8 16 --ffn_tokens 24 --square 64",
    "decode": f"{MODEL} --sizes 27m --tokens 3 --contexts 4 --batches 1 2 --ffn_tokens 24",
    "growth": "--from tiny --to tiny-grown",
    "memory": f"{MODEL} --shapes 64x32x256 --backends streamed --lengths 16",
    "loading": "--sizes tiny",
    "loop": "--batch 1 --length 16",
    "loss": "--tokens 32 --width 16 --vocab 64",
    "startup": "",
}
NAMES = {
    "operator": {"released", "mlp", "reference", "direct", "streamed"},
    "narrow": {"tokenformer", "released", "Transformer", "GPT", "nanoGPT"},
    "sparse": {"gated, all", "gated, chosen", "centroid, chosen"}
    | {f"{name}, {form}" for name in ("dense", "routed", "routed, chosen") for form in FORMATS}
    | {f"{name}, {form}" for name in (*ROUTED, f"{COPIES}x the tokens") for form in FORMATS},
    "training": {"auto", "released", "GPT-NeoX", "TransformerEncoder"},
    "decode": {"auto", "bf16", "int8", "int4", "released", "GPT-NeoX"},
    "growth": {"on disk", "in memory", "Net2Net"},
    "memory": {"released", "mlp", "streamed", "auto", "GPT-NeoX"},
    "loading": {"from_pretrained", "from_pretrained, read", "plain", "GPT-NeoX", "GPT-NeoX, read"},
    "loop": {"loop"},
    "loss": {"plain", "chunked"},
    "startup": {
        "import torch",
        "import transformers",
        "GPT-NeoX, one token",
        "tokenformer --help",
        "inspect",
        "generate, one token",
    },
}


def rows_of(name: str, out: Path) -> list[results.Row]:
    module = importlib.import_module(f"benchmarks.{name}")
    module.main([*TINY[name].split(), "--rounds", "1", "--out", str(out)])
    return json.loads(out.read_text())[name]["rows"]


SLOW = ("growth", "memory", "loading", "startup")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in BENCHMARKS]
)
def test_benchmark_measures_every_implementation(name, tmp_path, capsys):
    out = tmp_path / "results.json"
    rows = rows_of(name, out)
    assert {row["name"] for row in rows} == NAMES[name]
    table = capsys.readouterr().out
    assert all(row["case"] in table for row in rows)
    floats = [value for row in rows for value in row.values() if isinstance(value, float)]
    assert floats
    assert all(map(math.isfinite, floats))
    if name in dict(plot.PANELS):
        plot.main([str(out)])
        assert out.with_suffix(".png").stat().st_size > 10_000
    else:
        with pytest.raises(ValueError, match="no section to draw"):
            plot.main([str(out)])


def test_adapters(tmp_path):
    pytest.importorskip("peft", reason="peft is not installed")
    adapters = importlib.import_module("benchmarks.adapters")
    out = tmp_path / "results.json"
    options = f"{MODEL} --ffn_tokens 24 --adapter_tokens 4 --adapters 3 --batches 1 4 --rounds 1"
    adapters.main([*options.split(), "--out", str(out)])
    rows = json.loads(out.read_text())["adapters"]["rows"]
    kinds = {"base", "one", "different"}
    named = {f"{model}, {kind}" for model in ("tokens", "LoRA") for kind in kinds}
    assert {row["name"] for row in rows} == named | {"tokens, base, eager"}
    assert all(row["times_one"] == 1 for row in rows if row["name"].endswith("one"))
    assert all(row["adapter_bytes"] > 0 for row in rows)


def test_benchmark_runs_as_a_command(tmp_path):
    """`benchmarks.operator` does not shadow the standard library's `operator`."""
    out = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks.operator", "--json", "--rounds=1", f"--out={out}"]
    done = subprocess.run(
        [*command, "--shapes", "4x8x16"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    printed = json.loads(done.stdout)
    assert printed["operator"]["rows"][0]["rows"] == 4


def test_sections_share_a_file_without_host_name_or_path(tmp_path):
    out = tmp_path / "deep" / "results.json"
    results.write_section(out, "a", {"rows": [{"share": 1 / 3}]})
    results.write_section(out, "b", {"rows": []})
    written = json.loads(out.read_text())
    assert written.keys() == {"machine", "a", "b"}
    assert written["a"]["rows"] == [{"share": 0.33333}]
    assert not list(out.parent.glob("*.part"))
    assert platform.node() not in out.read_text()
    assert str(Path.home()) not in out.read_text()
    named = results.results_path().name
    assert f"-{written['machine']['threads']}t-torch" in named
    assert named.endswith(f"-tokenformer{written['machine']['tokenformer']}.json")


def test_ratios_are_medians_within_rounds():
    times = {"limit": [1.0, 2.0, 4.0], "ours": [2.0, 4.0, 4.0]}
    assert ratio(times["limit"], times["ours"])[0] == 0.5
    row = compare(times, "limit", work=3, against=("ours",))["ours"]
    assert (row["share"], row["seconds"], row["times_ours"]) == (1.5, 4.0, 1.0)
    calls: list[str] = []
    functions = {name: lambda name=name: calls.append(name) for name in "ab"}
    assert {name: len(times) for name, times in time_interleaved(functions, 2).items()} == {
        "a": 2,
        "b": 2,
    }
    assert calls == ["a", "b"] * 3


def test_scaling_exponents_are_fitted_along_one_axis():
    rows = [
        {"name": "x", "n": n, "rows": r, "seconds": 3 * n * r**2} for n in (2, 4, 8) for r in (1, 5)
    ]
    exponents = scaling_exponents(rows, ("n", "rows"), "seconds")
    powers = {(line["over"], *line["fixed"].values()): line["power"] for line in exponents}
    assert powers == pytest.approx(
        {("n", 1): 1, ("n", 5): 1, ("rows", 2): 2, ("rows", 4): 2, ("rows", 8): 2}
    )


def peak_of_32_mib() -> tuple[int, int]:
    """Measure a peak after an earlier, larger one."""
    earlier = bytearray(b"x" * (96 << 20))
    del earlier
    with PeakMemory() as peak:
        block = bytearray(b"x" * (32 << 20))
        del block
    return peak.bytes, peak.anonymous_bytes


def test_peak_memory_ignores_earlier_peaks():
    peak, anonymous = in_new_process(peak_of_32_mib)
    assert 60 << 20 < peak < 80 << 20  # the block and the bytes it was made of
    assert anonymous <= peak
