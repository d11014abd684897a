"""Loading a model folder: against reading its files once, and in how much memory.

    python -m benchmarks.loading                       # 354m
    python -m benchmarks.loading --sizes 1.4b

`from_pretrained` of ours and of transformers' GPT-NeoX of equal size, interleaved with `read()` of
all files into one buffer; what is read lies in the page cache. `read` weights were summed once
after loading, since a loaded model may be a map of its file that nobody has looked at. In a process
of its own each way loads for the first time, with the peak of its resident memory; there `plain` is
the way without `from_pretrained`: build the model, read the state dict, copy it in.
"""

import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import compared, interleaved, number, parser, progress, run, with_spread
from benchmarks.resident import PeakMemory, alone
from benchmarks.results import Row
from benchmarks.sizes import config_of, model_class
from benchmarks.training import neox, size_of

BLOCK = 16 << 20
COLUMNS = {
    "of the speed of reading": with_spread("share"),
    "weights read too": number("share_read"),
    "times GPT-NeoX": with_spread("times_GPT-NeoX"),
    "seconds": number("seconds", ".3f"),
    "reading, GB/s": number("limit_gbytes", ".1f"),
    "peak, copies of the model": number("copies"),
    "of them own memory": number("own_copies"),
}


def write(name: str, size: str, folder: Path) -> int:
    """In a process of its own; the number of parameters."""
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
    made = model_class("Tokenformer")
    if name == "from_pretrained":
        return made.from_pretrained(folder)
    from safetensors.torch import load_file

    model = made(made.config_class.from_pretrained(folder))
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)  # the tied head
    return model


def touch(model: Any) -> None:
    for parameter in model.parameters():
        parameter.detach().sum()


def first_load(name: str, folder: Path, threads: int) -> Row:
    """In the process that is measured."""
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
    return row | {"bytes": peak.bytes, "own_bytes": peak.own_bytes}


def in_turn(folders: dict[str, Path], rounds: int) -> dict[str, list[float]]:
    """Seconds of reading and of loading, with and without a look at the weights."""

    def bind(name: str, look: Callable[[Any], None]) -> Callable[[], None]:
        return lambda: look(load(name, folders[name]))

    functions: dict[str, Callable[[], None]] = {"reading": lambda: read(folders["from_pretrained"])}
    for name in folders:
        functions[name] = bind(name, lambda model: None)
        functions[f"{name}, read"] = bind(name, touch)
    return interleaved(functions, rounds)


def measure_size(folder: Path, size: str, rounds: int) -> Iterator[Row]:
    folders = {"from_pretrained": folder / "ours", "GPT-NeoX": folder / "neox"}
    parameters = {}
    for name, path in folders.items():
        progress(f"loading: writing {size}, {name}")
        parameters[name] = alone(write, name, size, path)
    weights = sum(file.stat().st_size for file in folders["from_pretrained"].iterdir())
    case = {"size": size, "bytes": weights, "parameters": parameters["from_pretrained"]}
    progress(f"loading {size} again and again")
    taken = in_turn(folders, rounds)
    found = compared(taken, "reading")
    again = {**case, "case": f"{size}, again and again", "what": "again"}
    speed = weights / sorted(taken["reading"])[rounds // 2] / 1e9
    for name, row in found.items():
        peer = "GPT-NeoX, read" if name.endswith(", read") else "GPT-NeoX"
        against = compared(taken, "reading", against=(peer,))[name]
        for end in ("", "_spread"):
            row[f"times_GPT-NeoX{end}"] = against[f"times_{peer}{end}"]
        yield {**again, **row, "limit_gbytes": speed}
    for name in ("from_pretrained", "plain", "GPT-NeoX"):
        progress(f"loading {size} in a new process, {name}")
        path = folders.get(name, folders["from_pretrained"])
        row = alone(first_load, name, path, torch.get_num_threads())
        row |= {"copies": row.pop("bytes") / weights, "own_copies": row.pop("own_bytes") / weights}
        first = {**case, "case": f"{size}, first", "what": "first", "name": name}
        yield {**first, **row, "share_spread": 0.0}


def measure(options: Namespace) -> Iterator[Row]:
    from transformers.utils import logging

    logging.disable_progress_bar()
    for size in options.sizes or (["354m", "1.4b"] if options.full else ["354m"]):
        with tempfile.TemporaryDirectory() as name:
            yield from measure_size(Path(name), size, options.rounds or 5)


def main(arguments: list[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--sizes", nargs="+", help="presets")
    run("loading", measure, COLUMNS, made.parse_args(arguments), axes=("bytes",))


if __name__ == "__main__":
    main()
