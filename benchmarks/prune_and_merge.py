"""Held-out bits per byte after pruning, merging and taking a prefix of a small byte-level model.

    python -m benchmarks.prune_and_merge prune
    python -m benchmarks.prune_and_merge merge --enwik8 enwik8.gz
    python -m benchmarks.prune_and_merge prefix

`prune` trains a model of 0.6M parameters on Python's standard library and drops tokens, chosen by
contribution or at random, with and without correcting the scale and refitting the values. `merge`
trains an ancestor on Python and Wikipedia, grows it by zero keys, fine-tunes one copy on each of
them (new tokens only, or all tokens) and merges both. `prefix` trains a model with nested dropout
and takes prefixes of it, against a model trained at each size.
"""

import argparse
import gzip
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tokenformer
from tokenformer.data.batches import fixed_batches
from tokenformer.data.byte_tokenizer import VOCAB_SIZE
from tokenformer.data.corpus import TokenIds
from tokenformer.data.standard_library import standard_library
from tokenformer.growth.tokens.prune import keep_tokens, rows_to_keep
from tokenformer.growth.tokens.token_set import token_layers
from tokenformer.growth.tokens.token_usage import token_statistics
from tokenformer.train.loop import Loop, train
from tokenformer.train.options import OptimizerOptions, RunOptions, ScheduleOptions
from tokenformer.train.task import LanguageTask

LENGTH = 128
CORPUS = 2_000_000
HELD_OUT = 200_000
PIECE = 10_000
KEEP_SHARES = (1.0, 0.9, 0.75, 0.5, 0.25)
TRAINED_SHARES = (0.25, 0.5, 0.75, 1.0)
PREFIX_SHARES = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125)


def small_model(share: float = 1.0) -> Any:
    config = tokenformer.TokenformerConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        qkv_tokens=round(128 * share),
        output_tokens=round(128 * share),
        ffn_tokens=round(512 * share),
        max_position_embeddings=LENGTH,
        variant="paper",
        positions="rotary",
        rotary_fraction=0.5,
    )
    return tokenformer.TokenformerForCausalLM(config)


def train_model(
    model: Any,
    tokens: TokenIds,
    steps: int,
    rate: float,
    decay: float = 0.1,
    nested: list[float] | None = None,
) -> None:
    task = LanguageTask(model, tokens, tokens[:HELD_OUT], length=LENGTH)
    loop = Loop(
        task,
        OptimizerOptions(learning_rate=rate, weight_decay=decay),
        ScheduleOptions(warmup_steps=50),
        RunOptions(
            steps=steps, batch_size=8, validate_every=steps, validation_sequences=1, nested=nested
        ),
    )
    train(loop, lambda row: None)


def windows(tokens: TokenIds, count: int) -> Tensor:
    return torch.cat(fixed_batches(tokens, batch_size=1, length=LENGTH, count=count))


