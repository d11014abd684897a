"""Growing a model on disk: from one Hugging Face folder to another.

An old TokenFormer is read through a memory map, one layer at a time, so that no more is held than
the new model and one layer of the old. Of a Transformer both models are held.
"""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from tokenformer.growth.growth_report import GrowthReport, Part, gathered, size
from tokenformer.growth.tokens.growth import TokenGrowth
from tokenformer.growth.tokens.token_counts import target_sizes
from tokenformer.growth.transformer.methods import grow_transformer
from tokenformer.models.catalogue import MODELS
from tokenformer.models.configuration import TokenConfig, Tokens, TransformerConfig
from tokenformer.models.language import TransformerForCausalLM
from tokenformer.models.loading import check_folder, load_config, load_whole
from tokenformer.models.model_card import read_history, write_card
from tokenformer.models.weight_files import weight_files

REPORT = "growth.json"
MOST_PARTS = 12
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
        self.homes: dict[str, Any] = {}
        for path in weight_files(folder):
            file = files.enter_context(safe_open(path, framework="pt"))
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
    verify: bool = True,
    **tokens: Tokens,
) -> GrowthReport:
    """As `grow`, from the model folder `source` to `out`, with the tokenizer or image processor and
    the report. `verify=False` skips the check of the old weights."""
    config = load_config(str(source))
    check_folder(source, config, verify=verify)
    sizes = target_sizes(config, to, tokens)
    growth = TokenGrowth(
        MODELS[type(config)], config, sizes, init=init, scale=scale, seed=seed, old_rate=old_rate
    )
    with stored_tensors(source) as stored:
        tensors = growth.tensors(stored.__getitem__, stored.names)
    report = growth.report(**growth.about)
    save(growth.build(MODELS[type(config)], tensors), report, source, out)
    return report


def grow_transformer_folder(
    source: Path,
    out: Path,
    to: str | TransformerConfig | None = None,
    *,
    method: str = "net2net",
    seed: int = 0,
    verify: bool = True,
    **sizes: int,
) -> GrowthReport:
    """As `grow_transformer`, from the model folder `source` to `out`."""
    model = load_whole(TransformerForCausalLM, str(source), verify=verify, dtype="auto").eval()
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
    write_card(out, model.config, [*read_history(source), history_line(report.asdict())])


def history_line(report: dict[str, Any]) -> str:
    """A saved report of growth, pruning or merging as a line for a model card."""
    method = report["method"]
    grown = "Grown by tokens" if method == "tokens" else f"Grown by {method}"
    verb = {"prune": "Pruned", "merge": "Merged with another model"}.get(method, grown)
    options = ", ".join(f"{name} {report[name]}" for name in ("init", "scale") if report[name])
    counts = f"{report['parameters_before']:,} to {report['parameters_after']:,} parameters"
    parts = [Part(p["name"], tuple(p["before"]), tuple(p["after"])) for p in report["parts"]]
    changes = [f"{p.name} {size(p.before) or 'new'} to {size(p.after)}" for p in gathered(parts)]
    more = [f"{len(changes) - MOST_PARTS} more"] if len(changes) > MOST_PARTS else []
    how = f" ({options})" if options else ""
    return f"{verb}{how}: " + "; ".join([counts, *changes[:MOST_PARTS], *more])
