"""What Pattention costs over the two matrix products it cannot do without.

    .venv/bin/python benchmarks/pattention.py

For each shape, forward and backward of three functions of the same input, interleaved, median of
many rounds, as ratios to the bare products x K^T V (the limit): the bias-free GELU network with the
same matrices, which is what a Transformer's feed-forward layer does, and `tokenformer.pattention`.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import tokenformer

SHAPES = [  # rows, d, n: the 124M model's projections and feed-forward layer, then larger ones
    (1024, 768, 576),
    (1024, 768, 2304),
    (1024, 768, 8560),
    (4096, 128, 512),
]


def products(x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return x @ keys.T @ values


def gelu_network(x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return F.gelu(x @ keys.T) @ values


FUNCTIONS = {
    "bare products": products,
    "GELU network": gelu_network,
    "pattention": tokenformer.pattention,
}


def seconds(function: Callable[..., Tensor], tensors: list[Tensor]) -> float:
    start = time.perf_counter()
    function(*tensors).sum().backward()
    taken = time.perf_counter() - start
    for tensor in tensors:
        tensor.grad = None
    return taken


def measure(rows: int, d: int, n: int, rounds: int) -> dict[str, float]:
    tensors = [torch.randn(*shape, requires_grad=True) for shape in ((rows, d), (n, d), (n, d))]
    taken: dict[str, list[float]] = {name: [] for name in FUNCTIONS}
    for round_number in range(rounds + 2):
        for name, function in FUNCTIONS.items():
            time_taken = seconds(function, tensors)
            if round_number >= 2:  # the first rounds warm the caches
                taken[name].append(time_taken)
    return {name: statistics.median(times) for name, times in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, fp32, {rounds} rounds")
    print(f"{'rows x d x n':>20}" + "".join(f"{name:>16}" for name in FUNCTIONS) + f"{'GF/s':>8}")
    for rows, d, n in SHAPES:
        medians = measure(rows, d, n, rounds)
        limit = medians["bare products"]
        ratios = "".join(f"{median / limit:>16.2f}" for median in medians.values())
        speed = 12 * rows * d * n / medians["pattention"] / 1e9
        print(f"{f'{rows} x {d} x {n}':>20}{ratios}{speed:>8.0f}")


if __name__ == "__main__":
    main()
