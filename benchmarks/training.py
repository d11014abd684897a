"""A step of training and a prefill: TokenFormer beside transformers' GPT-NeoX of equal size.

    python benchmarks/training.py                     # 124m shapes, fewer layers
    python benchmarks/training.py --layers 12 --length 1024

Forward and backward of the same batch by three models: ours with `auto`, ours by the plain formula,
and GPT-NeoX with as many parameters (its MLP is widened or narrowed until they agree). Times are
interleaved; the share of the matrix products' speed counts the model's useful FLOPs alone, against
square products measured in the same rounds.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from measuring import interleaved, keep, machine, ratio

from tokenformer import TokenformerConfig, TokenformerForCausalLM
from tokenformer.models.accounting import forward_flops, training_flops

SQUARE = 2048


def ours(backend: str, options: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    config = TokenformerConfig(
        vocab_size=options.vocab,
        hidden_size=options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 64,
        qkv_tokens=3 * options.width // 4,
        output_tokens=3 * options.width // 4,
        ffn_tokens=3 * options.width,
        max_position_embeddings=options.length,
    )
    model = TokenformerForCausalLM(config)
    for module in model.modules():
        if hasattr(module, "backend"):
            module.backend = backend
    return model


def neox(parameters: int, options: argparse.Namespace) -> Any:
    """As many parameters as ours, embeddings tied as ours are."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    def build(intermediate: int) -> Any:
        config = GPTNeoXConfig(
            vocab_size=options.vocab,
            hidden_size=options.width,
            num_hidden_layers=options.layers,
            num_attention_heads=options.width // 64,
            intermediate_size=intermediate,
            max_position_embeddings=options.length,
            tie_word_embeddings=True,
        )
        return GPTNeoXForCausalLM(config)

    with torch.device("meta"):
        missing = parameters - build(4 * options.width).num_parameters()
    intermediate = 4 * options.width + missing // (options.layers * (2 * options.width + 1))
    return build(intermediate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    models = {"auto": ours("auto", options), "reference": ours("reference", options)}
    config, size = models["auto"].config, models["auto"].num_parameters()
    models["GPT-NeoX"] = neox(size, options)
    ids = torch.randint(options.vocab, (options.batch, options.length))
    square = torch.randn(SQUARE, SQUARE)

    def step(model: Any) -> Any:
        def run() -> None:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            model.zero_grad()

        return run

    def prefill(model: Any) -> Any:
        def run() -> None:
            with torch.no_grad():
                model(input_ids=ids, use_cache=False)

        return run

    about = machine()
    print(f"{about['cpu']}, {about['threads']} threads, torch {about['torch']}, fp32")
    print(f"{size:,} parameters (GPT-NeoX {models['GPT-NeoX'].num_parameters():,})")
    results: dict[str, Any] = {"parameters": size}
    for what, make, flops in (
        ("training step", step, training_flops(config, options.length)),
        ("prefill", prefill, forward_flops(config, options.length)),
    ):
        functions = {name: make(model) for name, model in models.items()}
        taken = interleaved({"products": lambda: square @ square, **functions}, options.rounds)
        useful = options.batch * sum(flops.values()) / (2 * SQUARE**3)  # in such products
        results[what] = {}
        print(f"\n{what}, {options.batch} x {options.length} tokens")
        for name in models:
            share, spread = ratio(taken["products"], taken[name])
            against, _ = ratio(taken["GPT-NeoX"], taken[name])
            row = {"share_of_products": useful * share, "times_neox": against}
            results[what][name] = row
            print(
                f"  {name:<10} {row['share_of_products']:5.2f} ± {useful * spread:.2f} of the "
                f"products' speed, {against:5.2f} times as fast as GPT-NeoX"
            )
    keep(options.json, results)


if __name__ == "__main__":
    main()
