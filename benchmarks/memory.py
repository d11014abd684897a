"""Peak memory of forward and backward, for one layer by backend and for a whole model.

    python -m benchmarks.memory                      # the feed-forward layer of 1.4b at 4096 rows
    python -m benchmarks.memory --shapes 4096x768x6144 --backends streamed

The peak is the resident memory of a new process beyond what it holds before the forward pass:
inputs, tokens and output gradient of a layer, or the weights of a model. It includes the gradients,
buffers of the libraries below torch and memory that torch's allocator does not return. Hooks count
what autograd saves for the backward pass. The lower limit is the gradients.
"""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.baselines import mlp, released
from benchmarks.harness import make_parser, number, progress, run
from benchmarks.memory_usage import PeakMemory, SavedTensors, in_new_process
from benchmarks.operator import backend_function, shape
from benchmarks.results import Row
from benchmarks.training import neox, ours, size_of
from tokenformer.ops import BACKENDS

# Rows, d, n: the largest layer of 1.4b, then fewer rows, then fewer tokens.
SHAPES = [(4096, 768, 34480), (1024, 768, 34480), (4096, 768, 8560)]
MORE_SHAPES = [*SHAPES, (2048, 768, 34480), (4096, 768, 17240), (4096, 768, 2304)]
COLUMNS = {
    "peak, MB": number("peak_bytes", ",.0f", unit=1e6),
    "peak / released": number("peak", ".3f"),
    "saved, MB": number("saved_bytes", ",.0f", unit=1e6),
    "saved / released": number("saved", ".3f"),
    "gradients, MB": number("gradient_bytes", ",.0f", unit=1e6),
}
BASELINES = {"released": released, "mlp": mlp}


def layer_memory(name: str, rows: int, d: int, n: int, threads: int) -> Row:
    """Measure one layer. Runs in a new process."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    inputs = [torch.randn(size, requires_grad=True) for size in ((rows, d), (n, d), (n, d))]
    grad = torch.randn(rows, d)
    function = BASELINES.get(name) or backend_function(name)
    warm_up(function)
    with PeakMemory() as peak:
        with SavedTensors(inputs) as saved:
            out = function(*inputs)
        gradients = torch.autograd.grad(out, inputs, grad)
    gradient_bytes = sum(tensor.nbytes for tensor in gradients)
    return memory_row(peak, saved, gradient_bytes)


def warm_up(function: Any) -> None:
    """Let libraries allocate what they set up on first use."""
    small = [torch.randn(64, 64, requires_grad=True) for _ in range(3)]
    torch.autograd.grad(function(*small).sum(), small)


def model_memory(name: str, options: Namespace) -> Row:
    """Measure a training step; GPT-NeoX gets as many parameters. Runs in a new process."""
    torch.set_num_threads(options.threads)
    if name == "GPT-NeoX":
        with torch.device("meta"):
            size = size_of(ours("auto", options))
        model = neox(size, options)
    else:
        model = ours(name, options)
    ids = torch.randint(options.vocab, (options.batch, options.length))
    model(input_ids=ids[:1, :64], labels=ids[:1, :64], use_cache=False).loss.backward()
    model.zero_grad()

    with PeakMemory() as peak:
        with SavedTensors(model.parameters()) as saved:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    gradient_bytes = sum(parameter.grad.nbytes for parameter in model.parameters())
    return memory_row(peak, saved, gradient_bytes)


def memory_row(peak: PeakMemory, saved: SavedTensors, gradient_bytes: int) -> Row:
    return {
        "peak_bytes": peak.bytes,
        "saved_bytes": saved.bytes,
        "gradient_bytes": gradient_bytes,
    }


def relative_to_released(case: Row, measured: dict[str, Row]) -> Iterator[Row]:
    for name, row in measured.items():
        shares = {
            what: row[f"{what}_bytes"] / max(1, measured["released"][f"{what}_bytes"])
            for what in ("peak", "saved")
        }
        yield {**case, "name": name, **row, **shares}


def measure(options: Namespace) -> Iterator[Row]:
    threads = options.threads = torch.get_num_threads()
    shapes = options.shapes or (MORE_SHAPES if options.full else SHAPES)
    for rows, d, n in shapes:
        measured = {}
        for name in ("released", "mlp", *options.backends):
            progress(f"memory of {name}: {rows} rows, width {d}, {n} tokens")
            measured[name] = in_new_process(layer_memory, name, rows, d, n, threads)
        case = {"case": f"{rows} x {d} x {n}", "what": "layer", "rows": rows, "d": d, "n": n}
        yield from relative_to_released(case, measured)
    for length in options.lengths:
        options.length = length
        options.ffn_tokens = 3 * options.width
        measured = {}
        for name in ("released", "auto", "GPT-NeoX"):
            progress(f"memory of a training step, {name}, {options.batch} x {length}")
            measured[name] = in_new_process(model_memory, name, options)
        case = {"case": f"training step, {options.batch} x {length}", "what": "training step"}
        yield from relative_to_released({**case, "length": length}, measured)


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shapes", type=shape, nargs="*", help="rows x d x n")
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=[*BACKENDS, "auto"],
        default=["reference", "direct", "streamed"],
    )
    parser.add_argument("--width", type=int, default=768, help="of the model")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 1024])
    options = parser.parse_args(arguments)
    axes = ("n", "rows", "d", "length")
    run("memory", measure, COLUMNS, options, axes=axes, cost="peak_bytes")


if __name__ == "__main__":
    main()
