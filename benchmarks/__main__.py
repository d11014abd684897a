"""Runs benchmarks one after the other, each in a process of its own, and draws the picture.

python -m benchmarks                       # the lot, in minutes
python -m benchmarks operator memory       # some
python -m benchmarks --full --out results.json
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.measuring import progress
from benchmarks.plot import PANELS, draw
from benchmarks.results import results_path

LOT = ("operator", "training", "decode", "growth", "memory", "loading", "loop", "loss")
ROOT = Path(__file__).parent.parent


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"by default {', '.join(LOT)}")
    parser.add_argument("--full", action="store_true", help="longer sweeps, more rounds")
    parser.add_argument("--out", type=Path, help="the results file")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in LOT]:
        parser.error(f"no benchmark {', '.join(unknown)}; choose of {', '.join(LOT)}")
    names, start = options.names or LOT, time.perf_counter()
    out = (options.out or results_path()).absolute()
    words = [f"--out={out}", *(["--full"] if options.full else [])]
    failed = []
    for place, name in enumerate(names, 1):
        spent = time.perf_counter() - start
        progress(f"[{spent / 60:4.1f} min] {name}, {place} of {len(names)}")
        done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *words], cwd=ROOT)
        failed += [name] if done.returncode else []
    found = json.loads(out.read_text()) if out.exists() else {}
    if any(section in found for section, _ in PANELS):
        draw(found, out.with_suffix(".png"))
        print(f"drawn to {out.with_suffix('.png').name}")
    print(f"{(time.perf_counter() - start) / 60:.1f} minutes in all")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
