"""What Pattention costs, forward and backward, by backend: time against bare products, and memory.

    python benchmarks/pattention.py
    python benchmarks/pattention.py --backends streamed --shapes 4096x768x6144 --json out.json

The limit is the six matrix products that forward and backward cannot do without (x K^T, W V, and
two for the gradients of each). `released` is the formula as the authors' code has it, in our own
words: the norm, the division and the scaling are passes of their own that autograd keeps. What is
kept for the backward pass is counted by hooks; the peak of memory is not measured here.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import interleaved, keep, machine, ratio
from torch import Tensor

from tokenformer.ops import BACKENDS, pattention

SHAPES = [  # rows, d, n: layers of 124m, 354m and 1.4b, more rows, and a narrow model
    (1024, 768, 576),
    (1024, 768, 2304),
    (1024, 768, 8560),
    (4096, 768, 2304),
    (4096, 768, 6144),
    (2048, 768, 34480),
    (4096, 128, 512),
]


def released(x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    scores = x @ keys.T
    normed = scores / torch.norm(scores, p=2, dim=-1, keepdim=True)
    return F.gelu(normed * keys.shape[0] ** 0.5) @ values


def by(backend: str) -> Any:
    return lambda x, keys, values: pattention(x, keys, values, backend=backend)


def kept_bytes(function: Any, inputs: list[Tensor]) -> int:
    """Of what autograd keeps besides the inputs."""
    own, seen = {tensor.data_ptr() for tensor in inputs}, {}

    def note(tensor: Tensor) -> Tensor:
        seen[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = function(*inputs)
    del out
    return sum(size for address, size in seen.items() if address not in own)


def measure(rows: int, d: int, n: int, names: list[str], rounds: int) -> dict[str, Any]:
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

    functions = {"released": released, **{name: by(name) for name in names}}

    def step(function: Any) -> Any:
        return lambda: torch.autograd.grad(function(*inputs), inputs, grad)

    steps = {name: step(function) for name, function in functions.items()}
    taken = interleaved({"products": products, **steps}, rounds)
    limit = sorted(taken["products"])[rounds // 2]
    found: dict[str, Any] = {
        "rows": rows,
        "d": d,
        "n": n,
        "gflops": 12 * rows * d * n / limit / 1e9,
    }
    most = kept_bytes(released, inputs)
    for name, function in functions.items():
        share, spread = ratio(taken["products"], taken[name])
        faster, _ = ratio(taken["released"], taken[name])
        found[name] = {
            "share_of_products": share,
            "spread": spread,
            "times_released": faster,
            "kept": kept_bytes(function, inputs) / most,
        }
    return found


def shape(text: str) -> tuple[int, int, int]:
    rows, d, n = (int(number) for number in text.split("x"))
    return rows, d, n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shapes", type=shape, nargs="+", default=SHAPES, help="rows x d x n")
    here = [name for name in BACKENDS if name != "triton"]  # which is not for CPUs
    parser.add_argument("--backends", nargs="+", choices=[*here, "auto"], default=here)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    about = machine()
    print(f"{about['cpu']}, {about['threads']} threads, torch {about['torch']}, fp32")
    print("share of the products' speed ± quartiles, times as fast as released, kept of released's")
    results = []
    for rows, d, n in options.shapes:
        found = measure(rows, d, n, options.backends, options.rounds)
        results.append(found)
        print(f"\n{rows} x {d} x {n}: products at {found['gflops']:.0f} GF/s")
        for name in ("released", *options.backends):
            row = found[name]
            print(
                f"  {name:<10} {row['share_of_products']:5.2f} ± {row['spread']:.2f}"
                f" {row['times_released']:6.2f} {row['kept']:7.3f}",
                flush=True,
            )
    keep(options.json, results)


if __name__ == "__main__":
    main()
