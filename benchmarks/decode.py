"""Decoding a token at a time through `generate`: beside GPT-NeoX, and against reading the weights.

    python benchmarks/decode.py                      # 27M parameters, after 128 tokens
    python benchmarks/decode.py --layers 12 --vocab 50304 --context 1024

A token cannot be had faster than all weights are read once; that limit is the sum of as many
numbers, measured in the same rounds.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from measuring import interleaved, keep, machine, ratio
from training import neox, ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.length = options.context + options.tokens
    models = {"auto": ours("auto", options), "reference": ours("reference", options)}
    size = models["auto"].num_parameters()
    models["GPT-NeoX"] = neox(size, options)
    ids = torch.randint(options.vocab, (1, options.context))
    weights = torch.randn(size)

    def speak(model: Any, tokens: int) -> Any:
        model = model.eval()
        bounds = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        return lambda: model.generate(ids, **bounds, do_sample=False, pad_token_id=0)

    functions = {name: speak(model, options.tokens) for name, model in models.items()}
    # What reading the prompt takes is not decoding; it is measured apart and taken off.
    first = {f"{name}, first": speak(model, 1) for name, model in models.items()}
    reading = {"reading": lambda: [weights.sum() for _ in range(options.tokens - 1)]}
    taken = interleaved({**reading, **functions, **first}, options.rounds)
    decoded = {
        name: [a - b for a, b in zip(taken[name], taken[f"{name}, first"], strict=True)]
        for name in models
    }
    about = machine()
    print(f"{about['cpu']}, {about['threads']} threads, torch {about['torch']}, fp32")
    print(f"{size:,} parameters, batch 1, {options.tokens} tokens after {options.context}")
    results: dict[str, Any] = {"parameters": size, "context": options.context}
    for name, seconds in decoded.items():
        share, spread = ratio(taken["reading"], seconds)
        against, _ = ratio(decoded["GPT-NeoX"], seconds)
        results[name] = {"share_of_reading": share, "times_neox": against}
        print(
            f"  {name:<10} {share:5.2f} ± {spread:.2f} of the speed of reading, "
            f"{against:5.2f} times as fast as GPT-NeoX"
        )
    keep(options.json, results)


if __name__ == "__main__":
    main()
