"""Sparsifying trained models: what stays exact, what the report says, what is refused."""

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenformer
from tests.support.growth import evenly_spaced
from tokenformer import TokenformerForImageClassification, TokenformerVisionConfig
from tokenformer.growth.tokens.prefix import set_active_share
from tokenformer.growth.tokens.sparse_distillation import divergence, mean_losses
from tokenformer.growth.tokens.sparsify import fit_router
from tokenformer.growth.tokens.token_clusters import assign, balanced_clusters
from tokenformer.growth.tokens.token_usage import observe_inputs
from tokenformer.layers import RoutedPattention, ThresholdedPattention
from tokenformer.layers.router import Router
from tokenformer.ops import THETAS


@pytest.mark.parametrize(("tokens", "size"), [(40, 8), (43, 8), (5, 8), (16, 1)])
def test_clusters_hold_every_token_once(tokens: int, size: int) -> None:
    profiles = torch.randn(tokens, 12, generator=torch.Generator().manual_seed(0))
    order = balanced_clusters(profiles, size)
    assert sorted(order.tolist()) == list(range(tokens))
    assert torch.equal(order, balanced_clusters(profiles, size)), "the same seed, the same order"


def test_clusters_find_tokens_that_fire_together() -> None:
    generator = torch.Generator().manual_seed(0)
    kinds = torch.arange(60) % 6
    directions = torch.randn(6, 20, generator=generator)
    profiles = directions[kinds] + 0.2 * torch.randn(60, 20, generator=generator)
    found = kinds[balanced_clusters(profiles, 10)].view(6, 10)
    pure = sum(int(row.bincount(minlength=6).max()) for row in found)
    assert pure >= 50, found


def test_no_cluster_takes_more_than_its_capacity() -> None:
    similarity = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]])
    assert assign(similarity, torch.tensor([2, 1])).tolist() == [0, 0, 1]
    assert assign(similarity, torch.tensor([1, 2])).tolist() == [0, 1, 1]


def test_the_router_is_the_best_linear_one() -> None:
    rows = torch.randn(500, 6, generator=torch.Generator().manual_seed(0))
    true_weight, true_intercept = torch.randn(4, 6), torch.randn(4)
    strengths = Router.normalized(rows) @ true_weight.T + true_intercept
    weight, intercept = fit_router(rows, strengths)
    torch.testing.assert_close(weight, true_weight, atol=0.01, rtol=0.01)
    torch.testing.assert_close(intercept, true_intercept, atol=0.01, rtol=0.01)


