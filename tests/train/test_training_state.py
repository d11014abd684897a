"""Growing the state of a run: model, optimizer, EMA weights and counters together."""

from dataclasses import replace

import pytest
import torch

import tokenformer
from tests.support.training import SIZES, make_loop
from tokenformer.train.model_growth import grow_model
from tokenformer.train.options import GrowthOptions
from tokenformer.train.training_state import TrainingState


def trained_state(**run: object) -> TrainingState:
    loop = make_loop(**run)
    for _ in range(3):
        loop.step()
    return TrainingState.from_loop(loop)


def test_every_parameter_of_the_grown_model_has_ema_weights_and_the_counters_stay():
    before = trained_state(ema=0.9)
    # Learned scales are parameters that the small model does not have.
    after, report = before.grow(GrowthOptions(sizes=SIZES, scale="learned"))
    parameters = dict(after.model.named_parameters())
    assert after.ema.keys() == parameters.keys()
    assert {name: ema.shape for name, ema in after.ema.items()} == {
        name: parameter.shape for name, parameter in parameters.items()
    }
    added = [name for name, mapping in report.mappings.items() if mapping.source is None]
    assert added
    assert all(torch.equal(after.ema[name], parameters[name]) for name in added)
    assert after.loop_state["progress"] == before.loop_state["progress"]
    assert after.loop_state["recent"] == []


def test_a_state_without_ema_grows_without():
    after, _ = trained_state().grow(GrowthOptions(sizes=SIZES))
    assert after.ema == {}


def test_a_model_grows_to_the_size_of_another_folder(tmp_path):
    state = trained_state()
    larger, _ = grow_model(state.model, GrowthOptions(sizes=SIZES))
    larger.save_pretrained(tmp_path / "larger")
    grown, _ = grow_model(state.model, GrowthOptions(to=str(tmp_path / "larger")))
    assert grown.config.to_dict().keys() == larger.config.to_dict().keys()
    assert [p.shape for p in grown.parameters()] == [p.shape for p in larger.parameters()]
    transformer = tokenformer.TransformerForCausalLM(
        tokenformer.TransformerConfig(
            vocab_size=257, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
        )
    )
    with pytest.raises(
        ValueError, match="larger is a tokenformer model, not a tokenformer_transformer"
    ):
        grow_model(transformer, GrowthOptions(to=str(tmp_path / "larger")))


def test_a_transformer_grows_by_net2net_unless_another_method_is_named(seed):
    config = tokenformer.TransformerConfig(
        vocab_size=257, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = tokenformer.TransformerForCausalLM(config).eval()
    options = GrowthOptions(sizes={"intermediate_size": 2 * config.intermediate_size})
    default, report = grow_model(model, options)
    named, _ = grow_model(model, replace(options, method="net2net"))
    assert report.max_output_change < 1e-5
    for one, other in zip(default.parameters(), named.parameters(), strict=True):
        assert torch.equal(one, other)
