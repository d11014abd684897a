"""The child process of `chat_template.py`: reads lines of JSON, replies to each with one line.

The first line has the template and its limits, each later one the messages of a chat. It imports
neither torch nor the models, so it is small and starts fast.
"""

import json
import signal
import sys
from pathlib import Path
from typing import Any

MEMORY = 2**30
"""Bytes that rendering may allocate (enforced on Linux)."""


def limit_memory() -> None:
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        return
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and kills this
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
            raise ValueError(f"it renders {len(text)} characters, more than {limit}")
        return text

    reply(status="ready")
    for line in requests:
        if hasattr(signal, "alarm"):  # ends this process if the parent is gone
            signal.alarm(setup["alarm"])
        try:
            reply(text=render(json.loads(line)))
        except Exception as error:  # templates can raise anything
            reply(error=f"{error}" or type(error).__name__)
        if hasattr(signal, "alarm"):
            signal.alarm(0)


if __name__ == "__main__":
    main()
