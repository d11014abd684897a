"""Loads model folders. They must be complete, and their code is never run.

    model = load_pretrained(AutoModelForCausalLM, "runs/text/model")

transformers initializes missing weights at random; here they are an error. The configuration and
the headers of the weight files are compared first, which takes milliseconds, and local weight files
are verified once (`tokenformer.models.checksums`). Every failure is a one-line `ModelFolderError`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tokenformer.errors import TokenformerError, first_line
from tokenformer.models.block_configuration import BlockConfig, check_count
from tokenformer.models.checksums import verify_weights
from tokenformer.models.weight_files import (
    ModelFolderError,
    StoredTensor,
    read_headers,
    read_object,
    weight_files,
)

MAX_NAMES = 12
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
GENERATION = "generation_config.json"


class IncompleteModelError(ModelFolderError):
    """A folder has missing weights, or weights of another shape or dtype."""


def load_pretrained(model_class: Any, name: str, *, verify: bool = True, **options: Any) -> Any:
    """Load a folder or hub name by `model_class.from_pretrained`.

    `trust_remote_code=False` keeps transformers from asking on the terminal whether to run code in
    the folder. `verify=False` skips the search of the weights for damage, NaN and inf.
    """
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # problems are reported below, in one line
    try:
        config = load_config(name)
        if Path(name).is_dir():
            check_folder(Path(name), config, verify=verify)
        model, found = model_class.from_pretrained(
            name,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
    except TokenformerError:
        raise
    except Exception as error:  # anything transformers raises for a bad folder
        raise ModelFolderError(name, first_line(error)) from error
    finally:
        logging.set_verbosity(verbosity)
    misshaped = [
        f"{key} {[*shape]} instead of {[*wanted]}"
        for key, shape, wanted in sorted(found["mismatched_keys"])
    ]
    refuse_incomplete(name, sorted(found["missing_keys"]), misshaped)
    return model


def device() -> torch.device:
    """Return the device that models run on: this process's GPU, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def load_for_training(model_class: Any, folder: str, *, quantized: bool = False) -> Any:
    """Load a model in fp32, whatever dtype it was saved in: updates at usual learning rates are
    too small for half precision, and a resumed run builds its model in fp32. `quantized` allows a
    model whose own weights will not train."""
    model = load_pretrained(model_class, folder, dtype=torch.float32)
    if getattr(model, "is_quantized", False) and not quantized:
        raise ValueError(f"{folder} is quantized; train the model it was quantized from")
    return model


def load_tokenformer(folder: Path, *, verify: bool = True) -> Any:
    """Load a TokenFormer, in eval mode."""
    from tokenformer.models.configuration import TokenConfig
    from tokenformer.models.model_classes import MODEL_CLASSES

    if not (folder / "config.json").exists():
        raise TokenformerError(f"{folder} is not a model folder: it has no config.json")
    config = load_config(str(folder))
    if not isinstance(config, TokenConfig):
        raise TokenformerError(f"{folder} is a {config.model_type} model, not a TokenFormer")
    return load_pretrained(MODEL_CLASSES[type(config)], str(folder), verify=verify).eval()


def load_config(name: str) -> Any:
    """Load the configuration of a model folder or a hub name."""
    from transformers import AutoConfig

    if Path(name).is_dir():
        check_config(Path(name))
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        raise ModelFolderError(name, first_line(error)) from error


def check_config(folder: Path) -> None:
    """Raise an error for values that would make transformers or torch fail with a traceback."""
    found = read_object(folder, "config.json")
    for name in SIZES:
        if name in found and str(found.get("model_type")).startswith("tokenformer"):
            try:
                check_count(name, found[name])
            except ValueError as error:
                raise ModelFolderError(folder, f"config.json: {error}") from None
    for name in ("dtype", "torch_dtype"):
        value = found.get(name)
        if not isinstance(value, str) or value == "auto":
            continue
        if not isinstance(getattr(torch, value, None), torch.dtype):
            raise ModelFolderError(folder, f"config.json: {name}={value!r} is not a torch dtype")
    weights = found.get("transformers_weights")
    if weights is not None and (not isinstance(weights, str) or Path(weights).name != weights):
        reason = f"config.json: transformers_weights={weights!r} names a file outside the folder"
        raise ModelFolderError(folder, reason)


