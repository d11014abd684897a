"""The loop of `generate` for greedy search and sampling, on top of the native decoder.

transformers prepares the inputs of every token anew: masks, positions, output classes. On a CPU
that takes half a millisecond, as long as reading a few million parameters. This loop does the same
with the same logits processors, stopping criteria and streamer, but only prepares the first token
after the prompt that way; from there on ids go to the native code and logits come back. A token
that the native code cannot decode, for instance because a hook was registered, runs as in
transformers' loop.
"""

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation import GenerationMixin
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import CausalLMOutputWithPast

from tokenformer.models.kv_cache import preallocated_tensors
from tokenformer.models.native_decoder import (
    MAX_BATCH,
    CausalDecoder,
    CausalSession,
    decoder_of,
    first_tokens,
    is_supported,
)

if TYPE_CHECKING:
    from tokenformer.models.language import LanguageModelForCausalLM

PARAMETERS = {
    "_sample": "self input_ids logits_processor stopping_criteria generation_config synced_gpus "
    "streamer model_kwargs",
    "_prefill": "self input_ids generation_config model_kwargs is_first_iteration",
}
"""The methods of transformers that this loop replaces and calls, as it knows them."""
METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_prefill")
INPUTS = {"input_ids", "past_key_values", "attention_mask", "position_ids", "use_cache"}
INPUTS |= {"logits_to_keep"}
"""Inputs of the model that the native decoder knows how to use or may ignore."""


@functools.cache
def knows_transformers() -> bool:
    """Whether the installed version has the methods that this loop was written for."""
    return all(
        hasattr(GenerationMixin, name)
        and [*inspect.signature(getattr(GenerationMixin, name)).parameters] == names.split()
        for name, names in PARAMETERS.items()
    )


def is_overridden(model: "LanguageModelForCausalLM") -> bool:
    """Whether a subclass or a library has its own way to prepare or run the model's tokens."""
    from tokenformer.models.image_text import (
        TokenformerForImageTextToText,
        TokenformerImageTextModel,
    )
    from tokenformer.models.language import LanguageModel, LanguageModelForCausalLM

    # Both decode text as the language models do.
    heads = LanguageModelForCausalLM.forward, TokenformerForImageTextToText.forward
    backbones = LanguageModel.forward, TokenformerImageTextModel.forward
    return (
        any(name in model.__dict__ for name in METHODS)
        or any(getattr(type(model), name) is not getattr(GenerationMixin, name) for name in METHODS)
        or type(model).forward not in heads
        or type(model.model).forward not in backbones
    )


def supports(
    model: "LanguageModelForCausalLM",
    input_ids: Tensor,
    settings: Any,
    synced_gpus: bool,
    inputs: dict[str, Any],
) -> bool:
    """Whether a call of `generate` can use this loop."""
    return (
        knows_transformers()
        and not synced_gpus
        and not settings.is_assistant
        and not settings.output_attentions
        and not settings.output_hidden_states
        and not torch.is_grad_enabled()
        and bool(inputs.get("use_cache"))
        and input_ids.ndim == 2
        and 0 < input_ids.shape[0] <= MAX_BATCH
        and is_supported(torch.empty(1, 1, device=input_ids.device))
        and not is_overridden(model)
        and not model._valid_auto_compile_criteria(inputs, settings)
        and decoder_of(model) is not None
    )


def decode(
    model: "LanguageModelForCausalLM",
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    settings: Any,
    streamer: Any,
    inputs: dict[str, Any],
) -> GenerateDecoderOnlyOutput | Tensor:
    """Decode after `input_ids` [B, T] as `GenerationMixin._sample` does."""
    decoding = Decoding(model, inputs)
    logits: Any = decoding.prefill(input_ids, settings)  # [B, vocab_size]
    returns_all = settings.return_dict_in_generate
    scores: Any = () if returns_all and settings.output_scores else None
    raw_logits: Any = () if returns_all and settings.output_logits else None
    is_greedy = not settings.do_sample
    # The best tokens of the native code do for plain greedy search, which is the fastest.
    is_plain = is_greedy and not logits_processor and scores is raw_logits is None
    pads = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    unfinished = torch.ones(input_ids.shape[0], dtype=torch.long)
    tokens: Any = None
    while True:
        if tokens is None:
            processed = logits_processor(input_ids, logits)
            if scores is not None:
                scores += (processed,)
            if raw_logits is not None:
                raw_logits += (logits,)
            if is_greedy:
                tokens = processed.argmax(-1)
            else:
                tokens = torch.multinomial(processed.softmax(-1), num_samples=1).squeeze(1)
        if pads and input_ids.shape[0] > 1:  # a finished batch of one ends the loop
            tokens = tokens * unfinished + settings._pad_token_tensor * (1 - unfinished)
        input_ids = torch.cat([input_ids, tokens[:, None]], dim=-1)
        unfinished = unfinished & ~stopping_criteria(input_ids, scores)
        if streamer is not None:
            streamer.put(tokens)
        if not unfinished.any():
            break
        logits, tokens = decoding.next(input_ids, tokens, is_plain)
    if streamer is not None:
        streamer.end()
    if not returns_all:
        return input_ids
    cache = decoding.inputs.get("past_key_values")
    return GenerateDecoderOnlyOutput(
        sequences=input_ids, scores=scores, logits=raw_logits, past_key_values=cache
    )


