"""The optimizer of a grown model keeps the state of every old entry."""

import copy

import pytest
import torch

import tokenformer
from tests.support.growth import train_once, trained_tokenformer
from tokenformer.growth.grown_optimizer import grow_average
from tokenformer.growth.tokens import token_growth

SIZES = {"qkv_tokens": 48, "output_tokens": 30, "ffn_tokens": 200}
KEY, VALUE = "model.layers.1.ffn.key_tokens", "model.layers.1.ffn.value_tokens"


def moments(optimizer, parameter):
    state = optimizer.state[parameter]
    return state["exp_avg"], state["exp_avg_sq"]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("state", ["keep", "mean"])
def test_old_rows_keep_their_moments(make_config, state, fused):
    model, _ = trained_tokenformer(make_config)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1, "rate_factor": 0.5}, {"params": others}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=fused)
    for _ in range(3):
        train_once(model, optimizer)
    grown, report = tokenformer.grow(model, **SIZES)
    larger = tokenformer.grow_optimizer(optimizer, report, state=state)
    assert larger.param_groups[0]["rate_factor"] == 0.5
    assert larger.param_groups[0]["betas"] == (0.9, 0.95)
    assert larger.param_groups[0]["fused"] is fused
    listed = [p for group in larger.param_groups for p in group["params"]]
    assert {id(p) for p in listed} == {id(p) for p in grown.parameters()}
    for name, parameter in grown.named_parameters():
        old = dict(model.named_parameters())[name]
        rows = old.shape[0]
        first, second = moments(larger, parameter)
        old_first, old_second = moments(optimizer, old)
        assert torch.equal(first[:rows], old_first)
        assert torch.equal(second[:rows], old_second)
        assert not first[rows:].any()
        if parameter.shape != old.shape:
            expected = old_second.mean(0) if state == "mean" else torch.zeros(())
            assert torch.allclose(second[rows:], expected.expand_as(second[rows:]))
        assert larger.state[parameter]["step"] == optimizer.state[old]["step"]
    train_once(grown, larger)  # and it can step


def test_reset_forgets_and_keeps_the_groups(make_config):
    model, optimizer = trained_tokenformer(make_config)
    _, report = tokenformer.grow(model, **SIZES)
    larger = tokenformer.grow_optimizer(optimizer, report, state="reset")
    assert not larger.state
    assert larger.param_groups[0]["betas"] == (0.9, 0.95)


def test_cloned_moments_are_those_of_the_cloned_gradients(make_config):
    """Without noise, the gradients after cloning are the old ones times the mapping's scale."""

    model, _ = trained_tokenformer(make_config, torch.float64)
    noise, token_growth.CLONE_NOISE = token_growth.CLONE_NOISE, 0.0
    try:
        grown, report = tokenformer.grow(model, qkv_tokens=72, ffn_tokens=192, init="clone")
    finally:
        token_growth.CLONE_NOISE = noise
    ids = torch.randint(61, (4, 24))
    for each in (model, grown):
        each(input_ids=ids, labels=ids).loss.backward()
    for name, parameter in grown.named_parameters():
        mapping = report.mappings[name]
        old = model.get_parameter(mapping.source)
        expected = mapping.gather(old.grad) * mapping.gradient_scale
        assert torch.allclose(parameter.grad, expected, rtol=1e-8, atol=1e-14), name


def test_training_goes_on_as_if_nothing_had_happened_where_clones_have_no_noise(make_config):
    """SGD on clones: the function moves as the old one does, keys at 1/k of the rate."""
    model, optimizer = trained_tokenformer(make_config, torch.float64)
    grown, report = tokenformer.grow(model, ffn_tokens=192, init="zero")
    larger = tokenformer.grow_optimizer(optimizer, report, state="keep")
    copied, copied_optimizer = copy.deepcopy((model, optimizer))
    torch.manual_seed(3)
    train_once(copied, copied_optimizer)
    torch.manual_seed(3)
    train_once(grown, larger)
    # Old rows of every layer have made the very step they would have made in the old model.
    for name, parameter in copied.named_parameters():
        rows = parameter.shape[0]
        assert torch.allclose(grown.get_parameter(name)[:rows], parameter, rtol=1e-9), name


def test_learned_scales_join_the_optimizer_without_decay(make_config):
    model, optimizer = trained_tokenformer(make_config)
    grown, report = tokenformer.grow(model, **SIZES, scale="learned")
    larger = tokenformer.grow_optimizer(optimizer, report)
    scales = [p for name, p in grown.named_parameters() if name.endswith("scale_tokens")]
    assert len(scales) == 10
    group = larger.param_groups[-1]
    assert {id(p) for p in group["params"]} == {id(p) for p in scales}
    assert group["weight_decay"] == 0.0


def test_frozen_parameters_stay_frozen_and_out(make_config):
    model, _ = trained_tokenformer(make_config)
    model.model.embed_tokens.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    grown, report = tokenformer.grow(model, **SIZES)
    larger = tokenformer.grow_optimizer(optimizer, report)
    assert not grown.model.embed_tokens.weight.requires_grad
    held = {id(p) for group in larger.param_groups for p in group["params"]}
    assert id(grown.model.embed_tokens.weight) not in held


@pytest.mark.parametrize("init", ["zero", "clone"])
def test_an_average_follows(make_config, init):
    model, _ = trained_tokenformer(make_config, torch.float64)
    grown, report = tokenformer.grow(model, **SIZES, init=init)
    average = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    larger = copy.deepcopy(grown)
    with torch.no_grad():
        for name, parameter in larger.named_parameters():
            source = report.mappings[name].source
            parameter.copy_(
                grow_average(
                    average.get_parameter(source),
                    model.get_parameter(source),
                    grown.get_parameter(name),
                    report.mappings[name],
                )
            )
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        was, became = average(input_ids=ids).logits, larger(input_ids=ids).logits
    assert torch.allclose(was, became, rtol=1e-9, atol=1e-9)


def test_strangers_and_reports_from_disk_are_refused(make_config):
    model, optimizer = trained_tokenformer(make_config)
    _, report = tokenformer.grow(model, **SIZES)
    with pytest.raises(ValueError, match="not in the model that grew"):
        tokenformer.grow_optimizer(
            torch.optim.AdamW(trained_tokenformer(make_config)[0].parameters()), report
        )
    with pytest.raises(ValueError, match="state='zero' is unknown"):
        tokenformer.grow_optimizer(optimizer, report, state="zero")
    report.new = {}
    with pytest.raises(ValueError, match="on disk"):
        tokenformer.grow_optimizer(optimizer, report)
