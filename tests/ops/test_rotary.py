"""Rotary positions in native code against torch's operations: values and gradients."""

import pytest
import torch

from tokenformer.layers.positions import RotaryPositions, rotate_all, rotate_half
from tokenformer.ops.backends.native import rotary
from tokenformer.ops.backends.native.library import library

needs_compiler = pytest.mark.skipif(library() is None, reason="needs a C++ compiler")


def split_heads(batch: int, length: int, heads: int, size: int) -> torch.Tensor:
    return torch.randn(batch, length, heads, size).requires_grad_().transpose(1, 2)


@needs_compiler
@pytest.mark.parametrize("shared", [True, False], ids=["shared positions", "positions per row"])
@pytest.mark.parametrize("dim", [2, 6, 8])
def test_values_and_gradients(shared, dim, monkeypatch, seed):
    monkeypatch.setattr(rotary, "NUMBERS_PER_THREAD", 1)
    query, key = split_heads(3, 5, 4, 8), split_heads(3, 5, 2, 8)
    ids = (
        torch.arange(5)[None] if shared else torch.tensor([[0, 1, 2, 3, 4]] * 2 + [[9, 1, 4, 4, 7]])
    )
    cos, sin = RotaryPositions(dim)(query, ids)[1]
    assert rotary.supports(query, cos, sin)
    found = rotate_all((query, key), (cos, sin))
    wanted = [rotate_half(heads, cos.unsqueeze(1), sin.unsqueeze(1)) for heads in (query, key)]
    grads = [torch.randn_like(part) for part in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
    for create_graph in (False, True):
        ours = torch.autograd.grad(
            found, [query, key], grads, create_graph=create_graph, retain_graph=True
        )
        theirs = torch.autograd.grad(wanted, [query, key], grads, retain_graph=True)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)


@needs_compiler
def test_only_one_of_two_is_used(seed):
    """The other then has no gradient."""
    query, key = split_heads(1, 3, 2, 4), split_heads(1, 3, 2, 4)
    rotation = RotaryPositions(4)(query, torch.arange(3)[None])[1]
    turned, _ = rotate_all((query, key), rotation)
    (gradient,) = torch.autograd.grad(turned.sum(), query)
    assert gradient.isfinite().all()


def test_other_layouts_and_dtypes_take_torchs_operations():
    heads = split_heads(2, 3, 2, 4).detach()
    cos, sin = RotaryPositions(4)(heads, torch.arange(3)[None])[1]
    assert not rotary.supports(heads.double(), cos, sin)
    assert not rotary.supports(heads.contiguous(), cos, sin)
    assert not rotary.supports(heads.to("meta"), cos, sin)
