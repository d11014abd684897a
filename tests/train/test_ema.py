import contextlib

import torch

from tests.support.training import make_loop
from tokenformer.train.loop import train


def test_the_average_is_the_formula_and_training_does_not_see_it():
    loop, plain = make_loop(ema=0.9, steps=12), make_loop(steps=12)
    name = "model.embed_tokens.weight"
    expected = loop.task.model.get_parameter(name).detach().double().clone()
    for row, plain_row in zip(loop.steps(), plain.steps(), strict=True):
        step = int(row["step"])
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * loop.task.model.get_parameter(name).detach()
        assert row["loss"] == plain_row["loss"]
    assert torch.allclose(loop.ema.tensors[name].double(), expected, atol=1e-6)
    assert not torch.allclose(loop.ema.tensors[name], loop.task.model.get_parameter(name))


def test_validation_is_of_the_average_and_leaves_the_weights():
    loop = make_loop(ema=0.95)
    train(loop, lambda row: None)
    before = {n: p.detach().clone() for n, p in loop.task.model.named_parameters()}
    averaged = loop.validate()
    assert all(torch.equal(p, before[n]) for n, p in loop.task.model.named_parameters())
    with torch.no_grad():
        for name, parameter in loop.task.model.named_parameters():
            parameter.copy_(loop.ema.tensors[name])
    loop.ema = None
    assert loop.validate() == averaged
    with torch.no_grad():
        for name, parameter in loop.task.model.named_parameters():
            parameter.copy_(before[name])
    assert loop.validate() != averaged


def test_a_problem_in_the_block_gives_the_weights_back():
    loop = make_loop(ema=0.5, steps=3)
    train(loop, lambda row: None)
    before = loop.task.model.model.embed_tokens.weight.clone()
    with contextlib.suppress(KeyError), loop.ema_weights():
        assert not torch.equal(loop.task.model.model.embed_tokens.weight, before)
        raise KeyError
    assert torch.equal(loop.task.model.model.embed_tokens.weight, before)
