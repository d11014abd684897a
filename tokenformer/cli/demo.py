"""`tokenformer demo`: a small TokenFormer learns to write Python, grows, and learns on, beside
models of its final size that begin from scratch. All it needs is on the machine already.

`tour` and `grow_up` are the story; the sizes and lengths of it are the constants below.
"""

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenformer.cli.terminal import printable
from tokenformer.errors import InputError
from tokenformer.files import new_folder

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tokenformer.models.configuration import LanguageConfig, TokenformerConfig
    from tokenformer.train.comparison import Seam, Setting
    from tokenformer.train.loop import Loop
    from tokenformer.train.metrics import Row

WIDTH, LAYERS, HEADS = 128, 2, 4
SMALL = {"qkv_tokens": 64, "output_tokens": 64, "ffn_tokens": 256}
GROWN = {"qkv_tokens": 192, "output_tokens": 192, "ffn_tokens": 1024}
SMALL_STEPS = 1500
GROWN_COMPUTE = 1.0
"""FLOPs of the training after growth, as a multiple of those before."""
BATCH_SIZE, LENGTH = 2, 256
LEARNING_RATE = 1.5e-3
MEASUREMENTS = 16
"""Of the held-out loss, in each of the three runs."""

PROMPT = "import os\nimport sys\n\n\ndef main"
SEAM_BYTES = 96
"""What the model writes before and after growth, besides the prompt."""
HOME = Path("runs", "demo")
LARGEST_SEED = 2**63 - 1
WIDEST = 80  # of a table


def demo(out: Path | None = None, steps: int = SMALL_STEPS, seed: int = 0) -> None:
    """Train a small TokenFormer, grow it and train on, beside models of that size from scratch.

    The text is the Python standard library of this machine; nothing is downloaded.

    Args:
        out: A new folder to keep the picture of the curves, the models and the metrics in; by
            default runs/demo, or runs/demo-2, ... if that is taken.
        steps: Training steps of the small model; those of the others follow. The default takes
            about three minutes on two cores.
        seed: Seed of the weights, the batches and the sample.
    """
    if steps < 1:
        raise InputError(f"--steps {steps} must be at least 1")
    if not 0 <= seed <= LARGEST_SEED:
        raise InputError(f"--seed {seed} must be a whole number from 0 to {LARGEST_SEED}")
    kept = out or next(free_folders())
    with new_folder("--out", kept) as folder:
        tour(folder, steps, seed)
    sys.stdout.write(
        f"\nThe curves: {kept / 'growth.png'}\n"
        "Beside them: model/ (grown), small/ (before), growth.json, metrics/\n"
    )


def free_folders() -> Iterator[Path]:
    """runs/demo, runs/demo-2, ...: those that neither exist nor are being filled."""
    for number in count(1):
        path = HOME if number == 1 else HOME.with_name(f"{HOME.name}-{number}")
        if not path.exists() and not any(path.parent.glob(f".{path.name}.unfinished-*")):
            yield path


