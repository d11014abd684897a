"""Attribution is the slope of the loss, ablation its exact change; a controlling set controls."""

import pytest
import torch

from tests.support.growth import train_on_text
from tokenformer.growth.tokens.token_usage import eval_mode
from tokenformer.interpret import (
    Behavior,
    Token,
    ablate_each,
    attribute,
    controlling_set,
    intervene,
    score_maps,
)
from tokenformer.interpret.attribution import strongest
from tokenformer.interpret.behavior import IGNORED
from tokenformer.interpret.controlling_set import busiest_set, rank, shortest_beginning
from tokenformer.interpret.token_name import named_layers


@pytest.fixture
def behavior(seed):
    ids = torch.randint(61, (16, 12))
    return Behavior.predicting(ids, lambda now, following: following < 12)


@pytest.mark.parametrize("trainable", [True, False])
def test_estimates_are_the_slope_of_the_loss(make_model, behavior, trainable):
    model = make_model("tokenformer").train().requires_grad_(trainable)
    estimates = attribute(model, behavior)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    step = 1e-5
    with eval_mode(model):
        for token in ("0.q.3", "1.k.5", "0.v.0", "1.o.19", "0.ffn.40"):
            with intervene(model, scale={token: 1 + step}):
                more = behavior.loss(model)
            with intervene(model, scale={token: 1 - step}):
                less = behavior.loss(model)
            layer, _, number = token.rpartition(".")
            slope = (less - more) / (2 * step)  # per whole weight that is taken away
            assert estimates[layer][int(number)] == pytest.approx(slope, rel=1e-4, abs=1e-8)


def test_exact_ablations_are_sorted_changes_of_the_loss(make_model, behavior):
    model = make_model("tokenformer")
    estimates = attribute(model, behavior, ["ffn"])
    best = strongest(estimates, 5)
    assert {token.layer for token in best} <= {"0.ffn", "1.ffn"}
    flat = torch.cat([estimates["0.ffn"], estimates["1.ffn"]]).sort(descending=True).values
    assert [estimates[t.layer][t.number] for t in best] == flat[:5].tolist()
    exact = ablate_each(model, behavior, best)
    assert set(exact) == set(best)
    assert list(exact.values()) == sorted(exact.values(), reverse=True)
    before = behavior.loss(model)
    for token, rise in exact.items():
        without = score_maps(model, behavior.inputs, [token.layer])[token.layer]
        with torch.no_grad():  # the same by replacing the layer's output
            weights = without.weights.clone()
            weights[..., token.number] = 0
            layer = named_layers(model)[token.layer]
            hook = layer.register_forward_hook(lambda *_, y=weights @ without.values: y)
            with eval_mode(model):
                changed = Behavior(behavior.inputs, behavior.targets).total_loss(model).item()
            hook.remove()
        assert changed / len(behavior) - before == pytest.approx(rise)


def test_a_behavior_and_the_rest_are_all_predictions(make_model, behavior):
    model = make_model("tokenformer")
    rest = behavior.rest()
    assert len(behavior) + len(rest) == 16 * 11
    assert (behavior.targets[behavior.targets != IGNORED] < 12).all()
    ids = torch.cat([behavior.inputs, behavior.inputs[:, :1]], 1)
    whole = Behavior.predicting(ids, lambda now, following: following >= 0)
    with torch.no_grad():
        logits = model(input_ids=behavior.inputs).logits
    everything = torch.where(behavior.targets == IGNORED, rest.targets, behavior.targets)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), everything.flatten())
    total = behavior.loss(model) * len(behavior) + rest.loss(model) * len(rest)
    assert total / 176 == pytest.approx(expected.item(), rel=1e-5)
    hits = (logits.argmax(-1) == everything).float().mean().item()
    found = behavior.accuracy(model) * len(behavior) + rest.accuracy(model) * len(rest)
    assert found / 176 == pytest.approx(hits)
    assert len(whole) == 176
    with pytest.raises(ValueError, match="the behavior is empty"):
        Behavior.predicting(ids, lambda now, following: following > 99)
    with pytest.raises(ValueError, match="knows no other predictions"):
        Behavior(behavior.inputs, behavior.targets).rest()


