"""Decoding through `generate`, against GPT-NeoX and the machine's memory bandwidth.

    python -m benchmarks.decode                      # 27M and 124M parameters
    python -m benchmarks.decode --sizes 124m --contexts 1024

Decoding is memory-bound: every new token reads all weights and the KV cache once. The limit is
summing a tensor of that many bytes, measured in the same rounds. The first token, which includes
the prefill of the prompt, is timed separately. Context, batch size and feed-forward tokens are
swept one at a time, with the others at their first value.
"""

import statistics
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.harness import (
    compare,
    make_parser,
    number,
    progress,
    ratio,
    run,
    time_interleaved,
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

    def decoder(model: Any, tokens: int) -> Any:
        model = model.eval()
        model.generation_config.eos_token_id = None  # always decode the same number of tokens
        inputs = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}
        return lambda: model.generate(ids, **inputs, max_new_tokens=tokens, do_sample=False)

    functions = {name: decoder(model, options.tokens) for name, model in models.items()}
    # The first token is timed separately and subtracted.
    first = {f"{name}, first": decoder(model, 1) for name, model in models.items()}
    steps = options.tokens - 1
    reading = {"reading": lambda: [weights.sum() for _ in range(steps)]}
    times = time_interleaved({**reading, **functions, **first}, options.rounds)
    decoded = {
        name: [a - b for a, b in zip(times[name], times[f"{name}, first"], strict=True)]
        for name in models
    }
    decoded["reading"] = times["reading"]
    rows = compare(decoded, "reading", against=("released", "GPT-NeoX"))
    for name in ("bf16", *BITS):
        bytes_read = sum(p.numel() * p.itemsize for p in models[name].parameters())
        bytes_read += (2 if name == "bf16" else 4) * cache
        for key in ("share", "share_spread"):
            rows[name][key] *= bytes_read / (4 * weights.numel())
    for name, row in rows.items():
        seconds, baseline = times[f"{name}, first"], times["GPT-NeoX, first"]
        speedup, spread = ratio(baseline, seconds)
        row |= {"first_seconds": statistics.median(seconds), "first_times_GPT-NeoX": speedup}
        row["first_times_GPT-NeoX_spread"] = spread
    speed = 4e-9 * weights.numel() * steps / statistics.median(times["reading"])
    case = {
        "case": f"{size / 1e6:.0f}M after {options.context}, "
        f"batch {options.batch}, n {options.ffn_tokens}",
        "context": options.context,
        "batch": options.batch,
        "n": options.ffn_tokens,
        "parameters": size,
        "limit_gbytes": speed,
    }
    return [{**case, **row, "seconds": row["seconds"] / steps} for row in rows.values()]


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
