"""Two ways to know the norms of l2_gelu where the tokens are spread over two processes.

    python benchmarks/token_parallel.py
    python benchmarks/token_parallel.py --shapes 4096x768x2304 --json out.json

One layer, forward and backward, on two processes with a thread each, over gloo. `rows` is what the
package does: they exchange the norms, one number a row, and in the backward pass one number more.
`gram` sums G = K^T K, [d, d], over both, once a step, and has the norms from x^T G x; in the
backward pass the number more then follows from the sum of the gradients of the rows, which is
exchanged anyway. `gram kept` finds G ready, as all micro-batches of a step but the first would.
`nothing` is one half of the tokens by `direct` on each, with nothing exchanged.
"""

import argparse
import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import interleaved, keep, machine, ratio
from torch import Tensor, multiprocessing

from tokenformer.ops import pattention
from tokenformer.ops.rules import RULES, cached_rows
from tokenformer.ops.sharded import sharded_pattention

SHAPES = ["1024x768x576", "1024x768x2304", "4096x768x2304", "4096x768x6144", "4096x128x512"]


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
        ctx.rule = RULES["l2_gelu"](scale, "none", 0.0)
        for few in cached_rows(scores):
            ctx.rule.weigh(scores[few], weights[few], squares[few].sqrt())
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
            work = torch.empty_like(scores[few])
            ctx.rule.begin_backward(scores[few], dinner[few], weights[few], work, (factor[few],))
        dy = dinner @ keys
        summing = dist.all_reduce(dy, async_op=True)
        dvalues = weights.T @ grad
        dkeys = dinner.T @ (factor * x)
        summing.wait()
        bend = -torch.linalg.vecdot(x, dy).unsqueeze(1) * factor / squares  # 2 c
        dkeys.addmm_(keys, x.T @ (bend * x))
        return factor * dy + bend * slope, dkeys, dvalues, None, None


def measure(rank: int, port: int, shapes: list[str], rounds: int, path: Path | None) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    results = []
    for shape in shapes:
        found = compare(rank, *map(int, shape.split("x")), rounds)
        if rank == 0:
            print(shape, *(f"{name} {value}" for name, value in found.items()), sep="  ")
            results.append({"shape": shape, **found})
    if rank == 0:
        keep(path, results)
    dist.destroy_process_group()


def compare(rank: int, rows: int, d: int, n: int, rounds: int) -> dict[str, Any]:
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
    found: dict[str, Any] = {"rows, ms": round(1e3 * sorted(taken["rows"])[rounds // 2], 1)}
    for name in ("gram", "gram kept", "nothing"):
        found[f"{name} / rows"] = [round(value, 2) for value in ratio(taken[name], taken["rows"])]
    found["bytes, rows"], found["bytes, gram"] = 2 * 4 * rows, 4 * d * d
    return found


def gram_of(keys: Tensor) -> Tensor:
    gram = keys.detach().T @ keys.detach()
    dist.all_reduce(gram)
    return gram


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="rows x channels x tokens")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(machine())
    arguments = (free_port(), options.shapes, options.rounds, options.json)
    multiprocessing.spawn(measure, arguments, nprocs=2)


if __name__ == "__main__":
    main()
