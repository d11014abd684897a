"""A prefix of the tokens: in place, and as a smaller model."""

import pytest
import torch

import tokenformer
from tests.support.growth import logits, train_on_text, trained_tokenformer
from tokenformer.growth.tokens.prefix import active_share
from tokenformer.growth.tokens.token_counts import token_share
from tokenformer.growth.tokens.token_set import token_layers
from tokenformer.ops import THETAS


@pytest.mark.parametrize("share", [0.3, 0.5, 1.0])
@pytest.mark.parametrize(
    "options",
    [*({"theta": theta} for theta in THETAS), {"learned_scale": True}, {"variant": "paper"}],
    ids=str,
)
def test_the_cut_model_equals_the_whole_one_at_that_share(make_config, tmp_path, options, share):
    model, _ = trained_tokenformer(make_config, **options)
    if options.get("theta") != "softmax":
        model, _ = tokenformer.grow(model, qkv_tokens=[31, 24], ffn_tokens=101)  # scales of its own
    whole = logits(model)
    smaller, report = tokenformer.take_prefix(model, share)
    assert torch.equal(logits(model), whole), "the model itself is left alone"
    tokenformer.set_active_share(model, share)
    cut = logits(model)
    assert torch.equal(cut, whole) == (share == 1)
    assert torch.equal(logits(smaller), cut)
    smaller.save_pretrained(tmp_path)
    again = tokenformer.TokenformerForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again.eval()), cut)
    assert report.parameters_after == smaller.num_parameters()
    assert report.exact == (share == 1)
    tokenformer.set_active_share(model, None)
    assert torch.equal(logits(model), whole)


def test_a_fresh_models_prefix_has_the_scale_of_a_fresh_one(make_config):
    model = tokenformer.TokenformerForCausalLM(make_config("tokenformer"))
    smaller, _ = tokenformer.take_prefix(model, 0.5)
    assert smaller.config.qkv_tokens == 12
    assert smaller.config.scale_tokens is None


def test_the_report_compares_with_the_whole_model_whatever_is_active(make_config):
    model, _ = trained_tokenformer(make_config)
    _, expected = tokenformer.take_prefix(model, 0.5)
    tokenformer.set_active_share(model, 0.5)
    _, report = tokenformer.take_prefix(model, 0.5)
    assert report.max_output_change == expected.max_output_change > 0
    assert model.model.layers[0].ffn.active_tokens == 48


def test_the_report_states_the_scale_of_the_model_in_memory(make_config):
    """As during training that moves it: the configuration has the first one."""
    model, _ = trained_tokenformer(make_config)
    for _, layer in token_layers(model).values():
        layer.scale_tokens = 5.0
    _, report = tokenformer.take_prefix(model, 0.5)
    assert {part.scale_before for part in report.parts} == {5.0}


def test_the_optimizer_follows(make_config):
    model, optimizer = trained_tokenformer(make_config)
    smaller, report = tokenformer.take_prefix(model, 0.5)
    moments = tokenformer.grow_optimizer(optimizer, report).state
    for name, parameter in smaller.named_parameters():
        before = optimizer.state[model.get_parameter(name)]["exp_avg"]
        assert torch.equal(moments[parameter]["exp_avg"], before[: len(parameter)])


def test_a_block_at_a_share_ends_as_it_began_also_by_an_error(make_config):
    model, _ = trained_tokenformer(make_config)
    model.model.layers[1].ffn.active_tokens = 7

    def fail():
        with active_share(model, 0.25):
            assert model.model.layers[1].ffn.active_tokens == 24
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    counts = [m.active_tokens for m in model.modules() if isinstance(m, tokenformer.Pattention)]
    assert counts == [None] * 9 + [7]


@pytest.mark.parametrize(("size", "share", "count"), [(30, 0.1, 3), (30, 0.11, 4), (5, 0.01, 1)])
def test_a_share_is_rounded_up_but_not_by_rounding_errors(size, share, count):
    assert token_share(size, share) == count


@pytest.mark.parametrize("share", [0, -0.5, 1.01, float("nan")])
def test_a_share_is_above_0_and_at_most_1(make_config, share):
    model = tokenformer.TokenformerForCausalLM(make_config("tokenformer"))
    for cut in (tokenformer.take_prefix, tokenformer.set_active_share):
        with pytest.raises(ValueError, match="must be above 0 and at most 1"):
            cut(model, share)


def test_a_prefix_that_was_trained_works_and_others_do_not(text, text_model, train_batches):
    """The point of nested dropout: half of the tokens alone, with and without it."""
    from tokenformer.train.nested_dropout import NestedDropout

    nested = NestedDropout(shares=(0.5, 1.0))
    plain = text_model()
    torch.manual_seed(0)
    model = tokenformer.TokenformerForCausalLM(plain.config)
    train_on_text(
        model,
        text,
        150,
        before_step=lambda step: tokenformer.set_active_share(model, nested.share(step)),
    )

    @torch.no_grad()
    def loss(model, share):
        with active_share(model, share):
            return model(input_ids=train_batches[0], labels=train_batches[0]).loss.item()

    assert loss(model, 0.5) < loss(plain, 0.5) - 0.2
    assert loss(model, None) < loss(plain, None) + 0.2
