"""`tokenformer demo`: train a small TokenFormer on Python code, grow it, continue training, and
compare it with models of both sizes trained from scratch. Nothing is downloaded.

Read `run_demo` and `train_and_grow`; sizes and lengths are the constants below.
"""

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenformer.cli.terminal import printable
from tokenformer.errors import InputError
from tokenformer.files import new_folder

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tokenformer.growth.growth_report import GrowthReport
    from tokenformer.models.configuration import LanguageConfig, TokenformerConfig
    from tokenformer.train.comparison import Comparison, GrowthStep
    from tokenformer.train.loop import Loop
    from tokenformer.train.metrics import Row

WIDTH, LAYERS, HEADS = 128, 2, 4
SMALL = {"qkv_tokens": 16, "output_tokens": 16, "ffn_tokens": 64}
GROWN = {"qkv_tokens": 64, "output_tokens": 64, "ffn_tokens": 256}
SMALL_STEPS = 300
SMALL_SHARE = 0.3
"""Share of the compute before growth."""
BATCH_SIZE, LENGTH = 16, 128
# The best learning rates in docs/results/growth.md, on another text.
TOKENFORMER_RATE, TRANSFORMER_RATE = 8e-3, 4e-3
EMBEDDING_RATE = {"*.embed_tokens.*": 4.0}
MEASUREMENTS = 16
"""Validations in each of the four runs."""

PROMPT = "import os\nimport sys\n\n\ndef main"
SAMPLE_BYTES = 96
"""Length of the samples before and after growth."""
HOME = Path("runs", "demo")
LARGEST_SEED = 2**63 - 1
WIDEST = 80  # columns of the table


def demo(out: Path | None = None, steps: int = SMALL_STEPS, seed: int = 0) -> None:
    """Train a small TokenFormer, grow it, and compare it with models trained from scratch.

    It trains on the source code of Python's standard library; nothing is downloaded.

    Args:
        out: New folder for the plot, the models and the metrics; by default runs/demo, or
            runs/demo-2, ... if that exists.
        steps: Training steps before growth; they are 30 % of the compute that every model gets. The
            default takes about four minutes on two cores.
        seed: Seed for weights, batches and sampling.
    """
    if steps < 1:
        raise InputError(f"--steps {steps} must be at least 1")
    if not 0 <= seed <= LARGEST_SEED:
        raise InputError(f"--seed {seed} must be a whole number from 0 to {LARGEST_SEED}")
    path = out or next(free_folders())
    with new_folder("--out", path) as folder:
        run_demo(folder, steps, seed)
    sys.stdout.write(
        f"\nLoss curves: {path / 'growth.png'}\n"
        "In the same folder: model/ (grown), small/ (before growth), growth.json, metrics/\n"
    )


def free_folders() -> Iterator[Path]:
    """Yield runs/demo, runs/demo-2, ...: those that neither exist nor are being written."""
    for number in count(1):
        path = HOME if number == 1 else HOME.with_name(f"{HOME.name}-{number}")
        if not path.exists() and not any(path.parent.glob(f".{path.name}.unfinished-*")):
            yield path


def run_demo(folder: Path, steps: int, seed: int) -> None:
    from rich.console import Console

    from tokenformer.data.standard_library import standard_library
    from tokenformer.models.accounting import matching_transformer
    from tokenformer.train.comparison import Comparison
    from tokenformer.train.options import OptimizerOptions

    console = Console(highlight=False)
    console.width = max(console.width, WIDEST)
    tokens, held_out = standard_library()
    console.print(
        f"The training data are {len(tokens) / 1e6:.1f} MB of Python's standard library, one token "
        "per byte. Losses are measured on held-out files.\n"
    )
    optimizer = OptimizerOptions(TOKENFORMER_RATE, rates=EMBEDDING_RATE, rate_law="tokens")
    comparison = Comparison(
        tokens, held_out, LENGTH, BATCH_SIZE, optimizer, validation_sequences=128, seed=seed
    )
    trainer = DemoTrainer(console, comparison, folder / "metrics")
    trainer.metrics.mkdir()
    small, grown = language_config(SMALL), language_config(GROWN)
    baseline = matching_transformer(grown, match_ffn=True)

    model, growth, growing = train_and_grow(trainer, small, grown, steps, folder)
    compute = growing[-1]["flops"]
    console.print(
        "\n[bold]4. Baseline: train a TokenFormer of the grown size from scratch,[/] on the same "
        f"data with the same compute as steps 1 and 3 together, {compute / 1e12:.3g} TFLOPs."
    )
    scratch = trainer.from_scratch(grown, compute, "tokenformer")
    console.print(
        f"\n[bold]5. Baseline: train a Transformer of about that size from scratch,[/] "
        f"{parameters(baseline):,} parameters, width {baseline.hidden_size}, with the same compute."
    )
    optimizer = replace(optimizer, learning_rate=TRANSFORMER_RATE)
    others = replace(trainer, comparison=replace(comparison, optimizer=optimizer))
    transformer = others.from_scratch(baseline, compute, "transformer")
    console.print(
        "\n[bold]6. Baseline: the small model, never grown,[/] from scratch with the same compute."
    )
    never_grown = trainer.from_scratch(small, compute, "small")

    console.print("\nTokens, FLOPs and seconds of the grown model include those before growth.\n")
    console.print(
        results(
            [
                ("small, before growth", small, growing[: growth.step]),
                ("grown, at the end", grown, growing),
                ("TokenFormer from scratch", grown, scratch),
                ("Transformer from scratch", baseline, transformer),
                ("small, never grown", small, never_grown),
            ]
        )
    )
    console.print()
    names = ("TokenFormer from scratch", "Transformer from scratch", "small model, never grown")
    for name, rows in zip(names, (scratch, transformer, never_grown), strict=True):
        console.print(compare(growing, name, rows))
    sizes = [f"{parameters(config) / 1e6:.2f}M" for config in (small, grown, baseline)]
    draw(folder / "growth.png", growth, sizes, (growing, scratch, transformer, never_grown))
    console.print("\nA sample of the grown model:\n")
    print_sample(console, sample(model, LENGTH - len(PROMPT), temperature=0.6, seed=seed))


