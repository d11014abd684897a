"""The OpenAI-compatible server for tests: as a process, and as an application in this process."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

from tests.support.processes import take_interrupts

LIMIT = 300
"""Seconds, for what takes one or two."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.content == 'sum' %}{{ 1 + message.content }}{% endif %}"
    "{% if message.content == 'loop' %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{% if message.content == 'power' %}{{ 9 ** (9 ** (messages|length + 8)) }}{% endif %}"
    "{% if message.content == 'memory' %}{{ message.content * 10 ** 10 }}{% endif %}"
    "{% if message.content == 'long' %}{{ message.content * 10 ** 5 }}{% endif %}"
    "[{{ message.role }}] {{ message.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
"""Renders a chat, and misbehaves for some messages."""


class Server:
    """A server process and a client of it."""

    def __init__(self, process: Any, folder: Path, url: str, key: str) -> None:
        self.process = process
        self.url = url
        self.log: list[str] = []
        self.client = openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=LIMIT)
        self.defaults = {"model": str(folder), "temperature": 0, "max_tokens": 40}

    def complete(self, **options: Any) -> Any:
        return self.client.completions.create(**{**self.defaults, **options})

    def chat(self, *texts: tuple[str, str], **options: Any) -> Any:
        messages = [{"role": role, "content": text} for role, text in texts]
        request = {**self.defaults, "messages": messages, **options}
        return self.client.chat.completions.create(**request)

    def end(self, by: int) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(by)
        return int(self.process.wait(LIMIT))


@contextmanager
def serving(
    folder: Path,
    *options: str,
    key: str | None = None,
    program: tuple[str, ...] = ("-m", "tokenformer"),
) -> Iterator[Server]:
    """Run `tokenformer serve` on a free port for the length of the block."""
    command = [sys.executable, *program, "serve", str(folder), "--port", "0", *options]
    environment = os.environ if key is None else {**os.environ, "TOKENFORMER_API_KEY": key}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=take_interrupts,
    )
    try:
        assert process.stdout
        assert process.stderr
        line = process.stdout.readline()
        assert line.startswith("Serving "), process.stderr.read()
        url = line.split(" at ")[1].partition(";")[0]
        assert url.startswith("http://127.0.0.1:")
        server = Server(process, folder, url, key or "none")
        for stream in (process.stdout, process.stderr):  # a full pipe would stop the server
            threading.Thread(target=server.log.extend, args=(stream,), daemon=True).start()
        yield server
    finally:
        process.kill()
        process.wait(LIMIT)


def build_small_app(**limits: Any) -> tuple[Any, Any]:
    """Return the server's application with an untrained model, and its prompt encoder."""
    import torch

    import tokenformer
    from tokenformer.data.byte_tokenizer import VOCAB_SIZE, byte_tokenizer
    from tokenformer.serve.generation_queue import GenerationQueue
    from tokenformer.serve.limits import Limits
    from tokenformer.serve.prompt_encoder import PromptEncoder
    from tokenformer.serve.server import build_app

    torch.manual_seed(0)
    config = tokenformer.TokenformerConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    model = tokenformer.TokenformerForCausalLM(config).eval()
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    checked = Limits(**limits)
    queue = GenerationQueue(model, 64, checked.max_queue, checked.max_batch)
    encoder = PromptEncoder(tokenizer, 64, checked)
    return build_app("tiny", model, tokenizer, queue, encoder, checked), encoder
