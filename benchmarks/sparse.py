"""Routed Pattention: training over the total number of tokens, and decoding.

    python -m benchmarks.sparse
    python -m benchmarks.sparse --what training --rows 4096 --active 2304 --factors 4 16
    python -m benchmarks.sparse --what layer blocks --sizes 1.4b

Training is forward and backward of one layer with its router. First the number of active tokens is
fixed and the total grows, at `--training_width`; then come the feed-forward layers of the sizes,
with a quarter of the tokens active and fewer rows. The limit is a dense layer of as many tokens as
are active; `x dense` is the speedup over a dense layer of all tokens. The router's share is that of
its own time, without gradients, in the time of the layer.

Decoding is in `sparse_decoding.py`.
"""

import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.harness import (
    compare,
    make_parser,
    number,
    progress,
    ratio,
    run,
    time_interleaved,
    with_spread,
)
from benchmarks.results import Row
from benchmarks.sparse_decoding import (
    SIZES,
    UPCYCLED_SIZE,
    active_groups,
    measure_blocks,
    measure_layer,
    measure_upcycled,
)
from tokenformer.layers import Pattention, RoutedPattention

MEASUREMENTS = ["training", "layer", "blocks", "upcycled"]
ROWS_OF_SIZES = 1024
FACTORS = (1, 4, 16)
MORE_FACTORS = (*FACTORS, 64)
VARIANTS = {
    "gated, all": ("gated", "all"),
    "gated, chosen": ("gated", "chosen"),
    "centroid, chosen": ("centroid", "chosen"),
}
"""Router, and the scores in the norm."""

COLUMNS = {
    "share of dense speed": with_spread("share"),
    "x dense": with_spread("times_dense"),
    "router's share": with_spread("router_share"),
    "share of read bandwidth": with_spread("bandwidth_share"),
    "ms": number("seconds", ".2f", unit=1e-3),
}


def measure_training(
    options: Namespace, rows: int, d: int, active: int, total: int
) -> Iterator[Row]:
    x = torch.randn(rows, d, requires_grad=True)
    grad = torch.randn(rows, d)
    sparse = {
        name: RoutedPattention(
            d,
            d,
            total,
            group_size=options.group_size,
            active_groups=active // options.group_size,
            router=router,
            norm=norm,
        )
        for name, (router, norm) in VARIANTS.items()
    }

    def step(layer: nn.Module) -> Callable[[], Any]:
        inputs = [x, *layer.parameters()]
        return lambda: torch.autograd.grad(layer(x), inputs, grad)

    def route(layer: RoutedPattention) -> Callable[[], Any]:
        return lambda: layer.router(x, layer.directions(), layer.active_groups)

    functions = {"active": step(Pattention(d, d, active))}
    functions["dense"] = step(Pattention(d, d, total))
    functions |= {name: step(layer) for name, layer in sparse.items()}
    routers = {f"{name}, router": route(layer) for name, layer in sparse.items()}
    times = time_interleaved({**functions, **routers}, options.rounds)
    found = compare({name: times[name] for name in functions}, "active", against=("dense",))
    case = {"case": f"{rows} x {d}, {active:,} of {total:,}", "what": "training"}
    case |= {"tokens": total, "active": active}
    for name in sparse:
        share, spread = ratio(times[f"{name}, router"], times[name])
        router = {"router_share": share, "router_share_spread": spread}
        yield {
            **case,
            **found[name],
            **router,
            "router_seconds": statistics.median(times[f"{name}, router"]),
        }


def measure(options: Namespace) -> Iterator[Row]:
    torch.manual_seed(0)
    options.rounds = options.rounds or (11 if options.full else 5)
    if "training" in options.what:
        for factor in options.factors or (MORE_FACTORS if options.full else FACTORS):
            total = factor * options.active
            progress(f"sparse, {options.active} active of {total} tokens")
            yield from measure_training(
                options, options.rows, options.training_width, options.active, total
            )
    for size in options.sizes:
        total = 4 * (options.tokens or SIZES[size][0])
        if "training" in options.what:
            progress(f"sparse, training step of a layer of {size}")
            active = options.group_size * active_groups(total, options.group_size)
            rows = min(options.rows, ROWS_OF_SIZES)
            yield from measure_training(options, rows, options.width, active, total)
        decoding = {"layer": measure_layer, "blocks": measure_blocks}
        if size == UPCYCLED_SIZE:
            decoding["upcycled"] = measure_upcycled
        for what in [name for name in decoding if name in options.what]:
            for group_size in options.decoding_group_sizes:
                progress(f"sparse, {what} of {size}, decoding, groups of {group_size}")
                yield from decoding[what](options, size, group_size)


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--what", nargs="+", choices=MEASUREMENTS, default=MEASUREMENTS)
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument("--width", type=int, default=768, help="of the sizes")
    parser.add_argument("--tokens", type=int, help="of a projection; default: that of the size")
    parser.add_argument("--layers", type=int, help="to decode with; default: that of the size")
    parser.add_argument("--new_tokens", type=int, default=32, help="tokens to decode")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--training_width", type=int, default=256)
    parser.add_argument("--active", type=int, default=512, help="active tokens")
    parser.add_argument("--group_size", type=int, default=32, help="in training")
    parser.add_argument("--decoding_group_sizes", type=int, nargs="+", default=[64, 32])
    parser.add_argument("--factors", type=int, nargs="+", help="total over active tokens")
    options = parser.parse_args(arguments)
    if options.active % options.group_size:
        parser.error("--active must be a multiple of --group_size")
    run("sparse", measure, COLUMNS, options, axes=("tokens", "active"))


if __name__ == "__main__":
    main()