@dataclass
class DemoTrainer:
    """Trains models on the same data, with a progress bar and a metrics file."""

    console: "Console"
    comparison: "Comparison"
    metrics: Path

    def from_scratch(self, config: "LanguageConfig", compute: int, name: str) -> "list[Row]":
        steps = max(1, round(compute / self.comparison.step_flops(config)))
        model = new_model(config, self.comparison.seed)
        return self.train(self.comparison.start(model, steps, measurements=MEASUREMENTS), name)

    def train(self, loop: "Loop", name: str) -> "list[Row]":
        from tokenformer.train.loop import train
        from tokenformer.train.progress_display import progress

        file = self.metrics / f"{name}.jsonl"
        with progress(self.console, loop.run.steps) as show, file.open("a") as record:

            def on_step(row: "Row") -> None:
                show({**row, "step": row["step"] - loop.first_step})
                record.write(json.dumps(row) + "\n")

            return train(loop, on_step)


def train_and_grow(
    trainer: DemoTrainer,
    small: "TokenformerConfig",
    grown: "TokenformerConfig",
    steps: int,
    folder: Path,
) -> "tuple[Any, GrowthStep, list[Row]]":
    """Steps 1 to 3: train a small model, grow it, continue training."""
    import tokenformer
    from tokenformer.train.options import GrowthOptions

    console, comparison = trainer.console, trainer.comparison
    console.print(
        f"[bold]1. Train a small TokenFormer.[/] It has {parameters(small):,} parameters: "
        f"{LAYERS} layers of width {WIDTH}, with {small.qkv_tokens} parameter tokens in each "
        f"attention projection and {small.ffn_tokens} in each feed-forward layer."
    )
    before = new_model(small, comparison.seed)
    half = MEASUREMENTS // 2
    loop = comparison.start(before, steps, measurements=half, schedule="constant")
    rows_before = trainer.train(loop, "growing")
    save_model(before, folder / "small")

    console.print(
        f"\n[bold]2. Grow it to {parameters(grown):,} parameters:[/] {grown.qkv_tokens} and "
        f"{grown.ffn_tokens} tokens. The new tokens are random and the values of the old ones "
        "shrink to make room for them: the loss rises now and ends lower."
    )
    ratio = comparison.step_flops(small) / comparison.step_flops(grown)
    grown_steps = max(1, round((1 / SMALL_SHARE - 1) * steps * ratio))
    options = GrowthOptions(sizes=GROWN, init="shrink", seed=comparison.seed)
    loop, growth = comparison.grow(loop, grown_steps, options, measurements=half)
    model = loop.task.model
    exact, exact_report = tokenformer.grow(before, grown, init="zero")
    samples = [sample(before, SAMPLE_BYTES), sample(exact, SAMPLE_BYTES)]
    print_growth(console, growth, exact_report, samples)
    save_growth(growth, exact_report, samples, folder / "growth.json")

    console.print(
        "\n[bold]3. Continue training the grown model,[/] old and new tokens alike. The optimizer "
        "keeps its state for the old ones."
    )
    rows = rows_before + trainer.train(loop, "growing")
    save_model(model, folder / "model")
    return model, growth, rows


def language_config(tokens: dict[str, int]) -> "TokenformerConfig":
    from tokenformer import TokenformerConfig
    from tokenformer.data.byte_tokenizer import END_OF_TEXT, VOCAB_SIZE

    return TokenformerConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=2 * LENGTH,
        # In a model this narrow, keys with std 1/sqrt(d) allow a higher learning rate than 0.02.
        variant="paper",
        positions="rotary",
        rotary_fraction=0.5,
        bos_token_id=END_OF_TEXT,
        eos_token_id=END_OF_TEXT,
        pad_token_id=END_OF_TEXT,
        **tokens,
    )


