"""`tokenformer demo`: a small TokenFormer learns to write Python, with nothing to download."""

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenformer.cli.errors import InputError
from tokenformer.cli.folder import new_folder
from tokenformer.cli.terminal import printable

if TYPE_CHECKING:
    from rich.console import Console

    from tokenformer.train.metrics import Row
    from tokenformer.train.task import LanguageTask

PROMPT = "import os\nimport sys\n\n\ndef main"
LENGTH = 256
LARGEST_SEED = 2**63 - 1


def demo(out: Path | None = None, steps: int = 2000, seed: int = 0) -> None:
    """Train a small byte-level TokenFormer on this machine's Python sources and let it speak.

    Args:
        out: A new folder to keep the model, its metrics and a picture of the loss in.
        steps: Training steps; the default takes a minute or so on two cores.
        seed: Seed of the weights, the batches and the sample.
    """
    if steps < 1:
        raise InputError(f"--steps {steps} must be at least 1")
    if not 0 <= seed <= LARGEST_SEED:
        raise InputError(f"--seed {seed} must be a whole number from 0 to {LARGEST_SEED}")
    with ExitStack() as stack:
        folder = None if out is None else stack.enter_context(new_folder("--out", out))
        tour(folder, steps, seed)
    if out is not None:
        sys.stdout.write(f"\nKept in {out}: model/, metrics.jsonl, loss.png\n")


def tour(folder: Path | None, steps: int, seed: int) -> None:
    import torch
    from rich.console import Console

    from tokenformer.data.standard_library import standard_library
    from tokenformer.train.task import LanguageTask

    console = Console(highlight=False)
    torch.manual_seed(seed)
    tokens, held_out = standard_library()
    model = small_model()
    introduce(console, model, len(tokens))
    task = LanguageTask(model, tokens, held_out, length=LENGTH, seed=seed)
    rows = learn(console, task, steps, folder)
    if folder is not None:
        keep(model, rows, folder)
    console.print(
        f"\n{rows[-1]['tokens']:,.0f} bytes read in {rows[-1]['seconds']:.0f} s. On files it has "
        f"never seen it needs {rows[-1]['val_bpb']:.2f} bits per byte; untrained it needed 8. "
        "Given two imports and the head of a function, it goes on:\n"
    )
    sample = printable(speak(model, LENGTH, seed), console.encoding)
    console.print(sample, style="cyan", markup=False, soft_wrap=True)


def small_model() -> Any:
    from tokenformer import TokenformerConfig, TokenformerForCausalLM
    from tokenformer.data.byte_tokenizer import END_OF_TEXT, VOCAB_SIZE

    config = TokenformerConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        qkv_tokens=128,
        output_tokens=128,
        ffn_tokens=512,
        max_position_embeddings=512,
        # Keys of 1/sqrt(d) bear a higher rate than the released 0.02 in a model this narrow.
        variant="paper",
        positions="rotary",
        rotary_fraction=0.5,
        bos_token_id=END_OF_TEXT,
        eos_token_id=END_OF_TEXT,
        pad_token_id=END_OF_TEXT,
    )
    return TokenformerForCausalLM(config)


def introduce(console: "Console", model: Any, corpus_size: int) -> None:
    config = model.config
    console.print(
        f"A TokenFormer of {model.num_parameters():,} parameters: {config.num_hidden_layers} "
        f"layers, width {config.hidden_size}, {config.qkv_tokens} parameter tokens in each "
        f"attention projection, {config.ffn_tokens} in each feed-forward layer.\n"
        f"It reads from {corpus_size / 1e6:.1f} MB of Python's standard library, byte by byte.\n"
    )


def learn(console: "Console", task: "LanguageTask", steps: int, folder: Path | None) -> "list[Row]":
    from tokenformer.train.loop import Loop, train
    from tokenformer.train.options import OptimizerOptions, RunOptions, ScheduleOptions
    from tokenformer.train.progress import progress

    loop = Loop(
        task,
        OptimizerOptions(learning_rate=1.5e-3),
        ScheduleOptions(warmup_steps=min(50, steps)),
        RunOptions(steps=steps, batch_size=2, validate_every=200, validation_sequences=32),
    )
    with ExitStack() as stack:
        show = stack.enter_context(progress(console, steps))
        metrics = stack.enter_context((folder / "metrics.jsonl").open("w")) if folder else None

        def on_step(row: "Row") -> None:
            show(row)
            if metrics:
                metrics.write(json.dumps(row) + "\n")

        return train(loop, on_step)


def keep(model: Any, rows: "list[Row]", folder: Path) -> None:
    from transformers.utils import logging

    from tokenformer.data.byte_tokenizer import byte_tokenizer
    from tokenformer.train.curve import draw_loss

    logging.disable_progress_bar()  # one small file
    model.save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    draw_loss(rows, folder / "loss.png", f"TokenFormer, {model.num_parameters() / 1e6:.1f}M")


def speak(model: Any, length: int, seed: int) -> str:
    """A sample of `length` bytes in all; further than that the model has never been."""
    import torch

    from tokenformer.data.byte_tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    torch.manual_seed(seed)
    written = model.generate(
        **tokenizer(PROMPT, return_tensors="pt"),
        max_length=length,
        do_sample=True,
        temperature=0.6,
    )
    return str(tokenizer.decode(written[0], skip_special_tokens=True))
