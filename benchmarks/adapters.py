"""Decoding with a different adapter for every sequence of a batch, against one adapter for all.

    python -m benchmarks.adapters                       # the 124m shape, batches of 1, 10 and 100
    python -m benchmarks.adapters --batches 100 --adapter_tokens 8

A round decodes `--tokens` tokens of all sequences; its figure is the median time of a token. Our
model has token adapters on the feed-forward layers, the Transformer of the same size LoRA of equal
size on its MLP, in peft's mixed batches. Sequences have no adapter (base), all the same (one) or
each its own (different). The base decodes as in the server: up to 16 sequences in native code, more
layer by layer, as all with adapters. "base, eager" runs layer by layer too. Ratios are of times:
1.2 is a fifth slower.
"""

import statistics
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from benchmarks.harness import make_parser, number, progress, ratio, run, seconds_of, with_spread
from benchmarks.results import Row
from benchmarks.training import ours
from tokenformer import TokenAdapterConfig, TransformerConfig, TransformerForCausalLM
from tokenformer.adapters.adapter_folder import AdapterFolder
from tokenformer.adapters.adapter_set import AdapterSet, share_weights
from tokenformer.models.batch_decoder import BatchDecoder
from tokenformer.models.native_decoder import MAX_BATCH

COLUMNS = {
    "x one adapter": with_spread("times_one"),
    "x base": with_spread("times_base"),
    "ms/token": number("seconds", ".1f", unit=1e-3),
    "adapter, MB": number("adapter_bytes", ".2f", unit=1e6),
}


class Sequences:
    """A batch that decodes; a call returns the median seconds of a token of all sequences."""

    def __init__(self, decoder: BatchDecoder, adapters: list[str | None], options: Namespace):
        self.decoder, self.tokens = decoder, options.tokens
        ids = torch.randint(options.vocab, (len(adapters), options.context))
        for row, adapter in zip(ids, adapters, strict=True):
            decoder.add(row[None], adapter)
        self.last = [1] * len(adapters)

    def __call__(self) -> float:
        return statistics.median(seconds_of(self.step) for _ in range(self.tokens))

    def step(self) -> None:
        logits, best = self.decoder.step(self.last, greedy=True)
        self.last = (logits.argmax(-1) if best is None else best).tolist()


def transformer(parameters: int, options: Namespace) -> Any:
    """Build the baseline with about this many parameters."""

    def build(intermediate: int) -> Any:
        config = TransformerConfig(
            vocab_size=options.vocab,
            hidden_size=options.width,
            num_hidden_layers=options.layers,
            num_attention_heads=max(1, options.width // 64),
            intermediate_size=intermediate,
            max_position_embeddings=options.length,
        )
        return TransformerForCausalLM(config)

    torch.manual_seed(0)
    with torch.device("meta"):
        missing = parameters - build(4 * options.width).num_parameters()
    return build(max(1, 4 * options.width + missing // (2 * options.layers * options.width)))


def with_adapters(model: Any, config: Any, count: int) -> tuple[AdapterSet, int]:
    """Return a model with `count` adapters, and the bytes of one on disk."""
    adapters = AdapterSet(model)
    with tempfile.TemporaryDirectory() as folder:
        copy = adapters.copy_base()
        get_peft_model(copy, config).save_pretrained(folder)
        for index in range(count):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of peft's use of transformers
                adapters.load(str(index), AdapterFolder.read(Path(folder)))
        size = (Path(folder) / "adapter_model.safetensors").stat().st_size
    return adapters, size


def eager_base(model: Any) -> Any:
    """Return a model with the same weights whose layers run one by one, as those with adapters."""
    copy: Any = share_weights(model)
    copy.model.layers[0].register_forward_pre_hook(lambda *arguments: None)
    return copy


def measure_batch(models: dict[str, AdapterSet], options: Namespace) -> dict[Any, list[float]]:
    """Return the seconds of a token in every round, by model and what its sequences have."""
    count = options.batch
    different = [str(index % options.adapters) for index in range(count)]
    batches: dict[tuple[str, str], Sequences] = {}
    for kind, adapters in models.items():
        choices: dict[str, list[str | None]] = {"base": [None] * count, "one": ["0"] * count}
        choices |= {"different": [*different]} if count > 1 else {}
        for name, chosen in choices.items():
            decoder = BatchDecoder(adapters.base, count, adapters.select)
            batches[kind, name] = Sequences(decoder, chosen, options)
        if kind == "tokens" and count <= MAX_BATCH:
            decoder = BatchDecoder(eager_base(adapters.base), count)
            batches[kind, "base, eager"] = Sequences(decoder, choices["base"], options)
    times: dict[tuple[str, str], list[float]] = {name: [] for name in batches}
    for round_number in range(options.rounds + 1):  # the first is a warm-up
        for name, batch in batches.items():
            seconds = batch()
            if round_number:
                times[name].append(seconds)
    return times


def rows_of(times: dict[Any, list[float]], sizes: dict[str, int], options: Namespace) -> list[Row]:
    rows = []
    for (kind, name), seconds in times.items():
        row = {"case": f"batch of {options.batch}", "batch": options.batch}
        row |= {"name": f"{kind}, {name}", "seconds": statistics.median(seconds)}
        for other in ("one", "base"):
            row[f"times_{other}"], row[f"times_{other}_spread"] = ratio(seconds, times[kind, other])
        rows.append(row | {"adapter_bytes": sizes[kind]})
    return rows


@torch.no_grad()
def measure(options: Namespace) -> Iterator[Row]:
    options.rounds = options.rounds or (11 if options.full else 5)
    options.length = options.context + (options.rounds + 2) * options.tokens
    base = ours("auto", options).eval()
    baseline = transformer(base.num_parameters(), options).eval()
    rank = max(1, 2 * options.adapter_tokens * options.width // mlp_sizes(baseline))
    configs = {
        "tokens": (base, TokenAdapterConfig(num_tokens=options.adapter_tokens)),
        "LoRA": (baseline, LoraConfig(r=rank, target_modules=["up", "down"])),
    }
    models, sizes = {}, {}
    for kind, (model, config) in configs.items():
        progress(f"adapters, loading {options.adapters} of {kind}")
        models[kind], sizes[kind] = with_adapters(model, config, options.adapters)
    for batch in options.batches:
        progress(f"adapters, batch of {batch}")
        options.batch = batch
        yield from rows_of(measure_batch(models, options), sizes, options)


def mlp_sizes(model: Any) -> int:
    """Return the parameters of LoRA of rank 1 on the MLP of a layer."""
    ffn = model.model.layers[0].ffn
    return sum(sum(part.weight.shape) for part in (ffn.up, ffn.down))


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--ffn_tokens", type=int, default=2304)
    parser.add_argument("--adapter_tokens", type=int, default=32, help="tokens of an adapter")
    parser.add_argument("--adapters", type=int, default=100, help="different adapters")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--context", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=3, help="tokens to decode in a round")
    run("adapters", measure, COLUMNS, parser.parse_args(arguments), axes=())


if __name__ == "__main__":
    main()
