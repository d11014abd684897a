"""Pruning routed layers: whole groups go, and with them their outputs of the router."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenformer
from tests.support.growth import logits, relative_change, train_once, trained_routed
from tokenformer.growth.tokens.group_usage import GroupUsageSums, KeptGroups, NormShare
from tokenformer.layers import Pattention, RoutedPattention
from tokenformer.layers.router import ROUTERS, balance_routers, routers
from tokenformer.ops import THETAS, routed_pattention
from tokenformer.ops.routed_pattention import group_mask

CASES = [("l2_gelu", "all"), *((theta, "chosen") for theta in THETAS)]
cases = pytest.mark.parametrize(("theta", "theta_norm"), CASES)
FFN = "model.layers.0.ffn"


@pytest.fixture
def trained(make_config: Any) -> Any:
    """trained(**options): a routed model whose groups are all chosen by some rows, and its
    optimizer."""

    def make(*args: Any, **options: Any) -> Any:
        model, optimizer = trained_routed(make_config, *args, **options)
        model.model.embed_tokens.weight.data.normal_(std=3.0)  # rows that differ
        for _ in range(30):
            for ids in batches():
                model(ids)
            for router in routers(model):
                router.balance_rate = 0.05
            balance_routers(model)
        return model, optimizer

    return make


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(61, (4, 24), generator=generator) for _ in range(2)]


def never_choose(model: Any, groups: list[int]) -> None:
    """Make some groups of every routed layer idle."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.ffn.router.bias[groups] = -100.0
            if layer.ffn.norm == "all":
                mask = group_mask(torch.tensor(groups), layer.ffn.num_tokens, layer.ffn.group_size)
                layer.ffn.key_tokens[mask] = 0.0


def make_layer(**options: Any) -> tuple[RoutedPattention, Tensor]:
    """A layer whose last group is smaller, and rows."""
    torch.manual_seed(0)
    layer = RoutedPattention(
        6, 5, 30, **{"group_size": 4, "active_groups": 3, "bias": True, **options}
    ).double()
    with torch.no_grad():
        layer.router.bias.normal_(std=0.3)
        layer.bias.normal_()
    return layer.eval(), torch.randn(50, 6, dtype=torch.float64)


def choice(layer: RoutedPattention, x: Tensor) -> tuple[Tensor, Tensor]:
    groups, gates = layer.router(x, layer.directions(), layer.active_groups)
    return groups, torch.ones(groups.shape).double() if gates is None else gates


def output(layer: RoutedPattention, x: Tensor, groups: Tensor, gates: Tensor) -> Tensor:
    return routed_pattention(
        x, layer.key_tokens, layer.value_tokens, groups, gates=gates, group_size=layer.group_size,
        norm=layer.norm, scale_tokens=layer.routed_scale, theta=layer.theta, backend="reference",
    )  # fmt: skip


@pytest.mark.parametrize("router", ROUTERS)
@cases
@torch.no_grad()
def test_the_contribution_of_a_group_is_the_error_without_it(router, theta, theta_norm):
    layer, x = make_layer(router=router, theta=theta, norm=theta_norm)
    sums = GroupUsageSums(layer)
    for rows in x.split(20):
        sums.add(rows)
    groups, gates = choice(layer, x)
    whole = output(layer, x, groups, gates)
    for group, contribution in enumerate(sums.result().contribution.tolist()):
        without = output(layer, x, groups, gates.masked_fill(groups == group, 0.0))
        expected = (whole - without).square().sum(1).mean().item()
        assert contribution == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("kept", [[0, 2, 3, 5, 6], [1, 3, 7], [4, 7]], ids=str)
