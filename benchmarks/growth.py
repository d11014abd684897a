"""Growing a published size on disk: how exact, how long against a copy, in how much memory.

    python benchmarks/growth.py                       # 124m to 354m
    python benchmarks/growth.py --from 124m --to 1.4b --init clone

The model has fresh weights, scaled up so that every part moves the logits. Growing runs in a
process of its own, whose peak of memory is compared with the size of the grown model; its time is
compared with copying the grown folder (read and written once, synced), as the limit that the disk
sets.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GROW = """
import json, resource, sys, time
from pathlib import Path
from tokenformer.growth.folder import grow_folder
from transformers.utils import logging
logging.disable_progress_bar()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
report = grow_folder(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], init=sys.argv[4])
for file in Path(sys.argv[2]).iterdir():
    with file.open("rb") as opened:
        __import__("os").fsync(opened.fileno())
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": seconds, "peak": 1024 * peak, "base": 1024 * before,
                  "max_layer_change": report.max_layer_change}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", dest="small", default="124m")
    parser.add_argument("--to", dest="large", default="354m")
    parser.add_argument("--init", default="zero")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        small, large, copy = (Path(folder) / name for name in ("small", "large", "copy"))
        make(small, options.small)
        large.mkdir()
        words = [sys.executable, "-c", GROW, small, large, options.large, options.init]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        found = json.loads(done.stdout)
        size = sum(file.stat().st_size for file in large.iterdir())
        copying = copied(large, copy)
        taken, held = found["seconds"] / copying, found["peak"] - found["base"]
        print(f"{options.small} -> {options.large}, {options.init}: {size / 1e9:.2f} GB")
        print(f"grown in {found['seconds']:.1f} s, {taken:.1f} times a copy ({copying:.1f} s)")
        print(f"memory {held / 1e9:.2f} GB, {held / size:.2f} times the grown model")
        print(f"largest change of a layer's output {found['max_layer_change']:.1e}")
        shutil.rmtree(copy)
        print(f"largest change of the logits {logit_change(small, large):.1e}")


def make(folder: Path, preset: str) -> None:
    import torch

    from tokenformer import TokenformerConfig, TokenformerForCausalLM

    torch.manual_seed(0)
    model = TokenformerForCausalLM(TokenformerConfig.from_preset(preset))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    model.save_pretrained(folder)


def copied(source: Path, target: Path) -> float:
    start = time.perf_counter()
    shutil.copytree(source, target)
    for file in target.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    return time.perf_counter() - start


def logit_change(small: Path, large: Path) -> float:
    from tokenformer import TokenformerForCausalLM
    from tokenformer.growth.probe import output_change

    models = [TokenformerForCausalLM.from_pretrained(folder) for folder in (small, large)]
    return output_change(*models, seed=0)


if __name__ == "__main__":
    main()
