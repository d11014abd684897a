"""A whole training step of small models, optimizer included, against a Transformer and nanoGPT.

    python -m benchmarks.narrow                # nanoGPT's model for a CPU, and the laptop recipes'
    python -m benchmarks.narrow --compile      # also with torch.compile; compiling takes minutes
    python -m benchmarks.narrow --threads 1

All models of a case have the same width, depth, batch and about the same parameters. `Transformer`
is our baseline in the same code. `GPT` is plain torch with the parts of nanoGPT, with AdamW fused;
`nanoGPT` is the same with AdamW as nanoGPT calls it on a CPU. The limit is square matrix products.
"""

import statistics
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.baselines import PlainGPT, use_released_formula
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
from tokenformer import (
    TokenformerConfig,
    TokenformerForCausalLM,
    TransformerConfig,
    TransformerForCausalLM,
)
from tokenformer.models.accounting import training_flops
from tokenformer.train.optimizer import clip_gradients, make_optimizer
from tokenformer.train.options import OptimizerOptions
from tokenformer.train.task import NextTokenLoss

VOCAB, HEADS = 257, 4
STEPS = 4
"""Steps per timing: one is a few milliseconds on a fast machine."""


class Case(NamedTuple):
    layers: int
    batch: int
    length: int
    attention_tokens: int
    ffn_tokens: int


CASES = {
    "nanogpt": Case(4, 12, 64, 96, 384),
    "text": Case(2, 4, 128, 128, 512),
    "enwik8": Case(4, 8, 256, 128, 512),
}
"""nanoGPT's settings for a CPU, and the recipes of these names."""

COLUMNS = {
    "x Transformer": with_spread("times_Transformer"),
    "x nanoGPT": with_spread("times_nanoGPT"),
    "x GPT": with_spread("times_GPT"),
    "x released": with_spread("times_released"),
    "share of matmul speed": with_spread("share"),
    "ms/step": number("seconds", ".1f", unit=1e-3),
    "parameters": number("parameters", ","),
}


def our_models(case: Case, width: int) -> dict[str, Any]:
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": width,
        "num_hidden_layers": case.layers,
        "num_attention_heads": HEADS,
        "max_position_embeddings": case.length,
        "rotary_fraction": 0.5,
    }
    tokens = TokenformerConfig(
        **shape,
        qkv_tokens=case.attention_tokens,
        output_tokens=case.attention_tokens,
        ffn_tokens=case.ffn_tokens,
    )
    # Two tokens are two matrix rows: what attention does not use goes to the MLP.
    missing = 4 * case.attention_tokens + case.ffn_tokens - 2 * width
    matrices = TransformerConfig(**shape, intermediate_size=missing)
    return {
        "tokenformer": TokenformerForCausalLM(tokens),
        "released": use_released_formula(TokenformerForCausalLM(tokens)),
        "Transformer": TransformerForCausalLM(matrices),
    }


def step_of(
    loss: Callable[[Tensor], Tensor],
    parameters: Iterable[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    batch: Tensor,
) -> Callable[[], None]:
    parameters = list(parameters)

    def steps() -> None:
        for _ in range(STEPS):
            loss(batch).backward()
            clip_gradients(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return steps


def our_step(model: Any, batch: Tensor, compiled: bool = False) -> Callable[[], None]:
    model.train()
    count = batch.shape[0] * (batch.shape[1] - 1)
    module: Any = NextTokenLoss(model)
    summed = torch.compile(module) if compiled else module
    optimizer = make_optimizer(model, OptimizerOptions())
    return step_of(lambda ids: summed(ids) / count, model.parameters(), optimizer, batch)


def measure_case(name: str, options: Namespace) -> list[Row]:
    torch.manual_seed(0)
    case, width = CASES[name], options.width
    batch = torch.randint(VOCAB, (case.batch, case.length + 1))
    models = our_models(case, width)
    functions = {key: our_step(model, batch) for key, model in models.items()}
    if options.compile:
        for key, model in our_models(case, width).items():
            if key != "released":
                models[f"{key}, compiled"] = model
                functions[f"{key}, compiled"] = our_step(model, batch, compiled=True)
    for key, fused in (("GPT", True), ("nanoGPT", None)):
        inner = models["Transformer"].config.intermediate_size
        models[key] = PlainGPT(VOCAB, width, inner, case.layers, HEADS, case.length)
        optimizer = torch.optim.AdamW(models[key].parameters(), betas=(0.9, 0.95), fused=fused)
        functions[key] = step_of(models[key], models[key].parameters(), optimizer, batch)
    square = torch.randn(options.square, options.square)
    functions["products"] = lambda: square @ square
    times = time_interleaved(functions, options.rounds)
    per_sequence = sum(training_flops(models["tokenformer"].config, case.length).values())
    flops = STEPS * case.batch * per_sequence
    baselines = ("Transformer", "nanoGPT", "GPT", "released")
    work = flops / (2 * options.square**3)
    rows = compare(times, "products", work=work, against=baselines)
    about = {
        "case": f"{name}: {case.layers} layers, {case.batch} x {case.length}",
        "batch": case.batch,
        "length": case.length,
        "layers": case.layers,
        "threads": torch.get_num_threads(),
        "limit_gflops": 2e-9 * options.square**3 / statistics.median(times["products"]),
    }
    return [
        {
            **about,
            **row,
            "seconds": row["seconds"] / STEPS,
            "parameters": sum(p.numel() for p in models[key].parameters()),
        }
        for key, row in rows.items()
    ]


def measure(options: Namespace) -> Iterator[Row]:
    options.rounds = options.rounds or (41 if options.full else 15)
    if options.threads:
        torch.set_num_threads(options.threads)
    for name in options.cases:
        progress(f"narrow, {name}")
        yield from measure_case(name, options)


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--compile", action="store_true", help="also with torch.compile")
    parser.add_argument("--square", type=int, default=1024, help="matrix size of the limit")
    run("narrow", measure, COLUMNS, parser.parse_args(arguments))


if __name__ == "__main__":
    main()