@pytest.mark.parametrize("theta", THETAS)
def test_with_all_groups_nothing_changes(make_model: Any, theta: str) -> None:
    model = make_model("tokenformer", theta=theta, scale_tokens={"ffn": [9.0, None]}).eval()
    ids = torch.randint(61, (4, 32))
    sparse, report = tokenformer.sparsify(model, [ids], active=1.0, group_size=24)
    with torch.no_grad():
        torch.testing.assert_close(sparse(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-6)
    assert all(layer.error < 1e-5 for layer in report.layers)
    assert report.active_parameters == report.parameters


@pytest.mark.parametrize("theta", ["l2_gelu", "softmax"])
def test_half_of_the_groups(
    text_model: Any, train_batches: Any, held_out: Tensor, theta: str
) -> None:
    model = text_model(theta)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sparse, report = tokenformer.sparsify(
        model, train_batches, active=0.5, group_size=8, held_out=[held_out]
    )
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    for number, layer in enumerate(report.layers):
        assert layer.name == f"model.layers.{number}.ffn"
        assert (layer.tokens, layer.groups, layer.active_groups) == (128, 16, 8)
        assert 0 < layer.oracle_error < layer.error < 0.6
        module = sparse.get_submodule(layer.name)
        assert isinstance(module, RoutedPattention)
        assert module.router.balance_rate == 0
    assert report.loss_before == pytest.approx(mean_losses(model, [held_out]))
    assert report.loss_after == pytest.approx(mean_losses(sparse, [held_out]))
    assert abs(report.loss_after - report.loss_before) < 0.3
    assert report.divergence == pytest.approx(divergence(sparse, model, [held_out]))
    assert report.parameters - report.active_parameters == 2 * 2 * 48 * 64
    assert f"loss {report.loss_before:.4f} -> {report.loss_after:.4f}" in str(report)


def test_the_router_beats_chance_and_the_bias_restores_the_mean(
    text_model: Any, train_batches: Any, held_out: Tensor
) -> None:
    model = text_model()
    sparse, report = tokenformer.sparsify(model, train_batches, active=0.25, group_size=8)
    name = report.layers[0].name
    rows: list[Tensor] = []
    observe_inputs(model, train_batches, {name: rows.append})
    dense, layer, x = model.get_submodule(name), sparse.get_submodule(name).eval(), torch.cat(rows)
    with torch.no_grad():
        missing = (dense(x) - layer(x)).flatten(0, 1)
        assert missing.mean(0).norm() < 0.2 * layer.bias.norm()
        error = missing.norm() / dense(x).norm()
        assert error.item() == pytest.approx(report.layers[0].error, rel=0.2)
        layer.router.weight.copy_(layer.router.weight[torch.randperm(16)])
        layer.router.bias.zero_()
        assert (dense(x) - layer(x)).norm() > 1.5 * missing.norm()


def test_distillation_recovers_most_of_the_loss(
    text_model: Any, train_batches: Any, held_out: Tensor
) -> None:
    seen: list[tuple[str, int, int]] = []
    losses = []
    for steps in (0, 25):
        _, report = tokenformer.sparsify(
            text_model(),
            train_batches,
            active=0.25,
            group_size=8,
            held_out=[held_out],
            distill_steps=steps,
            learning_rate=1e-3,
            on_progress=lambda *shown: seen.append(shown),
        )
        losses.append(report.divergence)
    assert losses[1] < 0.6 * losses[0]
    assert seen[-1] == ("distilling", 25, 25)


def test_all_projections_and_the_saved_model(
    text_model: Any, train_batches: Any, held_out: Tensor, tmp_path: Any
) -> None:
    sparse, report = tokenformer.sparsify(
        text_model(), train_batches, 0.5, 10, projections=("q", "k", "v", "o", "ffn")
    )
    assert len(report.layers) == 10
    assert sparse.config.active_groups["o"] == [3, 3], "of five groups; the last is smaller"
    sparse.eval().save_pretrained(tmp_path)
    loaded = tokenformer.TokenformerForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(held_out).logits, sparse(held_out).logits)
    report.save(tmp_path / "sparsity.json")
    assert json.loads((tmp_path / "sparsity.json").read_text()) == report.asdict()


@pytest.mark.parametrize("active", [0.5, 0.25])
def test_thresholds_leave_the_wanted_share(
    text_model: Any, train_batches: Any, held_out: Tensor, tmp_path: Any, active: float
) -> None:
    model = text_model()
    sparse, report = tokenformer.sparsify(
        model, train_batches, active, method="threshold", held_out=[held_out]
    )
    for layer in report.layers:
        assert layer.active_groups == pytest.approx(active * 128, abs=6)
        assert 0 < layer.error < 0.6
    name = report.layers[1].name
    dense, module = model.get_submodule(name), sparse.get_submodule(name)
    assert isinstance(module, ThresholdedPattention)
    x = torch.randn(50, 48).double()  # in fp32 rounding decides about tokens at the threshold
    with torch.no_grad():
        weights = THETAS["l2_gelu"](x @ dense.key_tokens.double().T, 128.0, "tanh", 1e-5)
        added = weights[..., None] * dense.value_tokens.double()  # [R, n, d]
        kept = added.norm(dim=-1, keepdim=True) >= module.threshold
        torch.testing.assert_close(copy.deepcopy(module).double()(x), (added * kept).sum(1))
        sparse.eval().save_pretrained(tmp_path)
        loaded = tokenformer.TokenformerForCausalLM.from_pretrained(tmp_path).eval()
        torch.testing.assert_close(loaded(held_out).logits, sparse(held_out).logits)
    routed, _ = tokenformer.sparsify(model, train_batches, active, 8)
    assert divergence(sparse, model, [held_out]) < divergence(routed, model, [held_out])


def test_no_threshold_changes_nothing(make_model: Any) -> None:
    model = make_model("tokenformer").eval()
    ids = torch.randint(61, (4, 32))
    sparse, _ = tokenformer.sparsify(model, [ids], 1.0, method="threshold")
    with torch.no_grad():
        torch.testing.assert_close(sparse(ids).logits, model(ids).logits)
    with pytest.raises(ValueError, match=r"thresholds=.*only the dense model .* can be pruned"):
        tokenformer.prune(sparse, [ids], keep=0.5)
    with pytest.raises(ValueError, match=r"thresholds=.*only the dense model .* can be merged"):
        tokenformer.merge(sparse, sparse)
    with pytest.raises(ValueError, match="only the tokens of a dense model can be made sparse"):
        tokenformer.sparsify(sparse, [ids])


