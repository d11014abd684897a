"""Building blocks of all models: layers, attention kernels by name, the two sets of projections.

Language and vision models differ in embedding and head. TokenFormer and Transformer differ in one
function, `projections`, which builds the five projections of a layer. All are native Hugging Face
models.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from tokenformer.layers import (
    Attention,
    GeluMLP,
    LayerNorm,
    ParallelBlock,
    PatchEmbedding,
    Pattention,
    RoutedPattention,
    SequentialBlock,
    SwiGLU,
    ThresholdedPattention,
)
from tokenformer.layers.norm import NORMS
from tokenformer.layers.router import LearnedRouter, Router
from tokenformer.models.block_configuration import BlockConfig
from tokenformer.models.configuration import MatrixConfig, TokenConfig

Projections = Callable[[Any, int], list[nn.Module]]
"""(config, layer) -> q, k, v, o and the feed-forward layer."""


class NamedAttention(Attention):
    """Attention whose kernel is looked up by name: sdpa, eager, flash_attention_2, ..."""

    def __init__(
        self, *projections: nn.Module, config: BlockConfig, layer_idx: int, is_causal: bool
    ) -> None:
        super().__init__(
            *projections,
            head_dim=config.head_dim,
            num_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            is_causal=is_causal,
            layer_idx=layer_idx,
        )
        self.config = config

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        kernel: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention
        )
        return kernel(self, query, key, value, attention_mask, scaling=self.scaling, **options)


def eager_attention(
    module: NamedAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The plain formula; the only kernel that returns the attention weights."""
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    scores = query @ key.transpose(-1, -2) * scaling  # [B, H, T, S]
    if attention_mask is not None:
        scores = scores + attention_mask
    wide = torch.promote_types(query.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=wide).to(query.dtype)
    return (weights @ value).transpose(1, 2), weights


class SequentialLayer(GradientCheckpointingLayer, SequentialBlock):
    pass


class ParallelLayer(GradientCheckpointingLayer, ParallelBlock):
    pass


LAYERS = {"sequential": SequentialLayer, "parallel": ParallelLayer}


class BlockPreTrainedModel(PreTrainedModel):
    """Initialization and saving of weights, and the features of transformers that are supported."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar = ["SequentialLayer", "ParallelLayer"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs: ClassVar = {"hidden_states": SequentialBlock, "attentions": Attention}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize a module with normal weights. Standard deviations of variant `released`: keys,
        embeddings and matrices `initializer_range`; values, and matrices that write to the residual
        stream, 2 / (L sqrt(d)). Of variant `paper`: keys 1/sqrt(d), values 1/sqrt(n), matrices
        1/sqrt(fan in)."""
        released = self.config.variant == "released"
        std = self.config.initializer_range
        if isinstance(module, Pattention):
            key_std, value_std = self.token_stds(module)
            init.normal_(module.key_tokens, std=key_std)
            init.normal_(module.value_tokens, std=value_std)
            if isinstance(module, RoutedPattention) and module.bias is not None:
                init.zeros_(module.bias)
            if isinstance(module.scale_tokens, nn.Parameter):
                init.constant_(module.scale_tokens, module.initial_scale)
        elif isinstance(module, Router):
            init.zeros_(module.bias)
            if isinstance(module, LearnedRouter):
                init.normal_(module.weight, std=module.weight.shape[1] ** -0.5)
        elif isinstance(module, nn.Linear | nn.Conv2d):
            writes = hasattr(module, "writes_to_residual")
            released_std = self.residual_std if writes else std
            fan_in = module.weight[0].numel()
            init.normal_(module.weight, std=released_std if released else fan_in**-0.5)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, PatchEmbedding):
            init.normal_(module.positions, std=std)
            if module.class_token is not None:
                init.normal_(module.class_token, std=std)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=std)
        elif isinstance(module, LayerNorm):
            if module.weight is not None:
                init.ones_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)

    def save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> None:
        """Save as transformers does, with a model card, checksums of the weights, and a stub that
        loads the model without `import tokenformer` (`tokenformer.models.saved_folder`)."""
        from tokenformer.models.saved_folder import auto_mapped, complete

        if not getattr(self, "_hf_peft_config_loaded", False) and has_adapter(self):
            raise ValueError(
                "the model has an adapter attached: save the adapter with the save_pretrained of "
                "the PeftModel, or merge it first with merge_and_unload"
            )
        with auto_mapped(self.config):
            super().save_pretrained(save_directory, *args, **options)
        folder = Path(save_directory)
        # transformers only warns if `save_directory` is a file.
        if folder.is_dir() and self._writes_folder(*args, **options):
            complete(self, folder)

    def _writes_folder(self, is_main_process: bool = True, *_: Any, **options: Any) -> bool:
        """Whether this process has just saved a complete model, not an adapter."""
        adapter = getattr(self, "_hf_peft_config_loaded", False)
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        first = not distributed or torch.distributed.get_rank() == 0
        return is_main_process and first and not adapter

    def _upload_modified_files(self, working_dir: Any, *args: Any, **options: Any) -> Any:
        """Rewrite the card before an upload: transformers has just replaced it."""
        from tokenformer.models.saved_folder import complete

        complete(self, Path(working_dir))
        return super()._upload_modified_files(working_dir, *args, **options)

    def token_stds(self, layer: Pattention) -> tuple[float, float]:
        """Return the initial standard deviations of keys and values."""
        if self.config.variant == "released":
            return self.config.initializer_range, self.residual_std
        return layer.in_features**-0.5, layer.tokens_per_row**-0.5

    @property
    def residual_std(self) -> float:
        """Initial standard deviation of weights that write to the residual stream."""
        std: float = 2 / (self.config.num_hidden_layers * self.config.hidden_size**0.5)
        return std


