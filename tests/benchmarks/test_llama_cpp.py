"""The Llama that `benchmarks.llama_cpp` compares with has as many parameters as our model."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.decode import SIZES
from benchmarks.llama_cpp import BLOCK, feed_forward_size, llama_parameters
from tokenformer import TokenformerConfig, TokenformerForCausalLM


def test_the_llama_is_as_large_as_our_model():
    layers, vocab = SIZES["124m"]
    with torch.device("meta"):
        parameters = TokenformerForCausalLM(TokenformerConfig.from_preset("124m")).num_parameters()
    hidden = feed_forward_size(parameters, 768, layers, vocab)
    assert hidden % BLOCK == 0
    assert llama_parameters(hidden, 768, layers, vocab) == pytest.approx(parameters, rel=1e-3)


def test_parameters_are_counted_as_in_transformers():
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        assert LlamaForCausalLM(config).num_parameters() == llama_parameters(160, 64, 3, 96)


def test_a_model_without_room_for_a_feed_forward_layer():
    with pytest.raises(ValueError, match="too few"):
        feed_forward_size(20_000, 64, 1, 96)
