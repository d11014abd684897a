"""Local paths and hub names are told apart before anything is loaded."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tokenformer.paths import NameNotFoundError, check_hub, closest_path, is_local, missing_message


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("runs/text/model", "runs/digits", "recipes"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "name",
    ["runs/txt", "runs/text", "./x", "../x", "~/x", "/x", "a/b/c", "runs", "x/", "", "~nobody/x"],
)
def test_a_name_that_can_only_be_a_path_is_local(name):
    assert is_local(name)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", ["gpt2", "EleutherAI/pythia-160m", "run", "x" * 999])
def test_a_hub_name_is_not_local(name):
    assert not is_local(name)


@pytest.mark.usefixtures("folder")
def test_the_closest_existing_path_is_suggested():
    assert missing_message("runs/txt") == "no runs/txt; did you mean runs/text?"
    assert missing_message("runs/txt/model") == "no runs/txt/model; did you mean runs/text/model?"
    assert missing_message("run/text") == "no run/text; did you mean runs/text?"
    assert missing_message("runs/zzz") == "no runs/zzz"
    assert closest_path(Path("runs/txt/nothing")) is None
    assert closest_path(Path("runs/text/model/config.json")) is None
    Path("typo.yaml").touch()
    assert closest_path(Path("nofile.yaml")) is None, "a suffix in common is not enough"
    assert closest_path(Path("tipo.yaml")) == Path("typo.yaml")


class Hub(ThreadingHTTPServer):
    """A hub with a status code per model name, which records the requests."""

    statuses: dict[str, int]
    requests: list[str]


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        _, _, kind, name = (*self.path.split("/", 3), "")[:4]
        if kind in ("models", "datasets"):  # the client makes other requests too
            self.server.requests.append(self.path)
        self.send_response(self.server.statuses.get(name, 404))
        if name not in self.server.statuses:
            self.send_header("X-Error-Code", "RepoNotFound")
        body = json.dumps({"id": name, "siblings": [], "tags": []}).encode()
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Nothing on stderr."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    from huggingface_hub import constants

    server = Hub(("127.0.0.1", 0), Handler)
    server.statuses, server.requests = {}, []
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    check_hub.cache_clear()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(timeout=60)


def test_the_hub_gets_one_request(hub: Hub, tmp_path: Path) -> None:
    hub.statuses = {"owner/known": 200, "owner/broken": 503}
    check_hub("owner/known")
    check_hub("owner/known")
    assert hub.requests == ["/api/models/owner/known"]
    for name, reason in (
        ("owner/unknown", "neither a folder here nor a model on the hub (not found;"),
        ("owner/broken", "(the hub answered with status 503)"),
        ("owner/not valid", "(not a valid hub name)"),
    ):
        with pytest.raises(NameNotFoundError) as error:
            check_hub(name)
        assert reason in str(error.value)
        assert "\n" not in str(error.value)
    assert len(hub.requests) == 3
    with pytest.raises(NameNotFoundError, match="nor a dataset on the hub"):
        check_hub("owner/unknown", "dataset")
    (tmp_path / "cache" / "models--owner--cached" / "snapshots").mkdir(parents=True)
    check_hub("owner/cached")
    assert hub.requests[3:] == ["/api/datasets/owner/unknown"]


@pytest.mark.usefixtures("folder")
def test_an_unreachable_hub_gives_a_short_message(hub: Hub) -> None:
    hub.shutdown()
    hub.server_close()
    with pytest.raises(NameNotFoundError) as error:
        check_hub("run/text")
    assert str(error.value) == (
        "run/text is neither a folder here nor a model on the hub (could not connect); "
        "did you mean runs/text?"
    )
