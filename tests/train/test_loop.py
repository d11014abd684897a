import json
import math

import pytest
import torch

from tests.support.training import make_loop
from tokenformer.train.loop import Progress, train


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


SAVED_STATE = {
    "step": 7,
    "stage": 0,
    "config": {},
    "scales_began": None,
    "progress": {"step": 7, "samples": 32, "tokens": 512, "flops": 9, "seconds": 1.5},
    "best": [2.5, 5],
    "recent": [3.0, 2.5],
    "scaler": {},
    "threads": 2,
}
"""The state in checkpoints of the first releases; keys must keep their meaning."""


def test_the_state_of_an_old_checkpoint_loads():
    loop = make_loop()
    loop.spikes.recent.append(1.0)
    loop.load_state_dict(SAVED_STATE)
    assert loop.progress == Progress(step=7, samples=32, tokens=512, flops=9, seconds=1.5)
    assert [*loop.spikes.recent] == [3.0, 2.5]
    del SAVED_STATE["scales_began"]  # absent before scales could be annealed
    make_loop().load_state_dict(SAVED_STATE)


def test_a_loop_resumes_from_its_state_and_tensors():
    whole = [row["loss"] for row in train(make_loop(steps=8), lambda row: None)]
    first, second = make_loop(steps=8), make_loop(steps=8)
    losses = [first.step()["loss"] for _ in range(4)]
    state = json.loads(json.dumps(first.state_dict()))
    assert state.keys() <= SAVED_STATE.keys() | {"scales_began"}
    second.task.model.load_state_dict(first.task.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.load_state_dict(state)
    assert losses + [row["loss"] for row in second.steps()] == whole
