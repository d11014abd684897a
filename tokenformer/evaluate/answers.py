"""Answers of a model that outlive a crash.

Each batch of requests is one line of a file that only grows: the batch's key, then for each request
its log-likelihood and whether greedy decoding would have said it. The file is named after
everything an answer depends on beside the requests themselves, which are in the keys, so an answer
that another model, precision or version gave is never found. Batches depend on the requests alone,
so a run that goes on gives the same numbers as one that was never broken, to the last bit.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import tokenformer
from tokenformer.files import cache_folder

Answer = tuple[float, bool]
PACKAGES = ("torch", "transformers", "tokenizers", "lm-eval")


class Answers:
    """What was answered so far, by batch; kept in `path` until `finish`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.known = read_whole_lines(path)
        self.file = path.open("a", encoding="utf-8")

    def get(self, key: str) -> list[Answer] | None:
        return self.known.get(key)

    def add(self, key: str, answers: Sequence[Answer]) -> None:
        self.known[key] = list(answers)
        self.file.write(json.dumps([key, answers]) + "\n")
        self.file.flush()

    def finish(self) -> None:
        """All is answered; nothing is kept."""
        self.file.close()
        self.path.unlink(missing_ok=True)


def read_whole_lines(path: Path) -> dict[str, list[Answer]]:
    """The batches in a file. A last line that was cut short is cut off, one that another process or
    a crash of the machine has spoiled is passed over."""
    if not path.exists():
        return {}
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(path, end)
    batches = {}
    for line in content[:end].splitlines():
        with suppress(ValueError):
            key, answers = json.loads(line)
            batches[key] = [(logprob, greedy) for logprob, greedy in answers]
    return batches


def batch_key(requests: Sequence[Any]) -> str:
    """Of requests as JSON can hold them."""
    return hashlib.blake2b(json.dumps(requests).encode(), digest_size=16).hexdigest()


def fingerprint(model: Any, **settings: Any) -> str:
    """Of all that a model's answers depend on: its tensors, its configuration, where it runs, the
    code that runs it, and `settings`."""
    digest = hashlib.blake2b(digest_size=16)
    config = {n: v for n, v in model.config.to_dict().items() if not n.startswith("_")}
    facts = {
        "class": type(model).__name__,
        "config": config,
        "device": model.device.type,
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in PACKAGES},
        **settings,
    }
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    package = Path(tokenformer.__file__).parent
    for source in sorted(package.rglob("*.py")):
        digest.update(source.read_bytes())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy())
    return digest.hexdigest()


def answers_folder() -> Path:
    """Where answers are kept for an interrupted evaluation to resume."""
    return cache_folder() / "evaluate"
