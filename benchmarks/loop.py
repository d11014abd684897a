"""What the training loop costs over bare forward, backward and optimizer step.

    python -m benchmarks.loop

The same small model, batches and optimizer, interleaved step by step, median of the ratios: the
loop's share is picking and cutting the batch, clipping, the watch over spikes and the metrics row.
"""

from argparse import Namespace
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.measuring import compared, interleaved, number, parser, progress, run, with_spread
from benchmarks.results import Row
from tokenformer import TokenformerConfig, TokenformerForCausalLM
from tokenformer.train.loop import Loop
from tokenformer.train.options import OptimizerOptions, RunOptions, ScheduleOptions
from tokenformer.train.task import LanguageTask

COLUMNS = {
    "of the bare step's speed": with_spread("share", 3),
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
    taken = interleaved({"bare step": bare_step, "loop": loop.step}, rounds)
    case = {"case": f"{options.batch} x {options.length}", "length": options.length}
    yield {**case, **compared(taken, "bare step")["loop"]}


def main(arguments: list[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--batch", type=int, default=8)
    made.add_argument("--length", type=int, default=256)
    run("loop", measure, COLUMNS, made.parse_args(arguments))


if __name__ == "__main__":
    main()
