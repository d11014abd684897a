"""Added tokens against the reference over all tokens together: values and gradients."""

import pytest
import torch

from tokenformer.ops.added_tokens import pattention_per_sample, pattention_with_added
from tokenformer.ops.pattention import reference
from tokenformer.ops.theta import THETAS, ThetaOptions


def random_tensors(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in shapes
    ]


def gradients(output, inputs):
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)
    return torch.autograd.grad((output * weights).sum(), inputs)


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("lead", [(3,), (3, 5), (3, 2, 1)])
@pytest.mark.parametrize("per_sample", [False, True])
def test_equals_the_reference_over_all_tokens(theta, lead, per_sample):
    x, keys, values = random_tensors((*lead, 7), (11, 7), (11, 4))
    own = (3,) if per_sample else ()
    added_keys, added_values = random_tensors((*own, 5, 7), (*own, 5, 4), seed=1)
    options = ThetaOptions(theta, 11.0, "none", 0.0)
    found = pattention_with_added(x, keys, values, added_keys, added_values, options)
    if per_sample:
        expected = torch.stack(
            [
                reference(
                    x[n],
                    torch.cat([keys, added_keys[n]]),
                    torch.cat([values, added_values[n]]),
                    options,
                )
                for n in range(3)
            ]
        )
    else:
        joined = torch.cat([keys, added_keys]), torch.cat([values, added_values])
        expected = reference(x, *joined, options)
    torch.testing.assert_close(found, expected)
    inputs = (x, keys, values, added_keys, added_values)
    for one, other in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("theta", THETAS)
def test_tokens_of_every_sample(theta):
    x, keys, values = random_tensors((3, 5, 7), (3, 6, 7), (3, 6, 4))
    counts = torch.tensor([1, 6, 2])
    behind = torch.arange(6) >= counts[:, None]
    keys = keys.masked_fill(behind[..., None], 0)
    options = ThetaOptions(theta, 1.0, "tanh", 0.0)
    found = pattention_per_sample(x, keys, values, counts, options)
    for n, m in enumerate(counts.tolist()):
        expected = reference(x[n], keys[n, :m], values[n, :m], options._replace(scale=float(m)))
        torch.testing.assert_close(found[n], expected)


@pytest.mark.parametrize("theta", [name for name in THETAS if name != "softmax"])
def test_zero_keys_pad_without_an_effect(theta):
    x, keys, values, added_keys, added_values = random_tensors(
        (2, 3, 7), (11, 7), (11, 4), (2, 5, 7), (2, 5, 4)
    )
    options = ThetaOptions(theta, 11.0, "none", 0.0)
    padding = torch.zeros(2, 4, 7, dtype=x.dtype), torch.ones(2, 4, 4, dtype=x.dtype)
    pairs = zip((added_keys, added_values), padding, strict=True)
    padded = [torch.cat(pair, dim=1) for pair in pairs]
    found = pattention_with_added(x, keys, values, *padded, options)
    expected = pattention_with_added(x, keys, values, added_keys, added_values, options)
    torch.testing.assert_close(found, expected)
