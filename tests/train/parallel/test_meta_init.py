"""Initial weights of a model on the meta device follow its own rule and depend only on the seed."""

import pytest
import torch

import tokenformer
from tokenformer.train.parallel.meta_init import init_weights


@pytest.fixture
def init(make_config, family):
    classes = {
        "tokenformer": tokenformer.TokenformerForCausalLM,
        "transformer": tokenformer.TransformerForCausalLM,
    }

    def make(seed=0, **options):
        with torch.device("meta"):
            model = classes[family](make_config(family, **options))
        init_weights(model, seed, torch.device("cpu"))
        return model

    return make


def test_every_parameter_follows_the_models_rule(init, family):
    model = init(hidden_size=128, positions="learned", tie_word_embeddings=False)
    built = type(model)(model.config)
    for name, parameter in model.named_parameters():
        expected = built.get_parameter(name)
        assert parameter.shape == expected.shape
        assert parameter.requires_grad
        assert parameter.mean().item() == pytest.approx(expected.mean().item(), abs=0.02)
        assert parameter.std().item() == pytest.approx(expected.std().item(), rel=0.1, abs=1e-9)


def test_the_seed_decides_and_nothing_else(init):
    torch.manual_seed(1)
    one = init()
    after = torch.rand(2)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(2), after), "the generator of the caller is left alone"
    for name, parameter in init().named_parameters():
        assert torch.equal(parameter, one.get_parameter(name))
    other = init(seed=1)
    assert not torch.equal(other.model.embed_tokens.weight, one.model.embed_tokens.weight)
    # A layer's weights do not depend on how many there are.
    deeper = init(num_hidden_layers=3, variant="paper")
    shallow = init(num_hidden_layers=2, variant="paper")
    for name, parameter in shallow.model.layers[1].named_parameters():
        assert torch.equal(parameter, deeper.model.layers[1].get_parameter(name))


def test_tied_weights_stay_tied(init):
    model = init()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert init(tie_word_embeddings=False).lm_head.weight is not model.lm_head.weight


def test_a_learned_scale_begins_at_its_value(make_config):
    with torch.device("meta"):
        model = tokenformer.TokenformerForCausalLM(make_config("tokenformer", learned_scale=True))
    init_weights(model, 0, torch.device("cpu"))
    assert model.model.layers[0].attention.q.scale_tokens.item() == 24
    assert model.model.layers[1].ffn.scale_tokens.item() == 44
