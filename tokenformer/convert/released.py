"""Converting the authors' checkpoints to our Hugging Face folders and back, bit for bit.

Their `pytorch_model.bin` is a flat state dict: the embedding, ten token matrices per layer, and the
final norm. Both directions only rename tensors, which are read through a memory map. All names and
shapes are checked before anything is written.
"""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from tokenformer.convert.conversion_summary import ConversionSummary
from tokenformer.convert.model_writer import write_folder
from tokenformer.convert.released_config import to_ours, to_released
from tokenformer.convert.source import (
    CONFIG,
    RELEASED,
    TOKENFORMER,
    WEIGHTS,
    Source,
    read_config,
)
from tokenformer.convert.source_tokenizer import find_tokenizer
from tokenformer.convert.state_dict import read_state_dict
from tokenformer.errors import ConversionError
from tokenformer.growth.model_folder import COMPANION_FILES, stored_tensors
from tokenformer.models.configuration import TokenformerConfig
from tokenformer.models.loading import check_folder, join_names, load_config

PARTS = {
    "attention.q": "attention.query",
    "attention.k": "attention.key",
    "attention.v": "attention.value",
    "attention.o": "attention.proj",
    "ffn": "mlp",
}
"""Our name of each Pattention within a layer -> the released name."""
EMBEDDING = "sequential.0.word_embeddings.weight"
LAYER = re.compile(r"sequential\.(\d+)\.(?:attention|mlp)\.")
FIRST_LAYER = 2
"""`sequential.1` and `sequential.(L + 2)`, before the final norm, have no tensors."""


def convert_released(
    source: Source, out: Path, num_attention_heads: int | None = None, tokenizer: str | None = None
) -> ConversionSummary:
    """Convert a released `pytorch_model.bin`, or the folder that holds one."""
    stored = read_state_dict(source.path)
    sizes = check_tensors(stored)
    options = to_ours(read_config(source.folder), sizes, num_attention_heads)
    found = find_tokenizer(tokenizer, source.folder, sizes["vocab_size"])
    config = TokenformerConfig(**options, **({} if found is None else found.special_ids))
    names = released_names(config.num_hidden_layers)
    tensors = {ours: stored[theirs] for ours, theirs in names.items()}
    write_folder(config, tensors, None if found is None else found.tokenizer, out)
    location = None if found is None else found.location
    return ConversionSummary.of(source, config, tensors, to=TOKENFORMER, tokenizer=location)


def convert_to_released(source: Source, out: Path, no_verify: bool = False) -> ConversionSummary:
    """Convert one of our model folders to a `pytorch_model.bin`, config.json and tokenizer."""
    config = load_config(str(source.path))
    check_folder(source.path, config, verify=not no_verify)
    document = to_released(config)
    names = released_names(config.num_hidden_layers)
    with stored_tensors(source.path) as files:
        tensors = {names.get(name, name): files[name] for name in files.names}
        check_tensors(tensors)
        torch.save(tensors, out / WEIGHTS)
    document["torch_dtype"] = str(tensors[EMBEDDING].dtype).removeprefix("torch.")
    (out / CONFIG).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    copied = [
        n for n in COMPANION_FILES if n != "generation_config.json" and (source.path / n).exists()
    ]
    for name in copied:
        shutil.copyfile(source.path / name, out / name)
    return ConversionSummary.of(
        source, config, tensors, to=RELEASED, tokenizer=str(source.path) if copied else None
    )


def released_names(layers: int) -> dict[str, str]:
    """Return the mapping from our tensor names to the released names."""
    names = {"model.embed_tokens.weight": EMBEDDING}
    for layer in range(layers):
        for ours, theirs in PARTS.items():
            for half in ("key", "value"):
                names[f"model.layers.{layer}.{ours}.{half}_tokens"] = (
                    f"sequential.{FIRST_LAYER + layer}.{theirs}.{half}_param_tokens"
                )
    for half in ("weight", "bias"):
        names[f"model.norm.{half}"] = f"sequential.{FIRST_LAYER + layers + 1}.norm.{half}"
    return names


def check_tensors(stored: Mapping[str, Tensor]) -> dict[str, int]:
    """Check that all tensors exist with consistent shapes, and return the sizes of the model."""
    sizes = read_sizes(stored)
    compare(expected_shapes(sizes), stored)
    return sizes


def read_sizes(stored: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the sizes of the model, by our names, each from the first tensor that has it."""
    numbers = [int(match[1]) for name in stored if (match := LAYER.match(name))]
    # Ignore numbers above the tensor count: a forged one would make us list names forever.
    layers = max((n for n in numbers if n <= len(stored)), default=0) - FIRST_LAYER + 1
    if layers < 1:
        raise ConversionError(
            f"not a released TokenFormer: its keys are {join_names(stored)}; expected "
            f"{EMBEDDING}, sequential.2.attention.query.key_param_tokens, ..."
        )
    known = [name for name in released_names(layers).values() if name in stored]
    matrices = {name: stored[name] for name in known if stored[name].ndim == 2}
    size_tensors = {
        "vocab_size": EMBEDDING,
        "qkv_tokens": ".attention.query.key_param_tokens",
        "output_tokens": ".attention.proj.key_param_tokens",
        "ffn_tokens": ".mlp.key_param_tokens",
    }
    sizes = {"num_hidden_layers": layers}
    for option, ending in size_tensors.items():
        matrix = next((t for name, t in matrices.items() if name.endswith(ending)), None)
        if matrix is None:
            expected = [name for name in released_names(layers).values() if name.endswith(ending)]
            raise ConversionError(f"missing or not matrices: {join_names(expected)}")
        sizes[option] = matrix.shape[0]
    return {**sizes, "hidden_size": matrices[EMBEDDING].shape[1]}


def expected_shapes(sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
    width = sizes["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {}
    for name in released_names(sizes["num_hidden_layers"]).values():
        if name == EMBEDDING:
            shapes[name] = (sizes["vocab_size"], width)
        elif ".norm." in name:
            shapes[name] = (width,)
        else:
            option = "ffn" if ".mlp." in name else "output" if ".proj." in name else "qkv"
            shapes[name] = (sizes[f"{option}_tokens"], width)
    return shapes


def compare(shapes: dict[str, tuple[int, ...]], stored: Mapping[str, Tensor]) -> None:
    """Raise with every tensor that is missing, unknown, or of the wrong shape or dtype."""
    problems = []
    if missing := [name for name in shapes if name not in stored]:
        problems.append(f"missing: {join_names(missing)}")
    if extra := [name for name in stored if name not in shapes]:
        problems.append(f"unknown: {join_names(extra)}")
    misshaped = [
        f"{name} {[*stored[name].shape]}, expected {[*shape]}"
        for name, shape in shapes.items()
        if name in stored and tuple(stored[name].shape) != shape
    ]
    if misshaped:
        problems.append(f"wrong shape: {join_names(misshaped)}")
    dtype = stored[EMBEDDING].dtype
    if not dtype.is_floating_point:
        problems.append(f"{EMBEDDING} is {dtype}, not floating point")
    elif other := [f"{name} {t.dtype}" for name, t in stored.items() if t.dtype != dtype]:
        problems.append(f"dtype differs from the embedding's {dtype}: {join_names(other)}")
    if problems:
        raise ConversionError("; ".join(problems))
