"""Routed Pattention over the total number of tokens, at a fixed number of active ones.

    python -m benchmarks.sparse
    python -m benchmarks.sparse --rows 4096 --width 768 --active 2304 --group_size 64

Forward and backward of one layer with its router. The limit is a dense layer of as many tokens as
are active; `x dense` is the speedup over a dense layer of all tokens. The router's share is that of
its own time, without gradients, in the time of the layer.
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
from tokenformer.layers import Pattention, RoutedPattention

FACTORS = (1, 4, 16)
MORE_FACTORS = (*FACTORS, 64)
VARIANTS = {
    "centroid, all": ("centroid", "all"),
    "centroid, chosen": ("centroid", "chosen"),
    "learned, chosen": ("learned", "chosen"),
}
"""Router, and the scores in the norm."""

COLUMNS = {
    "share of dense speed": with_spread("share"),
    "x dense": with_spread("times_dense"),
    "router's share": with_spread("router_share"),
    "ms": number("seconds", ".1f", unit=1e-3),
}


def measure_case(options: Namespace, factor: int, rounds: int) -> Iterator[Row]:
    d, total = options.width, factor * options.active
    x = torch.randn(options.rows, d, requires_grad=True)
    grad = torch.randn(options.rows, d)
    sparse = {
        name: RoutedPattention(
            d,
            d,
            total,
            group_size=options.group_size,
            active_groups=options.active // options.group_size,
            router=router,
            norm=norm,
        )
        for name, (router, norm) in VARIANTS.items()
    }

    def step(layer: nn.Module) -> Callable[[], Any]:
        inputs = [x, *layer.parameters()]
        return lambda: torch.autograd.grad(layer(x), inputs, grad)

    def route(layer: RoutedPattention) -> Callable[[], Any]:
        return lambda: layer.router(x, layer.centroids(), layer.active_groups)

    functions = {"active": step(Pattention(d, d, options.active))}
    functions["dense"] = step(Pattention(d, d, total))
    functions |= {name: step(layer) for name, layer in sparse.items()}
    routers = {f"{name}, router": route(layer) for name, layer in sparse.items()}
    times = time_interleaved({**functions, **routers}, rounds)
    found = compare({name: times[name] for name in functions}, "active", against=("dense",))
    case = {"case": f"{options.rows} x {d}, {options.active} of {total}", "tokens": total}
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
    for factor in options.factors or (MORE_FACTORS if options.full else FACTORS):
        progress(f"sparse, {options.active} active of {factor * options.active} tokens")
        yield from measure_case(options, factor, options.rounds or (11 if options.full else 5))


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--active", type=int, default=512, help="active tokens")
    parser.add_argument("--group_size", type=int, default=32)
    parser.add_argument("--factors", type=int, nargs="+", help="total over active tokens")
    options = parser.parse_args(arguments)
    if options.active % options.group_size:
        parser.error("--active must be a multiple of --group_size")
    run("sparse", measure, COLUMNS, options, axes=("tokens",))


if __name__ == "__main__":
    main()
