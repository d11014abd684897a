"""Pattention forward and backward, by backend: time relative to its matrix products, and memory.

    python -m benchmarks.operator
    python -m benchmarks.operator --backends streamed --shapes 4096x768x6144 --rounds 7

The limit is the six matrix products of forward and backward (x K^T, W V, and two for the gradients
of each). `released` is the formula of the authors' code, `mlp` a Transformer MLP with as many
weights. Hooks count what autograd saves for the backward pass; `memory` measures peaks.
"""

import statistics
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines import mlp, released
from benchmarks.harness import (
    compare,
    make_parser,
    number,
    progress,
    run,
    time_interleaved,
    with_spread,
)
from benchmarks.memory_usage import SavedTensors
from benchmarks.results import Row
from tokenformer.ops import BACKENDS, pattention

# Rows, d, n: n of the layers of 124m, 354m and 1.4b; more and fewer rows; a narrow model.
SHAPES = [
    (1024, 768, 576),
    (1024, 768, 2304),
    (1024, 768, 8560),
    (1024, 768, 34480),
    (256, 768, 2304),
    (4096, 768, 2304),
    (4096, 128, 512),
]
MORE_SHAPES = [*SHAPES, (4096, 768, 6144), (2048, 768, 34480), (4096, 768, 34480)]

COLUMNS = {
    "share of matmul speed": with_spread("share"),
    "x released": with_spread("times_released"),
    "x mlp": with_spread("times_mlp"),
    "saved / released": number("saved", ".3f"),
    "matmul, GFLOP/s": number("limit_gflops", ".0f"),
}


def backend_function(backend: str) -> Any:
    return lambda x, keys, values: pattention(x, keys, values, backend=backend)


def saved_bytes(function: Any, inputs: list[Tensor]) -> int:
    with SavedTensors(inputs) as saved:
        function(*inputs)
    return saved.bytes


def measure_shape(rows: int, d: int, n: int, names: list[str], rounds: int) -> list[Row]:
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((rows, d), (n, d), (n, d))]
    grad, weights = torch.randn(rows, d), torch.randn(rows, n)
    x, keys, values = (tensor.detach() for tensor in inputs)
    out, down = torch.empty(rows, d), torch.empty(n, d)

    def products() -> None:
        torch.mm(x, keys.T, out=weights)
        torch.mm(weights, values, out=out)
        torch.mm(grad, values.T, out=weights)
        torch.mm(weights, keys, out=out)
        torch.mm(weights.T, grad, out=down)
        torch.mm(weights.T, x, out=down)

    functions = {
        "released": released,
        "mlp": mlp,
        **{name: backend_function(name) for name in names},
    }

    def step(function: Any) -> Any:
        return lambda: torch.autograd.grad(function(*inputs), inputs, grad)

    steps = {name: step(function) for name, function in functions.items()}
    times = time_interleaved({"products": products, **steps}, rounds)
    compared = compare(times, "products", against=("released", "mlp"))
    saved = {name: saved_bytes(function, inputs) for name, function in functions.items()}
    case = {"case": f"{rows} x {d} x {n}", "rows": rows, "d": d, "n": n}
    speed = 12 * rows * d * n / statistics.median(times["products"]) / 1e9
    memory = {
        name: {"saved_bytes": count, "saved": count / saved["released"]}
        for name, count in saved.items()
    }
    return [{**case, **compared[name], **memory[name], "limit_gflops": speed} for name in functions]


def measure(options: Namespace) -> Iterator[Row]:
    torch.manual_seed(0)
    shapes = options.shapes or (MORE_SHAPES if options.full else SHAPES)
    for position, (rows, d, n) in enumerate(shapes, 1):
        progress(f"operator, {position} of {len(shapes)}: {rows} rows, width {d}, {n} tokens")
        yield from measure_shape(
            rows, d, n, options.backends, options.rounds or (11 if options.full else 5)
        )


def shape(text: str) -> tuple[int, int, int]:
    rows, d, n = (int(size) for size in text.split("x"))
    return rows, d, n


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shapes", type=shape, nargs="+", help="rows x d x n")
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=[name for name in (*BACKENDS, "auto") if name not in ("native", "triton")],
        default=["reference", "direct", "streamed"],
    )
    run("operator", measure, COLUMNS, parser.parse_args(arguments), axes=("n", "rows", "d"))


if __name__ == "__main__":
    main()
