"""Growing a published size on disk: how exact, how long against a copy, in how much memory.

    python -m benchmarks.growth                       # 124m to 354m
    python -m benchmarks.growth --from 124m --to 354m 1.4b --init clone

The model has fresh weights, scaled up so that every part moves the logits. `on disk` is
`tokenformer grow`, which reads the old model layer by layer; `in memory` is the plain way (load,
grow, save); the peer is the Transformer of the same presets, grown by Net2Net. Each runs in a
process of its own, whose peak of resident memory, with and without the mapped pages of the old
model, is compared with the size of the grown folder; the limit is copying that folder (read and
written once, synced).
"""

import os
import shutil
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.measuring import number, parser, progress, ratio, run, with_spread
from benchmarks.resident import PeakMemory, alone
from benchmarks.results import Row
from benchmarks.sizes import config_of, model_class

PEER = "Net2Net"
COLUMNS = {
    "time of a copy's": with_spread("times_copy", 1),
    "times as fast as Net2Net": with_spread(f"times_{PEER}"),
    "seconds": number("seconds", ".1f"),
    "peak, of the grown": number("bytes_of_grown"),
    "own memory": number("own_bytes_of_grown"),
    "change of a layer": number("max_layer_change", ".1e"),
    "change of the logits": number("max_logit_change", ".1e"),
}


def make(family: str, size: str, folder: Path) -> None:
    """In a process of its own, whose memory is given back."""
    import torch

    torch.manual_seed(0)
    model = model_class(family)(config_of(family, size))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    model.save_pretrained(folder)


def on_disk(small: Path, large: Path, to: str, init: str) -> float | None:
    from tokenformer.growth.model_folder import grow_folder

    return grow_folder(small, large, config_of("Tokenformer", to), init=init).max_layer_change


def in_memory(small: Path, large: Path, to: str, init: str) -> float | None:
    import tokenformer

    model = model_class("Tokenformer").from_pretrained(small)
    grown, report = tokenformer.grow(model, config_of("Tokenformer", to), init=init)
    grown.save_pretrained(large)
    return report.max_layer_change


def net2net(small: Path, large: Path, to: str, init: str) -> float | None:
    from tokenformer.growth.model_folder import grow_transformer_folder

    return grow_transformer_folder(small, large, config_of("Transformer", to)).max_layer_change


WAYS: dict[str, Callable[[Path, Path, str, str], float | None]] = {
    "on disk": on_disk,
    "in memory": in_memory,
    PEER: net2net,
}


def grow_by(way: str, small: Path, large: Path, to: str, init: str) -> Row:
    """In the process that is measured."""
    shutil.rmtree(large, ignore_errors=True)
    large.mkdir()
    os.sync()
    start = time.perf_counter()
    with PeakMemory() as peak:
        change = WAYS[way](small, large, to, init)
        sync(large)
    seconds = time.perf_counter() - start
    row = {"seconds": seconds, "bytes": peak.bytes, "own_bytes": peak.own_bytes}
    return {**row, "max_layer_change": change}


def sync(folder: Path) -> None:
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def copied(source: Path, target: Path) -> float:
    """The seconds it takes."""
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    start = time.perf_counter()
    shutil.copytree(source, target)
    sync(target)
    return time.perf_counter() - start


def logit_change(small: Path, large: Path) -> float:
    from tokenformer import TokenformerForCausalLM
    from tokenformer.growth.probe import output_change

    old, new = (TokenformerForCausalLM.from_pretrained(folder) for folder in (small, large))
    return output_change(old, new, seed=0)


def measure_size(folder: Path, options: Namespace, to: str) -> Iterator[Row]:
    small = {way: folder / ("small" if way != PEER else "small-peer") for way in WAYS}
    large = {way: folder / f"large-{place}" for place, way in enumerate(WAYS)}
    taken: dict[str, list[float]] = {name: [] for name in ("copy", *WAYS)}
    found: dict[str, Row] = {}
    for turn in range(1, options.rounds + 1):
        for way in WAYS:
            progress(f"growth to {to} {way}, round {turn} of {options.rounds}")
            found[way] = alone(grow_by, way, small[way], large[way], to, options.init)
            taken[way].append(found[way]["seconds"])
        taken["copy"].append(copied(large["on disk"], folder / "copy"))
    size = {way: sum(file.stat().st_size for file in large[way].iterdir()) for way in WAYS}
    for way in WAYS:
        row: Row = {"case": f"{options.small} to {to}, {options.init}", "name": way}
        row |= {"seconds": statistics.median(taken[way]), "bytes": size[way]}
        for rival in ("copy", PEER):
            over = (taken[way], taken[rival]) if rival == "copy" else (taken[rival], taken[way])
            row[f"times_{rival}"], row[f"times_{rival}_spread"] = ratio(*over)
        for key in ("bytes", "own_bytes"):
            row |= {f"peak_{key}": found[way][key], f"{key}_of_grown": found[way][key] / size[way]}
        row |= {"copy_seconds": statistics.median(taken["copy"])}
        if way != PEER:  # which does not measure its layers
            row["max_layer_change"] = found[way]["max_layer_change"]
        if way == "on disk":
            row["max_logit_change"] = alone(logit_change, small[way], large[way])
        yield row


def measure(options: Namespace) -> Iterator[Row]:
    options.rounds = options.rounds or (5 if options.full else 3)
    sizes = options.large or (["354m", "757m", "1.4b"] if options.full else ["354m"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        progress(f"growth: writing {options.small}")
        alone(make, "Tokenformer", options.small, folder / "small")
        alone(make, "Transformer", options.small, folder / "small-peer")
        for to in sizes:
            yield from measure_size(folder, options, to)


def main(arguments: list[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--from", dest="small", default="124m")
    made.add_argument("--to", dest="large", nargs="+")
    made.add_argument("--init", default="zero")
    run("growth", measure, COLUMNS, made.parse_args(arguments), axes=("bytes",))


if __name__ == "__main__":
    main()
