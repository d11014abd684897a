"""A server with a hostile chat template: it must answer other requests meanwhile, and shut down on
a signal."""

import json
import re
import signal
import socket
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.campaign.processes import Child, Ended, Limits, tokenformer

START, ANSWER, END = 120.0, 30.0, 60.0
"""Seconds within which a server must start, answer and end on a busy machine."""
LOOP = "{% for a in range(99999) %}"
TEMPLATES = {
    "loops": 3 * LOOP + 3 * "{% endfor %}",
    "code": "{{{{ cycler.__init__.__globals__.os.system('touch {canary}') }}}}",
    "attributes": "{{{{ ''.__class__.__mro__[1].__subclasses__() }}}}{{{{ x.__globals__ }}}}",
    "a huge text": LOOP + "{{ 'a' * 99999 }}{% endfor %}",
}


def write_template(model: Path, kind: str, canary: Path) -> None:
    text = TEMPLATES[kind]
    code = kind in ("code", "attributes")
    (model / "chat_template.jinja").write_text(text.format(canary=canary) if code else text)


def ask(command: Sequence[str], log: Path, limits: Limits) -> tuple[Ended, str]:
    """Start a server, send a chat request and another request meanwhile, stop the server. Return
    how it ended and what went wrong."""
    child = tokenformer(command, log, limits=limits)
    limits.seconds += START + ANSWER + END
    port = wait_for_port(child, log)
    if port is None:
        return child.end(), ""
    body = json.dumps({"messages": [{"role": "user", "content": "key"}], "max_tokens": 4}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
    about = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=ANSWER) as waiting:
        waiting.sendall((head + about).encode() + body)
        waiting.settimeout(3.0)
        with suppress(OSError):  # a template without end has no answer
            waiting.recv(1 << 16)
        problem = "" if answers(port) else "the server hangs"
    child.kill(signal.SIGTERM)
    if not child.wait(END):
        problem = problem or "SIGTERM does not end it"
        child.kill()
    return child.end(), problem


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=ANSWER) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def wait_for_port(child: Child, log: Path) -> int | None:
    """Return the port once the server listens; None if it ends or never does."""
    deadline = time.monotonic() + START
    while time.monotonic() < deadline and not child.wait(0.1):
        if found := re.search(
            r"http://127\.0\.0\.1:(\d+)", log.read_text() if log.exists() else ""
        ):
            return int(found[1])
    return None
