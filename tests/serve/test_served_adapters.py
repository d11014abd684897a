"""Adapters of a running server: not removed while in use."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, GPTNeoXConfig, GPTNeoXForCausalLM

pytest.importorskip("peft", reason="peft is not installed")

from peft import LoraConfig, PeftModel

from tests.support.adapters import make_adapter, make_base
from tokenformer.adapters.adapter_folder import AdapterFolder
from tokenformer.data.byte_tokenizer import byte_tokenizer
from tokenformer.errors import AdapterError
from tokenformer.serve.generation_queue import GenerationQueue
from tokenformer.serve.served_adapters import AdapterInUseError, ServedAdapters


def test_an_adapter_in_use_stays(tmp_path):
    base = make_base(vocab_size=257, max_position_embeddings=4000)
    reference = make_base(vocab_size=257, max_position_embeddings=4000)
    make_adapter(reference, tmp_path / "a")
    adapters = ServedAdapters(base, tmp_path)
    queue = GenerationQueue(base, 4000, adapters=adapters)

    async def run() -> None:
        await adapters.add(queue, "a", "a")
        config = GenerationConfig(do_sample=False, eos_token_id=None, max_new_tokens=3900)
        config.stop, config.seed, config.adapter = [], None, "a"
        inputs = {"input_ids": torch.tensor([[1]])}
        _, streamer = queue.generate_streaming(base, byte_tokenizer(), inputs, config, "request")
        with pytest.raises(AdapterInUseError, match="used by 1 request"):
            await adapters.delete(queue, "a")
        assert "a" in adapters.served
        streamer.cancel()
        for _ in range(100):
            try:
                await adapters.delete(queue, "a")
                break
            except AdapterInUseError:
                await asyncio.sleep(0.01)
        assert not adapters.served
        assert adapters.adapted is None
        for folder in ("..", "/", "a/../../a/..", "\0"):
            with pytest.raises(AdapterError, match="no adapter folder"):
                await adapters.add(queue, "b", folder)
        with pytest.raises(AdapterError, match="the name"):
            await adapters.add(queue, "b\n", "a")

    asyncio.run(run())
    queue.wait()


def answer(queue, model, adapter, **options):
    async def ask():
        config = GenerationConfig(
            do_sample=False, eos_token_id=None, pad_token_id=0, max_new_tokens=15, **options
        )
        config.stop, config.seed, config.adapter = [], None, adapter
        inputs = {"input_ids": torch.tensor([[7, 8]])}
        arguments = model, byte_tokenizer(), inputs, config, "request"
        return await queue.generate_non_streaming(*arguments)

    return asyncio.run(ask())[2]


def test_requests_that_run_alone_have_their_adapter(tmp_path):
    base = make_base(vocab_size=257)
    adapters = ServedAdapters(base)
    folder = make_adapter(make_base(vocab_size=257), tmp_path / "a", std=2.0)
    adapters.load("a", AdapterFolder.read(folder))
    queue = GenerationQueue(base, 64, adapters=adapters)
    found = answer(queue, base, "a")
    assert found != answer(queue, base, None)
    assert answer(queue, base, "a", max_time=1000.0) == found


def test_lora_on_a_model_of_transformers(tmp_path):
    def neox():
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        return GPTNeoXForCausalLM(
            GPTNeoXConfig(vocab_size=257, intermediate_size=16, **sizes)
        ).eval()

    base, found = neox(), {}
    adapters = ServedAdapters(base)
    config = LoraConfig(r=2, target_modules=["query_key_value", "dense_h_to_4h"])
    for seed, name in enumerate("ab"):
        folder = make_adapter(neox(), tmp_path / name, seed=seed, config=config, std=20.0)
        adapters.load(name, AdapterFolder.read(folder))
    queue = GenerationQueue(base, 64, adapters=adapters)
    for name in ("a", "b", None, "a"):
        model = neox()
        if name is not None:
            model = PeftModel.from_pretrained(model, tmp_path / name)
        expected = model.generate(
            input_ids=torch.tensor([[7, 8]]),
            attention_mask=torch.ones(1, 2),
            do_sample=False,
            max_new_tokens=15,
            eos_token_id=None,
            pad_token_id=0,
        )
        found[name] = answer(queue, base, name)
        assert found[name] == expected[0, 2:].tolist()
    assert len(set(map(str, found.values()))) == 3


def test_what_cannot_mix_is_not_loaded_into_a_mixed_batch(tmp_path):
    base = make_base(vocab_size=257)
    config = LoraConfig(r=2, target_parameters=["ffn.key_tokens"])
    make_adapter(make_base(vocab_size=257), tmp_path / "lora", config=config)
    adapters = ServedAdapters(base, tmp_path)
    queue = GenerationQueue(base, 64, adapters=adapters)
    rows = [SimpleNamespace(adapter=name) for name in ("a", None)]

    async def add():
        queue.batch.rows = rows[:]
        await adapters.add(SimpleNamespace(batch=queue.batch, change=change), "lora", "lora")

    async def change(function):
        return function()

    with pytest.raises(AdapterError, match="cannot mix"):
        asyncio.run(add())
    assert adapters.adapted is None
    assert not adapters.served
    assert adapters.mixes
    rows.pop()
    asyncio.run(add())
    assert list(adapters.served) == ["lora"]


def test_adapters_cannot_be_changed_unless_allowed(client):
    body = {"name": "a", "folder": "a"}
    assert client.post("/v1/adapters", json=body).status_code == 404
    assert client.delete("/v1/adapters/a").status_code == 404
