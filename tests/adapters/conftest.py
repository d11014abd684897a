import pytest
import torch

pytest.importorskip("peft", reason="peft is not installed")

from tokenformer import TokenformerConfig, TokenformerForCausalLM


def make_base(seed: int = 0, **options: object) -> TokenformerForCausalLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"qkv_tokens": 12, "output_tokens": 12, "ffn_tokens": 24}
    config = TokenformerConfig(**(sizes | tokens | options))
    return TokenformerForCausalLM(config).eval()


@pytest.fixture
def base() -> TokenformerForCausalLM:
    return make_base()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 61, (4, 9), generator=torch.Generator().manual_seed(1))
