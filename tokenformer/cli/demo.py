"""`tokenformer demo`: a small TokenFormer learns to write Python, with nothing to download."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenformer.cli.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

PROMPT = "def "
SAMPLE_LENGTH = 400


def demo(out: Path | None = None, steps: int = 1000, seed: int = 0) -> None:
    """Train a small byte-level TokenFormer on this machine's Python sources and let it speak.

    Args:
        out: A new folder to keep the model, its metrics and a picture of the loss in.
        steps: Training steps; the default takes about a minute on two cores.
        seed: Seed of the weights, the batches and the sample.
    """
    if steps < 1:
        raise InputError(f"--steps {steps} must be at least 1")
    if out is not None:
        make_folder(out)

    import torch
    from rich.console import Console

    from tokenformer.data.standard_library import standard_library
    from tokenformer.train.curve import draw_loss
    from tokenformer.train.loop import train
    from tokenformer.train.options import TrainOptions
    from tokenformer.train.progress import progress

    console = Console()
    torch.manual_seed(seed)
    tokens, held_out = standard_library()
    model = small_model()
    introduce(console, model, len(tokens))
    options = TrainOptions(steps=steps, warmup_steps=min(20, steps), seed=seed)
    with ExitStack() as stack:
        show = stack.enter_context(progress(console, steps))
        metrics = stack.enter_context((out / "metrics.jsonl").open("w")) if out else None

        def on_step(row: dict[str, float]) -> None:
            show(row)
            if metrics:
                metrics.write(json.dumps(row) + "\n")

        rows = train(model, tokens, held_out, options, on_step)
    console.print(
        f"\n{rows[-1]['tokens']:,.0f} bytes read in {rows[-1]['seconds']:.0f} s. On files it has "
        f"never seen it needs {rows[-1]['val_bpb']:.2f} bits per byte; untrained it needed 8. "
        f"Asked to go on from {PROMPT!r}, it writes:\n",
        highlight=False,
    )
    console.print(speak(model, seed), style="cyan", markup=False, highlight=False)
    if out is not None:
        keep(model, out)
        draw_loss(rows, out / "loss.png", f"TokenFormer, {model.num_parameters() / 1e6:.1f}M")
        console.print(f"\nKept in {out}: model/, metrics.jsonl, loss.png", highlight=False)


def make_folder(out: Path) -> None:
    """Before the work, not after it: a folder that cannot be used is found out at once."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise InputError(f"--out {out} is not empty; name a new folder")
    except OSError as error:
        raise InputError(f"--out {out} cannot be made: {error.strerror}") from None


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


def introduce(console: Console, model: Any, corpus_size: int) -> None:
    config = model.config
    console.print(
        f"A TokenFormer of {model.num_parameters():,} parameters: {config.num_hidden_layers} "
        f"layers, width {config.hidden_size}, {config.qkv_tokens} parameter tokens in each "
        f"attention projection, {config.ffn_tokens} in each feed-forward layer.\n"
        f"It reads {corpus_size / 1e6:.1f} MB of Python's standard library, byte by byte.\n",
        highlight=False,
    )


def speak(model: Any, seed: int) -> str:
    import torch

    from tokenformer.data.byte_tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    torch.manual_seed(seed)
    written = model.generate(
        **tokenizer(PROMPT, return_tensors="pt"),
        max_new_tokens=SAMPLE_LENGTH,
        do_sample=True,
        temperature=0.7,
        top_p=0.95,
    )
    return str(tokenizer.decode(written[0], skip_special_tokens=True))


def keep(model: Any, out: Path) -> None:
    from transformers.utils import logging

    from tokenformer.data.byte_tokenizer import byte_tokenizer

    logging.disable_progress_bar()  # one small file
    model.save_pretrained(out / "model")
    byte_tokenizer().save_pretrained(out / "model")
