"""Hugging Face's Trainer on our models: resuming, accumulating, predicting."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

import tokenformer

Make = Callable[..., Any]


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Random sequences; row i has its first i % 5 + 1 labels masked, so that batches differ in
    their number of items."""

    def __init__(self, count: int = 32) -> None:
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(61, (count, 9), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.ids[index].clone()
        labels[: index % 5 + 1] = -100
        return {"input_ids": self.ids[index], "labels": labels}


def make_trainer(model: Any, folder: Path, **options: Any) -> Trainer:
    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    arguments = TrainingArguments(**{**arguments, **options})
    return Trainer(model=model, args=arguments, train_dataset=Rows())


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def fresh(make_config: Make, family: str) -> Any:
    set_seed(1)
    classes = {
        "tokenformer": tokenformer.TokenformerForCausalLM,
        "transformer": tokenformer.TransformerForCausalLM,
    }
    return classes[family](make_config(family))


def test_resumed_run_equals_the_unbroken_one(
    make_config: Make, family: str, tmp_path: Path
) -> None:
    unbroken = make_trainer(fresh(make_config, family), tmp_path / "unbroken")
    unbroken.train()

    class StopAfterFive(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 5

    saving = {"save_strategy": "steps", "save_steps": 5}
    broken = make_trainer(fresh(make_config, family), tmp_path / "broken", **saving)
    broken.add_callback(StopAfterFive())
    broken.train()
    checkpoint = tmp_path / "broken" / "checkpoint-5"
    assert (checkpoint / "model.safetensors").is_file()
    assert len(losses(broken)) == 5

    other = fresh(make_config, family)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    resumed = make_trainer(other, tmp_path / "broken", **saving)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert losses(resumed) == losses(unbroken)
    assert len(losses(unbroken)) == 8
    final = resumed.model.state_dict()
    for name, value in unbroken.model.state_dict().items():
        assert torch.equal(final[name], value), name
    assert resumed.model.lm_head.weight is resumed.model.model.embed_tokens.weight


def test_training_learns(make_config: Make, family: str, tmp_path: Path) -> None:
    trainer = make_trainer(
        fresh(make_config, family), tmp_path, max_steps=60, per_device_train_batch_size=32
    )
    trainer.train()
    first, last = losses(trainer)[0], losses(trainer)[-1]
    assert first == pytest.approx(4.11, abs=0.1)  # ln 61
    assert last < 0.75 * first


@pytest.mark.parametrize("checkpointing", [False, True])
def test_accumulated_steps_equal_one_large_batch(
    make_config: Make, family: str, tmp_path: Path, checkpointing: bool
) -> None:
    """Only if the loss is divided by the items of the whole step, since the parts hold unequally
    many."""
    trained = []
    for size, parts in [(8, 1), (2, 4)]:
        trainer = make_trainer(
            fresh(make_config, family),
            tmp_path / str(size),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=parts,
            gradient_checkpointing=checkpointing and parts > 1,
            max_steps=3,
            # Plain gradient descent: Adam would blow rounding errors up and hide wrong factors.
            optim="sgd",
            learning_rate=0.5,
        )
        assert trainer.model_accepts_loss_kwargs
        trainer.train()
        trained.append((losses(trainer), trainer.model.state_dict()))
    (whole_losses, whole), (part_losses, parts_) = trained
    assert part_losses == pytest.approx(whole_losses, rel=1e-4)
    for name, value in whole.items():
        torch.testing.assert_close(parts_[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_evaluation_and_prediction(make_config: Make, family: str, tmp_path: Path) -> None:
    trainer = make_trainer(fresh(make_config, family), tmp_path, per_device_eval_batch_size=5)
    rows = Rows(11)
    predicted = trainer.predict(rows)
    # The cache is not a prediction: it must not be gathered with the logits.
    assert predicted.predictions.shape == (11, 9, 61)
    model = trainer.model.eval()
    with torch.no_grad():
        expected = model(rows.ids).logits
    torch.testing.assert_close(torch.tensor(predicted.predictions), expected, rtol=0, atol=1e-5)
    assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(4.11, abs=0.1)