def has_adapter(model: nn.Module) -> bool:
    """Whether peft has replaced layers of a model, whose weights then have other names."""
    return any(hasattr(module, "base_layer") for module in model.modules())


def make_layer(
    config: BlockConfig,
    projections: Projections,
    index: int,
    *,
    is_causal: bool,
    drop_path: float = 0.0,
) -> nn.Module:
    *attention, ffn = projections(config, index)
    return LAYERS[config.residual](
        NamedAttention(*attention, config=config, layer_idx=index, is_causal=is_causal),
        ffn,
        make_norm(config, config.norm_parameters),
        make_norm(config, config.norm_parameters),
        drop_path=drop_path,
    )


def make_norm(config: BlockConfig, parameters: str) -> LayerNorm:
    return NORMS[config.norm](config.hidden_size, parameters=parameters, eps=config.norm_eps)


def tokenformer_projections(config: TokenConfig, layer: int) -> list[nn.Module]:
    d, kv = config.hidden_size, config.key_value_size

    def tokens(name: str, out_features: int) -> Pattention:
        scale, active_groups = config.scale(name, layer), config.active(name, layer)
        sizes = d, out_features, config.tokens(name, layer)
        options: dict[str, Any] = {
            "theta": config.theta,
            "scale_tokens": nn.Parameter(torch.tensor([scale])) if config.learned_scale else scale,
            "approximate": config.approximate,
            "eps": config.theta_eps,
        }
        threshold = config.threshold(name, layer)
        layer_tokens: Pattention
        if active_groups is not None:
            layer_tokens = RoutedPattention(
                *sizes,
                group_size=config.group_size,
                active_groups=active_groups,
                router=config.router,
                norm=config.theta_norm,
                balance_rate=config.balance_rate,
                bias=config.routed_bias,
                **options,
            )
        elif threshold is not None:
            layer_tokens = ThresholdedPattention(*sizes, threshold=threshold, **options)
        else:
            layer_tokens = Pattention(*sizes, **options)
        layer_tokens.initial_scale = scale  # `_init_weights` may see an empty parameter
        return layer_tokens

    return [tokens("q", d), tokens("k", kv), tokens("v", kv), tokens("o", d), tokens("ffn", d)]


def transformer_projections(config: MatrixConfig, layer: int) -> list[nn.Module]:
    d, kv = config.hidden_size, config.key_value_size
    ffn = (
        SwiGLU(d, config.intermediate_size)
        if config.mlp == "swiglu"
        else GeluMLP(d, config.intermediate_size, config.approximate)
    )
    q, k, v, o = (nn.Linear(d, size, bias=False) for size in (d, kv, kv, d))
    for writer in (o, ffn.down):
        # `_init_weights` sees each matrix on its own, and is not called for modules without
        # parameters.
        writer.writes_to_residual = True  # type: ignore[assignment]
    return [q, k, v, o, ffn]
