"""The feed-forward networks of the Transformer baselines, and Pattention compared with them."""

import pytest
import torch
import torch.nn.functional as F

from tokenformer.layers import GeluMLP, Pattention, SwiGLU


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_mlp(approximate):
    mlp = GeluMLP(6, 10, approximate).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    hidden = F.gelu(x @ mlp.up.weight.T, approximate=approximate)
    torch.testing.assert_close(mlp(x), hidden @ mlp.down.weight.T)
    assert sum(p.numel() for p in mlp.parameters()) == 2 * 6 * 10  # no biases


def test_swiglu():
    mlp = SwiGLU(6, 10).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    gate, up = x @ mlp.gate.weight.T, x @ mlp.up.weight.T
    torch.testing.assert_close(mlp(x), (gate * torch.sigmoid(gate) * up) @ mlp.down.weight.T)
    assert sum(p.numel() for p in mlp.parameters()) == 3 * 6 * 10


def test_pattention_is_a_gelu_mlp_on_rescaled_rows():
    layer = Pattention(6, 6, 10, dtype=torch.float64)
    mlp = GeluMLP(6, 10).double()
    mlp.load_state_dict({"up.weight": layer.key_tokens, "down.weight": layer.value_tokens.T})
    x = torch.randn(5, 6, dtype=torch.float64)
    lengths = (x @ layer.key_tokens.T).norm(dim=-1, keepdim=True)
    torch.testing.assert_close(layer(x), mlp(x * 10**0.5 / lengths))
    assert not torch.allclose(layer(x), mlp(x))
