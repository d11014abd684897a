"""The causal language models: TokenFormer and the Transformer baseline, in the same code.

Both are native Hugging Face models: `from_pretrained`, `save_pretrained`, `generate`, Trainer,
gradient checkpointing and attention kernels by name work as for any other.

    config = TokenformerConfig.from_preset("124m")
    model = TokenformerForCausalLM(config)
    logits = model(input_ids).logits            # [B, T] -> [B, T, vocab_size]
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import AutoModel, AutoModelForCausalLM
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from tokenformer.layers import LearnedPositions, Linear, NoPositions, RotaryPositions
from tokenformer.models import decoding_loop
from tokenformer.models.backbone import (
    BlockPreTrainedModel,
    Projections,
    make_layer,
    make_norm,
    tokenformer_projections,
    transformer_projections,
)
from tokenformer.models.configuration import LanguageConfig, TokenformerConfig, TransformerConfig
from tokenformer.models.kv_cache import preallocate
from tokenformer.models.native_decoder import MAX_BATCH, decode_token


def make_positions(config: LanguageConfig) -> nn.Module:
    if config.positions == "rotary":
        return RotaryPositions(config.rotary_dim, config.rotary_base)
    if config.positions == "learned":
        return make_embedding(LearnedPositions, config.max_position_embeddings, config)
    return NoPositions()


def make_embedding(kind: type[nn.Embedding], count: int, config: LanguageConfig) -> nn.Embedding:
    """Build an embedding. On the meta device, where every model is built that is loaded, leave out
    its initialization: torch would import sympy for it, which takes half a second."""
    size = (count, config.hidden_size)
    is_meta = torch.get_default_device().type == "meta"
    return kind(*size, _weight=torch.empty(size) if is_meta else None)


class LanguagePreTrainedModel(BlockPreTrainedModel):
    _skip_keys_device_placement: ClassVar = ["past_key_values"]


class LanguageModel(LanguagePreTrainedModel):
    """Embedding, blocks and final norm, without a head."""

    projections: Projections
    """Builds the projections, the only difference between TokenFormer and Transformer."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__(config)
        self.embed_tokens = make_embedding(nn.Embedding, config.vocab_size, config)
        self.positions = make_positions(config)
        self.layers = nn.ModuleList(
            [
                make_layer(config, self.projections, index, is_causal=True)
                for index in range(config.num_hidden_layers)
            ]
        )
        self.norm = make_norm(config, config.final_norm_parameters)
        self.gradient_checkpointing = False
        self.post_init()

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
        return self.forward_text(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            **options,
        )

    def forward_text(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        past_key_values: Cache | None,
        inputs_embeds: Tensor | None,
        use_cache: bool | None,
        **options: Any,
    ) -> BaseModelOutputWithPast:
        """`forward`, without what transformers wraps around it."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds, not both and not neither")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)  # [B, T, d]
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            position_ids = make_position_ids(inputs_embeds, attention_mask, past_key_values)
        hidden, rotation = self.positions(inputs_embeds, position_ids)
        decoded = None
        if self._is_decoding(hidden, past_key_values):
            decoded = decode_token(self, hidden, rotation, attention_mask, past_key_values)
        if decoded is None:
            causal_mask = create_causal_mask(
                config=self.config,
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
            )
            for layer in self.layers:
                hidden = layer(
                    hidden,
                    attention_mask=causal_mask,
                    rotation=rotation,
                    past_key_values=past_key_values,
                    **options,
                )
        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(hidden if decoded is None else decoded),
            past_key_values=past_key_values,
        )

    def _is_decoding(self, hidden: Tensor, past_key_values: Cache | None) -> bool:
        """Whether this is one new token of a few sequences, which native code may run."""
        return (
            not self.training
            and past_key_values is not None
            and not torch.compiler.is_compiling()
            and hidden.shape[0] <= MAX_BATCH
            and hidden.shape[1] == 1
        )


class LanguageModelForCausalLM(LanguagePreTrainedModel, GenerationMixin):
    """A language model with the output head."""

    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}
    backbone: ClassVar[type[LanguageModel]]

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__(config)
        self.model = self.backbone(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        if not getattr(model_kwargs.get("past_key_values"), "_is_user_defined", False):
            preallocate(model_kwargs.get("past_key_values"))

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Called by `generate` for greedy search and sampling."""
        steps = logits_processor, stopping_criteria, generation_config
        if decoding_loop.supports(self, input_ids, generation_config, synced_gpus, model_kwargs):
            return decoding_loop.decode(self, input_ids, *steps, streamer, model_kwargs)
        return super()._sample(
            input_ids, *steps, synced_gpus=synced_gpus, streamer=streamer, **model_kwargs
        )

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
        """`labels` are the input ids (they are shifted here), with -100 where the loss is ignored.
        `logits_to_keep` limits the logits to the last positions, or to those given."""
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
    """Positions from 0, counted from the first token that a 2-d mask does not mask out."""
    cached = past_key_values.get_seq_length() if past_key_values is not None else 0
    indices = torch.arange(embeds.shape[1], device=embeds.device) + cached  # [T]
    if isinstance(mask, Tensor) and mask.ndim == 2:  # cached and new tokens, and maybe more
        return (mask.long().cumsum(-1) - 1).clamp_min(0)[:, indices]  # [B, T]
    return indices.unsqueeze(0)  # [1, T]


class TokenformerModel(LanguageModel):
    """A TokenFormer without the output head."""

    config: TokenformerConfig
    projections = staticmethod(tokenformer_projections)


class TokenformerForCausalLM(LanguageModelForCausalLM):
    """A TokenFormer language model: every projection is Pattention."""

    config: TokenformerConfig
    backbone = TokenformerModel
    _tp_plan: ClassVar = {"lm_head": "colwise_gather_output"}


class TransformerModel(LanguageModel):
    """The Transformer baseline without the output head."""

    config: TransformerConfig
    projections = staticmethod(transformer_projections)


class TransformerForCausalLM(LanguageModelForCausalLM):
    """The Transformer baseline: the same language model with linear projections and an MLP."""

    config: TransformerConfig
    backbone = TransformerModel


AutoModel.register(TokenformerConfig, TokenformerModel, exist_ok=True)
AutoModel.register(TransformerConfig, TransformerModel, exist_ok=True)
AutoModelForCausalLM.register(TokenformerConfig, TokenformerForCausalLM, exist_ok=True)
AutoModelForCausalLM.register(TransformerConfig, TransformerForCausalLM, exist_ok=True)
