"""Decoding with routed tokens, for `benchmarks.sparse`: single layers and the blocks of a model.

A quarter of the groups is active. Dense and routed layers have the same tokens and take turns; an
upcycled model has four times those of the dense one, and as many active. The limit is summing a
tensor. There are as many layers as it takes to read all weights from memory. The
models have few ids, so that nearly all of their time is that of the blocks, and decode through
`generate`.
"""

import copy
import math
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.decode import Decoder
from benchmarks.harness import ratio, seconds_of, time_interleaved
from benchmarks.results import Row
from tokenformer import TokenformerConfig, TokenformerForCausalLM, upcycle
from tokenformer.layers import Pattention, RoutedPattention
from tokenformer.layers.int8 import Int8Pattention
from tokenformer.layers.quantized_routing import RoutedInt8Pattention
from tokenformer.layers.routed_pattention import GroupRouting
from tokenformer.models.configuration import PROJECTIONS
from tokenformer.models.quantization import quantize_model

SIZES = {"124m": (576, 12), "1.4b": (8620, 2)}
"""Tokens of an attention projection, and layers to decode with: two of the twelve of 1.4b."""
FORMATS = ("fp32", "bf16", "int8")
ACTIVE = 0.25
COPIES, UPCYCLED_SIZE = 4, "124m"
"""Upcycling is measured at one size, to spare the memory."""
COLD_BYTES, MOST_LAYERS = 1 << 28, 64
ROUTED = {
    "ffn": ({"ffn"}, "all"),
    "all": (set(PROJECTIONS), "all"),
    "all, chosen": (set(PROJECTIONS), "chosen"),
}
"""Projections that are routed, and the scores in their norm."""
VOCAB, CONTEXT = 512, 16


def active_groups(tokens: int, group_size: int) -> int:
    return max(1, round(ACTIVE * math.ceil(tokens / group_size)))


def bytes_read(module: nn.Module) -> float:
    """Bytes of weights that one token reads."""
    total = float(sum(p.numel() * p.itemsize for p in module.parameters()))
    for layer in module.modules():
        if not isinstance(layer, GroupRouting):
            continue
        tokens = [p for name, p in layer.named_parameters() if name.endswith(TOKEN_TENSORS)]
        skipped = 1 - layer.tokens_per_row / layer.num_tokens
        total -= skipped * sum(p.numel() * p.itemsize for p in tokens)
        if layer.norm == "all" and isinstance(layer, RoutedPattention):
            with torch.no_grad():
                root = layer.key_summary().gram_root
            total += root.numel() * root.itemsize  # the quantized have it as a parameter
    return total


TOKEN_TENSORS = ("key_tokens", "value_tokens", "key_scales", "value_scales")


def rows_of(
    case: Row, times: dict[str, list[float]], sizes: dict[str, float], read: int
) -> list[Row]:
    """Compare every format's routed variants with its dense one, and all with reading."""
    rows = []
    for name, seconds in times.items():
        if name == "reading":
            continue
        dense, spread = ratio(times[f"dense, {name.rpartition(', ')[2]}"], seconds)
        share, share_spread = ratio(times["reading"], seconds)
        moved = sizes[name] / read
        rows.append(
            {
                **case,
                "name": name,
                "seconds": statistics.median(seconds),
                "times_dense": dense,
                "times_dense_spread": spread,
                "bandwidth_share": share * moved,
                "bandwidth_share_spread": share_spread * moved,
                "limit_gbytes": 1e-9 * read / statistics.median(times["reading"]),
            }
        )
    return rows


def with_format(layer: Pattention, form: str) -> nn.Module:
    if form == "int8":
        kind = RoutedInt8Pattention if isinstance(layer, RoutedPattention) else Int8Pattention
        return kind(layer).eval()
    return layer.to(torch.bfloat16 if form == "bf16" else torch.float32).eval()