@torch.no_grad()
def bits_per_byte(logits: Any, held_out: Tensor) -> float:
    """Return the held-out loss of `logits`, a function from ids to logits."""
    losses = [
        F.cross_entropy(logits(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).item()
        for batch in held_out.split(32)
    ]
    return sum(losses) / len(losses) / math.log(2)


def logits_of(model: Any) -> Any:
    return lambda ids: model(input_ids=ids, use_cache=False).logits


def mean_logits(a: Any, b: Any) -> Any:
    return lambda ids: (logits_of(a)(ids) + logits_of(b)(ids)) / 2


def prune_curve(steps: int) -> None:
    tokens, unseen = standard_library()
    torch.manual_seed(0)
    model = small_model()
    start = time.perf_counter()
    train_model(model, tokens, steps, 1.5e-3)
    seconds = time.perf_counter() - start
    held_out = windows(unseen, 256)
    batches = windows(tokens, 128)[:, :-1].split(8)
    print(f"{steps} steps in {seconds:.0f} s: {bits_per_byte(logits_of(model), held_out):.3f}")
    statistics = token_statistics(model, batches)
    shares = {name: layer.share for name, layer in statistics.items()}
    columns = (
        "scale frozen",
        "scale measured",
        "+ values refitted",
        "random tokens",
        "random, refitted",
    )
    print(f"| keep | parameters | {' | '.join(columns)} |\n{'|---' * 7}|")
    for keep in KEEP_SHARES:
        frozen, _ = tokenformer.prune(model, batches, keep=keep, scale="frozen", refit=False)
        measured, _ = tokenformer.prune(model, batches, keep=keep, refit=False)
        refitted, _ = tokenformer.prune(model, batches, keep=keep)
        random_choice = {
            name: rows_to_keep(
                refitted.get_submodule(name).num_tokens,
                torch.zeros(module.num_tokens, dtype=torch.bool),
                torch.rand(module.num_tokens).double(),
            )
            for name, (_, module) in token_layers(model).items()
        }
        randomly, _ = keep_tokens(model, random_choice, shares)
        randomly_refitted, _ = keep_tokens(model, random_choice, shares, list(batches))
        models = (frozen, measured, refitted, randomly, randomly_refitted)
        cells = [f"{bits_per_byte(logits_of(each), held_out):.3f}" for each in models]
        print(f"| {keep:g} | {refitted.num_parameters():,} | {' | '.join(cells)} |", flush=True)


def freeze_old_tokens(model: Any, old: Any) -> None:
    for name, parameter in model.named_parameters():
        if not name.endswith("_tokens"):
            parameter.requires_grad_(False)
            continue
        is_new = torch.zeros(len(parameter), 1)
        is_new[len(old.get_parameter(name)) :] = 1
        parameter.register_hook(lambda gradient, is_new=is_new: gradient * is_new)


def average_weights(a: Any, b: Any) -> nn.Module:
    mean = type(a)(a.config).eval()
    with torch.no_grad():
        for name, parameter in mean.named_parameters():
            parameter.copy_((a.get_parameter(name) + b.get_parameter(name)) / 2)
    return mean


def merge_table(enwik8: Path, steps: int) -> None:
    python, python_unseen = standard_library()
    python = python[:CORPUS]
    with gzip.open(enwik8) if enwik8.suffix == ".gz" else enwik8.open("rb") as file:
        text = np.frombuffer(file.read(CORPUS + HELD_OUT), dtype=np.uint8).astype(np.uint16)
    wiki, wiki_unseen = text[:CORPUS], text[CORPUS:]
    pieces = [c[i : i + PIECE] for i in range(0, CORPUS, PIECE) for c in (wiki, python)]
    held_out = windows(wiki_unseen, 256), windows(python_unseen, 256)
    torch.manual_seed(0)
    ancestor = small_model()
    train_model(ancestor, np.concatenate(pieces), 2 * steps, 1.5e-3)

    def line(name: str, logits: Any, size: int | str) -> None:
        wiki_bits, python_bits = (bits_per_byte(logits, each) for each in held_out)
        print(f"| {name} | {size} | {wiki_bits:.3f} | {python_bits:.3f} |", flush=True)

    print("| model | ffn tokens | Wikipedia | Python |\n|---|---|---|---|")
    line("ancestor", logits_of(ancestor), 512)
    sizes = {"qkv_tokens": 160, "output_tokens": 160, "ffn_tokens": 640}
    for trained in ("new tokens only", "all tokens"):
        tuned = []
        for seed, corpus in enumerate((wiki, python)):
            model, _ = tokenformer.grow(ancestor, **sizes, init="zero", seed=seed)
            if trained == "new tokens only":
                freeze_old_tokens(model, ancestor)
                train_model(model, corpus, steps, 1.5e-3, decay=0.0)
            else:
                train_model(model, corpus, steps, 5e-4)
            tuned.append(model.eval())
        a, b = tuned
        line(f"a: {trained}, trained on Wikipedia", logits_of(a), 640)
        line(f"b: {trained}, trained on Python", logits_of(b), 640)
        merged, _ = tokenformer.merge(a, b)
        line("merge(a, b)", logits_of(merged), merged.config.ffn_tokens)
        summed, _ = tokenformer.merge(a, b, own="sum")
        line('merge(a, b, own="sum")', logits_of(summed), summed.config.ffn_tokens)
        batches = torch.cat([windows(corpus, 64)[:, :-1] for corpus in (wiki, python)]).split(8)
        pruned, _ = tokenformer.prune(merged, batches, **sizes)
        line("merge(a, b), pruned on both corpora", logits_of(pruned), 640)
        line("mean of the logits of a and b", mean_logits(a, b), "2 x 640")
        line("mean of the weights of a and b", logits_of(average_weights(a, b)), 640)


def prefix_curve(steps: int) -> None:
    tokens, unseen = standard_library()
    held_out = windows(unseen, 256)

    def trained(share: float = 1.0, nested: list[float] | None = None) -> Any:
        torch.manual_seed(0)
        model = small_model(share)
        train_model(model, tokens, steps, 1.5e-3, nested=nested)
        return model.eval()

    ordinary, nested = trained(), trained(nested=list(TRAINED_SHARES))
    batches = windows(tokens, 128)[:, :-1].split(8)
    columns = ("nested dropout", "ordinary training", "ordinary, pruned", "trained at that size")
    print(f"| share | parameters | {' | '.join(columns)} |\n{'|---' * 6}|")
    for share in PREFIX_SHARES:
        models = [tokenformer.take_prefix(model, share)[0] for model in (nested, ordinary)]
        models.append(tokenformer.prune(ordinary, batches, keep=share)[0])
        if share in TRAINED_SHARES:
            models.append(ordinary if share == 1 else trained(share))
        cells = [f"{bits_per_byte(logits_of(model), held_out):.3f}" for model in models]
        cells += [""] * (len(columns) - len(cells))
        print(f"| {share:g} | {models[0].num_parameters():,} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("experiment", choices=["prune", "merge", "prefix"])
    parser.add_argument("--enwik8", type=Path, default=Path("enwik8.gz"))
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    start = time.perf_counter()
    if options.experiment == "prune":
        prune_curve(options.steps or 1000)
    elif options.experiment == "prefix":
        prefix_curve(options.steps or 1000)
    else:
        merge_table(options.enwik8, options.steps or 200)
    print(f"{time.perf_counter() - start:.0f} s, torch {torch.__version__}, "
          f"{torch.get_num_threads()} threads")  # fmt: skip


if __name__ == "__main__":
    main()
