"""A cache of model responses on disk, so that an interrupted evaluation resumes.

Each batch of requests is one line of an append-only file: the batch's key, then for each request
its log-likelihood and whether greedy decoding produces it. The file name is a fingerprint of
everything a response depends on except the requests, so responses of another model, precision or
version are never reused. Batches depend only on the requests, so a resumed evaluation equals an
uninterrupted one bit for bit.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import tokenformer
from tokenformer.files import cache_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Response = tuple[float, bool]
"""Log-likelihood, and whether greedy decoding gives the continuation."""
PACKAGES = ("torch", "transformers", "tokenizers", "lm-eval")


class ResponseCache:
    """Responses by batch key, saved in `path` until `delete`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.batches = read_complete_lines(path)
        self.file = path.open("a", encoding="utf-8")

    def get(self, key: str) -> list[Response] | None:
        return self.batches.get(key)

    def add(self, key: str, responses: Sequence[Response]) -> None:
        self.batches[key] = list(responses)
        self.file.write(json.dumps([key, responses]) + "\n")
        self.file.flush()

    def delete(self) -> None:
        """Delete the file once the evaluation is finished."""
        self.file.close()
        self.path.unlink(missing_ok=True)


def read_complete_lines(path: Path) -> dict[str, list[Response]]:
    """Read the batches of a file. Truncate an incomplete last line, and skip lines that a crash or
    another process has damaged."""
    if not path.exists():
        return {}
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(path, end)
    batches = {}
    for line in content[:end].splitlines():
        with suppress(ValueError):
            key, responses = json.loads(line)
            batches[key] = [(logprob, greedy) for logprob, greedy in responses]
    return batches


def batch_key(requests: Sequence[Any]) -> str:
    """Hash a batch of requests, which must be JSON-serializable."""
    return hashlib.blake2b(json.dumps(requests).encode(), digest_size=16).hexdigest()


def fingerprint(model: "PreTrainedModel", **settings: Any) -> str:
    """Hash everything a model's responses depend on: tensors, configuration, device, threads, the
    code of this package, library versions and `settings`."""
    digest = hashlib.blake2b(digest_size=16)
    config = {n: v for n, v in model.config.to_dict().items() if not n.startswith("_")}
    attached = getattr(model, "peft_config", {})  # by name; also options such as LoRA's alpha
    adapters = {name: sorted_sets(each.to_dict()) for name, each in attached.items()}
    facts = {
        "class": type(model).__name__,
        "config": config,
        "adapters": adapters,
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


def sorted_sets(values: dict[str, Any]) -> dict[str, Any]:
    """Sort sets, whose order differs from process to process."""
    return {n: sorted(value) if isinstance(value, set) else value for n, value in values.items()}


def response_cache_folder() -> Path:
    return cache_folder() / "evaluate"
