"""A client of the server's application in this process."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.serving import build_small_app


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    from starlette.testclient import TestClient

    app, encoder = build_small_app()
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        yield client
    encoder.close()
