"""The fused native layer of `l2_gelu`, alone and several of one input, against float64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu

from tokenformer.ops import pattention
from tokenformer.ops.backends import joint
from tokenformer.ops.backends.direct import Direct
from tokenformer.ops.backends.native import fused
from tokenformer.ops.backends.native.fused import TokenGroup
from tokenformer.ops.theta import ThetaOptions

pytestmark = pytest.mark.skipif(fused.gemm() is None, reason="needs a C++ compiler with OpenMP")
OPTIONS = ThetaOptions("l2_gelu", 37.0, "none", 0.0)


@pytest.fixture(params=[1, 2, 3])
def threads(request, monkeypatch):
    """The number of threads, also where there is little work for each."""
    monkeypatch.setattr(fused, "FLOPS_PER_THREAD", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def make_groups(d_in: int, *sizes: tuple[int, int], **options: Any) -> list[TokenGroup]:
    return [
        TokenGroup(
            torch.randn(n, d_in),
            torch.randn(n, d_out),
            OPTIONS._replace(scale=1.5 * n, **options),
        )
        for n, d_out in sizes
    ]


def make_rows(rows: int, d_in: int, groups: list[TokenGroup]) -> Tensor:
    """Random rows. One whose scores almost vanish, as with a single token that it is orthogonal to,
    has a norm of few exact digits in fp32: it is moved along a key."""
    x = torch.randn(rows, d_in)
    for group in groups:
        norms = (x @ group.keys.T).norm(dim=1)
        small = norms < 0.05 * x.norm(dim=1) * group.keys.norm()
        x = torch.where(small[:, None], x + group.keys[0], x)
    return x


def exact(x: Tensor, groups: list[TokenGroup], grads: list[Tensor]) -> list[Tensor]:
    """Outputs and the gradients of x, keys and values, by autograd in float64."""
    rows = x.double().requires_grad_()
    tokens = [t.double().requires_grad_() for g in groups for t in (g.keys, g.values)]
    outs = [
        g.options.weights(rows @ keys.T) @ values
        for g, keys, values in zip(groups, tokens[::2], tokens[1::2], strict=True)
    ]
    found = torch.autograd.grad(outs, [rows, *tokens], [grad.double() for grad in grads])
    return [*(out.detach() for out in outs), *found]


def assert_near(found: Tensor, wanted: Tensor, tolerance: float = 2e-6) -> None:
    """Errors relative to the largest number: sums of many terms cancel."""
    assert found.shape == wanted.shape
    largest = max(1.0, wanted.abs().max().item()) if wanted.numel() else 1.0
    assert ((found.double() - wanted).abs() <= tolerance * largest).all()


SHAPES = [
    (5, [(7, 3)]),
    (16, [(1, 1)]),
    (24, [(40, 24)]),
    (8, [(33, 8), (5, 4), (64, 1)]),
    (128, [(96, 128), (96, 32), (96, 32)]),
]


@pytest.mark.parametrize(("d_in", "sizes"), SHAPES)
@pytest.mark.parametrize("rows", [0, 1, 7, 300])
@pytest.mark.parametrize(("eps", "approximate"), [(0.0, "none"), (1e-2, "none"), (0.0, "tanh")])
def test_values_and_gradients(d_in, sizes, rows, eps, approximate, threads, monkeypatch, seed):
    monkeypatch.setattr(fused, "BLOCK_ROWS", 21)
    monkeypatch.setattr(fused, "rows_per_product", lambda tokens: 100)
    groups = make_groups(d_in, *sizes, eps=eps, approximate=approximate)
    x, grads = make_rows(rows, d_in, groups), [torch.randn(rows, d_out) for _, d_out in sizes]
    outs, saved = fused.forward(x, groups, save=True)
    plain, _ = fused.forward(x, groups, save=False)
    dx, gradients = fused.backward(grads, x, groups, saved)
    found = [*outs, dx, *(t for g in gradients for t in (g.keys, g.values))]
    for ours, true in zip(found, exact(x, groups, grads), strict=True):
        assert_near(ours, true, 1e-5)
    for ours, unsaved in zip(outs, plain, strict=True):
        assert torch.equal(ours, unsaved)


def test_the_number_of_threads_changes_nothing_but_rounding(seed):
    (group,) = make_groups(64, (256, 64))
    x, grad = torch.randn(1500, 64), torch.randn(1500, 64)
    before, results = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        (out,), saved = fused.forward(x, [group], save=True)
        dx, (gradients,) = fused.backward([grad], x, [group], saved)
        results.append([out, dx, gradients.keys, gradients.values])
    torch.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        assert_near(one, two.double())


def test_a_learned_scale_has_a_gradient(seed):
    (group,) = make_groups(16, (40, 8))
    x, scale = torch.randn(90, 16), torch.tensor(11.0, requires_grad=True)
    wide = scale.detach().double().requires_grad_()
    out = pattention(x, *group[:2], scale_tokens=scale, backend="direct")
    tensors = [t.double() for t in (x, *group[:2])]
    (wanted,) = torch.autograd.grad(
        pattention(*tensors, scale_tokens=wide, backend="reference").sum(), wide
    )
    assert torch.autograd.grad(out.sum(), scale)[0].item() == pytest.approx(wanted.item(), rel=1e-4)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_is_as_accurate_as_torchs(approximate):
    """One row whose scores are the keys; identity values make the output its weights."""
    for low in range(-12, 12, 2):
        numbers = torch.linspace(low, low + 2, 1001)
        scale = numbers.double().square().sum().item()  # the factor is 1
        options = OPTIONS._replace(scale=scale, approximate=approximate)
        group = TokenGroup(numbers[:, None], torch.eye(1001), options)
        (weights,), (_, stats) = fused.forward(torch.ones(1, 1), [group], save=True)
        true = gelu(numbers.double() * stats[0, 0].item(), approximate=approximate)
        theirs = gelu(numbers * stats[0, 0], approximate=approximate)
        error = (theirs - true).abs().max()
        assert (weights[0] - true).abs().max() < max(2 * error.item(), 1e-12)


def test_zero_rows_have_zero_outputs_and_finite_gradients(seed):
    (group,) = make_groups(3, (9, 4))
    x = torch.tensor([[0.0, 0.0, 0.0], [1e-21, 0.0, -1e-22], [1.0, -2.0, 0.5]])
    (out,), saved = fused.forward(x, [group], save=True)
    dx, (gradients,) = fused.backward([torch.ones(3, 4)], x, [group], saved)
    assert not out[:2].any()
    assert not dx[:2].any()
    assert all(t.isfinite().all() for t in (dx, gradients.keys, gradients.values))


@pytest.mark.parametrize("rows", [0, 1, 1500])
def test_direct_gives_the_same_with_and_without_it(rows, monkeypatch, seed):
    x, keys, values, grad = (torch.randn(n, 24) for n in (rows, 40, 40, rows))
    kernel = Direct(OPTIONS)

    def run() -> list[Tensor]:
        out, saved = kernel.forward(x, keys, values)
        plain, _ = kernel.forward(x, keys, values, save=False)
        return [out, plain, *saved, *kernel.backward(grad, x, keys, values, saved)[:3]]

    assert fused.supports(x, TokenGroup(keys, values, OPTIONS))
    with_native = run()
    monkeypatch.setattr(fused, "supports", lambda *given: False)
    for ours, theirs in zip(with_native, run(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", [{"theta": "gelu_l2"}, {"theta": "softmax"}])
def test_other_thetas_take_torchs_operations(change):
    (group,) = make_groups(4, (6, 4))
    assert fused.supports(torch.ones(2, 4), group)
    assert not fused.supports(torch.ones(2, 4), group._replace(options=OPTIONS._replace(**change)))


def test_other_dtypes_devices_and_layouts_take_torchs_operations():
    (group,) = make_groups(4, (4, 4))
    assert not fused.supports(torch.ones(2, 4, dtype=torch.float64), group)
    assert not fused.supports(torch.ones(2, 4, device="meta"), group)
    assert not fused.supports(torch.ones(2, 4), group._replace(keys=group.keys.bfloat16()))
    assert not fused.supports(torch.ones(2, 4), group._replace(values=group.values.T))
    assert not fused.supports(torch.ones(2, 4), *[group] * 4)


def test_several_layers_under_autograd(seed):
    """Leading dimensions, inputs whose rows are not contiguous, gradients of gradients."""
    groups = make_groups(12, (20, 12), (30, 6), (10, 6))
    x = torch.randn(12, 4, 40).transpose(0, 2).requires_grad_()  # [40, 4, 12]
    tokens = [t.requires_grad_() for g in groups for t in (g.keys, g.values)]
    assert joint.supports(x, groups)
    grads = [torch.randn(40, 4, d) for d in (12, 6, 6)]
    wanted = [
        pattention(x, g.keys, g.values, scale_tokens=g.options.scale, backend="reference")
        for g in groups
    ]
    outs = joint.run(x, groups)
    for ours, true in zip(outs, wanted, strict=True):
        assert_near(ours, true.detach().double(), 1e-5)
    found = torch.autograd.grad(outs, [x, *tokens], grads, create_graph=True)
    true = torch.autograd.grad(wanted, [x, *tokens], grads, create_graph=True)
    for ours, theirs in zip(found, true, strict=True):
        assert_near(ours, theirs.detach().double(), 1e-5)
    total, wanted_total = (sum(g.square().sum() for g in some) for some in (found, true))
    for ours, theirs in zip(
        torch.autograd.grad(total, [x, *tokens]),
        torch.autograd.grad(wanted_total, [x, *tokens]),
        strict=True,
    ):
        assert_near(ours, theirs.double(), 1e-4)
