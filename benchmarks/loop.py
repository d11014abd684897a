"""Overhead of the training loop over bare forward, backward and optimizer step.

    python -m benchmarks.loop

Both use the same small model, batch and optimizer. The overhead is sampling the batch, clipping,
spike detection and the metrics row.
"""

from argparse import Namespace
from collections.abc import Iterator

import numpy as np
import torch

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
from tokenformer import TokenformerConfig, TokenformerForCausalLM
from tokenformer.train.loop import Loop
from tokenformer.train.options import OptimizerOptions, RunOptions, ScheduleOptions
from tokenformer.train.task import LanguageTask

COLUMNS = {
    "share of bare step": with_spread("share", 3),
    "ms": number("seconds", ".1f", unit=1e-3),
}


def make_loop(batch: int, length: int) -> Loop:
    torch.manual_seed(0)
    config = TokenformerConfig(
        vocab_size=257, hidden_size=192, num_hidden_layers=4, num_attention_heads=6
    )
    text = np.random.default_rng(0).integers(0, 256, 100_000).astype(np.uint16)
    return Loop(
        LanguageTask(TokenformerForCausalLM(config), text, text, length=length),
        OptimizerOptions(),
        ScheduleOptions(),
        RunOptions(steps=10**9, batch_size=batch, validate_every=10**9, validation_sequences=1),
    )


def measure(options: Namespace) -> Iterator[Row]:
    loop = make_loop(options.batch, options.length)
    batch = loop.task.batch(0, options.batch)
    loop.task.model.train()

    def bare_step() -> None:
        (loop.module(batch) / (options.batch * options.length)).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()

    rounds = options.rounds or (80 if options.full else 30)
    progress(f"loop, {rounds} steps each")
    times = time_interleaved({"bare step": bare_step, "loop": loop.step}, rounds)
    case = {"case": f"{options.batch} x {options.length}", "length": options.length}
    yield {**case, **compare(times, "bare step")["loop"]}


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    run("loop", measure, COLUMNS, parser.parse_args(arguments))


if __name__ == "__main__":
    main()
