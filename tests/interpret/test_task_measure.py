"""The effect of an intervention on a benchmark is that of the edited model."""

import pytest
import torch

import tokenformer
from tests.support.evaluation import copy_first_lines
from tokenformer.data.byte_tokenizer import VOCAB_SIZE, byte_tokenizer
from tokenformer.interpret import edit, effect, on_tasks


def test_the_scores_are_those_of_the_edited_model(real_data, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = copy_first_lines(real_data("eval"), tmp_path, 12)
    torch.manual_seed(0)
    config = tokenformer.TokenformerConfig(
        vocab_size=VOCAB_SIZE, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        qkv_tokens=8, output_tokens=8, ffn_tokens=24, max_position_embeddings=256,
        initializer_range=0.5,
    )  # fmt: skip
    model = tokenformer.TokenformerForCausalLM(config).eval()
    measure = on_tasks(byte_tokenizer(), ["lambada_openai"], data=data, limit=8)
    off = [f"0.ffn.{n}" for n in range(0, 24, 2)]
    found = effect(model, measure, off=off)
    assert found.before == measure(model)
    assert found.after == measure(edit(model, off=off))
    name = "lambada_openai/perplexity"
    assert found.before[name] != found.after[name]
