"""Training step and prefill against GPT-NeoX of equal size; layers against torch's encoder.

    python -m benchmarks.training                     # 124m shapes, fewer layers
    python -m benchmarks.training --layers 12 --lengths 1024 --what "training step"

Each row runs the same batch through our model with `auto`, our model with the released formula, or
the peer: transformers' GPT-NeoX or torch's `nn.TransformerEncoder`, with an MLP width that gives
as many parameters. All lengths have the same number of tokens per batch, so only the cost of
attention grows with length. Token counts are those of the feed-forward layer. The share counts the
model's useful FLOPs, relative to square matrix products measured in the same rounds.
"""

import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.baselines import use_released_formula
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
from tokenformer import TokenformerConfig, TokenformerEncoderLayer, TokenformerForCausalLM
from tokenformer.models.accounting import forward_flops

COLUMNS = {
    "share of matmul speed": with_spread("share"),
    "x released": with_spread("times_released"),
    "x peer": with_spread("times_peer"),
    "ms per 1,000 tokens": number("seconds_per_token", ".1f", unit=1e-6),
    "parameters": number("parameters", ","),
}


def ours(backend: str, options: Namespace) -> Any:
    """Build our model; the backend `released` stands for the formula of the authors' code."""
    torch.manual_seed(0)
    config = TokenformerConfig(
        vocab_size=options.vocab,
        hidden_size=options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=max(1, options.width // 64),
        qkv_tokens=3 * options.width // 4,
        output_tokens=3 * options.width // 4,
        ffn_tokens=options.ffn_tokens,
        max_position_embeddings=options.length,
    )
    return with_backend(backend, TokenformerForCausalLM(config))


def with_backend(backend: str, model: Any) -> Any:
    if backend == "released":
        return use_released_formula(model)
    for module in model.modules():
        if hasattr(module, "backend"):
            module.backend = backend
    return model


def neox(parameters: int, options: Namespace) -> Any:
    """Build a GPT-NeoX with tied embeddings and about this many parameters."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    def build(intermediate: int) -> Any:
        config = GPTNeoXConfig(
            vocab_size=options.vocab,
            hidden_size=options.width,
            num_hidden_layers=options.layers,
            num_attention_heads=max(1, options.width // 64),
            intermediate_size=intermediate,
            max_position_embeddings=options.length,
            tie_word_embeddings=True,
        )
        return GPTNeoXForCausalLM(config)

    with torch.device("meta"):
        missing = parameters - build(4 * options.width).num_parameters()
    intermediate = 4 * options.width + missing // (options.layers * (2 * options.width + 1))
    return build(max(1, intermediate))


def our_encoder(backend: str, options: Namespace) -> nn.Module:
    torch.manual_seed(0)
    attention_tokens = 3 * options.width // 4
    layer = TokenformerEncoderLayer(
        options.width,
        max(1, options.width // 64),
        options.ffn_tokens,
        dropout=0.0,
        qkv_tokens=attention_tokens,
        output_tokens=attention_tokens,
        batch_first=True,
    )
    stack: Any = nn.TransformerEncoder  # its annotations accept only torch's own layers
    return with_backend(backend, stack(layer, options.layers, enable_nested_tensor=False))


def torch_encoder(parameters: int, options: Namespace) -> nn.Module:
    """Build torch's encoder, pre-norm and without biases, with about this many parameters."""
    width = options.width
    spare = parameters // options.layers - 4 * width * width - 2 * width  # attention and two norms
    layer = nn.TransformerEncoderLayer(
        width,
        max(1, width // 64),
        max(1, spare // (2 * width)),
        dropout=0.0,
        activation="gelu",
        batch_first=True,
        norm_first=True,
        bias=False,
    )
    return nn.TransformerEncoder(layer, options.layers, enable_nested_tensor=False)


def size_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def model_step(model: Any, ids: Tensor) -> Callable[[], None]:
    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    return step


def model_prefill(model: Any, ids: Tensor) -> Callable[[], None]:
    @torch.no_grad()
    def prefill() -> None:
        model(input_ids=ids, use_cache=False)

    return prefill


def encoder_step(model: nn.Module, x: Tensor) -> Callable[[], None]:
    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return step


def measure_case(what: str, options: Namespace) -> list[Row]:
    """Measure one combination of length, batch size and feed-forward tokens."""
    make = our_encoder if what == "encoder step" else ours
    models = {"auto": make("auto", options), "released": make("released", options)}
    size = size_of(models["auto"])
    shape = (options.batch, options.length)
    if what == "encoder step":
        peer, inputs = "TransformerEncoder", torch.randn(*shape, options.width)
        models[peer] = torch_encoder(size, options)
        bind: Any = encoder_step
    else:
        peer, inputs = "GPT-NeoX", torch.randint(options.vocab, shape)
        models[peer] = neox(size, options)
        bind = model_step if what == "training step" else model_prefill
    square = torch.randn(options.square, options.square)
    square_flops = 2 * options.square**3
    functions = {name: bind(model, inputs) for name, model in models.items()}
    times = time_interleaved({"products": lambda: square @ square, **functions}, options.rounds)
    flops = options.batch * useful_flops(what, options)
    compared = compare(times, "products", work=flops / square_flops, against=("released", peer))
    rows = []
    for name, model in models.items():
        row = compared[name]
        for suffix in ("", "_spread"):
            row[f"times_peer{suffix}"] = row.pop(f"times_{peer}{suffix}")
        case = f"{what}, {options.batch} x {options.length}, n {options.ffn_tokens}"
        row |= {"case": case, "what": what, "length": options.length, "n": options.ffn_tokens}
        row |= {"batch": options.batch, "peer": peer, "parameters": size_of(model)}
        row["seconds_per_token"] = row["seconds"] / (options.batch * options.length)
        row["limit_gflops"] = square_flops / statistics.median(times["products"]) / 1e9
        rows.append(row)
    return rows


def useful_flops(what: str, options: Namespace) -> int:
    """Return the FLOPs of one sequence. The peer has the same up to the rounding of its width."""
    with torch.device("meta"):
        config = ours("auto", options).config
    parts = forward_flops(config, options.length)
    if what == "encoder step":  # it has no output head
        parts["head"] = 0
    return sum(parts.values()) * (1 if what == "prefill" else 3)


def measure(options: Namespace) -> Iterator[Row]:
    options.rounds = options.rounds or (7 if options.full else 5)
    shapes = [(length, options.ffn_tokens[0]) for length in options.lengths]
    shapes += [(options.lengths[0], tokens) for tokens in options.ffn_tokens[1:]]
    for what in options.what:
        for length, tokens in shapes:
            progress(f"{what}: length {length}, {tokens} feed-forward tokens")
            case = Namespace(**vars(options))
            case.length, case.batch = length, max(1, options.tokens // length)
            case.ffn_tokens = tokens
            yield from measure_case(what, case)


MEASUREMENTS = ["training step", "prefill", "encoder step"]


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--what", nargs="+", choices=MEASUREMENTS, default=MEASUREMENTS)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument(
        "--lengths", type=int, nargs="+", help="token counts are swept at the first"
    )
    parser.add_argument("--ffn_tokens", type=int, nargs="+", help="lengths are swept at the first")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens per batch")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--square", type=int, default=2048, help="matrix size of the limit")
    options = parser.parse_args(arguments)
    width = options.width
    options.lengths = options.lengths or ([512, 256, 1024, 2048] if options.full else [512, 1024])
    more = [6 * width, 12 * width] if options.full else [6 * width]
    options.ffn_tokens = options.ffn_tokens or [3 * width, *more]
    run("training", measure, COLUMNS, options, axes=("length", "n"), cost="seconds_per_token")


if __name__ == "__main__":
    main()
