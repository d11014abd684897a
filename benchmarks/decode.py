"""Decoding a token at a time through `generate`: beside GPT-NeoX, and against reading the weights.

    python -m benchmarks.decode                      # 27M parameters, after 128 and more tokens
    python -m benchmarks.decode --layers 12 --vocab 50304 --contexts 1024

A token cannot be had faster than all weights are read once; that limit is the sum of as many
numbers, measured in the same rounds. Swept are the context, the rows of a batch and the
feed-forward tokens, each with the others at their first value.
"""

import statistics
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.measuring import compared, interleaved, number, parser, progress, run, with_spread
from benchmarks.results import Row
from benchmarks.training import neox, ours

COLUMNS = {
    "of the speed of reading": with_spread("share"),
    "times released": with_spread("times_released"),
    "times GPT-NeoX": with_spread("times_GPT-NeoX"),
    "ms a token": number("seconds", ".1f", unit=1e-3),
    "reading, GB/s": number("limit_gbytes", ".0f"),
}


def measure_case(options: Namespace) -> list[Row]:
    """One shape: `options` with a context, a batch and a number of feed-forward tokens."""
    options.length = options.context + options.tokens
    models = {name: ours(name, options) for name in options.backends}
    size = models["auto"].num_parameters()
    models["GPT-NeoX"] = neox(size, options)
    ids = torch.randint(options.vocab, (options.batch, options.context))
    weights = torch.randn(size)

    def speak(model: Any, tokens: int) -> Any:
        model = model.eval()
        bounds = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        given = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}
        return lambda: model.generate(ids, **given, **bounds, do_sample=False)

    functions = {name: speak(model, options.tokens) for name, model in models.items()}
    # What reading the prompt takes is not decoding; it is measured apart and taken off.
    first = {f"{name}, first": speak(model, 1) for name, model in models.items()}
    steps = options.tokens - 1
    reading = {"reading": lambda: [weights.sum() for _ in range(steps)]}
    taken = interleaved({**reading, **functions, **first}, options.rounds)
    decoded = {
        name: [a - b for a, b in zip(taken[name], taken[f"{name}, first"], strict=True)]
        for name in models
    }
    decoded["reading"] = taken["reading"]
    found = compared(decoded, "reading", against=("released", "GPT-NeoX"))
    speed = 4e-9 * size * steps / statistics.median(taken["reading"])
    case = {
        "case": f"after {options.context}, batch {options.batch}, n {options.ffn_tokens}",
        "context": options.context,
        "batch": options.batch,
        "n": options.ffn_tokens,
        "parameters": size,
        "limit_gbytes": speed,
    }
    return [{**case, **row, "seconds": row["seconds"] / steps} for row in found.values()]


def measure(options: Namespace) -> Iterator[Row]:
    options.rounds = options.rounds or (11 if options.full else 5)
    (context, *contexts), (batch, *batches) = options.contexts, options.batches
    n, *more = options.ffn_tokens or [3 * options.width, 12 * options.width]
    cases = [(context, batch, n)]
    cases += [(other, batch, n) for other in contexts]
    cases += [(context, other, n) for other in batches]
    cases += [(context, batch, other) for other in more]
    for context, batch, n in cases:
        progress(f"decode after {context} tokens, batch {batch}, {n} feed-forward tokens")
        case = Namespace(**vars(options))
        case.context, case.batch, case.ffn_tokens = context, batch, n
        yield from measure_case(case)


def main(arguments: list[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--width", type=int, default=768)
    made.add_argument("--layers", type=int, default=3)
    made.add_argument("--vocab", type=int, default=8192)
    made.add_argument("--contexts", type=int, nargs="+", default=[128, 1024])
    made.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    made.add_argument("--ffn_tokens", type=int, nargs="+")
    made.add_argument("--tokens", type=int, default=32, help="decoded")
    options = made.parse_args(arguments)
    options.backends = ["auto", "released"]
    run("decode", measure, COLUMNS, options, axes=("context", "batch", "n"))


if __name__ == "__main__":
    main()
