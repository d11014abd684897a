"""Growing a model on disk: from one Hugging Face folder to another.

An old TokenFormer is read through a memory map, one layer at a time, so that no more is held than
the new model and one layer of the old. Of a Transformer both models are held.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig

from tokenformer.growth.plan import target_sizes
from tokenformer.growth.report import GrowthReport
from tokenformer.growth.tokens import TokenGrowth
from tokenformer.growth.transformer import grow_transformer
from tokenformer.models.catalogue import MODELS
from tokenformer.models.configuration import TransformerConfig
from tokenformer.models.language import TransformerForCausalLM
from tokenformer.models.projection_configuration import TokenConfig, Tokens

REPORT = "growth.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "preprocessor_config.json",
)
"""What belongs to a model folder and does not change when the model grows."""


class StoredTensors:
    """The tensors of a model folder by name, read when they are asked for."""

    def __init__(self, folder: Path, files: ExitStack) -> None:
        if (folder / INDEX).exists():
            names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        else:
            names = [WEIGHTS]
        self.homes: dict[str, Any] = {}
        for name in names:
            if Path(name).name != name:  # whatever an index from elsewhere may say
                raise ValueError(f"{folder / INDEX} names a file outside the folder: {name}")
            file = files.enter_context(safe_open(folder / name, framework="pt"))
            self.homes |= dict.fromkeys(file.keys(), file)

    @property
    def names(self) -> list[str]:
        return list(self.homes)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self.homes[name].get_tensor(name)
        return tensor


@contextmanager
def stored_tensors(folder: Path) -> Iterator[StoredTensors]:
    with ExitStack() as files:
        yield StoredTensors(folder, files)


def grow_folder(
    source: Path,
    out: Path,
    to: str | TokenConfig | None = None,
    *,
    init: str = "zero",
    scale: str | None = None,
    seed: int = 0,
    old_rate: float | None = None,
    **tokens: Tokens,
) -> GrowthReport:
    """As `grow`, from the model folder `source` to `out`, with the tokenizer or image processor and
    the report."""
    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    sizes = target_sizes(config, to, tokens)
    growth = TokenGrowth(
        MODELS[type(config)], config, sizes, init=init, scale=scale, seed=seed, old_rate=old_rate
    )
    with stored_tensors(source) as stored:
        tensors = growth.tensors(stored.__getitem__, stored.names)
    report = growth.report()
    save(growth.build(tensors), report, source, out)
    return report


def grow_transformer_folder(
    source: Path,
    out: Path,
    to: str | TransformerConfig | None = None,
    *,
    method: str = "net2net",
    seed: int = 0,
    **sizes: int,
) -> GrowthReport:
    """As `grow_transformer`, from the model folder `source` to `out`."""
    model = TransformerForCausalLM.from_pretrained(source, dtype="auto").eval()
    larger, report = grow_transformer(model, to, method=method, seed=seed, **sizes)
    save(larger, report, source, out)
    return report


def save(model: Any, report: GrowthReport, source: Path, out: Path) -> None:
    """The grown model with its report, and what belongs to the model folder it comes from."""
    model.save_pretrained(out)
    for name in COMPANIONS:
        if (source / name).exists():
            shutil.copyfile(source / name, out / name)
    report.save(out / REPORT)
