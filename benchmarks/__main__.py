"""Run benchmarks one after the other, each in its own process, and plot the results.

python -m benchmarks                       # all of them, about 25 minutes
python -m benchmarks operator memory       # a selection
python -m benchmarks --full --out results.json
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness import progress
from benchmarks.plot import PANELS, draw
from benchmarks.results import results_path

BENCHMARKS = (
    "operator",
    "narrow",
    "sparse",
    "training",
    "decode",
    "growth",
    "memory",
    "loading",
    "loop",
    "loss",
    "startup",
)
ROOT = Path(__file__).parent.parent


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.partition("\n")[0]
    )
    names = ", ".join(BENCHMARKS)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {names}")
    parser.add_argument("--full", action="store_true", help="longer sweeps, more rounds")
    parser.add_argument("--out", type=Path, help="results file")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in BENCHMARKS]:
        parser.error(f"no benchmark {', '.join(unknown)}; choose from {names}")
    selected, start = options.names or BENCHMARKS, time.perf_counter()
    out = (options.out or results_path()).absolute()
    shared = [f"--out={out}", *(["--full"] if options.full else [])]
    failed = []
    for position, name in enumerate(selected, 1):
        minutes = (time.perf_counter() - start) / 60
        progress(f"[{minutes:4.1f} min] {name}, {position} of {len(selected)}")
        done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *shared], cwd=ROOT)
        failed += [name] if done.returncode else []
    results = json.loads(out.read_text()) if out.exists() else {}
    if any(section in results for section, _ in PANELS):
        draw(results, out.with_suffix(".png"))
        print(f"plot saved to {out.with_suffix('.png').name}")
    print(f"{(time.perf_counter() - start) / 60:.1f} minutes in total")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
