"""Adapters of a running server: not removed while in use."""

import asyncio

import pytest
import torch
from transformers import GenerationConfig

pytest.importorskip("peft", reason="peft is not installed")

from tests.support.adapters import make_adapter, make_base
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


def test_adapters_cannot_be_changed_unless_allowed(client):
    body = {"name": "a", "folder": "a"}
    assert client.post("/v1/adapters", json=body).status_code == 404
    assert client.delete("/v1/adapters/a").status_code == 404