def tour(folder: Path, steps: int, seed: int) -> None:
    from rich.console import Console

    from tokenformer.data.standard_library import standard_library
    from tokenformer.models.accounting import twin
    from tokenformer.train.comparison import Setting

    console = Console(highlight=False)
    console.width = max(console.width, WIDEST)
    tokens, held_out = standard_library()
    console.print(
        f"The text is {len(tokens) / 1e6:.1f} MB of Python's standard library, read byte by byte. "
        "Losses are measured on files that are kept out of training.\n"
    )
    setting = Setting(tokens, held_out, LENGTH, BATCH_SIZE, LEARNING_RATE, seed=seed)
    school = School(console, setting, folder / "metrics")
    school.metrics.mkdir()
    small, grown = language_config(SMALL), language_config(GROWN)
    plain = twin(grown)

    model, seam, growing = grow_up(school, small, grown, steps, folder)
    compute = growing[-1]["flops"]
    console.print(
        "\n[bold]4. For comparison: a TokenFormer of the grown size from scratch,[/] on the same "
        f"text with the same compute, {compute / 1e12:.3g} trillion floating-point operations: as "
        "many as 1 and 3 took together."
    )
    scratch = school.from_scratch(grown, compute, "tokenformer")
    console.print(
        f"\n[bold]5. And a Transformer of about that size from scratch,[/] {parameters(plain):,} "
        f"parameters, width {plain.hidden_size}, with the same compute."
    )
    transformer = school.from_scratch(plain, compute, "transformer")

    console.print("\nTokens, FLOPs and seconds of the grown model include those before growth.\n")
    console.print(
        results(
            [
                ("small, at the seam", small, growing[: seam.step]),
                ("grown, at its end", grown, growing),
                ("TokenFormer from scratch", grown, scratch),
                ("Transformer from scratch", plain, transformer),
            ]
        )
    )
    console.print()
    for name, rows in (("TokenFormer", scratch), ("Transformer", transformer)):
        console.print(verdict(growing, name, rows))
    draw(folder / "growth.png", seam, (small, grown, plain), (growing, scratch, transformer))
    console.print("\nGiven two imports and the head of a function, the grown model goes on:\n")
    quote(console, write(model, LENGTH - len(PROMPT), temperature=0.6, seed=seed))


@dataclass
class School:
    """Where all models are trained: on the same text, in sight, every step on record."""

    console: "Console"
    setting: "Setting"
    metrics: Path

    def from_scratch(self, config: "LanguageConfig", compute: int, name: str) -> "list[Row]":
        steps = max(1, round(compute / self.setting.step_flops(config)))
        model = new_model(config, self.setting.seed)
        return self.train(self.setting.start(model, steps, measurements=MEASUREMENTS), name)

    def train(self, loop: "Loop", name: str) -> "list[Row]":
        from tokenformer.train.loop import train
        from tokenformer.train.progress import progress

        file = self.metrics / f"{name}.jsonl"
        with progress(self.console, loop.run.steps) as show, file.open("a") as record:

            def on_step(row: "Row") -> None:
                show({**row, "step": row["step"] - loop.first_step})
                record.write(json.dumps(row) + "\n")

            return train(loop, on_step)


def grow_up(
    school: School,
    small: "TokenformerConfig",
    grown: "TokenformerConfig",
    steps: int,
    folder: Path,
) -> "tuple[Any, Seam, list[Row]]":
    """Steps 1 to 3: a small model is trained, grows, and is trained on."""
    console, setting = school.console, school.setting
    console.print(
        f"[bold]1. A small TokenFormer learns.[/] It has {parameters(small):,} parameters: "
        f"{LAYERS} layers of width {WIDTH}, with {small.qkv_tokens} parameter tokens in each "
        f"attention projection and {small.ffn_tokens} in each feed-forward layer."
    )
    before = new_model(small, setting.seed)
    half = MEASUREMENTS // 2
    loop = setting.start(before, steps, measurements=half, schedule="constant")
    young = school.train(loop, "growing")
    keep_model(before, folder / "small")

    console.print(
        f"\n[bold]2. It grows to {parameters(grown):,} parameters:[/] {grown.qkv_tokens} and "
        f"{grown.ffn_tokens} tokens. The keys of the new tokens are zero, so they have no weight "
        "yet, and the larger model computes what the small one did."
    )
    ratio = setting.step_flops(small) / setting.step_flops(grown)
    grown_steps = max(1, round(GROWN_COMPUTE * steps * ratio))
    loop, seam = setting.grow(loop, grown_steps, measurements=half, **GROWN)
    model = loop.task.model
    samples = [write(before, SEAM_BYTES), write(model, SEAM_BYTES)]
    show_seam(console, seam, samples)
    keep_seam(seam, samples, folder / "growth.json")

    console.print(
        "\n[bold]3. The grown model learns on,[/] old and new tokens alike. Its optimizer keeps "
        "what it knew of the old ones."
    )
    rows = young + school.train(loop, "growing")
    keep_model(model, folder / "model")
    return model, seam, rows


