"""The routed Pattention layer and its routers."""

import copy

import pytest
import torch
import torch.nn.utils.parametrize
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tokenformer.layers import Pattention, RoutedPattention
from tokenformer.layers.router import (
    ROUTERS,
    CentroidRouter,
    LearnedRouter,
    balance_routers,
    largest,
    reset_counts,
)
from tokenformer.ops import THETAS, routed_pattention
from tokenformer.ops.backends.native import few_rows
from tokenformer.ops.backends.native.library import library

CASES = [("l2_gelu", "all"), *((theta, "chosen") for theta in THETAS)]
routers = pytest.mark.parametrize("router", ROUTERS)


def make_layer(active_groups: int = 3, **options: object) -> RoutedPattention:
    torch.manual_seed(0)
    defaults: dict[str, object] = {"group_size": 4, "router": "centroid"}
    return RoutedPattention(6, 4, 30, **{**defaults, **options, "active_groups": active_groups})


@routers
@pytest.mark.parametrize(("theta", "norm"), CASES)
@pytest.mark.parametrize("tokens", [28, 30])
def test_all_groups_are_the_dense_layer(router, theta, norm, tokens):
    torch.manual_seed(0)
    dense = Pattention(6, 4, tokens, theta=theta, scale_tokens=9, dtype=torch.float64)
    layer = RoutedPattention(
        6,
        4,
        tokens,
        group_size=4,
        active_groups=-(-tokens // 4),
        router=router,
        norm=norm,
        theta=theta,
        scale_tokens=9,
        dtype=torch.float64,
    )
    layer.load_state_dict(dense.state_dict(), strict=False)
    if router == "gated":
        nn.init.zeros_(layer.router.weight)  # gates of 1
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    for mode in (True, False):
        torch.testing.assert_close(layer.train(mode)(x), dense(x), rtol=1e-12, atol=1e-13)
    found, wanted = (
        torch.autograd.grad(module(x).square().sum(), [module.key_tokens, module.value_tokens])
        for module in (layer, dense)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("norm", ["all", "chosen"])
def test_rows_attend_to_the_groups_with_the_largest_scores(norm):
    layer = make_layer(2, norm=norm)
    x = torch.randn(7, 6)
    means = torch.stack([part.mean(0) for part in layer.key_tokens.detach().split(4)])
    groups = nn.functional.cosine_similarity(x[:, None], means, dim=-1).topk(2).indices
    expected = routed_pattention(
        x,
        layer.key_tokens,
        layer.value_tokens,
        groups,
        group_size=4,
        norm=norm,
        scale_tokens=30 if norm == "all" else 30 * 8 / 30,
        backend="reference",
    )
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer.eval()(3 * x), expected, msg="the length of x has no part")


@pytest.mark.parametrize("norm", ["all", "chosen"])
def test_no_active_groups(norm):
    layer = make_layer(0, norm=norm)
    x = torch.randn(5, 6, requires_grad=True)
    out = layer(x)
    out.sum().backward()
    assert (out == 0).all()
    assert (x.grad == 0).all()


def test_a_bias_is_added_to_the_output():
    plain, layer = make_layer(2), make_layer(2, bias=True)
    layer.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(5, 6)
    torch.testing.assert_close(layer(x), plain(x))
    with torch.no_grad():
        layer.bias.copy_(torch.arange(4.0))
    torch.testing.assert_close(layer(x), plain(x) + torch.arange(4.0))


def test_of_equal_groups_the_first_are_chosen():
    scores = torch.tensor([0.0, 2.0, -1.0, -0.0, 2.0, 0.0, 3.0, torch.inf]).repeat(30)
    scores = torch.stack([scores, -scores, torch.zeros_like(scores)])
    order = scores.argsort(dim=-1, descending=True, stable=True)
    for k in (0, 1, 7, 100, scores.shape[1]):
        found = largest(scores, k).sort(-1).values
        assert torch.equal(found, order[:, :k].sort(-1).values)
        assert torch.equal(largest(scores.double(), k).sort(-1).values, found)


def test_nan_scores_choose_as_many_groups():
    groups = largest(torch.full((2, 9), torch.nan), 4)
    assert all(len(set(row)) == 4 for row in groups.tolist())


def test_active_groups_can_change():
    layer = make_layer(8, norm="chosen").eval()
    x = torch.randn(5, 6)
    whole = layer(x)
    layer.active_groups = 2
    assert layer.tokens_per_row == 8
    assert not torch.allclose(layer(x), whole)
    layer.active_groups = 8
    assert torch.equal(layer(x), whole)


@routers
def test_gradients_reach_what_is_trained(router):
    layer = make_layer(2, router=router)
    layer(torch.randn(9, 6)).square().sum().backward()
    parameters = dict(layer.named_parameters())
    assert ("router.weight" in parameters) == (router != "centroid")
    assert all(parameter.grad.abs().sum() > 0 for parameter in parameters.values())


def test_the_gate_of_a_learned_router_is_one():
    """Straight through: the output has no gates, the router's gradient is that of sigmoids."""
    layer = make_layer(2, router="learned", dtype=torch.float64)
    x = torch.randn(9, 6, dtype=torch.float64)
    groups, gates = layer.router(x, layer.directions(), 2)
    assert (gates == 1).all()
    found = torch.autograd.grad(layer(x).square().sum(), layer.router.weight)[0]
    # By hand: dL/dlogit = sigmoid' <dL/dout, output of the group>.
    shares = nn.functional.rms_norm(x, (6,)) @ layer.router.weight.T
    out = layer(x).detach()
    weights = shares.gather(1, groups).sigmoid()
    parts = torch.stack(
        [
            routed_pattention(
                x, layer.key_tokens, layer.value_tokens, groups[:, [j]], group_size=4
            ).detach()
            for j in range(2)
        ],
        dim=1,
    )  # [R, 2, d_out]
    loss = (weights[..., None] * parts * (2 * out)[:, None]).sum()
    wanted = torch.autograd.grad(loss, layer.router.weight)[0]
    torch.testing.assert_close(found, wanted)


def test_a_gated_router_scales_its_groups():
    """Twice the sigmoid of the score; the gradients are those of the reference."""
    layer = make_layer(2, router="gated", dtype=torch.float64)
    x = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    groups = layer.router(x, layer.directions(), 2)[0]
    scores = nn.functional.rms_norm(x, (6,)) @ layer.router.weight.T
    expected = routed_pattention(
        x,
        layer.key_tokens,
        layer.value_tokens,
        groups,
        group_size=4,
        gates=2 * scores.gather(1, groups).sigmoid(),
        backend="reference",
    )
    torch.testing.assert_close(layer(x), expected)
    inputs = [x, *layer.parameters()]
    found, wanted = (
        torch.autograd.grad(out.square().sum(), inputs) for out in (layer(x), expected)
    )
    torch.testing.assert_close(found, wanted)


def test_scores_have_unit_spread_at_the_start():
    torch.manual_seed(0)
    for router in ROUTERS:
        layer = RoutedPattention(64, 64, 2048, active_groups=4, router=router)
        x = layer.router.normalized(100 * torch.randn(500, 64))
        scores = layer.router.scores(x, layer.directions())
        assert scores.std().item() == pytest.approx(1, rel=0.1)


@routers
def test_balancing_evens_out_the_load(router):
    """Rows around one direction would all choose the same groups."""
    torch.manual_seed(0)
    layer = RoutedPattention(
        16, 8, 256, group_size=8, active_groups=4, router=router, balance_rate=0.05
    )
    x = torch.randn(512, 16) + 2 * torch.randn(16)
    layer(x)
    first = balance_routers(layer)
    for _ in range(150):
        layer(x)
        last = balance_routers(layer)
    assert first.groups == last.groups == 32
    assert first.peak > 4
    assert last.peak < 2
    assert first.dead > 2 > last.dead
    assert abs(layer.router.bias.mean().item()) < 1e-6


def test_only_training_counts_rows():
    layer = make_layer(3)
    x = torch.randn(10, 6)
    with torch.no_grad():
        layer(x)
    layer.eval()(x)
    assert balance_routers(layer) is None
    layer.train()(x)
    layer(x)
    assert layer.router.counts.sum() == 2 * 10 * 3
    reset_counts(layer)
    assert layer.router.counts.sum() == 0
    assert (layer.router.bias == 0).all()


@routers
def test_a_frozen_layer_is_not_balanced(router):
    layer = make_layer(3, router=router)
    x = torch.randn(10, 6, requires_grad=True)
    layer.requires_grad_(False)
    layer(x).sum().backward()
    assert balance_routers(layer) is None
    layer.requires_grad_(True)
    layer(x)
    assert balance_routers(layer) is not None


@routers
@pytest.mark.parametrize(("theta", "norm"), CASES)
def test_the_weights_of_all_tokens_make_the_output(router, theta, norm):
    """Those of skipped tokens are zero; before the gates they are those of the tokens alone."""
    layer = make_layer(2, router=router, theta=theta, norm=norm, bias=True, dtype=torch.float64)
    nn.init.normal_(layer.bias)
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    found = layer.token_weights(x)
    torch.testing.assert_close(found.weights @ layer.value_tokens + layer.bias, layer(x))
    groups = layer.router(x, layer.directions(), 2)[0]
    group = torch.arange(30) // 4
    chosen = (group == groups[..., None]).any(-2)  # [3, 5, n]
    assert (found.weights[~chosen] == 0).all()
    assert found.ungated[chosen].abs().sum() > 0
    if router != "gated":
        assert torch.equal(found.ungated, found.weights)
    else:
        scores = nn.functional.rms_norm(x, (6,)) @ layer.router.weight.T
        torch.testing.assert_close(
            found.weights, found.ungated * 2 * scores.sigmoid()[..., group], rtol=1e-6, atol=1e-7
        )
    plain = x @ layer.key_tokens.T
    torch.testing.assert_close(found.scores[chosen], plain[chosen])
    if norm == "all":
        torch.testing.assert_close(found.scores, plain)
    half = copy.deepcopy(layer).bfloat16().token_weights(x.bfloat16())
    assert half.weights.dtype == torch.float32


def test_bias_moves_by_the_rate_and_towards_balance():
    router = CentroidRouter(4, balance_rate=0.1)
    router.update(torch.tensor([9, 1, 1, 1]))
    torch.testing.assert_close(router.bias, torch.tensor([-0.15, 0.05, 0.05, 0.05]))
    router.update(torch.tensor([4, 2, 2, 0]))  # steps -1, 0, 0 and 5
    torch.testing.assert_close(router.bias, torch.tensor([-0.35, -0.05, -0.05, 0.45]))
    still = CentroidRouter(4, balance_rate=0.0)
    still.update(torch.tensor([9, 1, 1, 1]))
    assert (still.bias == 0).all()


def test_the_bias_changes_the_choice_and_not_the_weights():
    layer = make_layer(1, router="learned")
    x = torch.randn(5, 6)
    with torch.no_grad():
        layer.router.bias[6] = 100.0
    groups, gates = layer.router(x, layer.directions(), 1)
    assert (groups == 6).all()
    assert (gates == 1).all()


@routers
def test_state_dict_round_trip(router):
    source, target = make_layer(router=router), make_layer(router=router)
    with torch.no_grad():
        for tensor in (*source.parameters(), *source.buffers()):
            tensor.copy_(torch.randn_like(tensor))
    assert "router.bias" in source.state_dict()
    target.load_state_dict(source.state_dict())
    x = torch.randn(5, 6)
    assert torch.equal(source(x), target(x))


@pytest.mark.parametrize("change", ["in place", "loaded", "replaced", "dtype"])
def test_evaluation_sees_changed_keys(change):
    """The factor of the Gram matrix is kept between calls."""
    layer = make_layer(2).eval()
    x, keys = torch.randn(5, 6), torch.randn(30, 6)
    with torch.no_grad():
        before = layer(x)
        assert torch.equal(layer(x), before)
        if change == "in place":
            layer.key_tokens.copy_(keys)
        elif change == "loaded":
            layer.load_state_dict({**layer.state_dict(), "key_tokens": keys}, assign=True)
        elif change == "replaced":
            layer.key_tokens = nn.Parameter(keys)
        else:
            layer.double()
            x, keys = x.double(), layer.key_tokens.detach()
        after = layer(x)
        fresh = RoutedPattention(
            6,
            4,
            30,
            group_size=4,
            active_groups=2,
            router="centroid",
            dtype=keys.dtype,
            backend="reference",
        )
        fresh.load_state_dict({**layer.state_dict(), "key_tokens": keys})
        torch.testing.assert_close(after, fresh(x))


def test_keys_that_are_computed_for_every_call_are_not_kept():
    """As LoRA does: the next ones may get the address of the last."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.update = torch.zeros(30, 6)

        def forward(self, keys: Tensor) -> Tensor:
            return keys + self.update

    layer, x = make_layer(2).eval(), torch.randn(5, 6)
    expected, plain = Sum(), copy.deepcopy(layer)
    nn.utils.parametrize.register_parametrization(layer, "key_tokens", expected)
    for seed in range(4):
        torch.manual_seed(seed)
        expected.update = torch.randn(30, 6)
        changed = copy.deepcopy(plain)
        with torch.no_grad():
            changed.key_tokens += expected.update
            torch.testing.assert_close(layer(x), changed(x))


def test_inference_mode_and_deepcopy():
    layer = make_layer(2).eval()
    x = torch.randn(5, 6)
    with torch.no_grad():
        expected = layer(x)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), expected)
        torch.testing.assert_close(copy.deepcopy(layer)(x), expected)


def test_autocast_chooses_the_same_groups():
    layer, x = make_layer(2), torch.randn(50, 6)
    chosen: list[Tensor] = []
    layer.router.register_forward_hook(lambda module, args, found: chosen.append(found[0]))
    layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(*chosen)


@pytest.mark.slow
@routers
def test_compiles_whole(router):
    torch._dynamo.reset()
    layer = make_layer(2, router=router)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(9, 6)
    torch.testing.assert_close(compiled(x), layer(x))
    found, wanted = (
        torch.autograd.grad(function(x).square().sum(), list(layer.parameters()))
        for function in (compiled, layer)
    )
    torch.testing.assert_close(found, wanted)
    assert layer.router.counts.sum() == 4 * 9 * 2, "compiled code counts, too"
    layer.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))


def test_learns_to_route():
    torch.manual_seed(0)
    layer = RoutedPattention(8, 4, 64, group_size=8, active_groups=2, router="learned")
    x, target = torch.randn(128, 8), torch.randn(128, 4)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    losses = []
    for _ in range(100):
        loss = (layer(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        balance_routers(layer)
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"group_size": 0}, "group_size=0"),
        ({"active_groups": 9}, "active_groups=9 must be from 0 to 8"),
        ({"active_groups": -1}, "active_groups=-1"),
        ({"router": "hash"}, "router='hash'.*centroid, gated, learned"),
        ({"norm": "some"}, "norm='some'"),
        ({"theta": "softmax"}, "norm='all' with theta='softmax'"),
        ({"in_features": 0}, "in_features=0"),
    ],
)
def test_wrong_arguments_are_named_when_the_layer_is_built(changed, named):
    options = {"in_features": 6, "out_features": 4, "num_tokens": 30, "group_size": 4}
    with pytest.raises(ValueError, match=named):
        RoutedPattention(**{**options, "active_groups": 2, **changed})


def test_a_prefix_of_active_tokens_is_refused():
    layer = make_layer(2)
    layer.active_tokens = None
    with pytest.raises(ValueError, match="set its active_groups"):
        layer.active_tokens = 8


def test_repr_shows_the_routing():
    assert "group_size=4, active_groups=3, norm='all'" in repr(make_layer())
    assert isinstance(make_layer(router="learned").router, LearnedRouter)


@pytest.mark.skipif(library() is None, reason="no C++ compiler")
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 16),
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 90), st.integers(1, 40)),
    group_size=st.integers(1, 95),
    share=st.floats(0, 1),
    case=st.sampled_from(CASES),
    router=st.sampled_from(ROUTERS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**16),
)
def test_native_code_for_a_few_rows(
    rows, sizes, group_size, share, case, router, dtype, threads, seed
):
    """Against dense scores of the groups that the router chooses."""
    torch.manual_seed(seed)
    d_in, n, d_out = sizes
    theta, norm = case
    k = round(share * -(-n // group_size))
    options = {"group_size": group_size, "theta": theta, "norm": norm}
    layer = RoutedPattention(
        d_in, d_out, n, active_groups=k, router=router, bias=True, dtype=dtype, **options
    ).eval()
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(few_rows, "threads_for", lambda size: threads)
        layer.router.bias.normal_()
        layer.bias.normal_()
        x = torch.randn(rows, d_in, dtype=dtype)
        assert layer.supports_native(x)
        groups, gates = layer.router(x, layer.directions(), k)
        wide = (tensor.double() for tensor in (x, layer.key_tokens, layer.value_tokens))
        scale = layer.routed_scale
        wanted = routed_pattention(
            *wide, groups, gates=gates, scale_tokens=scale, backend="reference", **options
        )
        wanted += layer.bias
        found = layer(x)
    assert found.dtype == dtype
    # GELU has as many digits after the point as its input, here up to sqrt(n).
    rounding = (
        torch.finfo(dtype).eps * wanted.abs().max() + 2e-6 * n * layer.value_tokens.abs().max()
    )
    assert (found.double() - wanted).abs().max() <= rounding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_balancing_moves_large_biases_of_a_half_model(dtype, tmp_path):
    """A bias of -6 plus a step of 0.01 is -6 in bf16."""
    layer = RoutedPattention(8, 8, 32, group_size=8, active_groups=2)
    layer.router.bias.fill_(-6.0)
    layer.to(dtype)
    assert layer.key_tokens.dtype == dtype
    before = layer.router.bias.clone()
    counts = torch.tensor([0, 5, 5, 10])
    for _ in range(50):
        layer.router.update(counts)
    moved = layer.router.bias - before
    assert moved.dtype == torch.float32
    assert moved[0] > 1
    assert moved[3] < -0.5
    with torch.no_grad():
        assert layer(torch.randn(3, 8, dtype=dtype)).dtype == dtype
    assert layer.double().router.bias.dtype == torch.float64
