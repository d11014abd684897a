"""Growing a model folder: exactness, time relative to a copy, and memory.

    python -m benchmarks.growth                       # 124m to 354m
    python -m benchmarks.growth --from 124m --to 354m 1.4b --init clone

The model has random weights, scaled up so that every part affects the logits. `on disk` is
`tokenformer grow`, which reads the old model layer by layer; `in memory` loads, grows and saves it;
the peer is the Transformer of the same presets, grown by Net2Net. Each runs in a new process. Peak
resident memory, with and without the mapped pages of the old model, is relative to the size of the
grown folder. The limit is copying that folder and syncing it: the one grown in memory, as the file
grown on disk has holes for zero keys. On a busy machine compare processor seconds too: a copy
mostly waits for the disk.
"""

import os
import shutil
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.harness import make_parser, number, progress, ratio, run, with_spread
from benchmarks.memory_usage import PeakMemory, in_new_process
from benchmarks.results import Row
from benchmarks.sizes import config_of, model_class

PEER = "Net2Net"
COLUMNS = {
    "time / copy": with_spread("times_copy", 1),
    "x Net2Net": with_spread(f"times_{PEER}"),
    "seconds": number("seconds", ".1f"),
    "processor s": number("processor_seconds", ".1f"),
    "peak / grown size": number("bytes_of_grown"),
    "without mapped pages": number("anonymous_bytes_of_grown"),
    "layer change": number("max_layer_change", ".1e"),
    "logit change": number("max_logit_change", ".1e"),
}


def make(family: str, size: str, folder: Path) -> None:
    """Save a model with random weights. Runs in a new process."""
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


METHODS: dict[str, Callable[[Path, Path, str, str], float | None]] = {
    "on disk": on_disk,
    "in memory": in_memory,
    PEER: net2net,
}


def grow_by(method: str, small: Path, large: Path, to: str, init: str) -> Row:
    """Grow the model and measure it. Runs in a new process."""
    shutil.rmtree(large, ignore_errors=True)
    large.mkdir()
    os.sync()
    start, processor_start = time.perf_counter(), time.process_time()
    with PeakMemory() as peak:
        change = METHODS[method](small, large, to, init)
        sync(large)
    seconds = time.perf_counter() - start
    row = {"seconds": seconds, "processor_seconds": time.process_time() - processor_start}
    row |= {"bytes": peak.bytes, "anonymous_bytes": peak.anonymous_bytes}
    return {**row, "max_layer_change": change}


def sync(folder: Path) -> None:
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def copy_seconds(source: Path, target: Path) -> float:
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
    small = {name: folder / ("small-peer" if name == PEER else "small") for name in METHODS}
    large = {name: folder / f"large-{index}" for index, name in enumerate(METHODS)}
    times: dict[str, list[float]] = {name: [] for name in ("copy", *METHODS)}
    measured: dict[str, Row] = {}
    for round_number in range(1, options.rounds + 1):
        for name in METHODS:
            progress(f"growth to {to} {name}, round {round_number} of {options.rounds}")
            arguments = (name, small[name], large[name], to, options.init)
            measured[name] = in_new_process(grow_by, *arguments)
            times[name].append(measured[name]["seconds"])
            if name == "in memory":  # while its files are in the page cache
                times["copy"].append(copy_seconds(large[name], folder / "copy"))
    size = {name: sum(file.stat().st_size for file in large[name].iterdir()) for name in METHODS}
    for name in METHODS:
        row: Row = {"case": f"{options.small} to {to}, {options.init}", "name": name}
        row |= {"seconds": statistics.median(times[name]), "bytes": size[name]}
        row["processor_seconds"] = measured[name]["processor_seconds"]
        row["times_copy"], row["times_copy_spread"] = ratio(times[name], times["copy"])
        row[f"times_{PEER}"], row[f"times_{PEER}_spread"] = ratio(times[PEER], times[name])
        for key in ("bytes", "anonymous_bytes"):
            peak = measured[name][key]
            row |= {f"peak_{key}": peak, f"{key}_of_grown": peak / size[name]}
        row |= {"copy_seconds": statistics.median(times["copy"])}
        if name != PEER:  # Net2Net does not measure the change of each layer
            row["max_layer_change"] = measured[name]["max_layer_change"]
        if name == "on disk":
            row["max_logit_change"] = in_new_process(logit_change, small[name], large[name])
        yield row


def measure(options: Namespace) -> Iterator[Row]:
    options.rounds = options.rounds or (5 if options.full else 3)
    sizes = options.large or (["354m", "757m", "1.4b"] if options.full else ["354m"])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        progress(f"growth: writing {options.small}")
        in_new_process(make, "Tokenformer", options.small, folder / "small")
        in_new_process(make, "Transformer", options.small, folder / "small-peer")
        for to in sizes:
            yield from measure_size(folder, options, to)


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--from", dest="small", default="124m")
    parser.add_argument("--to", dest="large", nargs="+")
    parser.add_argument("--init", default="zero")
    run("growth", measure, COLUMNS, parser.parse_args(arguments), axes=("bytes",))


if __name__ == "__main__":
    main()