def measure_layer(options: Namespace, size: str, group_size: int) -> Iterator[Row]:
    """One feed-forward layer."""
    d, tokens = options.width, 4 * (options.tokens or SIZES[size][0])
    routing = {
        "group_size": group_size,
        "active_groups": active_groups(tokens, group_size),
    }
    weights = torch.ones(COLD_BYTES // 4)
    functions: dict[str, Callable[[], Any]] = {"reading": weights.sum}
    sizes, counts = {}, {}
    for form in FORMATS:
        itemsize = {"fp32": 4, "bf16": 2, "int8": 1}[form]
        count = min(MOST_LAYERS, max(2, COLD_BYTES // (2 * tokens * d * itemsize)))
        x = torch.randn(1, d, dtype=torch.bfloat16 if form == "bf16" else torch.float32)
        for name, norm in (("dense", None), ("routed", "all"), ("routed, chosen", "chosen")):
            layers = []
            for _ in range(count):
                layer = Pattention(d, d, tokens)
                if norm:
                    layer = RoutedPattention(d, d, tokens, norm=norm, **routing)
                layers.append(with_format(layer, form))
            functions[f"{name}, {form}"] = decode_layers(layers, x)
            sizes[f"{name}, {form}"], counts[f"{name}, {form}"] = bytes_read(layers[0]), count
    times = time_interleaved(functions, options.rounds)
    for name, count in counts.items():
        times[name] = [seconds / count for seconds in times[name]]
    case = {"case": f"layer of {size}, groups of {group_size}", "what": "layer", "n": tokens}
    yield from rows_of(case, times, sizes, 4 * weights.numel())


def decode_layers(layers: list[nn.Module], x: Tensor) -> Callable[[], None]:
    @torch.no_grad()
    def decode() -> None:
        for layer in layers:
            layer(x)

    return decode


def measure_blocks(options: Namespace, size: str, group_size: int) -> Iterator[Row]:
    """All blocks of a model, by the projections that are routed."""
    tokens, layers = options.tokens or SIZES[size][0], options.layers or SIZES[size][1]
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": options.width,
        "num_hidden_layers": layers,
        "num_attention_heads": max(1, options.width // 64),
        "qkv_tokens": tokens,
        "output_tokens": tokens,
        "ffn_tokens": 4 * tokens,
        "max_position_embeddings": CONTEXT + options.new_tokens,
        "group_size": group_size,
    }
    torch.manual_seed(0)
    dense = TokenformerForCausalLM(TokenformerConfig(**shape))
    configs = {"dense": dense.config}
    for name, (projections, norm) in ROUTED.items():
        counts = {p: 4 * tokens if p == "ffn" else tokens for p in projections}
        groups = {p: active_groups(count, group_size) for p, count in counts.items()}
        configs[name] = TokenformerConfig(**shape, active_groups=groups, theta_norm=norm)
    models = {}
    for form in FORMATS:
        state = dense.bfloat16().state_dict() if form == "bf16" else dense.float().state_dict()
        for name, config in configs.items():
            models[f"{name}, {form}"] = in_format(share_weights(config, state), form)
    blocks = f"{layers} block{'s' if layers > 1 else ''} of {size}"
    case = {"case": f"{blocks}, groups of {group_size}", "what": "blocks", "n": tokens}
    yield from decode_models(case, models, options)


def measure_upcycled(options: Namespace, size: str, group_size: int) -> Iterator[Row]:
    """A dense model, and the same after growth to four times the feed-forward tokens, of which a
    row visits as many as before."""
    tokens, layers = options.tokens or SIZES[size][0], options.layers or SIZES[size][1]
    config = TokenformerConfig(
        vocab_size=VOCAB,
        hidden_size=options.width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, options.width // 64),
        qkv_tokens=tokens,
        output_tokens=tokens,
        ffn_tokens=4 * tokens // group_size * group_size,
        max_position_embeddings=CONTEXT + options.new_tokens,
    )
    torch.manual_seed(0)
    dense = TokenformerForCausalLM(config).eval()
    larger, _ = upcycle(dense, COPIES, group_size, theta_norm="chosen")
    models = {
        f"{name}, {form}": in_format(copy.deepcopy(model), form)
        for form in FORMATS
        for name, model in (("dense", dense), (f"{COPIES}x the tokens", larger))
    }
    case = {"case": f"{size} upcycled, groups of {group_size}", "what": "upcycled", "n": tokens}
    yield from decode_models(case, models, options)


def in_format(model: Any, form: str) -> Any:
    model = model.to(torch.bfloat16 if form == "bf16" else torch.float32).eval()
    if form == "int8":
        quantize_model(model)
    return model


def decode_models(case: Row, models: dict[str, Any], options: Namespace) -> Iterator[Row]:
    """Decode with `generate`, the models in turns."""
    ids = torch.randint(VOCAB, (1, CONTEXT))
    decoders = {name: Decoder(model, ids, options.new_tokens) for name, model in models.items()}
    sizes = {name: bytes_read(model) for name, model in models.items()}
    weights = torch.ones(COLD_BYTES // 4)
    times: dict[str, list[float]] = {name: [] for name in ("reading", *decoders)}
    for round_number in range(options.rounds + 1):  # the first is a warm-up
        found = {name: statistics.median(decode()[1]) for name, decode in decoders.items()}
        found["reading"] = statistics.median(seconds_of(weights.sum) for _ in range(8))
        for name in times if round_number else ():
            times[name].append(found[name])
    yield from rows_of(case, times, sizes, 4 * weights.numel())


def share_weights(config: TokenformerConfig, state: dict[str, Tensor]) -> Any:
    """Build a model with these weights, not copies of them, and new routers."""
    with torch.device("meta"):
        model = TokenformerForCausalLM(config)
    d = config.hidden_size
    routers = {
        name: torch.randn(tensor.shape) / d**0.5
        if name.endswith("weight")
        else torch.zeros(len(tensor))
        for name, tensor in model.state_dict().items()
        if ".router." in name
    }
    model.load_state_dict({**state, **routers}, assign=True)
    return model.to(model.model.embed_tokens.weight.dtype).eval()
