"""Tokens sharded over processes give the values and gradients of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.processes import run_processes
from tokenformer.ops import THETAS, pattention
from tokenformer.ops.sharded import SumGradient, sharded_pattention

ROWS = (3, 7)
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}


def part(tokens: Tensor) -> Tensor:
    """This process's, as DTensor splits them: the last ones may have fewer, or none."""
    parts = [*tokens.chunk(dist.get_world_size()), *[tokens[:0]] * dist.get_world_size()]
    return parts[dist.get_rank()]


def inputs(tokens: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Rows, keys, values and scale, and the gradient of the output; the same everywhere."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(*ROWS, 8), (tokens, 8), (tokens, 4), (*ROWS, 4)]
    x, keys, values, grad = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    x[0, 0] = 0
    wide = torch.promote_types(dtype, torch.float32)
    return [x, keys, values, torch.tensor([3.0], dtype=wide)], grad


def results(function, given: list[Tensor], grad: Tensor) -> list[Tensor]:
    """The output and the gradients of rows, keys, values and scale."""
    own = [tensor.clone().requires_grad_() for tensor in given]
    out = function(*own)
    return [out.detach(), *torch.autograd.grad(out, own, grad)]


def compare(theta: str, tokens: int, dtype: torch.dtype, **options) -> None:
    given, grad = inputs(tokens, dtype)

    def alone(x: Tensor, keys: Tensor, values: Tensor, scale: Tensor) -> Tensor:
        return pattention(
            x, keys, values, scale_tokens=scale, theta=theta, backend="reference", **options
        )

    def sharded(x: Tensor, keys: Tensor, values: Tensor, scale: Tensor) -> Tensor:
        world = dist.group.WORLD
        return sharded_pattention(
            x, keys, values, world, scale_tokens=scale, theta=theta, **options
        )

    x, keys, values, scale = given
    out, dx, dkeys, dvalues, dscale = results(alone, given, grad)
    expected = [out, dx, part(dkeys), part(dvalues), dscale]
    found = results(sharded, [x, part(keys), part(values), scale], grad)
    names = ("out", "x", "keys", "values", "scale")
    for name, ours, theirs in zip(names, found, expected, strict=True):
        size = theirs.double().abs().max().item() if theirs.numel() else 0.0
        torch.testing.assert_close(
            ours,
            theirs,
            rtol=0,
            atol=TOLERANCES[dtype] * max(1.0, size),
            msg=lambda text, name=name: f"{theta}, {tokens} tokens, {dtype}, {name}: {text}",
        )


def compare_all() -> None:
    for theta in THETAS:
        for tokens in (6, 5, 1):  # even, uneven, and a process without any
            for dtype in TOLERANCES:
                compare(theta, tokens, dtype)
    compare("l2_gelu", 5, torch.float32, approximate="tanh", eps=1e-3)
    check_that_calls_can_share_a_sum()
    check_that_norms_are_exchanged_in_fp32()
    check_autocast()
    check_that_second_derivatives_are_refused()


def check_that_calls_can_share_a_sum() -> None:
    (x, keys, values, _), grad = inputs(5, torch.float64)
    x.requires_grad_()
    once = SumGradient.apply(x, dist.group.WORLD)
    summed = [
        sharded_pattention(
            rows,
            part(keys),
            part(tokens),
            dist.group.WORLD,
            scale_tokens=5.0,
            sum_gradient=rows is x,
        )
        for rows in (x, once)
        for tokens in (values, 2 * values)
    ]
    apart = torch.autograd.grad(summed[0] + summed[1], x, grad)[0]
    together = torch.autograd.grad(summed[2] + summed[3], x, grad)[0]
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-12)


def check_that_norms_are_exchanged_in_fp32() -> None:
    """300 squared is beyond fp16, and so is the sum of the norms' squares."""
    keys, values = torch.full((4, 1), 300.0).half(), torch.eye(4).half()
    x = torch.ones(2, 1).half()
    whole = pattention(x, keys, values, backend="reference")
    mine = sharded_pattention(x, part(keys), part(values), dist.group.WORLD, scale_tokens=4.0)
    torch.testing.assert_close(mine, whole)


def check_autocast() -> None:
    (x, keys, values, _), _ = inputs(6, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = sharded_pattention(x, part(keys), part(values), dist.group.WORLD, scale_tokens=6.0)
        expected = pattention(x, keys, values, backend="reference")
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.05)


def check_that_second_derivatives_are_refused() -> None:
    (x, keys, values, _), grad = inputs(6, torch.float64)
    x.requires_grad_()
    out = sharded_pattention(x, part(keys), part(values), dist.group.WORLD, scale_tokens=6.0)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(out, x, grad, create_graph=True)


def test_two_processes_match_one(tmp_path):
    run_processes(2, compare_all, tmp_path)
