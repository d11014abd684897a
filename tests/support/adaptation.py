"""A small base model, texts and runs for tests of `tokenformer adapt`."""

import difflib
import inspect
import json
import textwrap
from pathlib import Path
from typing import Any

import torch

from tokenformer import (
    TokenformerConfig,
    TokenformerForCausalLM,
    TransformerConfig,
    TransformerForCausalLM,
)
from tokenformer.cli import main
from tokenformer.data.byte_tokenizer import VOCAB_SIZE, byte_tokenizer
from tokenformer.train.metrics import Row, read_metrics

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
SHORT = ["--steps", "6", "--batch_size", "4", "--length", "32", "--validation_sequences", "6"]
SHORT += ["--validate_every", "2"]


def save_base(folder: Path, *, kind: str = "tokenformer", seed: int = 0, **options: Any) -> Path:
    """Save a random model with the byte tokenizer."""
    torch.manual_seed(seed)
    model: Any
    if kind == "tokenformer":
        tokens = {"qkv_tokens": 12, "output_tokens": 12, "ffn_tokens": 24}
        model = TokenformerForCausalLM(TokenformerConfig(**SIZES, **tokens, **options))
    else:
        model = TransformerForCausalLM(TransformerConfig(**SIZES))
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def save_texts(folder: Path) -> tuple[Path, Path]:
    """Write two different texts of the standard library and return their files."""
    folder.mkdir(parents=True, exist_ok=True)
    new, kept = folder / "new.txt", folder / "kept.txt"
    new.write_text(inspect.getsource(textwrap)[:12_000])
    kept.write_text(difflib.__doc__ + inspect.getsource(difflib)[:12_000])
    return new, kept


def write_rows(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def sums(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"{n} + {n} =", "completion": f" {2 * n}"} for n in range(count)]


def adapt(*words: object) -> None:
    main(["adapt", *map(str, words)])


def rows_of(out: Path) -> list[Row]:
    """The metrics of a run without the times."""
    rows = read_metrics(out / "metrics.jsonl")
    return [{name: v for name, v in row.items() if name != "seconds"} for row in rows]
