"""Which existing tokens sparse finetuning trains."""

import math

import pytest
import torch

from tokenformer import TokenformerConfig, TokenformerForCausalLM
from tokenformer.growth.tokens.token_set import token_layers
from tokenformer.train.options import AdapterOptions
from tokenformer.train.sparse_rows import rates_of_best, token_scores, usage


@pytest.fixture
def model() -> TokenformerForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return TokenformerForCausalLM(TokenformerConfig(**sizes, ffn_tokens=12)).eval()


def batches(low: int, high: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(low)
    return [torch.randint(low, high, (1, 10), generator=generator) for _ in range(count)]


NAMES = ["model.layers.0.ffn", "model.layers.1.ffn"]


def test_the_use_of_a_token_is_its_weight_times_the_length_of_its_value(model) -> None:
    (batch,) = batches(0, 40, 1)
    layer = model.model.layers[1].ffn
    inputs = []
    hook = layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with torch.no_grad():
        model(batch)
        hook.remove()
        scores = inputs[0][0] @ layer.key_tokens.T  # [T, n]
        norms = scores.square().sum(-1, keepdim=True).sqrt()
        weights = torch.nn.functional.gelu(math.sqrt(12) * scores / norms)
        expected = weights.abs().sum(0) * layer.value_tokens.norm(dim=1)
    found = usage(model, batch, NAMES)[NAMES[1]]
    torch.testing.assert_close(found.float(), expected, rtol=1e-4, atol=1e-5)


def test_a_score_is_the_frequency_in_the_new_data_times_the_rarity_in_the_kept(model) -> None:
    new, kept = batches(0, 20, 3), batches(20, 40, 4)
    found = token_scores(model, new, kept, NAMES)[NAMES[0]]
    total = sum(usage(model, batch, NAMES)[NAMES[0]] for batch in new)
    documents = torch.zeros(12).double()
    for batch in kept:
        use = usage(model, batch, NAMES)[NAMES[0]]
        documents += (12 * use / use.sum()).clamp(max=1)
    expected = total / total.sum() * torch.log(5 / (1 + documents))
    torch.testing.assert_close(found, expected)


def test_a_token_that_only_the_new_data_uses_is_first_and_one_that_the_kept_uses_last(
    model,
) -> None:
    """Keys along the mean input of one corpus make tokens of that corpus."""
    new, kept = batches(0, 1, 3), batches(39, 40, 3)
    layer = model.model.layers[0].ffn
    means = []
    for group in (new, kept):
        inputs = []
        hook = layer.register_forward_pre_hook(lambda _, args, to=inputs: to.append(args[0]))
        with torch.no_grad():
            for batch in group:
                model(batch)
        hook.remove()
        means.append(torch.cat(inputs, 1)[0].mean(0))
    apart = means[0] - means[1]
    with torch.no_grad():
        layer.key_tokens[3] = 20 * apart
        layer.key_tokens[7] = -20 * apart
        layer.value_tokens.copy_(torch.ones_like(layer.value_tokens))
    scores = token_scores(model, new, kept, NAMES[:1])[NAMES[0]]
    assert scores.argmax() == 3
    assert scores[7] < scores[3] / 5


def test_the_best_tokens_get_rate_one(model) -> None:
    scores = {NAMES[1]: torch.tensor([0.0, 3, 2, 0, 0, 9, 0, 0, 0, 0, 0, 0])}
    places = {NAMES[1]: token_layers(model)[NAMES[1]][0]}
    rates = rates_of_best(scores, places, 2, AdapterOptions(tokens=3).count_rows)
    assert rates == {"ffn": [None, [[1, 0.0], [2, 1.0], [2, 0.0], [1, 1.0], [6, 0.0]]]}
    model.config.token_rates = rates
    assert model.config.row_rates("ffn", 1) == [0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0]


def test_the_number_of_rows() -> None:
    assert AdapterOptions(tokens=3).count_rows(12) == 3
    assert AdapterOptions(tokens=30).count_rows(12) == 12
    assert AdapterOptions(share=0.25).count_rows(12) == 3
    assert AdapterOptions(share=0.001).count_rows(12) == 1
