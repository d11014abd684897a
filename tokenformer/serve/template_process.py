"""The child process of `chat_template.py`: lines of JSON in, one line of JSON out for each.

The first line has the template and its limits, each later one the messages of a chat. It imports
neither torch nor the models, so that it is small and starts fast.
"""

import json
import signal
import sys
from pathlib import Path
from typing import Any

MEMORY = 2**30
"""Bytes that rendering may allocate, where the system can limit it (Linux)."""


def limit_memory() -> None:
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        return
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this
    from transformers.utils.chat_template_utils import render_jinja_template

    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    setup = json.loads(requests.readline())
    limit_memory()

    def reply(**values: str) -> None:
        replies.write(json.dumps(values).encode() + b"\n")
        replies.flush()

    def render(messages: list[dict[str, Any]]) -> str:
        rendered, _ = render_jinja_template(
            conversations=[messages],
            chat_template=setup["template"],
            add_generation_prompt=True,
            **setup["variables"],
        )
        text, limit = str(rendered[0]), setup["max_characters"]
        if len(text) > limit:
            raise ValueError(f"it makes {len(text)} characters of them, more than {limit}")
        return text

    reply(status="ready")
    for line in requests:
        if hasattr(signal, "alarm"):  # should the parent be gone: ends this process, loop or not
            signal.alarm(setup["alarm"])
        try:
            reply(text=render(json.loads(line)))
        except Exception as error:  # whatever a template can raise
            reply(error=f"{error}" or type(error).__name__)
        if hasattr(signal, "alarm"):
            signal.alarm(0)


if __name__ == "__main__":
    main()
