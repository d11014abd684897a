"""The tuner of token adapters: what peft calls to add, switch, merge and remove them."""

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from peft.tuners.tuners_utils import BaseTuner
from torch import nn

from tokenformer.adapters.adapter_config import TokenAdapterConfig
from tokenformer.adapters.adapter_layer import BASE, TokenAdapterLayer
from tokenformer.adapters.peft_registration import PREFIX
from tokenformer.errors import AdapterError
from tokenformer.growth.tokens.token_counts import config_with_tokens
from tokenformer.growth.tokens.token_set import token_layers
from tokenformer.models.configuration import TokenConfig


class TokenAdapterModel(BaseTuner):
    prefix: str = PREFIX
    tuner_layer_cls = TokenAdapterLayer
    target_module_mapping = {  # noqa: RUF012
        "tokenformer": ["ffn"],
        "tokenformer_vision": ["ffn"],
    }

    def _prepare_model(self, peft_config: TokenAdapterConfig, model: nn.Module) -> None:
        if not isinstance(getattr(model, "config", None), TokenConfig):
            raise TypeError(
                f"a token adapter needs a TokenFormer, not a {type(model).__name__}; use LoRA for "
                "other models"
            )
        check_base(peft_config, model)

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
        layer = TokenAdapterLayer(target, adapter_name, peft_config, current_key)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)  # an additional adapter is not trained until it is active
        self._replace_module(parent, target_name, layer, target)

    def _replace_module(
        self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module
    ) -> None:
        """Peft's own looks for a `weight`, which a Pattention does not have."""
        setattr(parent, child_name, new_module)

    def merge_and_unload(
        self,
        progressbar: bool = False,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
    ) -> nn.Module:
        """Return an ordinary TokenFormer that has the tokens of the adapters."""
        model = super().merge_and_unload(progressbar, safe_merge, adapter_names)
        model.config = config_of(model)
        return model

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
        layers = [m for m in self.modules() if isinstance(m, TokenAdapterLayer)]
        known = {name for layer in layers for name in layer.token_adapter_keys}
        if unknown := sorted(set(adapter_names) - known - {BASE}):
            raise ValueError(
                f"adapter_names: there is no adapter {unknown[0]!r}; there are "
                f"{', '.join(sorted(known))}, and {BASE} for none"
            )
        beams = kwargs.get("num_beams") or 1
        names = [name for name in adapter_names for _ in range(beams)]
        hook = partial(pass_adapter_names, names)
        handles = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def pass_adapter_names(
    names: Sequence[str], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, "adapter_names": names}


def config_of(model: nn.Module) -> TokenConfig:
    """Return the configuration of a model whose layers have other token counts than it says. All
    layers keep their scales; the rates of tokens are those of before, 1 for the merged."""
    config = cast(TokenConfig, model.config)
    layers = dict(token_layers(model).values())
    counts = {place: layer.num_tokens for place, layer in layers.items()}
    scales = {(projection, n): config.scale(projection, n) for projection, n in layers}
    rates = {}
    for (projection, n), layer in layers.items():
        if before := config.row_rates(projection, n):
            rates[projection, n] = [*before, *[1.0] * (layer.num_tokens - len(before))]
    return config_with_tokens(
        config, counts, scales, learned_scale=config.learned_scale, rates=rates
    )


def check_base(config: TokenAdapterConfig, model: nn.Module) -> None:
    """Compare the base with the one that an adapter was trained on; a new adapter takes its
    fingerprint."""
    if getattr(model.config, "quantization_config", None) is not None:
        if config.base_fingerprint is not None:
            warnings.warn(
                "the base is quantized, so its weights cannot be compared with those the adapter "
                "was trained on",
                stacklevel=2,
            )
        return
    found = fingerprint(model)
    if config.base_fingerprint is None:
        config.base_fingerprint = found
    elif found is not None and found != config.base_fingerprint:
        raise AdapterError(
            f"the adapter was trained on {config.base_model_name_or_path or 'another model'} "
            f"(weights {config.base_fingerprint}), not on this model (weights {found}); load the "
            "base it was trained on"
        )


@torch.no_grad()
def fingerprint(model: nn.Module) -> str | None:
    """Return a hash of the base's weights, rounded to bfloat16 so that a model and its copies in
    lower precision agree; None if it has no data yet."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if PREFIX in name:
            continue
        if parameter.is_meta:
            return None
        digest.update(f"{name.replace('.base_layer', '')} {tuple(parameter.shape)}".encode())
        rounded = parameter.detach().to("cpu", torch.bfloat16).contiguous()
        digest.update(rounded.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
