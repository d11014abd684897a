"""Two ways to know the norms of l2_gelu where the tokens are spread over two processes.

    python -m benchmarks.token_parallel
    python -m benchmarks.token_parallel --shapes 4096x768x2304

One layer, forward and backward, on two processes with a thread each, over gloo. `rows` is what the
package does: they exchange the norms, one number a row, and in the backward pass one number more.
`gram` sums G = K^T K, [d, d], over both, once a step, and has the norms from x^T G x; in the
backward pass the number more then follows from the sum of the gradients of the rows, which is
exchanged anyway. `gram kept` finds G ready, as all micro-batches of a step but the first would.
The limit is half of the tokens by `direct` on each, with nothing exchanged.
"""

import os
import socket
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from benchmarks.measuring import compared, interleaved, number, parser, progress, run, with_spread
from benchmarks.results import Row
from tokenformer.ops import pattention
from tokenformer.ops.backends.derivatives import DERIVATIVES, BackwardBlock, cached_rows
from tokenformer.ops.sharded import sharded_pattention
from tokenformer.ops.theta import ThetaOptions

SHAPES = ["1024x768x576", "1024x768x2304", "4096x768x2304", "4096x768x6144", "4096x128x512"]
COLUMNS = {
    "ms": number("seconds", ",.0f", unit=1e-3),
    "of the limit's speed": with_spread("share"),
    "times as fast as rows": with_spread("times_rows"),
    "kB exchanged for norms": number("bytes", ",.0f", unit=1e3),
}


class Gram(torch.autograd.Function):
    """`sharded_pattention` with the Gram matrix of all keys given; its passes are the same."""

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
        summing = dist.all_reduce(dy, async_op=True)
        dvalues = weights.T @ grad
        dkeys = dinner.T @ (factor * x)
        summing.wait()
        bend = -torch.linalg.vecdot(x, dy).unsqueeze(1) * factor / squares  # 2 c
        dkeys.addmm_(keys, x.T @ (bend * x))
        return factor * dy + bend * slope, dkeys, dvalues, None, None


def measure(options: Namespace) -> Iterator[Row]:
    for shape in options.shapes:
        progress(f"rows x channels x tokens {shape}")
        rows, d, n = map(int, shape.split("x"))
        queue = multiprocessing.get_context("spawn").SimpleQueue()
        arguments = (free_port(), rows, d, n, options.rounds or 9, queue)
        multiprocessing.spawn(take_turns, arguments, nprocs=2)
        sizes = {"rows": 2 * 4 * rows, "gram": 4 * d * d, "gram kept": 0}
        for name, row in compared(queue.get(), "nothing", against=("rows",)).items():
            yield {"case": shape, **row, "bytes": sizes[name]}


def take_turns(rank: int, port: int, rows: int, d: int, n: int, rounds: int, queue: Any) -> None:
    """In each of the processes; the first tells its times."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    x, grad = torch.randn(rows, d, requires_grad=True), torch.randn(rows, d)
    mine = [torch.randn(n, d).chunk(2)[rank].clone().requires_grad_() for _ in range(2)]
    kept = gram_of(mine[0])

    def by_rows() -> tuple[Tensor, ...]:
        out = sharded_pattention(x, *mine, dist.group.WORLD, scale_tokens=float(n))
        return torch.autograd.grad(out, [x, *mine], grad)

    def by_gram(gram: Tensor | None = None) -> tuple[Tensor, ...]:
        out = Gram.apply(x, *mine, gram_of(mine[0]) if gram is None else gram, float(n))
        return torch.autograd.grad(out, [x, *mine], grad)

    def nothing() -> None:
        out = pattention(x, *mine, scale_tokens=float(n), backend="direct")
        torch.autograd.grad(out, [x, *mine], grad)
        dist.barrier()  # as the others, it takes as long as the slower of both

    for ours, theirs in zip(by_rows(), by_gram(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    functions = {
        "rows": by_rows,
        "gram": by_gram,
        "gram kept": lambda: by_gram(kept),
        "nothing": nothing,
    }
    taken = interleaved(functions, rounds)
    if rank == 0:
        queue.put(taken)
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
    made = parser(__doc__)
    made.add_argument("--shapes", nargs="+", default=SHAPES, help="rows x channels x tokens")
    run("token_parallel", measure, COLUMNS, made.parse_args())


if __name__ == "__main__":
    main()