def test_images(make_classifier):
    model = make_classifier()
    images, classes = torch.randn(5, 1, 12, 12).double(), torch.tensor([0, 1, 2, 3, 4])
    behavior = Behavior(images, classes)
    with torch.no_grad():
        output = model(pixel_values=images, labels=classes)
    assert behavior.loss(model) == pytest.approx(output.loss.item(), rel=1e-5)
    estimates = attribute(model, behavior)
    token = strongest(estimates, 1)[0]
    assert ablate_each(model, behavior, [token])[token] != 0


@pytest.fixture
def trained(make_config):
    """A model of a text in which 5 follows every 4, and all else is random."""
    import tokenformer

    torch.manual_seed(0)
    text = torch.randint(6, 20, (4000,))
    text[::7], text[1::7] = 4, 5
    model = tokenformer.TokenformerForCausalLM(make_config("tokenformer", vocab_size=20))
    train_on_text(model, text, 60, rate=1e-2)
    return model, text


def test_a_controlling_set_controls_held_out_text_and_random_sets_do_not(trained):
    model, text = trained
    sequences = text[:3990].view(-1, 42)

    def closing(now, following):
        return now == 4

    found_on, held_out = (
        Behavior.predicting(part, closing) for part in (sequences[:40], sequences[40:])
    )
    assert held_out.accuracy(model) == 1
    found = controlling_set(model, found_on, rise=2.0, max_tokens=60, held_out=held_out)
    assert found.reached
    assert 1 <= len(found.tokens) <= 60
    assert found.after.loss - found.before.loss > 1.5
    assert found.after.accuracy < found.before.accuracy
    assert len(found.random) == 3
    assert found.rise == found.after.loss - found.before.loss
    assert found.random_rise < 0.5 * found.rise
    assert found.busiest_rise < 0.5 * found.rise
    goal = found_on.loss(model) + 2.0
    with intervene(model, off=found.tokens):
        assert found_on.loss(model) >= goal
    for token in found.tokens if len(found.tokens) > 1 else []:  # none is needless
        with intervene(model, off=[each for each in found.tokens if each != token]):
            assert found_on.loss(model) < goal
    text = str(found)
    assert "control the behavior" in text
    assert text.count("random set") == 3
    assert text.count("busiest tokens") == 1
    again = controlling_set(model, found_on, rise=2.0, max_tokens=60, held_out=held_out)
    assert again == found


def test_a_goal_out_of_reach_is_told(trained):
    model, text = trained
    behavior = Behavior.predicting(text[:420].view(-1, 42), lambda now, following: now == 4)
    found = controlling_set(model, behavior, rise=1e6, max_tokens=3, random_sets=1)
    assert (found.reached, len(found.tokens)) == (False, 3)
    assert "not enough" in str(found)
    ranking = strongest(attribute(model, behavior), 40)
    goal = behavior.loss(model) + 0.3
    count, reached = shortest_beginning(model, behavior, ranking, goal)
    assert reached
    with intervene(model, off=ranking[:count]):
        assert behavior.loss(model) >= goal
    with intervene(model, off=ranking[: count - 1]):
        assert behavior.loss(model) < goal


def test_a_ranking_looks_again_without_its_first_tokens(make_model, behavior):
    model = make_model("tokenformer")
    found = rank(model, behavior, 7, ["ffn"])
    assert len({*found}) == 7
    for start, end in ((0, 1), (1, 2), (2, 4), (4, 7)):
        with intervene(model, off=found[:start]):
            estimates = attribute(model, behavior, ["ffn"])
        for token in found[:start]:
            estimates[token.layer][token.number] = -torch.inf
        assert found[start:end] == strongest(estimates, end - start)
    layers = named_layers(model, ["0"])
    assert len({*rank(model, behavior, 10**6, ["0"])}) == sum(e.num_tokens for e in layers.values())


def test_the_busiest_tokens_are_those_that_add_most(make_model, behavior):
    model = make_model("tokenformer")
    maps = score_maps(model, behavior.inputs)
    tokens = [Token("0.ffn", 3), Token("1.o", 2), Token("0.ffn", 4)]
    found = busiest_set(model, behavior, tokens)
    for layer, count in (("0.ffn", 2), ("1.o", 1)):
        added = maps[layer].contributions.square().mean((0, 1))
        best = added.topk(count).indices.tolist()
        assert [token.number for token in found if token.layer == layer] == best