class Decoding:
    """The model's side of the loop: the logits of one token after the other."""

    def __init__(self, model: "LanguageModelForCausalLM", inputs: dict[str, Any]) -> None:
        self.model = model
        self.inputs = inputs
        """The inputs of the next token, without the `skipped` tokens."""
        self.skipped = 0
        self.session: CausalSession | None = None
        self.is_prepared = False

    def prefill(self, input_ids: Tensor, settings: Any) -> Tensor:
        outputs = self.model._prefill(input_ids, settings, self.inputs)
        return self.finish(outputs)

    def next(
        self, input_ids: Tensor, tokens: Tensor, is_plain: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logits after the last of `input_ids`, its `tokens`, and the best ids if
        `is_plain` and the native code found them."""
        found = self.run_native(input_ids, tokens, is_plain)
        if found is not None:
            self.skipped += 1
            return found[0], found[1] if is_plain else None
        outputs = self.model(**self.prepared(input_ids), return_dict=True)
        return self.finish(outputs), None

    def run_native(
        self, input_ids: Tensor, tokens: Tensor, is_plain: bool
    ) -> tuple[Tensor, Tensor] | None:
        if not self.is_prepared:
            self.is_prepared = True
            self.session = self.make_session(self.prepared(input_ids))
        session = self.session
        if session is None:
            return None
        # Processors, criteria and streamers may change the model or its cache.
        decoder, tensors = decoder_of(self.model), preallocated_tensors(self.cache)
        found = None
        if decoder is not None and tensors is not None:
            if decoder is not session.decoder:
                assert isinstance(decoder, CausalDecoder)
                session = CausalSession(decoder, session.starts, session.positions, session.offset)
                self.session = session
            found = session.decode(tokens, tensors, is_plain)
        session.offset += 1
        return found

    @property
    def cache(self) -> Any:
        return self.inputs.get("past_key_values")

    def make_session(self, prepared: dict[str, Any]) -> CausalSession | None:
        """Return a session if the native code can use what transformers prepared for a token."""
        decoder, tensors = decoder_of(self.model), preallocated_tensors(self.cache)
        unknown = {key for key in prepared.keys() - INPUTS if prepared[key] is not None}
        if unknown or decoder is None or tensors is None:
            return None
        rows, length = prepared["input_ids"].shape[0], tensors[0].length + 1
        starts = first_tokens(prepared.get("attention_mask"), rows, length)
        positions = prepared.get("position_ids")
        if starts is None:
            return None
        if positions is None:
            positions = length - 1 - starts
        elif positions.ndim != 2 or positions.shape[0] not in (1, rows):
            return None
        positions = positions.reshape(-1).long().expand(rows).contiguous().clone()
        assert isinstance(decoder, CausalDecoder)
        return CausalSession(decoder, starts, positions) if positions.min() >= 0 else None

    def prepared(self, input_ids: Tensor) -> dict[str, Any]:
        """The inputs of the model for the last token, as transformers prepares them."""
        if self.skipped:
            skipped = CausalLMOutputWithPast(past_key_values=self.cache)
            self.inputs = self.model._update_model_kwargs_for_generation(
                skipped, self.inputs, num_new_tokens=self.skipped
            )
            self.skipped = 0
        made: dict[str, Any] = self.model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=1, **self.inputs
        )
        return made

    def finish(self, outputs: Any) -> Tensor:
        """Take over the cache and return the last logits, a copy in fp32."""
        self.inputs = self.model._update_model_kwargs_for_generation(outputs, self.inputs)
        logits: Tensor = outputs.logits[:, -1]
        return logits.to(torch.float32, copy=True)
