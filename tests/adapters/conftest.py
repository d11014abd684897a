import pytest
import torch

pytest.importorskip("peft", reason="peft is not installed")

from tests.support.adapters import make_base
from tokenformer import TokenformerForCausalLM


@pytest.fixture
def base() -> TokenformerForCausalLM:
    return make_base()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 61, (4, 9), generator=torch.Generator().manual_seed(1))
