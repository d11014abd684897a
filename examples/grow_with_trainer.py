"""Grow a model between two runs of the Hugging Face Trainer.

    python examples/grow_with_trainer.py

`tokenformer.grow_optimizer` carries the Trainer's AdamW moments over to the larger model.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments, default_data_collator

import tokenformer

LENGTH = 64


def standard_library() -> Dataset:
    """Sequences of bytes of Python's own sources."""
    folder = Path(argparse.__file__).parent
    text = b"".join(file.read_bytes() for file in sorted(folder.glob("*.py"))[:40])
    sequences = [list(text[i : i + LENGTH]) for i in range(0, len(text) - LENGTH, LENGTH)]
    return Dataset.from_dict({"input_ids": sequences, "labels": sequences})


def make_trainer(
    model: torch.nn.Module, data: Dataset, steps: int, folder: str, **options: object
) -> Trainer:
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=16,
        learning_rate=2e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=min(10, steps),
        logging_steps=max(1, steps // 4),
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        seed=0,
    )
    return Trainer(
        model, arguments, train_dataset=data, data_collator=default_data_collator, **options
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100, help="steps before and after growth")
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    data = standard_library()
    config = tokenformer.TokenformerConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        qkv_tokens=32,
        output_tokens=32,
        ffn_tokens=128,
    )
    with tempfile.TemporaryDirectory() as folder:
        small = make_trainer(tokenformer.TokenformerForCausalLM(config), data, steps, folder)
        small.train()

        grown, report = tokenformer.grow(
            small.model, qkv_tokens=64, output_tokens=64, ffn_tokens=256
        )
        # accelerate wraps the optimizer; growth works on torch's own.
        optimizer = tokenformer.grow_optimizer(small.optimizer.optimizer, report)
        print(
            f"{small.model.num_parameters():,} -> {grown.num_parameters():,} parameters, "
            f"logits moved by {report.max_output_change:.1e}"
        )
        large = make_trainer(grown, data, steps, folder, optimizers=(optimizer, None))
        large.train()


if __name__ == "__main__":
    main()
