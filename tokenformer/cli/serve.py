"""`tokenformer serve`: a model behind OpenAI's HTTP interface, on this machine."""

import signal
import socket
import sys
from contextlib import closing, suppress
from types import FrameType

from tokenformer.cli.errors import InputError
from tokenformer.cli.model import check_bits, load_model

SECONDS_TO_END = 5
"""How long connections may stay once the server is told to end."""


def serve(
    model: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    context: int | None = None,
    bits: int | None = None,
) -> None:
    """Serve a model: /v1/completions and, with a chat template, /v1/chat/completions.

    Args:
        model: A folder or hub name of a causal language model, ours or any other.
        host: The address to listen at; 0.0.0.0 lets in whoever reaches this machine, unasked.
        port: The port to listen at; 0 for any that is free.
        name: What requests call the model; by default as it is given here.
        context: Tokens of a prompt and its answer together; by default as many as the model was
            made for.
        bits: 8 rounds a TokenFormer's numbers to int8 as it is loaded: a quarter of the memory.
    """
    if context is not None and context < 2:
        raise InputError(f"--context {context} must be at least 2: a prompt and an answer")
    check_bits(bits)
    with closing(bind(host, port)) as listener:
        run(listener, model, name or model, context, bits)


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
    listener: socket.socket, model: str, name: str, context: int | None, bits: int | None
) -> None:
    try:
        import openai  # noqa: F401  # without it transformers' server is half defined
        import uvicorn

        from tokenformer.converse.server import build_app
        from tokenformer.converse.voice import Voice
    except ImportError as error:
        hint = 'pip install "tokenformer[serve]"'
        raise InputError(f"the server is missing or does not fit: {error}; {hint}") from None

    from transformers.utils import logging

    from tokenformer.converse.prompt import context_length

    loaded, tokenizer = load_model(model, bits)
    voice = Voice(context or context_length(loaded.config) or 2048)
    logging.set_verbosity_error()  # uvicorn writes a line for each request

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            voice.hush()  # or uvicorn would wait for answers that take minutes
            super().handle_exit(sig, frame)

    app = build_app(name, loaded, tokenizer, voice)
    server = Server(uvicorn.Config(app, timeout_graceful_shutdown=SECONDS_TO_END))
    # When uvicorn has ended at either signal, it raises it again, for whoever waits for it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        sys.stdout.write(f"Serving {name} at {address(listener)}/v1; Ctrl-C ends it\n")
        sys.stdout.flush()
        server.run(sockets=[listener])
    voice.wait()


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
