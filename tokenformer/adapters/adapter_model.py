"""The tuner of token adapters: what peft calls to add, switch, merge and remove them."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from peft import TaskType
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from tokenformer.adapters.adapter_config import TokenAdapterConfig
from tokenformer.adapters.adapter_layer import (
    BASE,
    SampleAdapters,
    TokenAdapterLayer,
    TokenLayer,
    adapter_layer,
)
from tokenformer.adapters.peft_registration import PREFIX
from tokenformer.errors import AdapterError
from tokenformer.growth.tokens.token_counts import LayerProjection, config_with_tokens
from tokenformer.growth.tokens.token_set import FROZEN_ENCODER, layer_place, token_layers
from tokenformer.layers.quantized import QuantizedPattention
from tokenformer.layers.router import routing_biases
from tokenformer.models.configuration import TokenConfig, TokenformerConfig
from tokenformer.models.fingerprint import fingerprint
from tokenformer.models.image_text_configuration import TokenformerImageTextConfig


class TokenAdapterModel(BaseTuner):
    prefix: str = PREFIX
    tuner_layer_cls = TokenAdapterLayer
    target_module_mapping = {  # noqa: RUF012
        "tokenformer": ["ffn"],
        "tokenformer_vision": ["ffn"],
        "tokenformer_image_text": ["ffn"],
    }

    def _prepare_model(self, peft_config: TokenAdapterConfig, model: nn.Module) -> None:
        if not isinstance(getattr(model, "config", None), TokenConfig):
            raise TypeError(
                f"a token adapter needs a TokenFormer, not a {type(model).__name__}; use LoRA for "
                "other models"
            )
        if any(layer.merged for layer in self.adapter_layers()):
            raise ValueError("the model has merged adapters; call unmerge_adapter first")
        check_base(peft_config, model)
        if peft_config.task_type is None and isinstance(model.config, TokenformerConfig):
            peft_config.task_type = TaskType.CAUSAL_LM  # AutoPeftModel looks for the base by it

    @staticmethod
    def _check_target_module_exists(config: TokenAdapterConfig, key: str) -> Any:
        """Leave out the frozen encoder of a vision-language model, which gets no gradients."""
        if FROZEN_ENCODER in key:
            return False
        return BaseTuner._check_target_module_exists(config, key)

    def _create_and_replace(  # type: ignore[override]
        self,
        peft_config: TokenAdapterConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
    ) -> None:
        if isinstance(target, TokenAdapterLayer):
            target.update_layer(adapter_name, peft_config, peft_config.inference_mode)
            return
        row = None
        if isinstance(target, TokenLayer):  # others are refused
            row = merge_row(self.model.config, layer_place(current_key))
        layer = adapter_layer(target, adapter_name, peft_config, current_key, row)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)  # an additional adapter is not trained until it is active
        self._replace_module(parent, target_name, layer, target)

    def _replace_module(
        self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module
    ) -> None:
        """Peft's own looks for a `weight`, which a Pattention does not have."""
        setattr(parent, child_name, new_module)

    def merge_adapter(
        self, adapter_names: list[str] | None = None, safe_merge: bool = False
    ) -> None:
        self.check_merge(safe_merge, adapter_names)
        super().merge_adapter(adapter_names, safe_merge)

    def check_merge(self, safe_merge: bool, adapter_names: list[str] | None) -> None:
        """Raise before any layer has changed if one of them could not merge."""
        for layer in self.adapter_layers():
            layer.check_merge(safe_merge, adapter_names)

    def adapter_layers(self) -> list[TokenAdapterLayer]:
        return [module for module in self.modules() if isinstance(module, TokenAdapterLayer)]

    def _unload_and_optionally_merge(
        self,
        merge: bool = True,
        progressbar: bool = False,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
    ) -> Any:
        """Return an ordinary TokenFormer; with the tokens of the adapters if they are merged."""
        if merge:
            self.check_merge(safe_merge, adapter_names)
        super()._unload_and_optionally_merge(merge, progressbar, safe_merge, adapter_names)
        model: Any = self.model
        before, after = model.config, config_of(model)
        after._attn_implementation = before._attn_implementation
        for module in model.modules():
            if getattr(module, "config", None) is before:
                module.config = after
        return model

    def modules_for(self, names: Sequence[str]) -> list[nn.Module]:
        """Return the modules that take the names of a batch; raise for an unknown name."""
        layers = self.adapter_layers()
        known = {name for layer in layers for name in layer.token_adapter_keys}
        if unknown := sorted(set(names) - known - {BASE}):
            raise ValueError(
                f"adapter_names: there is no adapter {unknown[0]!r}; there are "
                f"{', '.join(sorted(known))}, and {BASE} for none"
            )
        saved = [m for m in self.modules() if isinstance(m, AuxiliaryTrainingWrapper)]
        return [*layers, *saved]

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Pass `adapter_names`, one per sample, to every adapted layer."""
        adapter_names = kwargs.pop("adapter_names", None)
        if adapter_names is None:
            yield
            return
        if self.training:
            raise ValueError("adapter_names is for inference; call model.eval() first")
        if not isinstance(adapter_names, list | tuple):
            raise TypeError(f"adapter_names must be a list of str, not {type(adapter_names)}")
        beams = kwargs.get("num_beams") or 1
        names = adapter_names
        if not isinstance(names, SampleAdapters) or beams > 1:
            names = SampleAdapters(name for name in adapter_names for _ in range(beams))
        if not names.modules:
            names.modules = self.modules_for(names)
        hook = partial(pass_adapter_names, names)
        handles = [
            module.register_forward_pre_hook(hook, with_kwargs=True) for module in names.modules
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def pass_adapter_names(
    names: Sequence[str], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, "adapter_names": names}


def merge_row(config: TokenConfig, place: LayerProjection) -> int | None:
    """Return the row of a layer at which tokens are merged: those of a joint model follow its new
    tokens; None is the end."""
    if isinstance(config, TokenformerImageTextConfig) and config.is_joined:
        return sum(config.parts(*place)[:2])
    return None


def config_of(model: nn.Module) -> TokenConfig:
    """Return the configuration of a model whose layers have other token counts than it says. All
    layers keep their scales; the rates of tokens are those of before, 1 for the merged, which count
    as added by one more growth."""
    config = cast(TokenConfig, model.config)
    layers = dict(token_layers(model).values())
    counts = {place: layer.num_tokens for place, layer in layers.items()}
    scales = {(projection, n): config.scale(projection, n) for projection, n in layers}
    rates, ages = {}, {}
    for place, layer in layers.items():
        known = config.ages(*place)
        row = merge_row(config, place)
        row = len(known) if row is None else row
        merged = layer.num_tokens - len(known)
        ages[place] = [*known[:row], *[config.growths + 1] * merged, *known[row:]]
        if before := config.row_rates(*place):
            rates[place] = [*before[:row], *[1.0] * merged, *before[row:]]
    return config_with_tokens(
        config, counts, scales, learned_scale=config.learned_scale, rates=rates, ages=ages
    )


QUANTIZED = "quantized"
"""The fingerprint of a quantized base, whose weights tell nothing about those of the original."""


def check_base(config: TokenAdapterConfig, model: nn.Module) -> None:
    """Compare the base with the one that an adapter was trained on; a new adapter takes its
    fingerprint, also if the same configuration was used for another base before."""
    found = base_fingerprint(model, config.modules_to_save or ())
    expected = config.base_fingerprint
    if expected is None or getattr(config, "is_new", False):
        config.base_fingerprint = found
        config.is_new = True  # not saved: it is not a field
        return
    if found in (None, expected):
        return
    trained_on = config.base_model_name_or_path or "another model"
    half = any(parameter.dtype is torch.float16 for parameter in model.parameters())
    if QUANTIZED in (found, expected) or half:
        why = "fp16" if half else "quantized"
        warnings.warn(
            f"the weights of the base cannot be compared with those the adapter was trained on "
            f"({trained_on}), because one of them is {why}",
            stacklevel=2,
        )
        return
    raise AdapterError(
        f"the adapter was trained on {trained_on} (weights {expected}), not on this model (weights "
        f"{found}); load the base it was trained on"
    )


def base_fingerprint(model: nn.Module, replaced: Iterable[str] = ()) -> str | None:
    """Return the fingerprint of the base's weights, without the modules that the adapter replaces,
    such as the classifier of other classes. A model whose weights do not change may keep those it
    had in `known_fingerprints`."""
    known: dict[frozenset[str], str | None] = getattr(model, "known_fingerprints", {})
    left_out = frozenset(replaced)
    if left_out not in known:
        known[left_out] = hash_base(model, left_out)
    return known[left_out]


def hash_base(model: nn.Module, left_out: frozenset[str]) -> str | None:
    if any(isinstance(module, QuantizedPattention) for module in model.modules()):
        return QUANTIZED
    weights: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        own = base_name(name)
        is_base = PREFIX not in name and ".modules_to_save." not in name
        if is_base and not left_out & set(own.split(".")):
            weights[own] = parameter
    weights |= {base_name(name): bias for name, bias in routing_biases(model)}
    return fingerprint(weights.items())


def base_name(name: str) -> str:
    """Return the name that a parameter of the base has without adapters."""
    return name.replace(".base_layer", "").replace(".original_module", "")
