"""Growing a model on disk: from one Hugging Face folder to another.

A TokenFormer is read through a memory map, one layer at a time, so memory holds the new model and
one layer of the old. A Transformer is loaded completely.
"""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from tokenformer.growth.growth_report import ChangedPart, GrowthReport, format_shape, group_alike
from tokenformer.growth.tokens.token_counts import target_token_counts
from tokenformer.growth.tokens.token_growth import TokenGrowth
from tokenformer.growth.transformer.methods import grow_transformer
from tokenformer.models.configuration import TokenConfig, Tokens, TransformerConfig
from tokenformer.models.language import TransformerForCausalLM
from tokenformer.models.loading import check_folder, load_config, load_pretrained
from tokenformer.models.model_card import read_history, write_card
from tokenformer.models.model_classes import MODEL_CLASSES
from tokenformer.models.weight_files import weight_files

REPORT = "growth.json"
MAX_CARD_PARTS = 12
COMPANION_FILES = (
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
"""Files of a model folder that do not change when the model grows."""


class StoredTensors:
    """The tensors of a model folder by name, read on access."""

    def __init__(self, folder: Path, files: ExitStack) -> None:
        self.files: dict[str, Any] = {}
        for path in weight_files(folder):
            file = files.enter_context(safe_open(path, framework="pt"))
            self.files |= dict.fromkeys(file.keys(), file)

    @property
    def names(self) -> list[str]:
        return list(self.files)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self.files[name].get_tensor(name)
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
    """Grow the TokenFormer in folder `source` into folder `out`, with its tokenizer or image
    processor and the report. `verify=False` skips the check of the old weights. The other arguments
    are those of `grow_tokens`."""
    config = load_config(str(source))
    check_folder(source, config, verify=verify)
    sizes = target_token_counts(config, to, tokens)
    growth = TokenGrowth(
        MODEL_CLASSES[type(config)],
        config,
        sizes,
        init=init,
        scale=scale,
        seed=seed,
        old_rate=old_rate,
    )
    with stored_tensors(source) as stored:
        tensors = growth.tensors(stored.__getitem__, stored.names)
    report = growth.report(**growth.report_fields)
    save_model_folder(growth.build(MODEL_CLASSES[type(config)], tensors), report, source, out)
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
    """Grow the Transformer in folder `source` into folder `out`; see `grow_transformer`."""
    model = load_pretrained(TransformerForCausalLM, str(source), verify=verify, dtype="auto").eval()
    larger, report = grow_transformer(model, to, method=method, seed=seed, **sizes)
    save_model_folder(larger, report, source, out)
    return report


def save_model_folder(
    model: PreTrainedModel, report: GrowthReport, source: Path, out: Path
) -> None:
    """Save a model that came from folder `source`: weights, report, companion files and card."""
    model.save_pretrained(out)
    for name in COMPANION_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, out / name)
    report.save(out / REPORT)
    write_card(out, model.config, [*read_history(source), history_line(report.asdict())])


def history_line(report: dict[str, Any]) -> str:
    """Return the line of the model card for a saved report of growth, pruning or merging."""
    method = report["method"]
    grown = "Grown by tokens" if method == "tokens" else f"Grown by {method}"
    verb = {"prune": "Pruned", "merge": "Merged with another model"}.get(method, grown)
    options = ", ".join(f"{name} {report[name]}" for name in ("init", "scale") if report[name])
    counts = f"{report['parameters_before']:,} to {report['parameters_after']:,} parameters"
    parts = [ChangedPart(p["name"], tuple(p["before"]), tuple(p["after"])) for p in report["parts"]]
    changes = [
        f"{p.name} {format_shape(p.before) or 'new'} to {format_shape(p.after)}"
        for p in group_alike(parts)
    ]
    more = [f"{len(changes) - MAX_CARD_PARTS} more"] if len(changes) > MAX_CARD_PARTS else []
    how = f" ({options})" if options else ""
    return f"{verb}{how}: " + "; ".join([counts, *changes[:MAX_CARD_PARTS], *more])