@cases
@torch.no_grad()
def test_what_is_left_is_a_layer_of_the_best_groups_left(router, theta, theta_norm, kept):
    """`KeptGroups`, which pruning measures and fits on, against a layer made of these groups."""
    layer, x = make_layer(router=router, theta=theta, norm=theta_norm)
    groups = KeptGroups(layer, torch.tensor(kept))
    rows = torch.cat([torch.arange(30).split(4)[group] for group in kept])
    assert torch.equal(groups.rows, rows)
    small = RoutedPattention(
        6, 5, len(rows), group_size=4, active_groups=min(3, len(kept)), router=router, theta=theta,
        norm=theta_norm, scale_tokens=groups.scale(0.7), bias=True,
    ).double().eval()  # fmt: skip
    assert small.routed_scale == pytest.approx(0.7 * layer.routed_scale)
    small.key_tokens.copy_(layer.key_tokens[rows])
    small.value_tokens.copy_(layer.value_tokens[rows])
    small.bias.copy_(layer.bias)
    for name, tensor in small.router.state_dict().items():
        tensor.copy_(layer.router.state_dict()[name][kept])
    found = groups.weights(x, groups.scale(0.7)) @ layer.value_tokens[rows] + layer.bias
    torch.testing.assert_close(found, small(x), rtol=1e-9, atol=1e-11)


@cases
@torch.no_grad()
def test_the_share_of_the_norm_that_is_left(theta, theta_norm):
    layer, x = make_layer(router="learned", theta=theta, norm=theta_norm)
    kept = KeptGroups(layer, torch.tensor([0, 2, 3, 5, 7]))
    share = NormShare(kept)
    for rows in x.split(20):
        share.add(rows)
    scores = x @ layer.key_tokens.T
    mass = {
        "l2_gelu": scores**2,
        "gelu_l2": torch.nn.functional.gelu(scores) ** 2,
        "l1_gelu": scores.abs(),
        "softmax": scores.exp(),
    }[theta]
    ranks = layer.router.scores(layer.router.normalized(x), None) + layer.router.bias
    left = ranks.clone()
    left[:, [1, 4, 6]] = -torch.inf
    before, after = (group_mask(r.topk(3).indices, 30, 4) for r in (ranks, left))
    if theta_norm == "all":
        before, after = torch.ones(30).bool(), group_mask(kept.groups, 30, 4)
    expected = ((mass * after).sum(1) / (mass * before).sum(1)).mean().item()
    assert share.result() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("router", ROUTERS)
