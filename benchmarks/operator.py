"""What Pattention costs, forward and backward, by backend: time against bare products, and memory.

    python -m benchmarks.operator
    python -m benchmarks.operator --backends streamed --shapes 4096x768x6144 --rounds 7

The limit is the six matrix products that forward and backward cannot do without (x K^T, W V, and
two for the gradients of each). `released` is the formula as the authors' code has it, `mlp` the
plain Transformer's feed-forward network of as many weights. What is kept for the backward pass is
counted by hooks; peaks of memory are in `memory`.
"""

import statistics
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.formula import Kept, mlp, released
from benchmarks.measuring import compared, interleaved, number, parser, progress, run, with_spread
from benchmarks.results import Row
from tokenformer.ops import BACKENDS, pattention

# Rows, d, n: along n with the layers of 124m, 354m and 1.4b, along the rows, and a narrow model.
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
    "of the products' speed": with_spread("share"),
    "times released": with_spread("times_released"),
    "times mlp": with_spread("times_mlp"),
    "kept, of released's": number("kept", ".3f"),
    "products, GF/s": number("limit_gflops", ".0f"),
}


def by(backend: str) -> Any:
    return lambda x, keys, values: pattention(x, keys, values, backend=backend)


def kept_bytes(function: Any, inputs: list[Tensor]) -> int:
    with Kept(inputs) as kept:
        made = function(*inputs)
    del made
    return kept.bytes


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

    functions = {"released": released, "mlp": mlp, **{name: by(name) for name in names}}

    def step(function: Any) -> Any:
        return lambda: torch.autograd.grad(function(*inputs), inputs, grad)

    steps = {name: step(function) for name, function in functions.items()}
    taken = interleaved({"products": products, **steps}, rounds)
    found = compared(taken, "products", against=("released", "mlp"))
    kept = {name: kept_bytes(function, inputs) for name, function in functions.items()}
    case = {"case": f"{rows} x {d} x {n}", "rows": rows, "d": d, "n": n}
    speed = 12 * rows * d * n / statistics.median(taken["products"]) / 1e9
    memory = {
        name: {"kept_bytes": kept[name], "kept": kept[name] / kept["released"]} for name in kept
    }
    return [{**case, **found[name], **memory[name], "limit_gflops": speed} for name in functions]


def measure(options: Namespace) -> Iterator[Row]:
    torch.manual_seed(0)
    shapes = options.shapes or (MORE_SHAPES if options.full else SHAPES)
    for place, (rows, d, n) in enumerate(shapes, 1):
        progress(f"operator, {place} of {len(shapes)}: {rows} rows, width {d}, {n} tokens")
        yield from measure_shape(
            rows, d, n, options.backends, options.rounds or (11 if options.full else 5)
        )


def shape(text: str) -> tuple[int, int, int]:
    rows, d, n = (int(size) for size in text.split("x"))
    return rows, d, n


def main(arguments: list[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--shapes", type=shape, nargs="+", help="rows x d x n")
    made.add_argument(
        "--backends",
        nargs="+",
        choices=[name for name in (*BACKENDS, "auto") if name not in ("native", "triton")],
        default=["reference", "direct", "streamed"],
    )
    run("operator", measure, COLUMNS, made.parse_args(arguments), axes=("n", "rows", "d"))


if __name__ == "__main__":
    main()
