"""One graph, no breaks, and the values and gradients of eager mode."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StaticCache

Make = Callable[..., Any]

OPTIONS = [
    {"positions": "learned", "num_key_value_heads": 2, "residual": "parallel"},
    {"variant": "paper", "norm": "rms_norm", "norm_parameters": "weight_bias"},
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def loss_and_gradients(
    model: Any, call: Callable[..., Any], **inputs: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    model.zero_grad()
    outputs = call(**inputs, use_cache=False)
    outputs.loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return outputs.loss.detach(), outputs.logits.detach(), gradients


def check_against_eager(
    model: Any, backend: str, tolerance: float, lengths: tuple[int, ...] = (8, 13)
) -> None:
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for length in lengths:
        ids = torch.randint(1, 61, (3, length))
        padding = torch.ones_like(ids)
        padding[0, :3] = 0
        for mask in ({}, {"attention_mask": padding}):
            inputs = {"input_ids": ids, "labels": ids, **mask}
            loss, logits, gradients = loss_and_gradients(model, compiled, **inputs)
            expected = loss_and_gradients(model, model, **inputs)
            close = {"rtol": tolerance, "atol": tolerance}
            torch.testing.assert_close(loss, expected[0], **close)
            torch.testing.assert_close(logits, expected[1], **close)
            for name, gradient in expected[2].items():
                assert gradient.abs().max() > 0, name
                torch.testing.assert_close(gradients[name], gradient, msg=name, **close)


@pytest.mark.slow
def test_training_step_is_one_graph(make_model: Make, family: str) -> None:
    model = make_model(family, num_hidden_layers=1).train()
    check_against_eager(model, "aot_eager", 1e-9, lengths=(9,))


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_training_step_of_every_kind_is_one_graph(
    make_model: Make, family: str, options: dict[str, Any]
) -> None:
    check_against_eager(make_model(family, **options).train(), "aot_eager", 1e-9)


@torch.no_grad()
def test_decoding_is_one_graph(make_model: Make, family: str) -> None:
    """With a static cache; new ids at a new position do not recompile."""
    model = make_model(family)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    ids = torch.randint(61, (2, 12))
    whole = model(ids, use_cache=False).logits
    cache = StaticCache(config=model.config, max_cache_len=16)
    steps = [model(ids[:, :5], past_key_values=cache).logits]
    for place in range(5, 12):
        position = torch.full((2, 1), place)
        steps.append(
            compiled(ids[:, place : place + 1], position_ids=position, past_key_values=cache).logits
        )
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=0, atol=1e-9)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.slow
def test_checkpointed_training_step_compiles(make_model: Make, family: str) -> None:
    model = make_model(family).train()
    ids = torch.randint(61, (2, 9))
    expected = loss_and_gradients(model, model, input_ids=ids, labels=ids)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    compiled = torch.compile(model, backend="aot_eager")
    loss, _, gradients = loss_and_gradients(model, compiled, input_ids=ids, labels=ids)
    torch.testing.assert_close(loss, expected[0])
    for name, gradient in expected[2].items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.slow
def test_inductor_training_step(make_model: Make, family: str) -> None:
    """In float32 with tamer weights, since the kernels reorder sums."""
    model = make_model(family).float().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.4)
    check_against_eager(model, "inductor", 1e-4)


@pytest.mark.slow
@torch.no_grad()
def test_inductor_generation(make_model: Make, family: str) -> None:
    model = make_model(family, tie_word_embeddings=False, eos_token_id=None).float()
    ids = torch.randint(1, 61, (2, 5))
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    settings |= {"pad_token_id": 0, "cache_implementation": "static"}
    expected = model.generate(ids, **settings)
    model.forward = torch.compile(model.forward, fullgraph=True)
    assert torch.equal(model.generate(ids, **settings), expected)
