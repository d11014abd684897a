"""The live page of `tokenformer explore --serve`: a site and the model it shows, on 127.0.0.1.

`POST /api/run` takes a text and the tokens to switch off, and returns the score map, the loss and
the continuation. Only pages of this server may ask: other sites are kept out by the checks of the
Host and Origin headers and of the content type, and the server listens on this machine only.
"""

import json
import math
import socket
import threading
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenformer.errors import InputError, TokenformerError, first_line
from tokenformer.interpret.behavior import Behavior
from tokenformer.interpret.intervention import intervene
from tokenformer.interpret.score_map import direct_effects, score_maps
from tokenformer.interpret.site_data import SiteData, script
from tokenformer.interpret.token_index import TokenIndex
from tokenformer.interpret.token_name import check_tokens, named_layers
from tokenformer.interpret.vocabulary import Vocabulary
from tokenformer.models.configuration import LanguageConfig
from tokenformer.serve.limits import HostCheck

MAX_BODY = 1 << 18
MAX_POSITIONS = 512
NEW_TOKENS = 60
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
SECONDS = 30
"""How long a client may take to send a request."""


class RequestError(TokenformerError):
    """A request that cannot be answered, with its HTTP status."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


def check_live(model: Any, earlier: Any = None) -> None:
    """Raise `InputError` unless both are language models with vocabularies of one size."""
    if not isinstance(model.config, LanguageConfig):
        raise InputError(
            "--serve needs a language model; write the page of an image classifier with --out "
            "and open it from disk"
        )
    if earlier is None:
        return
    if not isinstance(earlier.config, LanguageConfig):
        raise InputError("--before is an image classifier; name a language model to compare with")
    if earlier.config.vocab_size != model.config.vocab_size:
        raise InputError(
            f"--before has a vocabulary of {earlier.config.vocab_size}, the model one of "
            f"{model.config.vocab_size}; compare models with one tokenizer"
        )


class Explorer:
    """A site, the model that it shows, and maybe one to compare with."""

    def __init__(self, model: Any, vocabulary: Vocabulary, site: Path, earlier: Any = None) -> None:
        check_live(model, earlier)
        self.model, self.earlier, self.vocabulary = model, earlier, vocabulary
        self.files = {
            f"/{path.relative_to(site).as_posix()}": path
            for path in site.rglob("*")
            if path.suffix in TYPES and path.is_file() and not path.is_symlink()
        }
        index = TokenIndex.load(site / "index")
        self.data = SiteData(index, {}, vocabulary)
        models = [model] if earlier is None else [model, earlier]
        contexts = [each.config.max_position_embeddings for each in models]
        self.longest = min(MAX_POSITIONS, *contexts)
        first = index.samples[0, : min(96, self.longest)].tolist()
        text = vocabulary.decode(first).strip("\N{REPLACEMENT CHARACTER}")
        self.text = text.partition(" ")[2] or text  # a sample may begin within a word
        self.lock = threading.Lock()
        """Interventions change the model, so requests take turns."""

    def run(self, listener: socket.socket) -> None:
        """Serve until interrupted."""
        with Server(listener, partial(Handler, self)) as server:
            server.serve_forever(poll_interval=0.2)

    def live_piece(self) -> str:
        return script("live", {"text": self.text, "longest": 4 * self.longest})

    def answer(self, request: Any) -> dict[str, Any]:
        """Return what the page shows for `{"text": ..., "off": ["3.ffn.17", ...]}`."""
        fields: dict[str, Any] = request if isinstance(request, dict) else {}
        text, off = fields.get("text"), fields.get("off", [])
        is_named = isinstance(off, list) and all(isinstance(name, str) for name in off)
        if not isinstance(text, str) or not text or not is_named:
            raise RequestError(
                HTTPStatus.BAD_REQUEST, "send {text: a text, off: [names of tokens]}"
            )
        tokens = check_tokens(named_layers(self.model), off)
        ids = torch.tensor([self.encode(text)], device=self.model.device)
        with self.lock, torch.no_grad():
            with intervene(self.model, off=tokens):
                maps = score_maps(self.model, ids)
                logits = self.model(input_ids=ids, use_cache=False).logits
                effects = direct_effects(self.model, maps, logits.argmax(-1))
                changed = self.measure("switched off", self.model, ids) if tokens else None
            runs = [self.measure("all tokens on", self.model, ids)]
            runs += [changed] if changed else []
            if self.earlier is not None:
                runs.append(self.measure("before growth", self.earlier, ids))
        return {**self.data.example(maps, 0, logits, effects), "runs": runs}

    def encode(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError(
                HTTPStatus.BAD_REQUEST, "the text has half a character (a lone surrogate)"
            ) from None
        ids: list[int] = self.vocabulary.tokenizer(text, add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
        if not ids:
            raise RequestError(HTTPStatus.BAD_REQUEST, "the text has no tokens")
        if len(ids) > self.longest:
            raise RequestError(
                HTTPStatus.BAD_REQUEST,
                f"the text has {len(ids)} tokens; at most {self.longest} are shown",
            )
        return ids

    def measure(self, name: str, model: Any, ids: Tensor) -> dict[str, Any]:
        """Return a model's loss on the text and its greedy continuation."""
        loss = None
        if ids.shape[1] > 1:
            predictions = Behavior(ids[:, :-1].cpu(), ids[:, 1:].cpu())
            found = predictions.loss(model)
            loss = round(found, 6) if math.isfinite(found) else None
        count = min(NEW_TOKENS, max(1, model.config.max_position_embeddings - ids.shape[1]))
        made = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=model.config.eos_token_id or 0,
        )
        return {
            "name": name,
            "loss": loss,
            "continuation": self.vocabulary.decode(made[0, ids.shape[1] :].tolist()),
        }