def check_folder(folder: Path, config: Any, *, verify: bool = True) -> None:
    """Compare the weight files of a folder with its configuration before anything is allocated, and
    verify them. Models of other libraries are left to transformers, except that their files must be
    inside the folder."""
    if (folder / GENERATION).exists():
        check_generation(folder)
    if not isinstance(config, BlockConfig):
        if (folder / "model.safetensors.index.json").exists():
            weight_files(folder)
        return
    files = weight_files(folder)
    compare(folder, config, read_headers(folder, files))
    if verify:
        verify_weights(folder, files)


def check_generation(folder: Path) -> None:
    from transformers import GenerationConfig

    found = read_object(folder, GENERATION)
    try:
        GenerationConfig.from_dict(found)
    except Exception as error:
        raise ModelFolderError(folder, f"{GENERATION} is not valid: {first_line(error)}") from error


def compare(folder: Path, config: Any, stored: dict[str, StoredTensor]) -> None:
    """Raise an error for tensors that are missing or have the wrong shape or dtype."""
    from tokenformer.models.configuration import QUANTIZATION_METHOD
    from tokenformer.models.model_classes import build_on_meta
    from tokenformer.models.quantization import quantize_model

    quantization = getattr(config, "quantization_config", None) or {}
    method = quantization if isinstance(quantization, dict) else quantization.to_dict()
    if quantization and method.get("quant_method") != QUANTIZATION_METHOD:
        return  # another library, with its own tensors
    if config.num_hidden_layers > len(stored):  # before building all of them
        layers = f"{config.num_hidden_layers:,} layers"
        raise IncompleteModelError(folder, f"config.json has {layers}, more than the weights")
    model = build_on_meta(config)
    if quantization:
        quantize_model(model, method.get("bits", 8))
    prefix = f"{model.base_model_prefix}."  # models without a head are saved without the prefix
    found = {name.removeprefix(prefix): tensor for name, tensor in stored.items()}
    tied = set(model.all_tied_weights_keys)
    missing, misshaped, mistyped = [], [], []
    for name, wanted in model.state_dict().items():
        tensor = found.get(name.removeprefix(prefix))
        if tensor is None:
            missing += [] if name in tied else [name]
        elif tensor.shape != tuple(wanted.shape):
            misshaped.append(f"{name} {[*tensor.shape]} instead of {[*wanted.shape]}")
        elif not same_kind(tensor.torch_dtype, wanted.dtype):
            kind = str(tensor.torch_dtype or tensor.dtype).removeprefix("torch.")
            mistyped.append(f"{name} {kind}")
    refuse_incomplete(folder, missing, misshaped, mistyped)


def same_kind(stored: torch.dtype | None, wanted: torch.dtype) -> bool:
    """Whether stored weights can be loaded as `wanted`: any floating point as any other."""
    if stored is None or not wanted.is_floating_point:
        return stored == wanted
    return stored.is_floating_point


def refuse_incomplete(
    name: Path | str,
    missing: Iterable[str],
    misshaped: Iterable[str],
    mistyped: Iterable[str] = (),
) -> None:
    problems = {
        "missing": missing,
        "wrong shape of": misshaped,
        "wrong dtype of": mistyped,
    }
    if lines := [f"{what} {join_names(keys)}" for what, keys in problems.items() if keys]:
        raise IncompleteModelError(name, "; ".join(lines))


def join_names(names: Iterable[str]) -> str:
    """Join names, at most MAX_NAMES of them."""
    names = list(names)
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
