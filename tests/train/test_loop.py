import json
import math

import numpy as np
import pytest
import torch

from tokenformer import TokenformerConfig, TokenformerForCausalLM
from tokenformer.train.loop import learning_rate, make_optimizer, next_token_loss, train
from tokenformer.train.options import TrainOptions

OPTIONS = TrainOptions(
    steps=30, batch_size=4, length=16, learning_rate=5e-3, warmup_steps=5, validate_every=10
)
# A text that is easy to learn: the same eleven bytes over and over.
TEXT = np.frombuffer(b"abracadabra" * 200, dtype=np.uint8).astype(np.uint16)


def tiny_model() -> TokenformerForCausalLM:
    torch.manual_seed(0)
    return TokenformerForCausalLM(
        TokenformerConfig(
            vocab_size=257,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            rotary_fraction=0.5,
        )
    )


def test_it_learns_and_reports_every_step():
    seen: list[dict[str, float]] = []
    rows = train(tiny_model(), TEXT, TEXT, OPTIONS, seen.append)
    assert rows == seen
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert [row["step"] for row in rows if "val_loss" in row] == [10, 20, 30]
    assert rows[-1]["val_loss"] < 0.6 * rows[0]["loss"]
    assert rows[-1]["val_bpb"] == pytest.approx(rows[-1]["val_loss"] / math.log(2))
    assert rows[-1]["tokens"] == 30 * 4 * 16
    assert json.loads(json.dumps(rows)) == rows


def test_the_same_seed_gives_the_same_losses():
    first, second = (
        [row["loss"] for row in train(tiny_model(), TEXT, TEXT, OPTIONS, lambda row: None)]
        for _ in range(2)
    )
    assert first == second


def test_a_loss_that_is_not_finite_stops_the_run():
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="nan at step 1"):
        train(model, TEXT, TEXT, OPTIONS, lambda row: None)


def test_the_loss_is_that_of_the_models_own_labels():
    model = tiny_model()
    batch = torch.randint(257, (3, 17))
    own = model(batch, labels=batch).loss
    assert next_token_loss(model, batch).item() == pytest.approx(own.item(), rel=1e-6)


def test_decay_falls_on_matrices_alone():
    model = tiny_model()
    decayed, spared = make_optimizer(model, OPTIONS).param_groups
    assert {p.ndim for p in decayed["params"]} == {2}
    assert decayed["weight_decay"] == OPTIONS.weight_decay
    assert spared["params"] == [model.model.norm.weight, model.model.norm.bias]
    assert spared["weight_decay"] == 0


def test_rate_warms_up_peaks_and_ends_at_its_floor():
    rates = [learning_rate(step, OPTIONS) for step in range(1, 31)]
    assert rates[0] == pytest.approx(OPTIONS.learning_rate / 5)
    assert max(rates) == rates[4] == OPTIONS.learning_rate
    assert rates[-1] == pytest.approx(OPTIONS.learning_rate * OPTIONS.final_rate)
    assert rates[4:] == sorted(rates[4:], reverse=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("batch_size", 0),
        ("length", -1),
        ("learning_rate", -0.1),
        ("warmup_steps", -1),
        ("final_rate", 5.0),
    ],
)
def test_options_refuse_nonsense(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        TrainOptions(**{name: value})
