"""`tokenformer serve`: an OpenAI-compatible server for a language or vision-language model."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from tokenformer.cli.model import (
    adapter_folders,
    adapter_warnings,
    check_bits,
    check_image_text_options,
    check_peft,
    load_image_text,
    load_model,
    resolve_model,
    takes_images_with_text,
)
from tokenformer.errors import InputError
from tokenformer.installation import install_hint
from tokenformer.paths import exists, expand_user
from tokenformer.serve.limits import API_KEY_VARIABLE, HostCheck, Limits, is_loopback

IMAGE_BODY = 2**24
"""Default of --max_body for a model that takes images."""

SECONDS_TO_END = 5
"""How long open connections may take to finish after the signal."""

SECONDS_TO_EXIT = 9
"""When the process exits after the signal, whatever it is doing."""


def serve(
    model: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    context: int | None = None,
    adapter: tuple[str, ...] = (),
    allow_adapter_changes: Path | None = None,
    bits: int | None = None,
    api_key: str | None = None,
    allowed_hosts: tuple[str, ...] = (),
    max_body: int | None = None,
    max_queue: int = Limits.max_queue,
    max_batch: int = Limits.max_batch,
    request_timeout: float = Limits.request_timeout,
    template_timeout: float = Limits.template_timeout,
    max_images: int = Limits.max_images,
    max_image_pixels: int = Limits.max_image_pixels,
    no_verify: bool = False,
) -> None:
    """Serve a language model or a vision-language model with an OpenAI-compatible API.

    The endpoints are /v1/completions and, if the model has a chat template, /v1/chat/completions,
    whose messages may have images for a vision-language model.

    Args:
        model: A model folder, a run folder or a hub name of any causal language model, or of a
            vision-language model of `tokenformer join`.
        host: Address to listen on; with 0.0.0.0 (all interfaces), set an API key.
        port: Port to listen on; 0 picks a free one.
        name: Model name in the API; by default MODEL as given.
        context: Maximum tokens of prompt and response together; by default the model's context.
        adapter: An adapter to serve, NAME=DIR or a folder; several, or the option again, for more.
            A request chooses one by its model field.
        allow_adapter_changes: Let clients load adapters from this folder, and remove adapters,
            while the server is running.
        bits: 8 or 4 quantizes the weights of a TokenFormer, to a quarter or less than a
            fifth of the memory.
        api_key: API key that clients must send. Prefer the environment variable
            TOKENFORMER_API_KEY: other users can read options in the process list.
        allowed_hosts: Additional host names to accept in the Host header; any disables the check.
        max_body: Maximum size of a request body in bytes; by default 1 MiB, for a vision-language
            model 16 MiB.
        max_queue: Maximum number of requests that wait while others are generating.
        max_batch: Maximum number of requests that generate together.
        request_timeout: Seconds for a client to send the headers, and again for the body.
        template_timeout: Seconds for rendering the chat template.
        max_images: Maximum number of images in a request.
        max_image_pixels: Maximum number of pixels of an image, checked before it is decoded.
        no_verify: Skip verifying the weights (checksums.json, NaN, inf).
    """
    if context is not None and context < 2:
        raise InputError(f"--context {context} must be at least 2: a prompt and a response")
    check_bits(bits)
    takes_images = takes_images_with_text(model)
    if takes_images:
        check_image_text_options(
            bits=bits, adapter=adapter, allow_adapter_changes=allow_adapter_changes
        )
    else:
        resolve_model(model, "a language model")  # fail before the slow imports
    folders = adapter_folders(adapter, name or model)
    changes = allow_adapter_changes and adapter_root(allow_adapter_changes)
    if max_body is None:
        max_body = IMAGE_BODY if takes_images else Limits.max_body
    limits = Limits(
        max_body=max_body,
        max_images=max_images,
        max_image_pixels=max_image_pixels,
        max_queue=max_queue,
        max_batch=max_batch,
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
        if takes_images:
            load = partial(load_image_text, model, verify=not no_verify)
        run(listener, load, name or model, context, limits, folders, changes)


def adapter_root(folder: Path) -> Path:
    """Return the folder that clients may load adapters from, resolved."""
    path = expand_user(folder)
    if not (exists(path) and path.is_dir()):
        raise InputError(f"--allow_adapter_changes: {folder} is not a folder")
    check_peft("--allow_adapter_changes")
    return path.resolve()


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket, bound before the model loads: a taken port fails at once, and
    early clients wait."""
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
    folders: Mapping[str, Path],
    changes: Path | None,
) -> None:
    try:
        import openai  # noqa: F401  # transformers' server needs it
        import uvicorn

        from tokenformer.serve.generation_queue import GenerationQueue
        from tokenformer.serve.header_timeout import with_header_timeout
        from tokenformer.serve.prompt_encoder import PromptEncoder
        from tokenformer.serve.server import build_app
    except ImportError as error:
        hint = install_hint("serve")
        raise InputError(f"the server's packages are missing or too old: {error}; {hint}") from None

    from transformers.utils import logging

    from tokenformer.models.image_text_processing import TokenformerProcessor
    from tokenformer.serve.prompt import context_length

    loaded, reader = load()
    processor = reader if isinstance(reader, TokenformerProcessor) else None
    tokenizer = reader if processor is None else processor.tokenizer
    context = context or context_length(loaded.config) or 2048
    adapters = load_adapters(loaded, folders, changes)
    queue = GenerationQueue(loaded, context, limits.max_queue, limits.max_batch, adapters)
    encoder = PromptEncoder(tokenizer, queue.context, limits, processor)
    logging.set_verbosity_error()  # uvicorn logs the requests
    last_resort = threading.Timer(SECONDS_TO_EXIT, exit_now)
    last_resort.daemon = True

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if not self.should_exit:
                last_resort.start()
            super().handle_exit(sig, frame)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            queue.shut_down()  # otherwise uvicorn waits for long responses
            encoder.close()
            await super().shutdown(sockets)

    options: dict[str, Any] = {"http": with_header_timeout(limits.request_timeout), "ws": "none"}
    app = build_app(name, loaded, tokenizer, queue, encoder, limits, adapters)
    server = Server(uvicorn.Config(app, timeout_graceful_shutdown=SECONDS_TO_END, **options))
    # After shutting down, uvicorn raises the signal again. From here on Ctrl-C shuts the server
    # down, also during an import.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if callable(signal.getsignal(signal.SIGINT)):  # else it is ignored, as under nohup
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        sys.stdout.write(f"Serving {name} at {address(listener)}/v1; press Ctrl-C to stop\n")
        sys.stdout.flush()
        server.run(sockets=[listener])
    encoder.close()
    queue.wait()
    encoder.wait()  # before cancelling the timer: a long prompt may still be tokenizing
    last_resort.cancel()


def load_adapters(model: Any, folders: Mapping[str, Path], changes: Path | None) -> Any:
    """Return the adapters to serve; None if there are none and there never will be."""
    if not folders and changes is None:
        return None

    from tokenformer.adapters.adapter_folder import AdapterFolder
    from tokenformer.serve.served_adapters import ServedAdapters

    adapters = ServedAdapters(model, changes)
    with adapter_warnings():
        for name, folder in folders.items():
            adapters.load(name, AdapterFolder.read(folder))
    return adapters


def exit_now() -> None:
    """Exit while still busy, for example with the prefill of a long prompt."""
    sys.stderr.write(f"still busy {SECONDS_TO_EXIT} seconds after the signal; exiting anyway\n")
    sys.stderr.flush()
    os._exit(1)


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
