"""Requests in a continuous batch: each gets what it gets alone, and they come and go."""

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from starlette.exceptions import HTTPException
from transformers import GenerationConfig

from tests.support.decoding import record_native_decoding
from tests.support.image_text import make_joint, make_processor, pictures, train_new_tokens
from tokenformer.data.byte_tokenizer import END_OF_TEXT, byte_tokenizer
from tokenformer.ops.backends.native.library import library
from tokenformer.serve.generation_batch import GenerationBatch
from tokenformer.serve.generation_queue import GenerationQueue

CONTEXT = 30_000
LONG = 29_000
"""New tokens of a request that the test ends before it is complete."""
SAMPLING = {"do_sample": True, "top_k": 0}
REQUESTS: list[dict[str, Any]] = [
    {},
    {"max_new_tokens": 1},
    {**SAMPLING, "seed": 1},
    {**SAMPLING, "seed": 2, "temperature": 0.3, "top_p": 0.9},
    {**SAMPLING, "seed": 2, "top_k": 5},
    {"repetition_penalty": 1.5},
    {"stop": ["e"]},
    {"min_new_tokens": 20, "eos_token_id": list(range(200))},
    {"eos_token_id": list(range(100))},
    {"no_repeat_ngram_size": 2, "max_new_tokens": 40},
    {"penalty_alpha": None, "max_time": 1000.0},  # not batched
]


def settings(model: Any, **options: Any) -> GenerationConfig:
    """What the server makes of a request."""
    given = {"do_sample": False, "pad_token_id": END_OF_TEXT, "max_new_tokens": 25, **options}
    stop, seed, adapter = (given.pop(name, None) for name in ("stop", "seed", "adapter"))
    config = GenerationConfig(**given)
    config.stop, config.seed, config.adapter = stop or [], seed, adapter
    return config


@pytest.fixture
def model(make_model) -> Any:
    return make_model("tokenformer", vocab_size=257, max_position_embeddings=CONTEXT).float()


async def ask(queue: GenerationQueue, model: Any, number: int, **options: Any) -> Any:
    text = "ab " * number + "c"
    inputs = {"input_ids": torch.tensor([[*text.encode()]])}
    config = settings(model, **options)
    arguments = model, byte_tokenizer(), inputs, config, "request"
    return await queue.generate_non_streaming(*arguments)


async def started(queue: GenerationQueue) -> None:
    for _ in range(60_000):
        if queue.batch.rows:
            return
        await asyncio.sleep(0.001)
    raise TimeoutError("no request has started")


def test_answers_are_those_of_each_alone(model):
    async def together(max_batch: int) -> list[Any]:
        queue = GenerationQueue(model, CONTEXT, max_batch=max_batch)
        requests = [ask(queue, model, number, **options) for number, options in enumerate(REQUESTS)]
        found = await asyncio.gather(*requests)
        assert not queue.active
        assert not queue.waiting
        return found

    async def one_at_a_time() -> list[Any]:
        queue = GenerationQueue(model, CONTEXT)
        return [
            await ask(queue, model, number, **options) for number, options in enumerate(REQUESTS)
        ]

    expected = asyncio.run(one_at_a_time())
    assert len({text for text, _, _ in expected}) > 8
    for max_batch in (1, 3, 16):
        assert asyncio.run(together(max_batch)) == expected


