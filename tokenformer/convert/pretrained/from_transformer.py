"""A pretrained Transformer as a TokenFormer: the same function, in parameter tokens.

    model, report = from_transformer(source, batches)

Every map of every layer is rewritten as a Pattention (`translation`); what is outside the layers is
taken over as it is.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenformer.convert.pretrained.activation_statistics import PlainNorm, layer_inputs
from tokenformer.convert.pretrained.architectures import frame_of, outer_tensors
from tokenformer.convert.pretrained.constructions import BALLAST, FORMS
from tokenformer.convert.pretrained.conversion_report import ConversionReport, ConvertedMap
from tokenformer.convert.pretrained.source_comparison import compare
from tokenformer.convert.pretrained.translation import Settings, Translation, translate
from tokenformer.growth.model_from_tensors import build_model
from tokenformer.models.configuration import PROJECTIONS, TokenformerConfig
from tokenformer.models.language import TokenformerForCausalLM
from tokenformer.ops.pattention import pattention

RANDOM_SHAPE = (8, 128)
"""Tokens to measure on where no text is given."""


@torch.no_grad()
def from_transformer(
    source: Any,
    batches: Sequence[Tensor] | None = None,
    *,
    held_out: Sequence[Tensor] | None = None,
    linear: str = "pair",
    ballast: float = BALLAST,
    on_layer: Callable[[int], None] = lambda done: None,
) -> tuple[Any, ConversionReport]:
    """A TokenFormer that computes what `source` computes, and a report of how far it is from it.

    Args:
        source: a GPT-2, GPT-NeoX, Llama, Mistral or Qwen2 causal language model, or our own
            `TransformerForCausalLM`.
        batches: token ids [B, T + 1] of text, to fit on what has no exact form and to measure on. A
            model with RMS norms or a gated network needs them.
        held_out: the same, of other text, on which the two models are compared; by default
            `batches`.
        linear: tokens of a linear map: `pair`, two for every channel, or `shift`, one, which needs
            fp32 to be exact.
        ballast: how heavy the token is that holds the norm of the scores; see `constructions`.
        on_layer: called with the number of layers done so far.
    """
    if linear not in FORMS:
        raise ValueError(f"linear={linear!r} is unknown; choose one of {', '.join(FORMS)}")
    frame = frame_of(source.config)
    options = frame.options(source.config)
    norm = PlainNorm(options.get("norm", "layer_norm"), options["norm_eps"])
    first = frame.take_apart(source, 0)
    if batches is None and (norm.kind == "rms_norm" or first.gate is not None):
        raise ValueError("batches is missing: RMS norms and gated networks are fitted on text")
    on_data = batches is not None
    batches = random_batches(source.config) if batches is None else batches
    seen = layer_inputs(source, frame, norm, [batch[:, :-1] for batch in batches])
    head_dim = options["hidden_size"] // options["num_attention_heads"]
    approximate = TokenformerConfig(**options).approximate
    settings = Settings(norm, head_dim, approximate, linear, ballast, on_data)
    built = Assembly(torch.promote_types(source.dtype, torch.float32))
    for index in range(options["num_hidden_layers"]):
        for part in translate(frame.take_apart(source, index), seen[index], settings):
            built.add(index, part, approximate)
        on_layer(index + 1)
    model = built.model(options, outer_tensors(source, frame)).to(source.device)
    report = ConversionReport(
        source.config.model_type,
        linear,
        source.num_parameters(),
        model.num_parameters(),
        built.maps,
        "text" if on_data else "random tokens",
        compare(source, model, batches if held_out is None else held_out),
    )
    return model, report


def random_batches(config: Any) -> list[Tensor]:
    sequences, length = RANDOM_SHAPE
    length = min(length, config.max_position_embeddings)
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(config.vocab_size, (sequences, length + 1), generator=generator)]


class Assembly:
    """The tensors of the new model as they come, and what is reported of them."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.tensors: dict[str, Tensor] = {}
        self.maps: list[ConvertedMap] = []
        self.scales: dict[str, list[float | None]] = {name: [] for name in PROJECTIONS}
        self.counts: dict[str, list[int]] = {name: [] for name in PROJECTIONS}

    def add(self, index: int, part: Translation, approximate: str) -> None:
        layer = f"model.layers.{index}"
        place = "" if part.projection == "ffn" else "attention."
        name = f"{layer}.{place}{part.projection}"
        keys, values = part.tokens.keys.to(self.dtype), part.tokens.values.to(self.dtype)
        self.tensors |= {f"{name}.key_tokens": keys, f"{name}.value_tokens": values}
        if part.norm is not None:
            self.tensors[f"{layer}.{part.norm}.bias"] = part.offset.to(self.dtype)
        self.counts[part.projection].append(part.tokens.size)
        self.scales[part.projection].append(part.tokens.scale)
        found = pattention(
            part.inputs.to(self.dtype),
            keys,
            values,
            scale_tokens=part.tokens.scale,
            approximate=approximate,
        )
        tiny = torch.finfo(part.wanted.dtype).tiny  # a map may add nothing at all
        error = (found.double() - part.wanted).norm() / part.wanted.norm().clamp_min(tiny)
        self.maps.append(
            ConvertedMap(
                name,
                part.form,
                part.tokens.size,
                part.tokens.scale,
                part.parameters,
                keys.numel() + values.numel(),
                error.item(),
            )
        )

    def model(self, options: dict[str, Any], outer: dict[str, Tensor]) -> Any:
        names = {"o": "output_tokens"}
        counts = {names.get(name, f"{name}_tokens"): found for name, found in self.counts.items()}
        config = TokenformerConfig(
            **options,
            norm_parameters="bias",
            scale_tokens=self.scales,
            **{name: found[0] if len(set(found)) == 1 else found for name, found in counts.items()},
        )
        outer = {name: tensor.to(self.dtype).clone() for name, tensor in outer.items()}
        return build_model(TokenformerForCausalLM, config, self.tensors | outer).eval()
