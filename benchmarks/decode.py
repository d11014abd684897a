"""Decoding through `generate`, against GPT-NeoX and the machine's memory bandwidth.

    python -m benchmarks.decode                      # 27M and 124M parameters
    python -m benchmarks.decode --sizes 124m --contexts 1024

Decoding is memory-bound: every new token reads all weights and the KV cache once. The limit is
summing a tensor of that many bytes, measured in the same rounds. A round decodes `--tokens` tokens;
its figure is the median time between two of them. The first token, which includes the prefill of
the prompt, is a figure of its own. Context, batch size and feed-forward tokens are swept one at a
time, with the others at their first value.
"""

import statistics
import time
from argparse import Namespace
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from benchmarks.harness import (
    compare,
    make_parser,
    number,
    progress,
    ratio,
    run,
    seconds_of,
    with_spread,
)
from benchmarks.results import Row
from benchmarks.training import neox, ours
from tokenformer.models.quantization import quantize_model

SIZES = {"27m": (3, 8192), "124m": (12, 50304)}
"""Layers and vocabulary, at width 768."""
BITS = {"int8": 8, "int4": 4}

COLUMNS = {
    "share of read bandwidth": with_spread("share"),
    "x released": with_spread("times_released"),
    "x GPT-NeoX": with_spread("times_GPT-NeoX"),
    "ms/token": number("seconds", ".1f", unit=1e-3),
    "first token, ms": number("first_seconds", ".0f", unit=1e-3),
    "first x GPT-NeoX": with_spread("first_times_GPT-NeoX"),
    "bandwidth, GB/s": number("limit_gbytes", ".0f"),
}


class Clock:
    """A streamer that notes when each token arrives; the prompt comes first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class Decoder:
    """Decodes greedily after `ids`; a call returns the seconds to the first token and to each of
    the others."""

    def __init__(self, model: Any, ids: torch.Tensor, tokens: int) -> None:
        self.model, self.ids, self.tokens = model.eval(), ids, tokens
        model.generation_config.eos_token_id = None  # always decode the same number of tokens

    def __call__(self) -> tuple[float, list[float]]:
        clock, start = Clock(), time.perf_counter()
        self.model.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            pad_token_id=0,
            max_new_tokens=self.tokens,
            do_sample=False,
            streamer=clock,
        )
        tokens = clock.times[1:]
        return tokens[0] - start, [after - before for before, after in pairwise(tokens)]


def measure_case(options: Namespace) -> list[Row]:
    """Measure one combination of context, batch size and feed-forward tokens."""
    options.length = options.context + options.tokens
    models = {name: ours(name, options) for name in ("auto", "released")}
    size = models["auto"].num_parameters()
    models["bf16"] = ours("auto", options).bfloat16()
    for name, bits in BITS.items():
        models[name] = ours("auto", options)
        quantize_model(models[name], bits)
    models["GPT-NeoX"] = neox(size, options)
    ids = torch.randint(options.vocab, (options.batch, options.context))
    cache = 2 * options.layers * options.width * options.batch * options.context
    weights = torch.randn(size + cache)

    decoders = {name: Decoder(model, ids, options.tokens) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in ("reading", *models)}
    first: dict[str, list[float]] = {name: [] for name in models}
    for round_number in range(options.rounds + 1):  # the first is a warm-up
        found = {name: decode() for name, decode in decoders.items()}
        reading = [seconds_of(weights.sum) for _ in range(options.tokens)]
        if round_number:
            times["reading"].append(statistics.median(reading))
            for name, (prefill, tokens) in found.items():
                first[name].append(prefill)
                times[name].append(statistics.median(tokens))
    rows = compare(times, "reading", against=("released", "GPT-NeoX"))
    for name in ("bf16", *BITS):
        bytes_read = sum(p.numel() * p.itemsize for p in models[name].parameters())
        bytes_read += (2 if name == "bf16" else 4) * cache
        for key in ("share", "share_spread"):
            rows[name][key] *= bytes_read / (4 * weights.numel())
    for name, row in rows.items():
        speedup, spread = ratio(first["GPT-NeoX"], first[name])
        row |= {"first_seconds": statistics.median(first[name]), "first_times_GPT-NeoX": speedup}
        row["first_times_GPT-NeoX_spread"] = spread
    speed = 4e-9 * weights.numel() / statistics.median(times["reading"])
    case = {
        "case": f"{size / 1e6:.0f}M after {options.context}, "
        f"batch {options.batch}, n {options.ffn_tokens}",
        "context": options.context,
        "batch": options.batch,
        "n": options.ffn_tokens,
        "parameters": size,
        "limit_gbytes": speed,
    }
    return [{**case, **row} for row in rows.values()]


def measure(options: Namespace) -> Iterator[Row]:
    options.rounds = options.rounds or (11 if options.full else 5)
    (context, *contexts), (batch, *batches) = options.contexts, options.batches
    n, *more = options.ffn_tokens or [3 * options.width, 12 * options.width]
    cases = [(context, batch, n)]
    cases += [(other, batch, n) for other in contexts]
    first, *larger = options.sizes
    shapes = [(first, *case) for case in cases]
    shapes += [(first, context, other, n) for other in batches]
    shapes += [(first, context, batch, other) for other in more]
    # Prefill of the larger models is slow: sweep their contexts only with --full.
    shapes += [(size, *case) for size in larger for case in (cases if options.full else cases[:1])]
    for size, context, batch, n in shapes:
        progress(f"decode, {size} after {context} tokens, batch {batch}, {n} feed-forward tokens")
        case = Namespace(**vars(options))
        case.context, case.batch, case.ffn_tokens = context, batch, n
        layers, vocab = SIZES[size]
        case.layers, case.vocab = options.layers or layers, options.vocab or vocab
        yield from measure_case(case)


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--layers", type=int, help="default: that of the size")
    parser.add_argument("--vocab", type=int, help="default: that of the size")
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 16, 1024])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--ffn_tokens", type=int, nargs="+")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to decode")
    options = parser.parse_args(arguments)
    run("decode", measure, COLUMNS, options, axes=("parameters", "context", "batch", "n"))


if __name__ == "__main__":
    main()