def test_greedy_and_seeded_answers_are_those_of_generate(model):
    text = "ab c"
    ids = torch.tensor([[*text.encode()]])
    for options in ({}, {"repetition_penalty": 1.5}, {**SAMPLING, "temperature": 0.7, "seed": 4}):
        queue = GenerationQueue(model, CONTEXT)
        _, _, found = asyncio.run(ask(queue, model, 1, **options))
        config = settings(model, **options)
        if config.seed is not None:
            torch.manual_seed(config.seed)
        mask = torch.ones_like(ids)
        output = model.generate(ids, attention_mask=mask, generation_config=config)
        assert found == output[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("mode", ["routed", "shared", "projector"])
def test_requests_with_images_mix_with_others(mode):
    """Also one that is not batched; every answer is that of `generate` on the same inputs."""
    joint = train_new_tokens(make_joint(mode, torch.float32))
    processor = make_processor(joint)
    texts = ["<image>a", "none", "a <image> and <image>", "<image>a"]
    white, black = (Image.new("RGB", (16, 16), color) for color in ("white", "black"))
    images = [white, *pictures(2), black]
    given = [images[:1], [], images[1:3], images[3:]]
    batches = [
        processor(text=text, images=each or None, return_tensors="pt")
        for text, each in zip(texts, given, strict=True)
    ]
    sampled = {**SAMPLING, "seed": 1}
    options = [
        {"eos_token_id": 999, **each}  # of no token
        for each in (sampled, {}, {}, {**sampled, "max_time": 1000.0})
    ]

    async def together() -> list[Any]:
        queue = GenerationQueue(joint, 256)
        requests = [
            queue.generate_non_streaming(
                joint, processor.tokenizer, {**batch}, settings(joint, **each), "request"
            )
            for batch, each in zip(batches, options, strict=True)
        ]
        return await asyncio.gather(*requests)

    found = [ids for _, _, ids in asyncio.run(together())]
    for batch, each, ids in zip(batches, options, found, strict=True):
        torch.manual_seed(1)
        output = joint.generate(**batch, generation_config=settings(joint, **each))
        assert ids == output[0, batch["input_ids"].shape[1] :].tolist()
    assert found[0] != found[3]


@pytest.mark.skipif(library() is None, reason="no C++ compiler")
def test_a_batch_decodes_in_native_code(model, monkeypatch):
    native = record_native_decoding(monkeypatch)

    async def run() -> None:
        queue = GenerationQueue(model, CONTEXT)
        await asyncio.gather(*(ask(queue, model, number) for number in range(5)))

    asyncio.run(run())
    assert native == [False] * 5  # the prompts; tokens do not pass through the model's forward


def test_a_request_joins_a_running_batch(model):
    """And leaves it before the first one ends, which began earlier."""

    async def run() -> list[str]:
        queue = GenerationQueue(model, CONTEXT, max_batch=2)
        order: list[str] = []

        async def named(name: str, count: int) -> None:
            await ask(queue, model, 1, max_new_tokens=count, eos_token_id=None)
            order.append(name)

        long = asyncio.create_task(named("long", LONG))
        await started(queue)
        await named("short", 5)
        queue.shut_down()
        with pytest.raises(HTTPException, match="shutting down"):
            await long
        queue.wait()
        return order

    assert asyncio.run(run()) == ["short"]


def test_a_client_that_leaves_makes_space(model):
    async def run() -> None:
        queue = GenerationQueue(model, CONTEXT, max_batch=1)
        options = {"max_new_tokens": LONG, "eos_token_id": None}
        running = asyncio.create_task(ask(queue, model, 1, **options))
        waiting = asyncio.create_task(ask(queue, model, 1, **options))
        await started(queue)
        assert len(queue.active) == 2
        for task in (waiting, running):
            task.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        assert not queue.active
        start = time.monotonic()
        _, _, ids = await ask(queue, model, 1, max_new_tokens=3, eos_token_id=None)
        assert len(ids) == 3
        queue.wait()
        assert not queue.batch.rows
        assert time.monotonic() - start < 60

    asyncio.run(run())


def test_the_queue_counts_those_beyond_the_batch(model):
    queue = GenerationQueue(model, CONTEXT, max_queue=1, max_batch=2)
    queue.active.update(range(2))
    with queue.admit():
        assert queue.num_encoding == 1
        with pytest.raises(HTTPException, match="--max_queue"), queue.admit():
            pass
    assert queue.num_encoding == 0


def test_a_failing_request_fails_alone(model):
    async def run() -> list[Any]:
        queue = GenerationQueue(model, CONTEXT)
        broken = {"input_ids": torch.tensor([[257]])}  # above the vocabulary
        config = settings(model)
        failing = queue.generate_non_streaming(model, byte_tokenizer(), broken, config, "request")
        others = [ask(queue, model, number) for number in range(3)]
        return await asyncio.gather(others[0], failing, *others[1:], return_exceptions=True)

    first, failed, *others = asyncio.run(run())
    assert isinstance(failed, HTTPException)
    assert failed.status_code == 500
    assert "index out of range" in failed.detail
    assert all(isinstance(answer, tuple) for answer in (first, *others))


def test_a_step_that_fails_ends_its_batch_and_the_next_request_works(model, monkeypatch):
    async def run() -> None:
        queue = GenerationQueue(model, CONTEXT)
        expected = await ask(queue, model, 1)
        step, calls = queue.batch.decoder.step, []

        def fail_once(*arguments: Any) -> Any:
            calls.append(arguments)
            if len(calls) == 3:
                raise RuntimeError("out of memory")
            return step(*arguments)

        monkeypatch.setattr(queue.batch.decoder, "step", fail_once)
        failed = await asyncio.gather(
            *(ask(queue, model, 1) for _ in range(2)), return_exceptions=True
        )
        assert [str(error.detail) for error in failed] == ["out of memory"] * 2
        assert await ask(queue, model, 1) == expected

    asyncio.run(run())


def test_other_models_run_one_at_a_time():
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = GPTNeoXConfig(vocab_size=257, intermediate_size=16, **sizes)
    model = GPTNeoXForCausalLM(config).eval()
    batch = GenerationBatch(model, 16)
    assert (batch.max_batch, batch.decoder) == (1, None)

    async def run() -> list[Any]:
        queue = GenerationQueue(model, CONTEXT)
        return await asyncio.gather(*(ask(queue, model, 1, eos_token_id=None) for _ in range(2)))

    first, second = asyncio.run(run())
    assert first == second
    assert len(first[2]) == 25


def test_adapters_that_cannot_mix_take_turns(model):
    """A request of another adapter waits for the batch to end, and others wait behind it."""
    adapters = SimpleNamespace(mixes=False, select=None)
    batch = GenerationBatch(model, 4, adapters)
    request = SimpleNamespace(adapter="a", is_batched=True)
    assert batch.accepts(request)
    batch.rows = [SimpleNamespace(adapter="a")]
    assert batch.accepts(request)
    assert not batch.accepts(SimpleNamespace(adapter="b", is_batched=True))
    adapters.mixes = True
    assert batch.accepts(SimpleNamespace(adapter="b", is_batched=True))
    assert not batch.accepts(SimpleNamespace(adapter="a", is_batched=False))


def test_changes_run_between_two_tokens(model):
    async def run() -> None:
        queue = GenerationQueue(model, CONTEXT)
        running = asyncio.create_task(ask(queue, model, 1, max_new_tokens=LONG, eos_token_id=None))
        await started(queue)
        thread = await queue.change(threading.get_ident)
        assert thread == queue._thread._thread.ident
        assert not running.done()
        with pytest.raises(ZeroDivisionError):
            await queue.change(lambda: 1 // 0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        queue.wait()

    asyncio.run(run())
