"""TRL's trainers on a folder's path, not only on a model object."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenformer.data.byte_tokenizer import END_OF_TEXT, VOCAB_SIZE, byte_tokenizer

Make = Callable[..., Any]


def test_sft_trainer_takes_a_folder(make_model: Make, family: str, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    from datasets import Dataset

    model = make_model(family, vocab_size=VOCAB_SIZE, eos_token_id=END_OF_TEXT).float()
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    arguments = trl.SFTConfig(
        str(tmp_path / "run"),
        max_steps=2,
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=2,
        max_length=32,
    )
    rows = Dataset.from_dict({"text": ["hello there"] * 4})
    trainer = trl.SFTTrainer(model=str(tmp_path / "model"), args=arguments, train_dataset=rows)
    trainer.train()
    assert type(trainer.model) is type(model)
    assert trainer.state.global_step == 2
