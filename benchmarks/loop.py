"""What the training loop costs over bare forward, backward and optimizer step.

    .venv/bin/python benchmarks/loop.py

The same small model, batches and optimizer, interleaved step by step, median of the ratios: the
loop's share is picking and cutting the batch, clipping, the watch over spikes and the metrics row.
"""

import argparse
import statistics
import time

import numpy as np
import torch

from tokenformer import TokenformerConfig, TokenformerForCausalLM
from tokenformer.train.loop import Loop
from tokenformer.train.options import OptimizerOptions, RunOptions, ScheduleOptions
from tokenformer.train.task import LanguageTask

BATCH, LENGTH = 8, 256


def make_loop() -> Loop:
    torch.manual_seed(0)
    config = TokenformerConfig(
        vocab_size=257, hidden_size=192, num_hidden_layers=4, num_attention_heads=6
    )
    text = np.random.default_rng(0).integers(0, 256, 100_000).astype(np.uint16)
    return Loop(
        LanguageTask(TokenformerForCausalLM(config), text, text, length=LENGTH),
        OptimizerOptions(),
        ScheduleOptions(),
        RunOptions(steps=10**9, batch_size=BATCH, validate_every=10**9, validation_sequences=1),
    )


def bare_step(loop: Loop, batch: torch.Tensor) -> None:
    (loop.module(batch) / (BATCH * LENGTH)).backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    loop = make_loop()
    batch = loop.task.batch(0, BATCH)
    loop.task.model.train()
    times: list[tuple[float, float]] = []
    for _ in range(rounds + 3):
        start = time.perf_counter()
        bare_step(loop, batch)
        between = time.perf_counter()
        loop.step()
        times.append((between - start, time.perf_counter() - between))
    bare, whole = (statistics.median(column) for column in zip(*times[3:], strict=True))
    ratio = statistics.median(w / b for b, w in times[3:])
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {rounds} rounds")
    print(f"bare step {1e3 * bare:.1f} ms, loop step {1e3 * whole:.1f} ms, ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
