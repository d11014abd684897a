"""Loading model folders: checked before anything is allocated, complete, and without their code.

    model = load_whole(AutoModelForCausalLM, "runs/text/model")

transformers initializes weights that it does not find at random; here they are an error. The
configuration and the headers of the weight files are compared first, which costs milliseconds, and
local weight files are verified once (`tokenformer.models.checksums`). Every failure is a
`ModelFolderError` of one line.
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

MOST_NAMED = 12
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
GENERATION = "generation_config.json"


class IncompleteModelError(ModelFolderError):
    """A folder lacks weights of its model, or has them in another shape."""


def load_whole(model_class: Any, name: str, *, verify: bool = True, **options: Any) -> Any:
    """`model_class.from_pretrained`, for a folder or a hub name.

    Code that the folder may bring is never run; without `trust_remote_code=False` transformers
    would ask on the terminal. `verify=False` skips reading the weights for damage, NaN and inf.
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
    except Exception as error:  # whatever an unsound folder leads transformers to
        raise ModelFolderError(name, first_line(error)) from error
    finally:
        logging.set_verbosity(verbosity)
    misshaped = [
        f"{key} {[*shape]} for {[*wanted]}"
        for key, shape, wanted in sorted(found["mismatched_keys"])
    ]
    refuse_incomplete(name, sorted(found["missing_keys"]), misshaped)
    return model


def load_for_training(model_class: Any, folder: str) -> Any:
    """In fp32, whatever it was saved in: rates are too small for the steps of half precision, and
    what is resumed is made anew from the configuration."""
    model = load_whole(model_class, folder, dtype=torch.float32)
    if getattr(model, "is_quantized", False):
        raise ValueError(f"{folder} has rounded numbers; begin with the model it was made from")
    return model


def load_tokens(folder: Path, *, verify: bool = True) -> Any:
    """A TokenFormer from its folder, in eval mode, for commands that work on its tokens."""
    from tokenformer.models.configuration import TokenConfig
    from tokenformer.models.model_classes import MODEL_CLASSES

    if not (folder / "config.json").exists():
        raise TokenformerError(f"{folder} is not a model folder: it has no config.json")
    config = load_config(str(folder))
    if not isinstance(config, TokenConfig):
        raise TokenformerError(f"{folder} is a {config.model_type} model, not a TokenFormer")
    return load_whole(MODEL_CLASSES[type(config)], str(folder), verify=verify).eval()


def load_config(name: str) -> Any:
    """The configuration of a model folder or a hub name."""
    from transformers import AutoConfig

    if Path(name).is_dir():
        check_config(Path(name))
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        raise ModelFolderError(name, first_line(error)) from error


def check_config(folder: Path) -> None:
    """Refuse what transformers or torch would answer with a traceback."""
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
    """Compare a local folder with its configuration before anything is allocated, and verify its
    weights. Models of other libraries are left to transformers, but for where their files lie."""
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
    """Refuse tensors that are missing, of another shape or not of floating point."""
    from tokenformer.models.configuration import QUANTIZATION_METHOD
    from tokenformer.models.model_classes import build_on_meta
    from tokenformer.models.quantization import quantize_model

    quantization = getattr(config, "quantization_config", None) or {}
    method = quantization if isinstance(quantization, dict) else quantization.to_dict()
    if quantization and method.get("quant_method") != QUANTIZATION_METHOD:
        return  # of another library, with tensors of its own
    if config.num_hidden_layers > len(stored):  # before building them all
        layers = f"{config.num_hidden_layers:,} layers"
        raise IncompleteModelError(folder, f"config.json has {layers}, the weights do not")
    model = build_on_meta(config)
    if quantization:
        quantize_model(model)
    prefix = f"{model.base_model_prefix}."  # a model without a head is saved without it
    found = {name.removeprefix(prefix): tensor for name, tensor in stored.items()}
    tied = set(model.all_tied_weights_keys)
    missing, misshaped, mistyped = [], [], []
    for name, wanted in model.state_dict().items():
        tensor = found.get(name.removeprefix(prefix))
        if tensor is None:
            missing += [] if name in tied else [name]
        elif tensor.shape != tuple(wanted.shape):
            misshaped.append(f"{name} {[*tensor.shape]} for {[*wanted.shape]}")
        elif not same_kind(tensor.torch_dtype, wanted.dtype):
            kind = str(tensor.torch_dtype or tensor.dtype).removeprefix("torch.")
            mistyped.append(f"{name} {kind}")
    refuse_incomplete(folder, missing, misshaped, mistyped)


def same_kind(stored: torch.dtype | None, wanted: torch.dtype) -> bool:
    """Whether weights may be read as such: floating point as any other floating point."""
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
        "of the wrong shape": misshaped,
        "of the wrong dtype": mistyped,
    }
    if lines := [f"{what} are {shown(keys)}" for what, keys in problems.items() if keys]:
        raise IncompleteModelError(name, "; ".join(lines))


def shown(names: Iterable[str]) -> str:
    """Names in a line, of many the first."""
    names = list(names)
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
