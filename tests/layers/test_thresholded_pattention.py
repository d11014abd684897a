"""Thresholded Pattention: which tokens of a row are skipped."""

import pytest
import torch

from tokenformer.layers import Pattention, ThresholdedPattention
from tokenformer.ops import THETAS


@pytest.mark.parametrize("theta", THETAS)
def test_tokens_that_add_little_are_skipped(theta):
    torch.manual_seed(0)
    dense = Pattention(6, 4, 30, theta=theta, dtype=torch.float64)
    layer = ThresholdedPattention(6, 4, 30, threshold=0.03, theta=theta, dtype=torch.float64)
    layer.load_state_dict(dense.state_dict())
    x = torch.randn(7, 6, dtype=torch.float64)
    added = THETAS[theta](x @ dense.key_tokens.T, 30.0, "none", 0.0)[..., None] * dense.value_tokens
    kept = added.norm(dim=-1, keepdim=True) >= 0.03
    assert 0.1 < kept.double().mean() < 0.95
    torch.testing.assert_close(layer(x), (added * kept).sum(1))
    layer.threshold = 0.0
    torch.testing.assert_close(layer(x), dense(x))
    layer.active_tokens, dense.active_tokens = 11, 11
    torch.testing.assert_close(layer(x), dense(x))


def test_gradients_are_those_of_the_kept_tokens():
    torch.manual_seed(0)
    layer = ThresholdedPattention(6, 4, 30, threshold=1e6)
    x = torch.randn(7, 6, requires_grad=True)
    layer(x).sum().backward()
    assert (layer.value_tokens.grad == 0).all()
    assert (x.grad == 0).all()


@pytest.mark.parametrize("threshold", [-1.0, float("nan"), float("inf")])
def test_bad_thresholds_are_named(threshold):
    with pytest.raises(ValueError, match=f"threshold={threshold} must be"):
        ThresholdedPattention(6, 4, 30, threshold=threshold)


def test_repr_shows_the_threshold():
    assert repr(ThresholdedPattention(6, 4, 30, threshold=0.5)).endswith("threshold=0.5)")
