"""Growing a model on disk: from one Hugging Face folder to another.

A TokenFormer is read, grown and written one layer at a time: while one is hashed and written, the
next ones are made in parallel, and memory holds no others. A Transformer is loaded completely.
"""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from tokenformer.growth.growth_report import ChangedPart, GrowthReport, format_shape, group_alike
from tokenformer.growth.parameter_mapping import ParameterMapping
from tokenformer.growth.sparsity_report import SparsityReport
from tokenformer.growth.tokens.joint_growth import grow_new_tokens
from tokenformer.growth.tokens.token_counts import target_token_counts
from tokenformer.growth.tokens.token_growth import TokenGrowth
from tokenformer.growth.transformer.methods import grow_transformer
from tokenformer.models.block_configuration import BlockConfig
from tokenformer.models.configuration import TokenConfig, Tokens, TransformerConfig
from tokenformer.models.image_text import TokenformerForImageTextToText
from tokenformer.models.language import TransformerForCausalLM
from tokenformer.models.loading import check_folder, join_names, load_config, load_pretrained
from tokenformer.models.model_card import read_history, write_card
from tokenformer.models.model_classes import MODEL_CLASSES
from tokenformer.models.saved_folder import save_except_weights
from tokenformer.models.weight_files import StoredTensor, read_headers, weight_files
from tokenformer.models.weight_writer import WeightWriter

REPORT = "growth.json"
SPARSITY_REPORT = "sparsity.json"
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
    "processor_config.json",
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
    model_class, memory = MODEL_CLASSES[type(config)], ReusedMemory()
    growth = TokenGrowth(
        model_class,
        config,
        target_token_counts(config, to, tokens),
        init=init,
        scale=scale,
        seed=seed,
        old_rate=old_rate,
        copy=lambda name, tensor: (tensor, ParameterMapping(name)),
        allocate=memory.allocate,
    )
    shapes = grown_tensors(growth, read_headers(source, weight_files(source)))
    out.mkdir(parents=True, exist_ok=True)
    writer = WeightWriter(out, shapes)
    with stored_tensors(source) as stored:
        names = [name for name in writer.names if name in stored.files]
        with closing(growth.tensors(stored.__getitem__, names)) as made:
            hashes = writer.write(memory.release_after(in_order(made, writer.names)))
    report = growth.report(**growth.report_fields)
    grown = growth.build(model_class, shapes)
    save_except_weights(grown, out, hashes)
    save_companions(grown.config, report, source, out)
    return report


def grown_tensors(growth: TokenGrowth, stored: dict[str, StoredTensor]) -> dict[str, Tensor]:
    """Return the tensors of the grown model on the meta device, in the dtypes of the old ones."""
    wanted = growth.larger.state_dict()
    if unknown := [name for name in stored if name not in wanted]:
        raise ValueError(f"the model has no parameter {join_names(unknown)}")
    shapes = {}
    for name, tensor in wanted.items():
        layer, _, kind = name.rpartition(".")
        like = name if name in stored or kind != "scale_tokens" else f"{layer}.key_tokens"
        if name not in growth.larger.all_tied_weights_keys:
            shapes[name] = tensor.to(stored[like].torch_dtype)
    return shapes


class ReusedMemory:
    """Memory of the layers that are being grown.

    The system hands out fresh memory page by page, which takes longer than filling it with random
    numbers: a layer takes that of an earlier one that has been written.
    """

    def __init__(self) -> None:
        self.free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        self.used: set[int] = set()

    def allocate(self, old: Tensor, size: int) -> Tensor:
        """Return memory for `size` rows like `old`, not initialized. Threads may call this."""
        shape = torch.Size((size, old.shape[1]))
        try:
            rows = self.free[shape, old.dtype].pop()
        except (KeyError, IndexError):
            rows = old.new_empty(shape)
        self.used.add(rows.data_ptr())
        return rows

    def release_after(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors; each is overwritten some time after the next one is asked for."""
        for name, tensor in tensors:
            yield name, tensor
            if tensor.data_ptr() in self.used:
                self.free.setdefault((tensor.shape, tensor.dtype), []).append(tensor)


def in_order(
    tensors: Iterable[tuple[str, Tensor]], names: list[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in the order of `names`, holding those that come early."""
    source, early = iter(tensors), dict[str, Tensor]()
    for name in names:
        while name not in early:
            early.update([next(source)])
        yield name, early.pop(name)


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


def grow_joint_folder(
    source: Path, out: Path, to: Any = None, *, verify: bool = True, **options: Any
) -> GrowthReport:
    """Grow the vision-language model in folder `source` into folder `out`; see
    `grow_new_tokens`."""
    model = load_pretrained(
        TokenformerForImageTextToText, str(source), verify=verify, dtype="auto"
    ).eval()
    larger, report = grow_new_tokens(model, to, **options)
    save_model_folder(larger, report, source, out)
    return report


def save_model_folder(
    model: PreTrainedModel, report: GrowthReport, source: Path, out: Path
) -> None:
    """Save a model that came from folder `source`: weights, report, companion files and card."""
    model.save_pretrained(out)
    save_companions(model.config, report, source, out)


def save_companions(config: BlockConfig, report: GrowthReport, source: Path, out: Path) -> None:
    """Add the report, companion files and card to a saved model that came from folder `source`."""
    copy_companions(source, out)
    report.save(out / REPORT)
    write_card(out, config, [*read_history(source), history_line(report.asdict())])


def copy_companions(source: Path, out: Path) -> None:
    for name in COMPANION_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, out / name)


def save_sparse_folder(
    model: PreTrainedModel, report: SparsityReport, source: Path, out: Path
) -> None:
    """Save a sparsified model that came from folder `source`: weights, report, companion files and
    card."""
    model.save_pretrained(out)
    copy_companions(source, out)
    report.save(out / SPARSITY_REPORT)
    how = (
        f"{report.active_parameters:,} of {report.parameters:,} parameters active per token, "
        f"groups of {report.group_size} tokens"
        if report.method == "routing"
        else "thresholds on what a token adds to an output"
    )
    line = f"Made sparse by {report.method}: {how}"
    write_card(out, model.config, [*read_history(source), line])


def history_line(report: dict[str, Any]) -> str:
    """Return the line of the model card for a saved report of growth, pruning or merging."""
    method = report["method"]
    grown = "Grown by tokens" if method == "tokens" else f"Grown by {method}"
    verbs = {"prune": "Pruned", "merge": "Merged with another model", "upcycle": "Upcycled"}
    verb = verbs.get(method, grown)
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