def new_model(config: "LanguageConfig", seed: int) -> Any:
    import torch

    from tokenformer import TokenformerConfig, TokenformerForCausalLM, TransformerForCausalLM

    torch.manual_seed(seed)
    if isinstance(config, TokenformerConfig):
        return TokenformerForCausalLM(config)
    return TransformerForCausalLM(config)


def parameters(config: "LanguageConfig") -> int:
    from tokenformer.models.accounting import count_parameters

    return sum(count_parameters(config).values())


def sample(model: Any, length: int, *, temperature: float | None = None, seed: int = 0) -> str:
    """Return the prompt and `length` more bytes; greedy without a temperature."""
    import torch

    from tokenformer.data.byte_tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    torch.manual_seed(seed)
    sampling = {} if temperature is None else {"do_sample": True, "temperature": temperature}
    output = model.eval().generate(
        **tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=length, **sampling
    )
    return str(tokenizer.decode(output[0], skip_special_tokens=True))


def print_sample(console: "Console", text: str) -> None:
    shown = printable(text, console.encoding)
    console.print(shown, style="cyan", markup=False, soft_wrap=True)


def print_growth(
    console: "Console", growth: "GrowthStep", exact: "GrowthReport", samples: list[str]
) -> None:
    console.print(
        f"   held-out loss before   {bits(growth.loss_before):.3f} bits per byte\n"
        f"   held-out loss after    {bits(growth.loss_after):.3f} bits per byte\n\n"
        "With [bold]init=zero[/] the grown model would compute the same function:\n"
        f"   largest change of the logits, relative to the largest logit   "
        f"{exact.max_output_change:.1e}"
    )
    before, after = samples
    same = "the same text before and after" if before == after else "before growth"
    console.print(f"\nGreedy decoding, {same}:\n")
    print_sample(console, before)
    if before != after:
        console.print("\nand after growth:\n")
        print_sample(console, after)


def save_growth(
    growth: "GrowthStep", exact: "GrowthReport", samples: list[str], path: Path
) -> None:
    before, after = samples
    facts = {
        **growth.report.asdict(),
        "bits_per_byte_before": bits(growth.loss_before),
        "bits_per_byte_after": bits(growth.loss_after),
        "init_zero": {
            "max_output_change": exact.max_output_change,
            "sample_before": before,
            "sample_after": after,
        },
    }
    path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def save_model(model: Any, folder: Path) -> None:
    from transformers.utils import logging

    from tokenformer.data.byte_tokenizer import byte_tokenizer

    logging.disable_progress_bar()  # one small file
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def bits(loss: float) -> float:
    """Convert nats per byte to bits per byte."""
    return loss / math.log(2)


def results(runs: "list[tuple[str, LanguageConfig, list[Row]]]") -> "Table":
    from tokenformer.cli.inspect import new_table, quantity

    table = new_table(["", "parameters", "tokens", "FLOPs", "seconds", "bits/byte"])
    for name, config, rows in runs:
        last = rows[-1]
        table.add_row(
            name,
            f"{parameters(config):,}",
            f"{last['tokens']:,}",
            quantity(last["flops"]),
            f"{last['seconds']:.0f}",
            f"{last['val_bpb']:.3f}",
        )
    return table


def compare(growing: "list[Row]", name: str, baseline: "list[Row]") -> str:
    """Return a line that compares the grown model with a baseline."""
    end = baseline[-1]
    gain = end["val_bpb"] - growing[-1]["val_bpb"]
    if gain < 0:
        return f"Growing ended {-gain:.3f} bits per byte above the {name}."
    reached = next(row for row in growing if row.get("val_bpb", math.inf) <= end["val_bpb"])
    return (
        f"Growing ended {gain:.3f} bits per byte below the {name} and reached its loss with "
        f"{reached['flops'] / end['flops']:.0%} of the compute."
    )


def draw(
    path: Path,
    growth: "GrowthStep",
    sizes: list[str],
    runs: "tuple[list[Row], list[Row], list[Row], list[Row]]",
) -> None:
    from tokenformer.train.comparison_plot import Curve, draw_comparison

    small, grown, baseline = sizes
    growing, scratch, transformer, never_grown = runs
    draw_comparison(
        [
            Curve("growing TokenFormer", f"{small} to {grown} parameters", growing, growth.step),
            Curve("TokenFormer", f"{grown}, from scratch", scratch),
            Curve("Transformer", f"{baseline}, from scratch", transformer),
            Curve("small TokenFormer", f"{small}, never grown", never_grown),
        ],
        path,
        title="A TokenFormer grows while it trains",
        subtitle="Bits per byte on Python sources it has not seen, over training compute",
        growth="grows here",
    )
