"""A model for benchmarks, and a fixture that refuses network connections."""

import socket
from collections.abc import Callable
from typing import Any

import pytest

from tokenformer.data.byte_tokenizer import VOCAB_SIZE


@pytest.fixture
def byte_model(make_model: Callable[..., Any]) -> Any:
    """A float64 byte-level model with a context for most benchmark items."""
    return make_model("tokenformer", vocab_size=VOCAB_SIZE, max_position_embeddings=512)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*address: Any) -> None:
        raise AssertionError(f"a connection to {address} was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
