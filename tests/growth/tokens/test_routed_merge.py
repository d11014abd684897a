"""Merging routed layers: exact where both models choose as the merged one can, refused by name
elsewhere."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenformer
from tests.support.growth import logits, relative_change, train_once, trained_routed
from tokenformer.growth.parameter_mapping import NEW
from tokenformer.growth.tokens.group_merge import RoutedMerge, chosen_from
from tokenformer.layers import RoutedPattention
from tokenformer.layers.router import ROUTERS, balance_routers
from tokenformer.ops import THETAS

CASES = [("l2_gelu", "all"), *((theta, "chosen") for theta in THETAS)]
cases = pytest.mark.parametrize(("theta", "theta_norm"), CASES)
FFN = "model.layers.0.ffn"


@pytest.fixture
def trained(make_config: Any) -> Any:
    """trained(**options): a routed model after some steps, and its optimizer."""
    return partial(trained_routed, make_config)


def random_layer(seed: int, tokens: int = 32, **options: Any) -> RoutedPattention:
    torch.manual_seed(seed)
    sizes = {"group_size": 4, "active_groups": 3, "bias": True}
    layer = RoutedPattention(6, 5, tokens, **{**sizes, **options}).double().eval()
    with torch.no_grad():
        layer.router.bias.normal_(std=0.3)
        layer.bias.normal_()
    return layer


@torch.no_grad()
def merged_layer(
    a: RoutedPattention, b: RoutedPattention, router: str, factor: float = 0.5
) -> RoutedPattention:
    merge = RoutedMerge("ffn", a, b, factor)
    found = merge.replacement(None)
    layer = RoutedPattention(
        6, 5, found.tokens.size, group_size=4, active_groups=found.active_groups or 0,
        theta=a.theta, norm=a.norm, router=router, bias=True, scale_tokens=found.tokens.scale,
    ).double().eval()  # fmt: skip
    tensors = {"key_tokens": found.tokens.keys, "value_tokens": found.tokens.values}
    others = b.state_dict()
    for name, tensor in a.state_dict().items():
        if name not in tensors:
            tensors[name], _ = merge.copy(f"ffn.{name}", tensor, others[name])
    layer.load_state_dict(tensors)
    return layer


@pytest.mark.parametrize("own", ["average", "sum"])
@pytest.mark.parametrize("router", ROUTERS)
@cases
def test_a_model_merged_with_itself_is_itself(trained, theta, theta_norm, router, own):
    model, _ = trained(theta=theta, theta_norm=theta_norm, router=router, ffn_tokens=60)
    again, report = tokenformer.merge(model.eval(), copy.deepcopy(model), own=own)
    assert again.config.to_dict() == model.config.to_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert report.max_output_change == 0


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("theta_norm", ["all", "chosen"])
@pytest.mark.parametrize("init", ["zero", "zero_value"])
def test_groups_that_no_row_chooses_yet_change_nothing(trained, router, theta_norm, init):
    model, _ = trained(torch.float64, router=router, theta_norm=theta_norm)
    one, _ = tokenformer.grow(model.eval(), ffn_tokens=96, init=init, seed=1)
    for a, b in ((model, one), (one, model)):
        both, _ = tokenformer.merge(a, b)
        assert both.config.active_groups == {"ffn": 3}, "no slower"
        assert both.config.ffn_tokens == 96
        assert relative_change(logits(model), logits(both)) < 1e-10


@pytest.mark.parametrize(("theta", "theta_norm"), [("l2_gelu", "all"), ("gelu_l2", "chosen")])
@pytest.mark.parametrize("own", ["average", "sum"])
def test_with_all_groups_active_as_dense_models(trained, theta, theta_norm, own):
    options = {"active_groups": {"ffn": 8}, "router": "learned", "routed_bias": False}
    a, _ = trained(torch.float64, theta=theta, theta_norm=theta_norm, **options)
    b = copy.deepcopy(a.eval())
    with torch.no_grad():
        for parameter in b.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        if theta_norm == "all":  # half of the groups in common
            for one, other in zip(a.model.layers, b.model.layers, strict=True):
                other.ffn.load_state_dict(
                    {
                        name: torch.cat([tensor[: len(tensor) // 2], new[len(tensor) // 2 :]])
                        for (name, tensor), new in zip(
                            one.ffn.state_dict().items(), other.ffn.state_dict().values(),
                            strict=True,
                        )
                    }
                )  # fmt: skip
    found, _ = tokenformer.merge(a, b, own=own)
    groups = 12 if theta_norm == "all" else 16
    assert found.config.active_groups == {"ffn": groups}

    def dense(model):
        config = type(model.config).from_dict({**model.config.to_dict(), "active_groups": None})
        made = tokenformer.TokenformerForCausalLM(config).double().eval()
        made.load_state_dict(model.state_dict(), strict=False)
        return made

    expected, _ = tokenformer.merge(dense(a), dense(b), own=own)
    assert expected.config.ffn_tokens == groups * 8
    assert relative_change(logits(expected), logits(found)) < 1e-10


@pytest.mark.parametrize("router", ["gated", "learned"])
@cases
@torch.no_grad()
def test_layers_that_choose_as_before_become_their_mean_or_sum(theta, theta_norm, router):
    """Every row chooses the same groups of each; and what they weigh is alike in both."""
    a, b = (random_layer(seed, theta=theta, norm=theta_norm, router=router) for seed in (0, 1))
    a.router.bias.copy_(torch.tensor([50.0, -50, 50, -50, -50, -50, 50, -50]))
    b.router.bias.copy_(1000 + torch.tensor([-50.0, 50, -50, -50, 50, 50, -50, -50]))
    groups = a.key_tokens.view(8, 4, 6)  # the keys of b are those of a in another order
    b.key_tokens.copy_(groups[[1, 0, 3, 5, 2, 6, 7, 4]].flip(1).reshape(32, 6))
    x = torch.randn(40, 6, dtype=torch.float64)
    mean, total = merged_layer(a, b, router), merged_layer(a, b, router, 1.0)
    assert (mean.num_groups, mean.active_groups) == (16, 6)
    torch.testing.assert_close(mean(x), (a(x) + b(x)) / 2, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(total(x), a(x) + b(x), rtol=1e-9, atol=1e-10)
    chosen = mean.router(x, None, 6)[0]
    assert (chosen.sort().values == torch.tensor([0, 2, 6, 9, 12, 13])).all()


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("active", [(3, 3), (1, 6), (5, 2)])
@torch.no_grad()
def test_rows_choose_as_many_groups_of_each_as_before(router, active):
    """On average, whatever the level of the biases."""
    a, b = (
        random_layer(seed, 128, active_groups=each, router=router)
        for seed, each in enumerate(active)
    )
    b.router.bias += 7.0
    x = torch.randn(4000, 6, dtype=torch.float64)
    both = merged_layer(a, b, router)
    chosen = both.router(x, both.directions(), both.active_groups)[0]
    assert chosen.shape[1] == sum(active)
    assert (chosen < 32).double().sum(1).mean().item() == pytest.approx(active[0], abs=0.5)
    kept = [
        (chosen[:, :, None] == offset + each.router(x, each.directions(), k)[0][:, None])
        .any(2)
        .sum(1)
        for each, k, offset in ((a, active[0], 0), (b, active[1], 32))
    ]
    assert (sum(kept) / sum(active)).mean() > 0.75, "mostly those that each would choose"


@torch.no_grad()
def test_the_score_from_which_groups_are_chosen():
    layer = random_layer(0, 256, active_groups=9)
    x = torch.randn(20_000, 6, dtype=torch.float64)
    x = x * 6**0.5 / x.norm(dim=1, keepdim=True)
    scores = layer.router.scores(x, None) + layer.router.bias
    count = (scores > chosen_from(layer)).sum(1).double().mean().item()
    assert count == pytest.approx(9, rel=0.1)
    layer.router.bias += 3.0
    assert (layer.router.scores(x, None) + layer.router.bias > chosen_from(layer)).sum(
        1
    ).double().mean().item() == pytest.approx(count, rel=1e-3)


@pytest.mark.parametrize(
    ("active", "common", "expected"),
    [((3, 3), 8, 3), ((3, 3), 0, 6), ((3, 3), 4, 5), ((1, 4), 8, 4), ((8, 8), 2, 14)],
    ids=str,
)
@torch.no_grad()
def test_the_number_of_active_groups(active, common, expected):
    a, b = (random_layer(seed, active_groups=each) for seed, each in enumerate(active))
    b.key_tokens[: 4 * common] = a.key_tokens[: 4 * common]
    b.value_tokens[: 4 * common] = a.value_tokens[: 4 * common]
    merge = RoutedMerge("ffn", a, b, 0.5)
    assert merge.active_groups == expected
    assert merge.replacement(None).tokens.size == 64 - 4 * common


def test_rows_keep_their_places_and_groups_stay_whole(trained):
    a, optimizer = trained()
    b = copy.deepcopy(a)
    with torch.no_grad():
        b.model.layers[0].ffn.key_tokens[20] += 1.0  # of group 2
        b.model.layers[0].ffn.router.weight[5] += 1.0
    both, report = tokenformer.merge(a.eval(), b)
    first, second = (model.model.layers[0].ffn for model in (a, b))
    ffn = both.model.layers[0].ffn
    assert both.config.ffn_tokens == [72, 64]
    assert both.config.active_groups == {"ffn": [4, 3]}
    assert torch.equal(ffn.key_tokens[:64], first.key_tokens)
    assert torch.equal(ffn.key_tokens[64:], second.key_tokens[16:24])
    assert torch.equal(ffn.value_tokens[16:24], first.value_tokens[16:24] / 2)
    assert torch.equal(ffn.value_tokens[64:], second.value_tokens[16:24] / 2)
    assert torch.equal(ffn.value_tokens[24:64], first.value_tokens[24:])
    torch.testing.assert_close(ffn.router.weight[5], first.router.weight[5] + 0.5)
    assert torch.equal(ffn.router.weight[8], second.router.weight[2])
    rows = report.mappings[f"{FFN}.router.weight"].rows
    assert rows.tolist() == [*range(8), NEW]
    moved = tokenformer.grow_optimizer(optimizer, report)
    before = optimizer.state[first.router.weight]["exp_avg"]
    assert torch.equal(moved.state[ffn.router.weight]["exp_avg"][:8], before)
    train_once(both.train(), moved)
    assert balance_routers(both).groups == 17


def different(model: Any) -> Any:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return other


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("router", ROUTERS)
def test_saved_and_loaded_and_trained_on(trained, tmp_path: Path, router, learned):
    a, _ = trained(active_groups={"ffn": [None, 3], "o": 1}, router=router, learned_scale=learned)
    both, report = tokenformer.merge(a.eval(), different(a))
    assert both.config.active_groups == {"ffn": [None, 6], "o": 2}
    assert report.parameters_after == both.num_parameters()
    both.save_pretrained(tmp_path)
    again = tokenformer.TokenformerForCausalLM.from_pretrained(tmp_path)
    for name, tensor in both.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    torch.testing.assert_close(logits(again.eval()), logits(both))
    ids = torch.arange(40).view(2, 20)
    both.train()(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in both.parameters())
    assert tokenformer.prune(both, [ids], keep=0.5)[0].config.output_tokens == 24


def test_the_bias_of_the_output(trained):
    a, _ = trained()
    b = different(a)
    one, other = (model.model.layers[0].ffn.bias for model in (a, b))
    for own, expected in (("average", (one + other) / 2), ("sum", one + other)):
        both, _ = tokenformer.merge(a, b, own=own)
        assert torch.equal(both.model.layers[0].ffn.bias, expected)


def test_a_smaller_last_group_stays_last(trained):
    odd, _ = trained(ffn_tokens=60)
    whole, _ = tokenformer.prune(odd.eval(), [torch.arange(60).view(2, 30)], ffn_tokens=56)
    for a, b in ((odd, different(whole)), (different(whole), odd)):
        both, report = tokenformer.merge(a, b)
        ffn = both.model.layers[0].ffn
        assert (ffn.num_tokens, ffn.num_groups) == (116, 15)
        assert torch.equal(ffn.key_tokens[-4:], odd.model.layers[0].ffn.key_tokens[-4:])
        assert (
            sorted(report.mappings[f"{FFN}.key_tokens"].rows.tolist())[-1]
            == len(a.model.layers[0].ffn.key_tokens) - 1
        )
        assert logits(both).isfinite().all()
    message = r"the last groups of model.layers.0.ffn have fewer than group_size=8 .* prune both"
    with pytest.raises(ValueError, match=message):
        tokenformer.merge(odd, different(odd))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 16}, "group_size 8 and 16"),
        ({"router": "centroid"}, "router gated and centroid"),
        ({"theta_norm": "chosen"}, "theta_norm all and chosen"),
        ({"routed_bias": False}, "routed_bias True and False"),
        ({"active_groups": None}, "routed layers ffn 0, ffn 1 and none"),
        ({"active_groups": {"ffn": [3, None]}}, "routed layers ffn 0, ffn 1 and ffn 0"),
    ],
    ids=str,
)
def test_routers_that_do_not_fit_are_refused(trained, options, message):
    a, _ = trained()
    b, _ = trained(**options)
    with pytest.raises(ValueError, match=f"of different shape cannot be merged: {message}$"):
        tokenformer.merge(a, b)


def test_both_models_are_left_alone(trained):
    a, _ = trained()
    b = different(a)
    before: list[dict[str, Tensor]] = [
        {name: tensor.clone() for name, tensor in model.state_dict().items()} for model in (a, b)
    ]
    both, _ = tokenformer.merge(a, b)
    with torch.no_grad():
        for tensor in both.state_dict().values():
            tensor.add_(1.0)
    for model, kept in zip((a, b), before, strict=True):
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, kept[name]), name
