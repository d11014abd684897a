"""Two ways to compute the norms of l2_gelu when tokens are sharded over two processes.

    python -m benchmarks.token_parallel
    python -m benchmarks.token_parallel --shapes 4096x768x2304

One layer, forward and backward, on two processes with one thread each, over gloo. `rows` is what
the package does: exchange the norms, one number per row, and another number per row in the backward
pass. `gram` sums G = K^T K [d, d] over both processes once per step and computes the norms as
x^T G x; the number of the backward pass then follows from the summed input gradients, which are
exchanged anyway. `gram reused` has G from an earlier micro-batch of the step. The limit runs half
of the tokens on each process with `direct` and exchanges nothing.
"""

import os
import socket
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from benchmarks.harness import (
    compare,
    make_parser,
    number,
    progress,
    run,
    time_interleaved,
    with_spread,
)
from benchmarks.results import Row
from tokenformer.ops import pattention
from tokenformer.ops.backends.derivatives import DERIVATIVES, BackwardBlock, cached_rows
from tokenformer.ops.sharded import sharded_pattention
from tokenformer.ops.theta import ThetaOptions

SHAPES = ["1024x768x576", "1024x768x2304", "4096x768x2304", "4096x768x6144", "4096x128x512"]
COLUMNS = {
    "ms": number("seconds", ",.0f", unit=1e-3),
    "share of limit": with_spread("share"),
    "x rows": with_spread("times_rows"),
    "kB exchanged for norms": number("bytes", ",.0f", unit=1e3),
}


class Gram(torch.autograd.Function):
    """`sharded_pattention` with the Gram matrix of all keys as an argument."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, keys: Tensor, values: Tensor, gram: Tensor, scale: float
    ) -> Tensor:
        slope = x @ gram
        squares = torch.linalg.vecdot(slope, x).unsqueeze(1)
        scores = x @ keys.T
        weights = torch.empty_like(scores)
        ctx.theta = DERIVATIVES["l2_gelu"](ThetaOptions("l2_gelu", scale, "none", 0.0))
        for few in cached_rows(scores):
            ctx.theta.fill_weights(scores[few], weights[few], squares[few].sqrt())
        out = weights @ values
        dist.all_reduce(out)
        factor = (scale / squares).sqrt()
        ctx.save_for_backward(x, keys, values, slope, squares, factor, scores)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, keys, values, slope, squares, factor, scores = ctx.saved_tensors
        weights, dinner = torch.empty_like(scores), grad @ values.T
        for few in cached_rows(scores):
            scratch = torch.empty_like(scores[few])
            ctx.theta.backward_sums(
                BackwardBlock(scores[few], dinner[few], weights[few], scratch, (factor[few],))
            )
        dy = dinner @ keys
        reduction = dist.all_reduce(dy, async_op=True)
        dvalues = weights.T @ grad
        dkeys = dinner.T @ (factor * x)
        reduction.wait()
        twice_c = -torch.linalg.vecdot(x, dy).unsqueeze(1) * factor / squares
        dkeys.addmm_(keys, x.T @ (twice_c * x))
        return factor * dy + twice_c * slope, dkeys, dvalues, None, None


def measure(options: Namespace) -> Iterator[Row]:
    for shape in options.shapes:
        progress(f"rows x channels x tokens {shape}")
        rows, d, n = map(int, shape.split("x"))
        queue = multiprocessing.get_context("spawn").SimpleQueue()
        arguments = (free_port(), rows, d, n, options.rounds or 9, queue)
        multiprocessing.spawn(time_variants, arguments, nprocs=2)
        sizes = {"rows": 2 * 4 * rows, "gram": 4 * d * d, "gram reused": 0}
        for name, row in compare(queue.get(), "no exchange", against=("rows",)).items():
            yield {"case": shape, **row, "bytes": sizes[name]}


def time_variants(rank: int, port: int, rows: int, d: int, n: int, rounds: int, queue: Any) -> None:
    """Runs in both processes; rank 0 returns its times."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    x, grad = torch.randn(rows, d, requires_grad=True), torch.randn(rows, d)
    local = [torch.randn(n, d).chunk(2)[rank].clone().requires_grad_() for _ in range(2)]
    reused = gram_of(local[0])

    def by_rows() -> tuple[Tensor, ...]:
        out = sharded_pattention(x, *local, dist.group.WORLD, scale_tokens=float(n))
        return torch.autograd.grad(out, [x, *local], grad)

    def by_gram(gram: Tensor | None = None) -> tuple[Tensor, ...]:
        out = Gram.apply(x, *local, gram_of(local[0]) if gram is None else gram, float(n))
        return torch.autograd.grad(out, [x, *local], grad)

    def no_exchange() -> None:
        out = pattention(x, *local, scale_tokens=float(n), backend="direct")
        torch.autograd.grad(out, [x, *local], grad)
        dist.barrier()  # like the others, as slow as the slower process

    for expected, computed in zip(by_rows(), by_gram(), strict=True):
        torch.testing.assert_close(expected, computed, rtol=1e-3, atol=1e-3)
    functions = {
        "rows": by_rows,
        "gram": by_gram,
        "gram reused": lambda: by_gram(reused),
        "no exchange": no_exchange,
    }
    times = time_interleaved(functions, rounds)
    if rank == 0:
        queue.put(times)
    dist.destroy_process_group()


def gram_of(keys: Tensor) -> Tensor:
    gram = keys.detach().T @ keys.detach()
    dist.all_reduce(gram)
    return gram


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="rows x channels x tokens")
    run("token_parallel", measure, COLUMNS, parser.parse_args())


if __name__ == "__main__":
    main()