def language_config(tokens: dict[str, int]) -> "TokenformerConfig":
    from tokenformer import TokenformerConfig
    from tokenformer.data.byte_tokenizer import END_OF_TEXT, VOCAB_SIZE

    return TokenformerConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=2 * LENGTH,
        # Keys of 1/sqrt(d) bear a higher rate than the released 0.02 in a model this narrow.
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


def write(model: Any, length: int, *, temperature: float | None = None, seed: int = 0) -> str:
    """The prompt and `length` more bytes; without a temperature always the likeliest."""
    import torch

    from tokenformer.data.byte_tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    torch.manual_seed(seed)
    chosen = {} if temperature is None else {"do_sample": True, "temperature": temperature}
    written = model.eval().generate(
        **tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=length, **chosen
    )
    return str(tokenizer.decode(written[0], skip_special_tokens=True))


def quote(console: "Console", text: str) -> None:
    shown = printable(text, console.encoding)
    console.print(shown, style="cyan", markup=False, soft_wrap=True)


def show_seam(console: "Console", seam: "Seam", samples: list[str]) -> None:
    console.print(
        f"   held-out loss before   {bits(seam.loss_before):.6f} bits per byte\n"
        f"   held-out loss after    {bits(seam.loss_after):.6f} bits per byte\n"
        f"   largest change of the logits, as a share of the largest   "
        f"{seam.report.max_output_change:.1e}"
    )
    before, after = samples
    same = "the same text before and after" if before == after else "before growth"
    console.print(f"\nWriting the likeliest byte each time, {same}:\n")
    quote(console, before)
    if before != after:
        console.print("\nand after it:\n")
        quote(console, after)


def keep_seam(seam: "Seam", samples: list[str], path: Path) -> None:
    before, after = samples
    seen = {
        **seam.report.asdict(),
        "bits_per_byte_before": bits(seam.loss_before),
        "bits_per_byte_after": bits(seam.loss_after),
        "sample_before": before,
        "sample_after": after,
    }
    path.write_text(json.dumps(seen, indent=2) + "\n", encoding="utf-8")


def keep_model(model: Any, folder: Path) -> None:
    from transformers.utils import logging

    from tokenformer.data.byte_tokenizer import byte_tokenizer

    logging.disable_progress_bar()  # one small file
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def bits(loss: float) -> float:
    """Nats per byte as bits per byte."""
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


def verdict(growing: "list[Row]", name: str, rival: "list[Row]") -> str:
    """Whether growing has paid, against a model from scratch."""
    theirs = rival[-1]
    gain = theirs["val_bpb"] - growing[-1]["val_bpb"]
    if gain < 0:
        return f"Growing ended {-gain:.3f} bits per byte above the {name} from scratch."
    reached = next(row for row in growing if row.get("val_bpb", math.inf) <= theirs["val_bpb"])
    return (
        f"Growing ended {gain:.3f} bits per byte below the {name} from scratch; it was there with "
        f"{reached['flops'] / theirs['flops']:.0%} of the compute."
    )


def draw(
    path: Path,
    seam: "Seam",
    configs: "tuple[LanguageConfig, LanguageConfig, LanguageConfig]",
    runs: "tuple[list[Row], list[Row], list[Row]]",
) -> None:
    from tokenformer.train.comparison_plot import Curve, draw_comparison

    small, grown, plain = (f"{parameters(config) / 1e6:.2f}M" for config in configs)
    growing, scratch, transformer = runs
    draw_comparison(
        [
            Curve("growing TokenFormer", f"{small} to {grown} parameters", growing, seam.step),
            Curve("TokenFormer", f"{grown}, from scratch", scratch),
            Curve("Transformer", f"{plain}, from scratch", transformer),
        ],
        path,
        title="A TokenFormer grows without forgetting",
        subtitle="Bits per byte on Python sources it has not seen, over training compute",
        growth="grows here\n"
        f"{bits(seam.loss_before):.3f} before, {bits(seam.loss_after):.3f} after",
    )