@cases
@pytest.mark.parametrize(
    ("tokens", "groups"), [(64, [1, 4, 5]), (60, [1, 4]), (60, [2, 7])], ids=str
)
def test_groups_that_no_row_chooses_go_exactly(trained, router, theta, theta_norm, tokens, groups):
    if theta == "softmax" and theta_norm == "all":
        pytest.skip("softmax has no norm over all tokens")
    model, _ = trained(
        torch.float64, router=router, theta=theta, theta_norm=theta_norm, ffn_tokens=tokens
    )
    never_choose(model.eval(), groups)
    left = tokens - sum(4 if (tokens, group) == (60, 7) else 8 for group in groups)
    ids = batches()[0]
    before = logits(model, ids)
    share = (8 - len(groups)) / 8
    for options in ({}, {"ffn_tokens": left}, {"keep": share, "refit": True}):
        smaller, report = tokenformer.prune(model, batches(), **options)
        if "keep" in options:  # dense layers lose tokens too
            rows = report.mappings[f"{FFN}.key_tokens"].rows.tolist()
            assert not {row // 8 for row in rows} & set(groups)
            continue
        assert report.exact is None, "only on this data"
        assert report.scale == "frozen"
        assert smaller.config.ffn_tokens == left
        assert smaller.config.active_groups == {"ffn": 3}
        assert smaller.model.layers[1].ffn.num_groups == 8 - len(groups)
        assert relative_change(before, logits(smaller, ids)) < 1e-12
        for layer, old in zip(smaller.model.layers, model.model.layers, strict=True):
            assert layer.ffn.routed_scale == pytest.approx(old.ffn.routed_scale, rel=1e-12)


def test_a_group_in_the_norm_is_not_idle(trained):
    model, _ = trained(torch.float64, theta_norm="all")
    never_choose(model, [1])
    with torch.no_grad():
        model.model.layers[0].ffn.key_tokens[8:16].normal_()
    smaller, _ = tokenformer.prune(model.eval(), batches())
    assert smaller.config.ffn_tokens == [64, 56]
    measured, report = tokenformer.prune(model, batches(), ffn_tokens=56)
    assert not report.exact
    assert measured.config.scale("ffn", 0) < measured.config.scale("ffn", 1) == 64
    assert torch.equal(
        measured.model.layers[0].ffn.router.weight,
        model.model.layers[0].ffn.router.weight[[0, 2, 3, 4, 5, 6, 7]],
    )


def test_without_data_groups_of_zero_keys_go_if_all_are_active(trained):
    model, _ = trained(torch.float64, active_groups={"ffn": [8, 3]}, theta_norm="chosen")
    with torch.no_grad():
        for layer in model.eval().model.layers:
            layer.ffn.key_tokens[16:32] = 0.0
    smaller, report = tokenformer.prune(model)
    assert report.exact
    assert smaller.config.ffn_tokens == [48, 64]
    assert smaller.config.active_groups == {"ffn": [6, 3]}
    assert relative_change(logits(model), logits(smaller)) < 1e-12
    assert relative_change(logits(model), logits(tokenformer.prune(model, ffn_tokens=[48, 64])[0]))


def test_growth_is_undone(trained):
    """Groups that growth added and training has not used yet are the first to go."""
    for theta_norm in ("all", "chosen"):
        model, _ = trained(torch.float64, theta_norm=theta_norm)
        model.eval()
        grown, _ = tokenformer.grow(model, ffn_tokens=128)
        again, _ = tokenformer.prune(grown, batches())
        assert again.config.ffn_tokens == 64
        assert relative_change(logits(model), logits(again)) < 1e-10


@pytest.mark.parametrize("theta", THETAS)
def test_groups_of_one_token_that_are_all_active_are_a_dense_layer(trained, theta):
    """Contribution, scale and fit of both kinds of layers agree."""
    model, _ = trained(
        torch.float64, theta=theta, theta_norm="chosen", group_size=1, active_groups={"ffn": 64},
        router="learned", routed_bias=False,
    )  # fmt: skip
    config = type(model.config).from_dict({**model.config.to_dict(), "active_groups": None})
    dense = tokenformer.TokenformerForCausalLM(config).double().eval()
    dense.load_state_dict(model.state_dict(), strict=False)
    expected, one = tokenformer.prune(dense, batches(), keep=0.7)
    found, other = tokenformer.prune(model.eval(), batches(), keep=0.7)
    assert found.config.active_groups == {"ffn": 45}
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(parameter, found.get_parameter(name), rtol=1e-6, atol=1e-8)
    for one_part, other_part in zip(one.parts, other.parts, strict=True):
        assert other_part.scale_after == pytest.approx(one_part.scale_after, rel=1e-9)


@pytest.mark.parametrize(("theta", "theta_norm"), [("l2_gelu", "all"), ("l2_gelu", "chosen")])
@pytest.mark.parametrize("router", ROUTERS)
def test_a_refit_brings_the_layers_closer(trained, router, theta, theta_norm):
    model, _ = trained(torch.float64, router=router, theta_norm=theta_norm, theta=theta)
    model.eval()

    @torch.no_grad()
    def error(smaller):
        inputs = []
        hook = model.model.layers[0].ffn.register_forward_hook(
            lambda _, x, y: inputs.append((x[0], y))
        )
        for ids in batches():
            model(ids)
        hook.remove()
        small = smaller.model.layers[0].ffn
        return sum((small(x) - y).square().sum().item() for x, y in inputs)

    measured, report = tokenformer.prune(model, batches(), keep=0.5, refit=False)
    frozen, _ = tokenformer.prune(model, batches(), keep=0.5, refit=False, scale="frozen")
    fitted, _ = tokenformer.prune(model, batches(), keep=0.5)
    assert not report.exact
    assert error(fitted) < 0.8 * error(measured)
    before, after = model.model.layers[0].ffn, frozen.model.layers[0].ffn
    assert after.routed_scale == pytest.approx(before.routed_scale)
    assert fitted.config.qkv_tokens == 12, "dense layers of the same model as ever"
    assert fitted.config.ffn_tokens == 32


def test_a_refit_solves_the_normal_equations(trained):
    model, _ = trained(torch.float64)
    layer = model.eval().model.layers[0].ffn
    inputs = []
    hook = layer.register_forward_hook(lambda _, x, y: inputs.append((x[0], y)))
    smaller, report = tokenformer.prune(model, batches(), ffn_tokens=32)
    hook.remove()
    x, y = (torch.cat([pair[i].flatten(0, 1) for pair in inputs[:2]]) for i in (0, 1))
    small = smaller.model.layers[0].ffn
    rows = report.mappings[f"{FFN}.value_tokens"].rows
    kept = KeptGroups(layer, rows[::8] // 8)
    with torch.no_grad():
        weights = kept.weights(x, small.scale_tokens)
        torch.testing.assert_close(weights @ small.value_tokens + layer.bias, small(x))
    ridge = 1e-3 * (weights.T @ weights).diagonal().mean()
    values = small.value_tokens.detach().requires_grad_()
    change = values - layer.value_tokens[rows].detach()
    error = (weights @ values + layer.bias.detach() - y.detach()).square().sum()
    (error + ridge * change.square().sum()).backward()
    assert values.grad.abs().max() < 1e-8 * (weights.T @ y).abs().max()


@pytest.mark.parametrize(
    ("options", "tokens", "active"),
    [
        ({"keep": 0.5}, 32, 3),
        ({"keep": 0.26}, 24, 3),  # 8 groups * 0.26 are 3
        ({"keep": 0.2}, 16, 2),  # fewer than the active groups
        ({"ffn_tokens": 8}, 8, 1),
        ({"ffn_tokens": [16, 40]}, [16, 40], [2, 3]),
    ],
    ids=str,
)
def test_as_many_active_groups_but_no_more_than_are_left(trained, options, tokens, active):
    model, _ = trained()
    smaller, report = tokenformer.prune(model.eval(), batches(), **options)
    assert smaller.config.ffn_tokens == tokens
    assert smaller.config.active_groups == {"ffn": active}
    assert report.parameters_after == smaller.num_parameters() < model.num_parameters()
    assert logits(smaller).isfinite().all()
    train_once(smaller.train(), torch.optim.AdamW(smaller.parameters()))
    assert all(parameter.grad is None for parameter in smaller.parameters())


@pytest.mark.parametrize(
    ("tokens", "has_last"), [(56, False), (52, True), (4, True), (8, False), (60, True)]
)
def test_the_count_tells_whether_a_smaller_last_group_stays(trained, tokens, has_last):
    model, _ = trained(ffn_tokens=60, group_size=8)
    smaller, report = tokenformer.prune(model.eval(), batches(), ffn_tokens=tokens)
    assert smaller.config.ffn_tokens == tokens
    rows = report.mappings[f"{FFN}.key_tokens"].rows
    assert (rows[-1] == 59) == has_last
    assert smaller.model.layers[0].ffn.num_groups == -(-tokens // 8)
    assert logits(smaller).isfinite().all()


def test_saved_and_loaded_with_every_layer_of_its_own(trained, tmp_path: Path):
    model, _ = trained(
        torch.float64, active_groups={"ffn": [None, 3], "o": 2}, ffn_tokens=60, learned_scale=True,
        theta_norm="chosen",
    )  # fmt: skip
    smaller, report = tokenformer.prune(model.eval(), batches(), keep=0.6)
    first, second = smaller.model.layers
    assert type(first.ffn) is Pattention
    assert first.ffn.num_tokens == 36
    assert second.ffn.num_groups == 5
    assert first.attention.o.num_tokens == 16
    assert isinstance(second.ffn.scale_tokens, torch.nn.Parameter)
    smaller.save_pretrained(tmp_path)
    again = tokenformer.TokenformerForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(logits(again.eval()), logits(smaller))
    assert again.config.active_groups == {"ffn": [None, 3], "o": 2}
    report.save(tmp_path / "growth.json")
    grown, _ = tokenformer.grow(smaller, output_tokens=32)
    assert relative_change(logits(smaller), logits(grown)) < 1e-10


@pytest.mark.parametrize("router", ROUTERS)
def test_the_optimizer_and_the_balancing_follow_the_groups(trained, router):
    model, optimizer = trained(router=router)
    smaller, report = tokenformer.prune(model, batches(), keep=0.5)
    moved = tokenformer.grow_optimizer(optimizer, report)
    rows = report.mappings[f"{FFN}.key_tokens"].rows
    groups = rows[::8] // 8
    old, new = model.model.layers[0].ffn, smaller.model.layers[0].ffn
    assert torch.equal(new.router.bias, old.router.bias[groups])
    assert torch.equal(new.key_tokens, old.key_tokens[rows])
    if router != "centroid":
        assert torch.equal(new.router.weight, old.router.weight[groups])
        before = optimizer.state[old.router.weight]["exp_avg"]
        assert torch.equal(moved.state[new.router.weight]["exp_avg"], before[groups])
    assert old.router.counts.sum() == 0, "measuring counts no rows"
    train_once(smaller.train(), moved)
    load = balance_routers(smaller)
    assert load.groups == 8


def test_frozen_tokens_keep_their_values_and_the_model_is_left_alone(trained):
    model, _ = trained()
    grown, _ = tokenformer.grow(model, ffn_tokens=96, old_rate=0)
    before = {name: tensor.clone() for name, tensor in grown.state_dict().items()}
    smaller, report = tokenformer.prune(grown, batches(), ffn_tokens=40)
    rows = report.mappings[f"{FFN}.key_tokens"].rows
    assert torch.equal(
        smaller.model.layers[0].ffn.value_tokens, grown.model.layers[0].ffn.value_tokens[rows]
    )
    assert smaller.config.row_rates("ffn", 0) == [float(row >= 64) for row in rows]
    for name, tensor in grown.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_active_groups_that_were_changed_in_memory_are_kept(trained):
    model, _ = trained(theta_norm="chosen")
    for layer in model.eval().model.layers:
        layer.ffn.active_groups = 5
    smaller, _ = tokenformer.prune(model, batches(), ffn_tokens=48)
    assert smaller.config.active_groups == {"ffn": 5}


def test_an_image_classifier():
    torch.manual_seed(0)
    config = tokenformer.TokenformerVisionConfig(
        image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_labels=3, ffn_tokens=64, active_groups={"ffn": 2}, group_size=8,
    )  # fmt: skip
    model = tokenformer.TokenformerForImageClassification(config).eval()
    pixels = torch.randn(50, 3, 8, 8)
    smaller, _ = tokenformer.prune(model, [pixels], keep=0.5)
    assert smaller.config.ffn_tokens == 32
    assert smaller(pixels).logits.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ffn_tokens": 30}, r"ffn of layer 0 is routed and loses whole groups of group_size=8, so "
         r"it cannot have 30 tokens; use 24 or 32"),
        ({"ffn_tokens": 3}, "cannot have 3 tokens; use 8 or 16"),
        ({"ffn_tokens": 72}, "cannot enlarge"),
        ({"ffn_tokens": 32, "batches": None}, "routed, and only data show which 4 of its 8"),
        ({"keep": 0.5, "batches": None}, "batches is missing"),
        ({"keep": 0.5, "batches": []}, "batches is empty"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_is_refused(trained, options, message):
    model, _ = trained()
    with pytest.raises(ValueError, match=message):
        tokenformer.prune(model, **{"batches": batches(), **options})
