"""Loading a model folder: time relative to reading its files once, and memory.

    python -m benchmarks.loading                       # 354m
    python -m benchmarks.loading --sizes 1.4b

`from_pretrained` of our model and of transformers' GPT-NeoX of equal size, interleaved with reading
all files into one buffer from the page cache. Rows named `..., read` also sum all weights after
loading, because a loaded model may be a memory map that has not been read yet. The first load is
measured in a new process, with its peak resident memory; there `plain` builds the model, reads the
state dict and copies it instead of calling `from_pretrained`.
"""

import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import (
    compare,
    make_parser,
    number,
    progress,
    run,
    time_interleaved,
    with_spread,
)
from benchmarks.memory_usage import PeakMemory, in_new_process
from benchmarks.results import Row
from benchmarks.sizes import config_of, model_class
from benchmarks.training import neox, size_of

BLOCK = 16 << 20
COLUMNS = {
    "share of read speed": with_spread("share"),
    "with weights read": number("share_read"),
    "x GPT-NeoX": with_spread("times_GPT-NeoX"),
    "seconds": number("seconds", ".3f"),
    "read speed, GB/s": number("limit_gbytes", ".1f"),
    "peak / model size": number("copies"),
    "without mapped pages": number("anonymous_copies"),
}


def write(name: str, size: str, folder: Path) -> int:
    """Save a model with random weights and return its parameter count. Runs in a new process."""
    config = config_of("Tokenformer", size)
    with torch.device("meta"):
        model = model_class("Tokenformer")(config)
        if name == "GPT-NeoX":
            shape = Namespace(vocab=config.vocab_size, width=config.hidden_size)
            shape.layers, shape.length = config.num_hidden_layers, config.max_position_embeddings
            model = neox(size_of(model), shape)
    model.to_empty(device="cpu")
    model.tie_weights()
    for parameter in model.parameters():
        parameter.data.uniform_(-0.02, 0.02)
    model.save_pretrained(folder)
    return size_of(model)


def read(folder: Path) -> None:
    buffer = bytearray(BLOCK)
    for file in folder.iterdir():
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def load(name: str, folder: Path) -> Any:
    if name == "GPT-NeoX":
        from transformers import GPTNeoXForCausalLM

        return GPTNeoXForCausalLM.from_pretrained(folder)
    tokenformer = model_class("Tokenformer")
    if name == "from_pretrained":
        return tokenformer.from_pretrained(folder)
    from safetensors.torch import load_file

    model = tokenformer(tokenformer.config_class.from_pretrained(folder))
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)  # the head is tied
    return model


def touch(model: Any) -> None:
    for parameter in model.parameters():
        parameter.detach().sum()


def first_load(name: str, folder: Path, threads: int) -> Row:
    """Load a model for the first time and measure it. Runs in a new process."""
    torch.set_num_threads(threads)
    read(folder)
    start = time.perf_counter()
    read(folder)
    limit = time.perf_counter() - start
    with PeakMemory() as peak:
        start = time.perf_counter()
        model = load(name, folder)
        seconds = time.perf_counter() - start
        touch(model)
        with_reading = time.perf_counter() - start
    row = {"seconds": seconds, "share": limit / seconds, "share_read": limit / with_reading}
    return row | {"bytes": peak.bytes, "anonymous_bytes": peak.anonymous_bytes}


def repeated_loads(folders: dict[str, Path], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of reading the files and of loading, with and without reading weights."""

    def bind(name: str, after: Callable[[Any], None]) -> Callable[[], None]:
        return lambda: after(load(name, folders[name]))

    functions: dict[str, Callable[[], None]] = {"reading": lambda: read(folders["from_pretrained"])}
    for name in folders:
        functions[name] = bind(name, lambda model: None)
        functions[f"{name}, read"] = bind(name, touch)
    return time_interleaved(functions, rounds)


def measure_size(folder: Path, size: str, rounds: int) -> Iterator[Row]:
    folders = {"from_pretrained": folder / "ours", "GPT-NeoX": folder / "neox"}
    parameters = {}
    for name, path in folders.items():
        progress(f"loading: writing {size}, {name}")
        parameters[name] = in_new_process(write, name, size, path)
    weights = sum(file.stat().st_size for file in folders["from_pretrained"].iterdir())
    case = {"size": size, "bytes": weights, "parameters": parameters["from_pretrained"]}
    progress(f"loading {size} repeatedly")
    times = repeated_loads(folders, rounds)
    rows = compare(times, "reading")
    repeated = {**case, "case": f"{size}, repeated", "what": "repeated"}
    speed = weights / sorted(times["reading"])[rounds // 2] / 1e9
    for name, row in rows.items():
        peer = "GPT-NeoX, read" if name.endswith(", read") else "GPT-NeoX"
        against = compare(times, "reading", against=(peer,))[name]
        for end in ("", "_spread"):
            row[f"times_GPT-NeoX{end}"] = against[f"times_{peer}{end}"]
        yield {**repeated, **row, "limit_gbytes": speed}
    for name in ("from_pretrained", "plain", "GPT-NeoX"):
        progress(f"loading {size} in a new process, {name}")
        path = folders.get(name, folders["from_pretrained"])
        row = in_new_process(first_load, name, path, torch.get_num_threads())
        for key, count in (("bytes", "copies"), ("anonymous_bytes", "anonymous_copies")):
            row[count] = row.pop(key) / weights
        first = {**case, "case": f"{size}, first", "what": "first", "name": name}
        yield {**first, **row, "share_spread": 0.0}


def measure(options: Namespace) -> Iterator[Row]:
    from transformers.utils import logging

    logging.disable_progress_bar()
    for size in options.sizes or (["354m", "1.4b"] if options.full else ["354m"]):
        with tempfile.TemporaryDirectory() as folder:
            yield from measure_size(Path(folder), size, options.rounds or 5)


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--sizes", nargs="+", help="presets")
    run("loading", measure, COLUMNS, parser.parse_args(arguments), axes=("bytes",))


if __name__ == "__main__":
    main()
