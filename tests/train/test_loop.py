import json
import math

import numpy as np
import pytest
import torch

from tokenformer import TokenformerConfig, TokenformerForCausalLM
from tokenformer.train.loop import Loop, train
from tokenformer.train.options import OptimizerOptions, RunOptions, ScheduleOptions
from tokenformer.train.task import LanguageTask

# A text that is easy to learn: the same eleven bytes over and over.
TEXT = np.frombuffer(b"abracadabra" * 200, dtype=np.uint8).astype(np.uint16)
RUN = {"steps": 30, "batch_size": 4, "validate_every": 10, "validation_sequences": 6}


def make_loop(*, rates: dict[str, float] | None = None, **run: object) -> Loop:
    torch.manual_seed(0)
    model = TokenformerForCausalLM(
        TokenformerConfig(
            vocab_size=257,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            rotary_fraction=0.5,
        )
    )
    return Loop(
        LanguageTask(model, TEXT, TEXT, length=16),
        OptimizerOptions(learning_rate=5e-3, rates=rates or {}),
        ScheduleOptions(warmup_steps=5),
        RunOptions(**{**RUN, **run}),
    )


def losses(**options: object) -> list[float]:
    return [row["loss"] for row in train(make_loop(**options), lambda row: None)]


def test_it_learns_and_reports_every_step():
    seen: list[dict[str, float]] = []
    rows = train(make_loop(), seen.append)
    assert rows == seen
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert [row["step"] for row in rows if "val_loss" in row] == [10, 20, 30]
    assert rows[-1]["val_loss"] < 0.6 * rows[0]["loss"]
    assert rows[-1]["val_bpb"] == pytest.approx(rows[-1]["val_loss"] / math.log(2))
    assert rows[-1]["tokens"] == 30 * 4 * 16
    assert json.loads(json.dumps(rows)) == rows


def test_the_same_seed_gives_the_same_losses():
    assert losses() == losses()


@pytest.mark.parametrize("micro", [1, 2, 3])
def test_losses_do_not_depend_on_accumulation(micro):
    assert losses(micro_batch_size=micro) == pytest.approx(losses(), abs=1e-5)


@pytest.mark.parametrize("option", ["compile", "activation_checkpointing"])
def test_what_saves_time_or_memory_changes_nothing(option, monkeypatch):
    if option == "compile":  # tracing is what is ours to get right; inductor has its own tests
        compile = torch.compile
        monkeypatch.setattr(torch, "compile", lambda m: compile(m, backend="aot_eager"))
    changed = losses(**{option: True}, steps=5)
    assert changed == pytest.approx(losses(steps=5), abs=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_learns_about_the_same(precision):
    rounded = losses(precision=precision, steps=10)
    exact = losses(steps=10)
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.05)


def test_the_loss_is_that_of_the_models_own_labels():
    loop = make_loop()
    batch = torch.randint(257, (3, 17))
    own = loop.task.model(batch, labels=batch).loss
    assert loop.task.module(batch).item() / (3 * 16) == pytest.approx(own.item(), rel=1e-6)


def test_frozen_parameters_stay_to_the_bit_and_slow_ones_move_less():
    loop = make_loop(rates={"*.ffn.*": 0.0, "*.attention.*": 0.01})
    before = {n: p.detach().clone() for n, p in loop.task.model.named_parameters()}
    train(loop, lambda row: None)
    moved = {n: (p - before[n]).abs().max() for n, p in loop.task.model.named_parameters()}
    for name, distance in moved.items():
        if ".ffn." in name:
            assert distance == 0
        elif ".attention." in name:
            assert 0 < distance < 0.05 * moved["model.embed_tokens.weight"]


def test_a_step_that_is_not_finite_changes_nothing_and_uses_its_samples_up():
    loop = make_loop()
    with torch.no_grad():
        loop.task.model.model.norm.weight.fill_(math.nan)
    before = loop.task.model.model.embed_tokens.weight.clone()
    row = loop.step()
    assert row["problem"] == "the loss is nan"
    assert torch.equal(loop.task.model.model.embed_tokens.weight, before)
    assert (loop.progress.step, loop.progress.samples) == (0, 4)
    with pytest.raises(FloatingPointError, match="step 1: the loss is nan"):
        train(loop, lambda row: None)


def test_validation_counts_every_held_out_sequence_once():
    """Six sequences in batches of four: the last, smaller batch weighs less."""
    loop = make_loop()
    assert [len(batch) for batch in loop.held_out] == [4, 2]
    with torch.no_grad():
        whole = loop.task.module(torch.cat(loop.held_out)).item() / (6 * 16)
    assert loop.validate() == pytest.approx(whole, rel=1e-6)


def test_the_held_out_sequences_do_not_depend_on_the_micro_batch():
    one, other = (torch.cat(make_loop(micro_batch_size=size).held_out) for size in (1, 4))
    assert torch.equal(one, other)
