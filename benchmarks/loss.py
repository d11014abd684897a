"""Memory and time of the chunked loss against the plain one, at a 50k vocabulary.

    .venv/bin/python benchmarks/loss.py

Peak memory is what the process gains, beyond inputs and their gradients, while loss and gradients
are computed; each measurement runs in a process of its own, because a peak cannot be taken back.
"""

import argparse
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer.train.loss import chunked_cross_entropy

TOKENS, WIDTH, VOCABULARY = 4096, 768, 50304


def plain(hidden: Tensor, embedding: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ embedding.T, labels, reduction="sum")


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "plain": plain,
    "chunked": chunked_cross_entropy,
}


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(name: str, rounds: int, connection: Connection) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
    # At the scale of a real embedding: larger logits have softmaxes full of denormal numbers.
    embedding = torch.empty(VOCABULARY, WIDTH).normal_(std=0.02).requires_grad_()
    labels = torch.randint(VOCABULARY, (TOKENS,))
    hidden.grad, embedding.grad = torch.ones_like(hidden), torch.ones_like(embedding)
    # The weight's own gradient, once more: autograd makes it before adding it to `.grad`.
    spare = torch.ones_like(embedding)
    before = peak_bytes()
    del spare
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        LOSSES[name](hidden, embedding, labels).backward()
        times.append(time.perf_counter() - start)
    connection.send((peak_bytes() - before, statistics.median(times)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    context = multiprocessing.get_context("spawn")
    results = {}
    for name in LOSSES:
        ours, theirs = context.Pipe()
        process = context.Process(target=measure, args=(name, rounds, theirs))
        process.start()
        results[name] = ours.recv()
        process.join()
    print(f"{TOKENS} tokens, width {WIDTH}, vocabulary {VOCABULARY}, torch {torch.__version__}")
    for name, (memory, seconds) in results.items():
        print(f"{name:>8}: peak {memory / 2**20:7.0f} MiB, {seconds:5.2f} s")
    memory, seconds = (results["plain"][i] / results["chunked"][i] for i in (0, 1))
    print(f"plain / chunked: memory {memory:.1f}, time {seconds:.2f}")


if __name__ == "__main__":
    main()
