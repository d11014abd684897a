"""A saved adapter: a folder in peft's layout with a token adapter or LoRA, read without pickle.

    adapter = AdapterFolder.read(find_adapter("runs/python"))
    model = attach_adapters(model, [adapter])

Everything is checked before the model changes: the files, the kind of adapter, its options, the
base it was trained on, names and shapes of its weights. Every failure is a one-line `AdapterError`.
"""

import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model_state_dict
from peft.utils import set_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn

from tokenformer.adapters.adapter_config import TokenAdapterConfig
from tokenformer.adapters.adapter_model import TokenAdapterModel
from tokenformer.adapters.peft_registration import PREFIX, TOKEN_ADAPTER
from tokenformer.errors import AdapterError, TokenformerError, first_line, one_line
from tokenformer.models.loading import join_names
from tokenformer.models.weight_files import StoredTensor, read_headers, read_object
from tokenformer.paths import ADAPTER_CONFIG

WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
KINDS: dict[str, type[PeftConfig]] = {TOKEN_ADAPTER.value: TokenAdapterConfig, "LORA": LoraConfig}
LORA_INITS = (True, False, "gaussian", "orthogonal")
"""Initializations that leave the base as it is; others replace its weights or read files."""
LORA_OPTIONS = {
    "task_type",
    "peft_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "r",
    "target_modules",
    "exclude_modules",
    "lora_alpha",
    "lora_dropout",
    "fan_in_fan_out",
    "use_rslora",
    "modules_to_save",
    "init_lora_weights",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
    "use_dora",
    "lora_bias",
    "target_parameters",
}
"""Options that may differ from their defaults. Others change the base, import or read files."""


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter on disk, whose configuration and headers have been checked."""

    folder: Path
    config: PeftConfig
    stored: dict[str, StoredTensor]

    @classmethod
    def read(cls, folder: Path | str) -> "AdapterFolder":
        folder = Path(folder)
        kind = read_object(folder, ADAPTER_CONFIG).get("peft_type")
        if kind not in KINDS:
            raise refused(
                folder, f"peft_type={kind!r} is not supported; use one of {', '.join(KINDS)}"
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # options of another version of peft
                config = KINDS[kind].from_pretrained(str(folder))
        except Exception as error:  # whatever a damaged configuration makes peft raise
            raise refused(folder, f"{ADAPTER_CONFIG}: {first_line(error)}") from None
        if isinstance(config, LoraConfig):
            check_lora(folder, config)
        if not (folder / WEIGHTS).is_file():
            if (folder / PICKLED).exists():
                why = f"{PICKLED} is a pickle, which can run code when it is read"
                raise refused(folder, f"{why}; save the adapter as {WEIGHTS}")
            raise refused(folder, f"{WEIGHTS} is missing")
        stored = read_headers(folder, [folder / WEIGHTS])
        check_sizes(folder, config, stored)
        return cls(folder, config, stored)

    def attach(self, model: nn.Module, name: str) -> PeftModel:
        """Attach the adapter to a model, which may have others attached; it is not active yet.
        If it does not fit, the adapter is removed and an `AdapterError` raised."""
        self.config.inference_mode = True
        if isinstance(model, PeftModel) and model.peft_type != self.config.peft_type:
            raise refused(
                self.folder, "token adapters and LoRA cannot be attached to the same model"
            )
        try:
            if isinstance(model, PeftModel):
                model.add_adapter(name, self.config)
            else:
                model = PeftModel(model, self.config, adapter_name=name)
            self.load_weights(model, name)
        except Exception as error:  # whatever peft raises for a model that does not fit
            if isinstance(model, PeftModel) and name in model.peft_config:
                with suppress(Exception):
                    model.delete_adapter(name)
            if isinstance(error, TokenformerError):
                raise
            raise refused(self.folder, one_line(error)) from error
        model.requires_grad_(False)
        return model.eval()

    def load_weights(self, model: PeftModel, name: str) -> None:
        """Compare the adapter's weights with what the model expects and load them."""
        wanted = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
        misshaped = [
            f"{key} {[*self.stored[key].shape]} instead of {[*tensor.shape]}"
            for key, tensor in wanted.items()
            if key in self.stored and self.stored[key].shape != tuple(tensor.shape)
        ]
        problems = {
            "wrong shape of": misshaped,
            "missing": [key for key in wanted if key not in self.stored],
            "not of this model:": [key for key in self.stored if key not in wanted],
        }
        if lines := [f"{what} {join_names(keys)}" for what, keys in problems.items() if keys]:
            raise refused(self.folder, f"it does not fit the model: {'; '.join(lines)}")
        tensors = load_file(self.folder / WEIGHTS)
        if bad := [key for key, tensor in tensors.items() if not tensor.isfinite().all()]:
            raise refused(self.folder, f"NaN or inf in {join_names(bad)}")
        set_peft_model_state_dict(model, tensors, adapter_name=name)


def check_sizes(folder: Path, config: PeftConfig, stored: dict[str, StoredTensor]) -> None:
    """Refuse options that the weights do not have, before anything of their size is allocated."""
    if isinstance(config, TokenAdapterConfig):
        if config.base_fingerprint is None:
            raise refused(folder, "base_fingerprint is missing, so its base cannot be checked")
        option, size, names = "num_tokens", config.num_tokens, PREFIX
    elif isinstance(config, LoraConfig) and not (config.rank_pattern or config.target_parameters):
        option, size, names = "r", config.r, "lora_A"
    else:
        return
    for key, tensor in stored.items():
        if names in key and tensor.shape[0] != size:
            raise refused(folder, f"{option}={size}, but {key} has {tensor.shape[0]} rows")


def check_lora(folder: Path, config: LoraConfig) -> None:
    default = LoraConfig()
    for option in (field.name for field in fields(config) if field.name not in LORA_OPTIONS):
        value = getattr(config, option)
        if value and value != getattr(default, option):
            raise refused(folder, f"the LoRA option {option}={value!r} is not supported")
    if config.init_lora_weights not in LORA_INITS:
        raise refused(
            folder,
            f"init_lora_weights={config.init_lora_weights!r} changes the base; save the adapter "
            "with peft's path_initial_model_for_weight_conversion",
        )


def refused(folder: Path, reason: str) -> AdapterError:
    return AdapterError(f"the adapter {folder} cannot be loaded: {reason}")


@torch.no_grad()
def attach_adapters(model: nn.Module, adapters: Sequence[AdapterFolder]) -> Any:
    """Return the model with these adapters, all active together.

    Token adapters with a shared norm are merged: the result is an ordinary, larger TokenFormer that
    computes the same, with native decoding. Others stay attached, as layers of the model.
    """
    names = [f"adapter{index}" for index in range(len(adapters))]
    adapted: Any = model
    for name, adapter in zip(names, adapters, strict=True):
        adapted = adapter.attach(adapted, name)
    try:
        adapted.base_model.set_adapter(names, inference_mode=True)
    except ValueError as error:  # such as two that replace the same classifier
        raise AdapterError(f"the adapters cannot be active together: {one_line(error)}") from None
    if can_merge(adapted.base_model, names):
        return adapted.merge_and_unload(adapter_names=names).eval()
    return adapted.get_base_model().eval()


def can_merge(tuner: Any, names: Iterable[str]) -> bool:
    """Whether merging these adapters gives exactly the adapted model."""
    if not isinstance(tuner, TokenAdapterModel):
        return False
    try:
        tuner.check_merge(False, list(names))
    except ValueError:
        return False
    return True