def test_ages_move_with_their_tokens(make_model: Any) -> None:
    grown, _ = tokenformer.grow(make_model("tokenformer"), ffn_tokens=64)
    ids = torch.randint(61, (4, 32))
    sparse, _ = tokenformer.sparsify(grown, [ids], active=0.5, group_size=8)
    for number in range(2):
        ages = torch.tensor(sparse.config.ages("ffn", number))
        assert ages.sum() == 20
        keys = sparse.model.layers[number].ffn.key_tokens
        assert torch.equal((keys == 0).all(1), ages == 1), "new tokens have zero keys"


def test_learned_scales_stay(make_config: Any) -> None:
    torch.manual_seed(0)
    model = tokenformer.TokenformerForCausalLM(
        make_config("tokenformer", learned_scale=True, theta="gelu_l2")
    ).eval()
    ids = torch.randint(61, (4, 32))
    sparse, _ = tokenformer.sparsify(model, [ids], active=1.0, group_size=8)
    with torch.no_grad():
        torch.testing.assert_close(sparse(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_images() -> None:
    torch.manual_seed(0)
    config = TokenformerVisionConfig(
        image_size=8,
        patch_size=4,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_labels=3,
        ffn_tokens=64,
    )
    model = TokenformerForImageClassification(config).eval()
    images = torch.randn(24, 3, 8, 8)
    sparse, report = tokenformer.sparsify(model, images.split(8), 0.5, 8, distill_steps=3)
    assert report.loss_before is report.loss_after is None
    assert report.divergence >= 0
    assert "loss" not in str(report)
    assert sparse(images).logits.shape == (24, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"active": 0.0}, "active=0.0"),
        ({"active": 1.5}, "active=1.5"),
        ({"group_size": 0}, "group_size=0 must be from 1 to 44"),
        ({"group_size": 45}, "group_size=45 must be from 1 to 44"),
        ({"method": "magic"}, "method='magic' is unknown; choose one of routing, threshold"),
        ({"projections": ("mlp",)}, r"projections=\['mlp'\] are unknown; choose from q, k, v"),
        ({"projections": ()}, "projections is empty"),
        ({"distill_steps": -1}, "distill_steps=-1"),
    ],
)
def test_bad_options_are_named(make_model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tokenformer.sparsify(make_model("tokenformer"), [torch.arange(20)[None]], **options)


def test_what_cannot_be_made_sparse_is_refused(make_model: Any) -> None:
    ids = [evenly_spaced(torch.arange(60).repeat(20), 4)[:, :20]]
    routed = make_model("tokenformer", active_groups={"ffn": 1}, group_size=8)
    with pytest.raises(ValueError, match="only the tokens of a dense model can be made sparse"):
        tokenformer.sparsify(routed, ids)
    with pytest.raises(TypeError, match="TransformerForCausalLM"):
        tokenformer.sparsify(make_model("transformer"), ids)
    with pytest.raises(ValueError, match="batches is empty"):
        tokenformer.sparsify(make_model("tokenformer"), [])
    with pytest.raises(ValueError, match=r"1 rows for .* give more data"):
        tokenformer.sparsify(make_model("tokenformer"), [torch.tensor([[1]])])


def test_a_prefix_of_the_tokens_is_refused(make_model: Any) -> None:
    model = make_model("tokenformer", ffn_tokens=64)
    batches = [torch.randint(61, (2, 16))]
    for method in (
        lambda: tokenformer.sparsify(model, batches, active=0.5, group_size=8),
        lambda: tokenformer.upcycle(model, group_size=8),
    ):
        set_active_share(model, None)
        method()
        set_active_share(model, 0.5)
        with pytest.raises(ValueError, match=r"uses .* tokens; set active_tokens to None"):
            method()


def test_a_share_is_rounded_up_only_if_it_must_be(make_model: Any) -> None:
    model = make_model("tokenformer", ffn_tokens=100)
    batches = [torch.randint(61, (2, 16))]
    for active, groups in ((0.07, 7), (0.28, 28), (0.281, 29)):
        sparse, _ = tokenformer.sparsify(model, batches, active=active, group_size=1)
        assert sparse.config.active_groups == {"ffn": [groups, groups]}
