"""The causal language models: TokenFormer and, in the same code, its plain-Transformer twin.

Both are native Hugging Face models: `from_pretrained`, `save_pretrained`, `generate`, Trainer,
gradient checkpointing and attention by name work as for any other. They differ in one function,
`projections`, which builds the five learned maps of a layer.

    config = TokenformerConfig.from_preset("124m")
    model = TokenformerForCausalLM(config)
    logits = model(input_ids).logits            # [B, T] -> [B, T, vocab_size]
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModel, AutoModelForCausalLM
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from tokenformer.layers import (
    Attention,
    GeluMLP,
    LayerNorm,
    LearnedPositions,
    NoPositions,
    ParallelBlock,
    Pattention,
    RotaryPositions,
    SequentialBlock,
    SwiGLU,
)
from tokenformer.layers.norm import NORMS
from tokenformer.models.configuration import LanguageConfig, TokenformerConfig, TransformerConfig


class NamedAttention(Attention):
    """Attention whose kernel is looked up by name: sdpa, eager, flash_attention_2, ..."""

    def __init__(self, *projections: nn.Module, config: LanguageConfig, layer_idx: int) -> None:
        super().__init__(
            *projections,
            head_dim=config.head_dim,
            num_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            is_causal=True,
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


def make_positions(config: LanguageConfig) -> nn.Module:
    if config.positions == "rotary":
        return RotaryPositions(config.rotary_dim, config.rotary_base)
    if config.positions == "learned":
        return LearnedPositions(config.max_position_embeddings, config.hidden_size)
    return NoPositions()


class LanguagePreTrainedModel(PreTrainedModel):
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar = ["SequentialLayer", "ParallelLayer"]
    _skip_keys_device_placement: ClassVar = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs: ClassVar = {"hidden_states": SequentialBlock, "attentions": Attention}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """As released: keys, embeddings and matrices `initializer_range`; values, and the matrices
        that write to the residual stream, 2 / (L sqrt(d)). As in the paper's own figures: keys
        1/sqrt(d), values 1/sqrt(n), matrices 1/sqrt(fan in)."""
        released = self.config.variant == "released"
        std = self.config.initializer_range
        if isinstance(module, Pattention):
            key_std, value_std = self.token_deviations(module)
            init.normal_(module.key_tokens, std=key_std)
            init.normal_(module.value_tokens, std=value_std)
            if isinstance(module.scale_tokens, nn.Parameter):
                init.constant_(module.scale_tokens, module.first_scale)
        elif isinstance(module, nn.Linear):
            writes = hasattr(module, "writes_to_residual")
            released_std = self.residual_deviation if writes else std
            init.normal_(module.weight, std=released_std if released else module.in_features**-0.5)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=std)
        elif isinstance(module, LayerNorm):
            if module.weight is not None:
                init.ones_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)

    def token_deviations(self, layer: Pattention) -> tuple[float, float]:
        """Of the keys and of the values that a layer begins with."""
        if self.config.variant == "released":
            return self.config.initializer_range, self.residual_deviation
        return layer.in_features**-0.5, layer.num_tokens**-0.5

    @property
    def residual_deviation(self) -> float:
        deviation: float = 2 / (self.config.num_hidden_layers * self.config.hidden_size**0.5)
        return deviation


class LanguageModel(LanguagePreTrainedModel):
    """Embedding, blocks and final norm, without a head."""

    projections: Callable[[Any, int], list[nn.Module]]
    """(config, layer) -> q, k, v, o and the feed-forward map: all in which the models differ."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = make_positions(config)
        self.layers = nn.ModuleList(
            [self._make_layer(config, index) for index in range(config.num_hidden_layers)]
        )
        self.norm = NORMS[config.norm](
            config.hidden_size, parameters=config.final_norm_parameters, eps=config.norm_eps
        )
        self.gradient_checkpointing = False
        self.post_init()

    def _make_layer(self, config: LanguageConfig, index: int) -> nn.Module:
        *attention, ffn = self.projections(config, index)
        norms = [
            NORMS[config.norm](
                config.hidden_size, parameters=config.norm_parameters, eps=config.norm_eps
            )
            for _ in range(2)
        ]
        return LAYERS[config.residual](
            NamedAttention(*attention, config=config, layer_idx=index), ffn, *norms
        )

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **options: Any,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds, not both and not neither")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)  # [B, T, d]
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            position_ids = make_position_ids(inputs_embeds, attention_mask, past_key_values)
        causal_mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        hidden, rotation = self.positions(inputs_embeds, position_ids)
        for layer in self.layers:
            hidden = layer(
                hidden,
                attention_mask=causal_mask,
                rotation=rotation,
                past_key_values=past_key_values,
                **options,
            )
        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(hidden), past_key_values=past_key_values
        )


