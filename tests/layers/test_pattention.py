"""The Pattention layer as a replacement of nn.Linear."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import tokenformer
from tokenformer.layers import Pattention
from tokenformer.layers.pattention import project_all
from tokenformer.ops import THETAS, pattention


def test_public_name_is_the_layer():
    assert tokenformer.Pattention is Pattention


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 0)])
def test_takes_the_place_of_linear(leading):
    linear = nn.Linear(6, 4, bias=False)
    layer = Pattention(6, 4, 10)
    x = torch.randn(*leading, 6)
    assert layer(x).shape == linear(x).shape
    assert (layer.in_features, layer.out_features) == (linear.in_features, linear.out_features)
    assert {name for name, _ in layer.named_parameters()} == {"key_tokens", "value_tokens"}


@pytest.mark.parametrize(
    "options",
    [{"theta": theta} for theta in THETAS]
    + [{"scale_tokens": 3}, {"approximate": "tanh"}, {"eps": 0.5}],
)
def test_options_reach_the_operator(options):
    torch.manual_seed(0)
    layer = Pattention(6, 4, 10, **options, dtype=torch.float64)
    x = torch.randn(8, 6, dtype=torch.float64)
    assert torch.equal(layer(x), pattention(x, layer.key_tokens, layer.value_tokens, **options))
    plain = pattention(x, layer.key_tokens, layer.value_tokens)
    assert torch.equal(layer(x), plain) == (options == {"theta": "l2_gelu"})


def test_initial_spread_is_the_documented_one():
    torch.manual_seed(0)
    layer = Pattention(300, 200, 2500)
    for tokens, std in ((layer.key_tokens, 300**-0.5), (layer.value_tokens, 2500**-0.5)):
        assert tokens.std().item() == pytest.approx(std, rel=0.01)
        assert abs(tokens.mean().item()) < 0.01 * std


@pytest.mark.parametrize("tokens", [32, 512, 8192])
def test_initial_output_does_not_depend_on_the_token_count(tokens):
    torch.manual_seed(0)
    out = Pattention(64, 64, tokens)(torch.randn(512, 64))
    # E[gelu(z)^2] of a unit normal z is 0.425, whose root is 0.65.
    assert out.std().item() == pytest.approx(0.652, rel=0.1)


def test_state_dict_round_trip():
    source, target = Pattention(6, 4, 10), Pattention(6, 4, 10)
    x = torch.randn(5, 6)
    assert not torch.equal(source(x), target(x))
    state = source.state_dict()
    assert list(state) == ["key_tokens", "value_tokens"]
    target.load_state_dict(state)
    assert torch.equal(source(x), target(x))
    with pytest.raises(RuntimeError, match="size mismatch for key_tokens"):
        Pattention(6, 4, 11).load_state_dict(state)


@pytest.mark.parametrize("assign", [False, True])
def test_loading_keeps_the_scale(assign):
    layer = Pattention(6, 4, 10, scale_tokens=3)
    layer.load_state_dict(Pattention(6, 4, 10).state_dict(), assign=assign)
    assert layer.scale_tokens == 3.0


def test_grown_tokens_keep_the_scale_and_the_output():
    layer = Pattention(6, 4, 10)
    x = torch.randn(5, 6)
    before = layer(x)
    layer.key_tokens = nn.Parameter(torch.cat((layer.key_tokens.detach(), torch.zeros(7, 6))))
    layer.value_tokens = nn.Parameter(torch.cat((layer.value_tokens.detach(), torch.randn(7, 4))))
    assert layer.num_tokens == 17
    assert layer.scale_tokens == 10.0
    torch.testing.assert_close(layer(x), before)


def test_scale_can_be_learned():
    layer = Pattention(6, 4, 10)
    x = torch.randn(5, 6)
    before = layer(x)
    tokens = layer.state_dict()
    layer = Pattention(6, 4, 10, scale_tokens=nn.Parameter(torch.tensor(10.0)))
    layer.load_state_dict(tokens, strict=False)
    torch.testing.assert_close(layer(x), before)
    layer(x).sum().backward()
    assert layer.scale_tokens.grad.abs() > 0
    assert "scale_tokens" in layer.state_dict()
    assert "scale_tokens=tensor" in repr(layer)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtype_argument(dtype):
    layer = Pattention(6, 4, 10, device="cpu", dtype=dtype)
    assert layer.key_tokens.dtype == layer.value_tokens.dtype == dtype
    assert layer(torch.randn(5, 6, dtype=dtype)).dtype == dtype
    assert layer.float()(torch.randn(5, 6)).dtype == torch.float32


def test_meta_device_then_reset():
    layer = Pattention(60, 40, 100, device="meta")
    assert layer.key_tokens.is_meta
    assert layer(torch.empty(5, 60, device="meta")).shape == (5, 40)
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for tokens in layer.parameters():
            tokens.fill_(torch.nan)  # what empty memory may hold
    layer.reset_parameters()
    assert layer.key_tokens.std().item() == pytest.approx(60**-0.5, rel=0.1)
    assert layer(torch.randn(5, 60)).isfinite().all()


def test_deepcopy_is_independent():
    layer = Pattention(6, 4, 10, theta="gelu_l2", scale_tokens=3)
    copied = copy.deepcopy(layer)
    x = torch.randn(5, 6)
    assert torch.equal(copied(x), layer(x))
    with torch.no_grad():
        copied.key_tokens.zero_()
    assert not copied(x).any()
    assert layer(x).any()


def test_repr_shows_sizes_theta_and_scale():
    assert repr(Pattention(6, 4, 10, theta="softmax", scale_tokens=2.5)) == (
        "Pattention(in_features=6, out_features=4, num_tokens=10, theta='softmax', "
        "scale_tokens=2.5)"
    )


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"in_features": 0}, "in_features=0"),
        ({"out_features": -1}, "out_features=-1"),
        ({"num_tokens": 0}, "num_tokens=0"),
        ({"theta": "l3"}, "theta='l3'.*l2_gelu"),
        ({"approximate": "erf"}, "approximate='erf'.*tanh"),
        ({"backend": "magic"}, "backend='magic'.*auto"),
        ({"scale_tokens": 0}, "scale_tokens=0"),
        ({"scale_tokens": float("nan")}, "scale_tokens=nan"),
    ],
)
def test_wrong_arguments_are_named_when_the_layer_is_built(changed, named):
    with pytest.raises(ValueError, match=named):
        Pattention(**{"in_features": 6, "out_features": 4, "num_tokens": 10, **changed})


@pytest.mark.parametrize("theta", THETAS)
def test_active_tokens_are_a_layer_of_the_first_tokens(theta):
    torch.manual_seed(0)
    layer = Pattention(6, 4, 10, theta=theta, scale_tokens=20)
    x = torch.randn(5, 6)
    whole = layer(x)
    layer.active_tokens = 4
    expected = pattention(
        x, layer.key_tokens[:4], layer.value_tokens[:4], scale_tokens=8, theta=theta
    )
    assert torch.equal(layer(x), expected)
    layer(x).sum().backward()
    for tokens in layer.parameters():
        assert tokens.grad[:4].any()
        assert not tokens.grad[4:].any()
    assert repr(layer).endswith("scale_tokens=20, active_tokens=4)")
    assert layer.state_dict()["key_tokens"].shape == (10, 6)
    for everything in (10, None):
        layer.active_tokens = everything
        assert torch.equal(layer(x), whole)


@pytest.mark.parametrize("count", [0, 11, -1])
def test_as_many_tokens_are_active_as_there_are_at_most(count):
    with pytest.raises(ValueError, match=f"active_tokens={count} must be from 1 to 10, or None"):
        Pattention(6, 4, 10).active_tokens = count


def test_active_tokens_compile_whole():
    torch._dynamo.reset()
    layer = Pattention(6, 4, 10)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    x = torch.randn(3, 6)
    for count in (None, 5, 8, None):
        layer.active_tokens = count
        torch.testing.assert_close(compiled(x), layer(x))


def test_learns():
    torch.manual_seed(0)
    layer = Pattention(6, 4, 32)
    x, target = torch.randn(64, 6), torch.randn(64, 4)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    losses = []
    for _ in range(100):
        loss = (layer(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_stack_of_different_scales_compiles_whole():
    torch._dynamo.reset()
    stack = nn.Sequential(
        Pattention(6, 6, 8), Pattention(6, 6, 20), Pattention(6, 4, 5, scale_tokens=2)
    )
    compiled = torch.compile(stack, fullgraph=True, backend="eager")
    x = torch.randn(3, 6)
    torch.testing.assert_close(compiled(x), stack(x))
    stack[0].scale_tokens = 11.5  # as an annealed growth does
    torch.testing.assert_close(compiled(x), stack(x))


def three_layers(**options: Any) -> list[Pattention]:
    return [Pattention(8, size, n, **options) for size, n in ((8, 20), (4, 12), (4, 16))]


def test_layers_of_one_input_are_projected_together(seed):
    layers, x = three_layers(), torch.randn(9, 10, 8)
    layers[2].active_tokens = 7
    for found, layer in zip(project_all(layers, x), layers, strict=True):
        torch.testing.assert_close(found, layer(x))
    few = torch.randn(1, 2, 8)
    for found, layer in zip(project_all(layers, few), layers, strict=True):
        assert torch.equal(found, layer(few))


@pytest.mark.parametrize("kind", ["forward hook", "pre-hook", "backward hook", "replaced forward"])
def test_what_calling_a_layer_does_is_not_skipped(kind, seed):
    layers, x, called = three_layers(), torch.randn(9, 10, 8), []

    def note(*_: Any) -> None:
        called.append(kind)

    if kind == "forward hook":
        layers[1].register_forward_hook(note)
    elif kind == "pre-hook":
        layers[1].register_forward_pre_hook(note)
    elif kind == "backward hook":
        layers[1].register_full_backward_hook(note)
    else:
        plain = layers[1].forward
        layers[1].forward = lambda x: (note(), plain(x))[1]  # type: ignore[method-assign]
    sum(out.sum() for out in project_all(layers, x.requires_grad_())).backward()
    assert called == [kind]


def test_layers_with_learned_scales_or_another_backend_are_called_one_by_one(seed):
    x = torch.randn(90, 8)
    scale = torch.nn.Parameter(torch.tensor(9.0))
    for layers in (three_layers(scale_tokens=scale), three_layers(backend="reference")):
        for found, layer in zip(project_all(layers, x), layers, strict=True):
            assert torch.equal(found, layer(x))