class Server(ThreadingHTTPServer):
    """An HTTP server on a socket that listens already."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, handler: Any) -> None:
        super().__init__(listener.getsockname()[:2], handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "tokenformer"
    sys_version = ""
    timeout = SECONDS

    def __init__(self, explorer: Explorer, *args: Any) -> None:
        self.explorer = explorer
        super().__init__(*args)

    def do_GET(self) -> None:  # the name that http.server calls
        self.respond(self.get)

    def do_POST(self) -> None:
        self.respond(self.post)

    def respond(self, handle: Any) -> None:
        try:
            self.check_host()
            status, kind, body = handle()
        except RequestError as error:
            status, kind, body = error.status, "application/json", error_body(str(error))
            self.close_connection = True  # the body may be unread
        except TokenformerError as error:
            status, kind = HTTPStatus.BAD_REQUEST, "application/json"
            body = error_body(str(error))
        except (TimeoutError, ConnectionError):  # the client is gone
            raise
        except Exception as error:  # a model can raise anything
            status, kind = HTTPStatus.INTERNAL_SERVER_ERROR, "application/json"
            body = error_body(f"the server failed: {first_line(error)}")
            self.close_connection = True
        with suppress(BrokenPipeError, ConnectionResetError):
            self.send_response(status)
            for name, value in {**HEADERS, "Content-Type": kind}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)

    def check_host(self) -> None:
        """Refuse other names than this machine's own: a web page could rebind its name to it."""
        host = self.headers.get("Host", "")
        if not HostCheck().accepts(host):
            raise RequestError(HTTPStatus.FORBIDDEN, f"the Host {host[:100]!r} is not allowed")

    def get(self) -> tuple[HTTPStatus, str, bytes]:
        path = self.path.partition("?")[0]
        path = "/index.html" if path == "/" else path
        if path == "/data/live.js":
            return HTTPStatus.OK, TYPES[".js"], self.explorer.live_piece().encode()
        file = self.explorer.files.get(path)
        if file is None:
            raise RequestError(HTTPStatus.NOT_FOUND, "there is no such page")
        return HTTPStatus.OK, TYPES[file.suffix], file.read_bytes()

    def post(self) -> tuple[HTTPStatus, str, bytes]:
        if self.path != "/api/run":
            raise RequestError(HTTPStatus.NOT_FOUND, "there is no such page")
        origin = self.headers.get("Origin")
        if origin is not None and origin != f"http://{self.headers.get('Host')}":
            raise RequestError(HTTPStatus.FORBIDDEN, "requests from other sites are not allowed")
        if self.headers.get_content_type() != "application/json":
            raise RequestError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send application/json")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise RequestError(HTTPStatus.LENGTH_REQUIRED, "send a Content-Length")
        if int(length) > MAX_BODY:
            raise RequestError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"send at most {MAX_BODY} bytes"
            )
        try:
            request = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            raise RequestError(HTTPStatus.BAD_REQUEST, "the body is not JSON") from None
        answer = json.dumps(self.explorer.answer(request), allow_nan=False)
        return HTTPStatus.OK, "application/json", answer.encode()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: texts stay between the page and the model."""


def error_body(message: str) -> bytes:
    return json.dumps({"error": message}).encode()
