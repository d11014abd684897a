"""The peak of memory of forward and backward: of one layer by backend, and of a whole model.

    python -m benchmarks.memory                      # the feed-forward layer of 1.4b at 4096 rows
    python -m benchmarks.memory --shapes 4096x768x6144 --backends streamed

Each peak is that of the resident memory of a process of its own, beyond what it holds when forward
begins: rows, tokens and the gradient handed in for a layer; the weights for a model. The gradients
made are in it, buffers of the libraries beneath torch and what its allocator does not give back
too. What is kept for the backward pass is counted by hooks. The least possible is the gradients
themselves.
"""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.formula import Kept, mlp, released
from benchmarks.measuring import number, parser, progress, run
from benchmarks.operator import by, shape
from benchmarks.resident import PeakMemory, alone
from benchmarks.results import Row
from benchmarks.training import neox, ours, size_of
from tokenformer.ops import BACKENDS

# Rows, d, n: the largest layer of 1.4b, fewer rows, fewer tokens.
SHAPES = [(4096, 768, 34480), (1024, 768, 34480), (4096, 768, 8560)]
MORE_SHAPES = [*SHAPES, (2048, 768, 34480), (4096, 768, 17240), (4096, 768, 2304)]
COLUMNS = {
    "peak, MB": number("peak_bytes", ",.0f", unit=1e6),
    "of released's": number("peak", ".3f"),
    "kept, MB": number("kept_bytes", ",.0f", unit=1e6),
    "kept, of released's": number("kept", ".3f"),
    "gradients, MB": number("gradient_bytes", ",.0f", unit=1e6),
}
BY_NAME = {"released": released, "mlp": mlp}


def layer_memory(name: str, rows: int, d: int, n: int, threads: int) -> Row:
    """In the process that is measured."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    inputs = [torch.randn(size, requires_grad=True) for size in ((rows, d), (n, d), (n, d))]
    grad = torch.randn(rows, d)
    function = BY_NAME.get(name) or by(name)
    warm_up(function)
    with PeakMemory() as peak:
        with Kept(inputs) as kept:
            out = function(*inputs)
        made = torch.autograd.grad(out, inputs, grad)
    gradients = sum(tensor.nbytes for tensor in made)
    return {"peak_bytes": peak.bytes, "kept_bytes": kept.bytes, "gradient_bytes": gradients}


def warm_up(function: Any) -> None:
    """What the libraries set up at first use is not the function's."""
    small = [torch.randn(64, 64, requires_grad=True) for _ in range(3)]
    torch.autograd.grad(function(*small).sum(), small)


def model_memory(name: str, options: Namespace) -> Row:
    """In the process that is measured; GPT-NeoX as large as ours."""
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
        with Kept(model.parameters()) as kept:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    gradients = sum(parameter.grad.nbytes for parameter in model.parameters())
    return {"peak_bytes": peak.bytes, "kept_bytes": kept.bytes, "gradient_bytes": gradients}


def compared_with_released(case: Row, found: dict[str, Row]) -> Iterator[Row]:
    for name, row in found.items():
        shares = {
            what: row[f"{what}_bytes"] / max(1, found["released"][f"{what}_bytes"])
            for what in ("peak", "kept")
        }
        yield {**case, "name": name, **row, **shares}


def measure(options: Namespace) -> Iterator[Row]:
    threads = options.threads = torch.get_num_threads()
    shapes = options.shapes or (MORE_SHAPES if options.full else SHAPES)
    for rows, d, n in shapes:
        found = {}
        for name in ("released", "mlp", *options.backends):
            progress(f"memory of {name}: {rows} rows, width {d}, {n} tokens")
            found[name] = alone(layer_memory, name, rows, d, n, threads)
        case = {"case": f"{rows} x {d} x {n}", "what": "layer", "rows": rows, "d": d, "n": n}
        yield from compared_with_released(case, found)
    for length in options.lengths:
        options.length = length
        options.ffn_tokens = 3 * options.width
        found = {}
        for name in ("released", "auto", "GPT-NeoX"):
            progress(f"memory of a training step, {name}, {options.batch} x {length}")
            found[name] = alone(model_memory, name, options)
        case = {"case": f"training step, {options.batch} x {length}", "what": "training step"}
        yield from compared_with_released({**case, "length": length}, found)


def main(arguments: list[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--shapes", type=shape, nargs="*", help="rows x d x n")
    made.add_argument(
        "--backends",
        nargs="+",
        choices=[*BACKENDS, "auto"],
        default=["reference", "direct", "streamed"],
    )
    made.add_argument("--width", type=int, default=768, help="of the whole model")
    made.add_argument("--layers", type=int, default=3)
    made.add_argument("--vocab", type=int, default=8192)
    made.add_argument("--batch", type=int, default=2)
    made.add_argument("--lengths", type=int, nargs="*", default=[512, 1024])
    options = made.parse_args(arguments)
    axes = ("n", "rows", "d", "length")
    run("memory", measure, COLUMNS, options, axes=axes, cost="peak_bytes")


if __name__ == "__main__":
    main()
