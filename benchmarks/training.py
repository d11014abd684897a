"""A step of training and a prefill: TokenFormer beside transformers' GPT-NeoX of equal size, and
its layers beside torch's `nn.TransformerEncoder`.

    python -m benchmarks.training                     # 124m shapes, fewer layers
    python -m benchmarks.training --layers 12 --lengths 1024 --what "training step"

Forward and backward of the same batch by ours with `auto`, by ours with every Pattention by the
released formula, and by the peer with as many parameters (its feed-forward network is widened or
narrowed until they agree). Lengths share one number of tokens, so what grows with the length is
attention; token counts are those of the feed-forward layer. The share of the matrix products' speed
counts the model's useful FLOPs alone, against square products measured in the same rounds.
"""

import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.formula import by_formula
from benchmarks.measuring import compared, interleaved, number, parser, progress, run, with_spread
from benchmarks.results import Row
from tokenformer import TokenformerConfig, TokenformerEncoderLayer, TokenformerForCausalLM
from tokenformer.models.accounting import forward_flops

COLUMNS = {
    "of the products' speed": with_spread("share"),
    "times released": with_spread("times_released"),
    "times the peer": with_spread("times_peer"),
    "ms per 1,000 tokens": number("seconds_per_token", ".1f", unit=1e-6),
    "parameters": number("parameters", ","),
}


def ours(backend: str, options: Namespace) -> Any:
    """`backend` may also be `released`: the formula as the authors' code has it."""
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
        return by_formula(model)
    for module in model.modules():
        if hasattr(module, "backend"):
            module.backend = backend
    return model


def neox(parameters: int, options: Namespace) -> Any:
    """As many parameters as ours, embeddings tied as ours are."""
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
    stack: Any = nn.TransformerEncoder  # typed for torch's own layers alone
    return with_backend(backend, stack(layer, options.layers, enable_nested_tensor=False))


def torch_encoder(parameters: int, options: Namespace) -> nn.Module:
    """torch's own, pre-norm and without biases, as ours, and of equal size."""
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
    """One shape: `options` with a length, a batch and a number of feed-forward tokens."""
    # The encoder has neither embedding nor head.
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
    taken = interleaved({"products": lambda: square @ square, **functions}, options.rounds)
    flops = options.batch * useful_flops(what, options)
    found = compared(taken, "products", work=flops / square_flops, against=("released", peer))
    rows = []
    for name, model in models.items():
        row = found[name]
        for end in ("", "_spread"):
            row[f"times_peer{end}"] = row.pop(f"times_{peer}{end}")
        case = f"{what}, {options.batch} x {options.length}, n {options.ffn_tokens}"
        row |= {"case": case, "what": what, "length": options.length, "n": options.ffn_tokens}
        row |= {"batch": options.batch, "peer": peer, "parameters": size_of(model)}
        row["seconds_per_token"] = row["seconds"] / (options.batch * options.length)
        row["limit_gflops"] = square_flops / statistics.median(taken["products"]) / 1e9
        rows.append(row)
    return rows


def useful_flops(what: str, options: Namespace) -> int:
    """Of one sequence by our model; by the peer, of equal size, they are the same but for the
    rounding of its width."""
    with torch.device("meta"):
        config = ours("auto", options).config
    parts = forward_flops(config, options.length)
    if what == "encoder step":
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


WHAT = ["training step", "prefill", "encoder step"]


def main(arguments: list[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--what", nargs="+", choices=WHAT, default=WHAT)
    made.add_argument("--width", type=int, default=768)
    made.add_argument("--layers", type=int, default=3)
    made.add_argument("--lengths", type=int, nargs="+", help="the first also for all token counts")
    made.add_argument("--ffn_tokens", type=int, nargs="+", help="the first also for all lengths")
    made.add_argument("--tokens", type=int, default=1024, help="of a batch")
    made.add_argument("--vocab", type=int, default=8192)
    made.add_argument("--square", type=int, default=2048, help="side of the limit's products")
    options = made.parse_args(arguments)
    width = options.width
    options.lengths = options.lengths or ([512, 256, 1024, 2048] if options.full else [512, 1024])
    more = [6 * width, 12 * width] if options.full else [6 * width]
    options.ffn_tokens = options.ffn_tokens or [3 * width, *more]
    run("training", measure, COLUMNS, options, axes=("length", "n"), cost="seconds_per_token")


if __name__ == "__main__":
    main()
