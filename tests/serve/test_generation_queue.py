"""EOS tokens are not counted as part of a response."""

import asyncio

import pytest
import torch
from transformers import GenerationConfig

from tokenformer.data.byte_tokenizer import byte_tokenizer
from tokenformer.serve.generation_queue import GenerationQueue


@pytest.mark.parametrize("eos", [0, [5, 0]], ids=str)
def test_the_end_of_text_is_not_counted(make_model, eos):
    model = make_model("tokenformer", vocab_size=257)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # the likeliest token is the first
    inputs = {"input_ids": torch.tensor([[72, 105]])}
    config = GenerationConfig(do_sample=False, eos_token_id=eos, pad_token_id=0, max_new_tokens=3)
    config.stop, config.seed = [], None
    answer = GenerationQueue(model, 64).generate_non_streaming(
        model, byte_tokenizer(), inputs, config, "request"
    )
    assert asyncio.run(answer) == ("\0", 2, [])
