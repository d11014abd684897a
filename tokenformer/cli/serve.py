"""`tokenformer serve`: a model behind OpenAI's HTTP interface, on this machine."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

from tokenformer.cli.model import check_bits, load_model, resolve_model
from tokenformer.errors import InputError
from tokenformer.serve.limits import API_KEY_VARIABLE, HostCheck, Limits, is_loopback

SECONDS_TO_END = 5
"""How long connections may stay once the server is told to end."""

SECONDS_TO_EXIT = 9
"""After which the process exits, whatever it is doing."""


def serve(
    model: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    context: int | None = None,
    bits: int | None = None,
    api_key: str | None = None,
    allowed_hosts: tuple[str, ...] = (),
    max_body: int = Limits.max_body,
    max_queue: int = Limits.max_queue,
    request_timeout: float = Limits.request_timeout,
    template_timeout: float = Limits.template_timeout,
    no_verify: bool = False,
) -> None:
    """Serve a model: /v1/completions and, with a chat template, /v1/chat/completions.

    Args:
        model: A folder or hub name of a causal language model, ours or any other.
        host: The address to listen at; 0.0.0.0 for all of this machine, then use an API key.
        port: The port to listen at; 0 for any that is free.
        name: What requests call the model; by default as it is given here.
        context: Tokens of a prompt and its answer together; by default as many as the model was
            made for.
        bits: 8 rounds a TokenFormer's numbers to int8 as it is loaded: a quarter of the memory.
        api_key: The key that clients must send. Other users of this machine can see options in the
            process list, so set the environment variable TOKENFORMER_API_KEY instead.
        allowed_hosts: Further names that clients may reach the server by, as sent in the Host
            header; `any` turns this check off.
        max_body: The largest request body in bytes.
        max_queue: How many requests may wait while another one is answered.
        request_timeout: Seconds that a client has to send its headers, and then its body.
        template_timeout: Seconds that the chat template has to render a request.
        no_verify: Do not check the weights against checksums.json, nor for NaN and inf.
    """
    if context is not None and context < 2:
        raise InputError(f"--context {context} must be at least 2: a prompt and an answer")
    check_bits(bits)
    resolve_model(model, "a language model")  # a wrong name is refused before the imports
    limits = Limits(
        max_body=max_body,
        max_queue=max_queue,
        request_timeout=request_timeout,
        template_timeout=template_timeout,
        api_key=os.environ.get(API_KEY_VARIABLE) if api_key is None else api_key,
    )
    with closing(bind(host, port)) as listener:
        bound = listener.getsockname()[0]
        limits = replace(limits, hosts=HostCheck.of(bound, (host, *allowed_hosts)))
        if limits.api_key is None and not is_loopback(bound):
            sys.stderr.write(
                f"warning: --host {host or bound} without an API key: anyone who can reach this "
                f"machine can use the model; set {API_KEY_VARIABLE}\n"
            )
        load = partial(load_model, model, bits, verify=not no_verify)
        run(listener, load, name or model, context, limits)


def bind(host: str, port: int) -> socket.socket:
    """A socket that is ours before the model is loaded, which may take long; clients wait."""
    if not 0 <= port < 2**16:
        raise InputError(f"--port {port} must be from 0 to 65535")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise InputError(f"--host {host} --port {port}: {error.strerror}") from None
    return listener


def run(
    listener: socket.socket,
    load: Callable[[], tuple[Any, Any]],
    name: str,
    context: int | None,
    limits: Limits,
) -> None:
    try:
        import openai  # noqa: F401  # without it transformers' server is half defined
        import uvicorn

        from tokenformer.serve.generation_queue import GenerationQueue
        from tokenformer.serve.header_timeout import with_header_timeout
        from tokenformer.serve.prompt_encoder import PromptEncoder
        from tokenformer.serve.server import build_app
    except ImportError as error:
        hint = 'pip install "tokenformer[serve]"'
        raise InputError(f"the server is missing or does not fit: {error}; {hint}") from None

    from transformers.utils import logging

    from tokenformer.serve.prompt import context_length

    loaded, tokenizer = load()
    voice = GenerationQueue(context or context_length(loaded.config) or 2048, limits.max_queue)
    encoder = PromptEncoder(tokenizer, voice.context, limits)
    logging.set_verbosity_error()  # uvicorn writes a line for each request
    last_resort = threading.Timer(SECONDS_TO_EXIT, exit_now)
    last_resort.daemon = True

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if not self.should_exit:
                last_resort.start()
            super().handle_exit(sig, frame)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            voice.hush()  # or uvicorn would wait for answers that take minutes
            encoder.close()
            await super().shutdown(sockets)

    options: dict[str, Any] = {"http": with_header_timeout(limits.request_timeout), "ws": "none"}
    app = build_app(name, loaded, tokenizer, voice, encoder, limits)
    server = Server(uvicorn.Config(app, timeout_graceful_shutdown=SECONDS_TO_END, **options))
    # When uvicorn has ended at either signal, it raises it again, for whoever waits for it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        sys.stdout.write(f"Serving {name} at {address(listener)}/v1; Ctrl-C ends it\n")
        sys.stdout.flush()
        server.run(sockets=[listener])
    encoder.close()
    voice.wait()
    encoder.wait()  # before the timer is cancelled: a long prompt may still be tokenized
    last_resort.cancel()


def exit_now() -> None:
    """End a process that is still busy, say with the prefill of a long prompt."""
    sys.stderr.write(f"not done {SECONDS_TO_EXIT} seconds after the signal; exiting anyway\n")
    sys.stderr.flush()
    os._exit(1)


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