class LanguageModelForCausalLM(LanguagePreTrainedModel, GenerationMixin):
    """A language model with the output head."""

    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}
    backbone: ClassVar[type[LanguageModel]]

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__(config)
        self.model = self.backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """`labels` are the inputs themselves (the shift happens here), -100 where no loss counts;
        `logits_to_keep` asks for the logits of the last so many positions, or of those given."""
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **options,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])  # [B, T, vocab_size]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **options)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def make_position_ids(embeds: Tensor, mask: Any, past_key_values: Cache | None) -> Tensor:
    """Count positions from the first token that is not padding, where a padding mask tells."""
    seen = past_key_values.get_seq_length() if past_key_values is not None else 0
    places = torch.arange(embeds.shape[1], device=embeds.device) + seen  # [T]
    if isinstance(mask, Tensor) and mask.ndim == 2:  # of what was seen, what is new, and maybe more
        return (mask.long().cumsum(-1) - 1).clamp_min(0)[:, places]  # [B, T]
    return places.unsqueeze(0)  # [1, T]


def tokenformer_projections(config: TokenformerConfig, layer: int) -> list[nn.Module]:
    d, kv = config.hidden_size, config.key_value_size

    def tokens(name: str, out_features: int) -> Pattention:
        scale = config.scale(name, layer)
        made = Pattention(
            d,
            out_features,
            config.tokens(name, layer),
            theta=config.theta,
            scale_tokens=nn.Parameter(torch.tensor([scale])) if config.learned_scale else scale,
            approximate=config.approximate,
            eps=config.theta_eps,
        )
        made.first_scale = scale  # for `_init_weights`, where the parameter has no value yet
        return made

    return [tokens("q", d), tokens("k", kv), tokens("v", kv), tokens("o", d), tokens("ffn", d)]


def transformer_projections(config: TransformerConfig, layer: int) -> list[nn.Module]:
    d, kv = config.hidden_size, config.key_value_size
    ffn = (
        SwiGLU(d, config.intermediate_size)
        if config.mlp == "swiglu"
        else GeluMLP(d, config.intermediate_size, config.approximate)
    )
    q, k, v, o = (nn.Linear(d, size, bias=False) for size in (d, kv, kv, d))
    for writer in (o, ffn.down):
        # `_init_weights` sees a matrix without its surroundings, and is not called for modules that
        # own no parameters.
        writer.writes_to_residual = True  # type: ignore[assignment]
    return [q, k, v, o, ffn]


class TokenformerModel(LanguageModel):
    config: TokenformerConfig
    projections = staticmethod(tokenformer_projections)


class TokenformerForCausalLM(LanguageModelForCausalLM):
    config: TokenformerConfig
    backbone = TokenformerModel


class TransformerModel(LanguageModel):
    config: TransformerConfig
    projections = staticmethod(transformer_projections)


class TransformerForCausalLM(LanguageModelForCausalLM):
    config: TransformerConfig
    backbone = TransformerModel


AutoModel.register(TokenformerConfig, TokenformerModel, exist_ok=True)
AutoModel.register(TransformerConfig, TransformerModel, exist_ok=True)
AutoModelForCausalLM.register(TokenformerConfig, TokenformerForCausalLM, exist_ok=True)
AutoModelForCausalLM.register(TransformerConfig, TransformerForCausalLM, exist_ok=True)
