"""Convert a pretrained Transformer to a TokenFormer: exactly after layer norms, fitted elsewhere.

    model, report = from_transformer(source, batches)

Every projection becomes a Pattention (`block_conversion`); everything outside the layers is copied.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from tokenformer.convert.pretrained.activation_statistics import PlainNorm, collect_statistics
from tokenformer.convert.pretrained.architectures import find_architecture, tensors_outside_blocks
from tokenformer.convert.pretrained.block_conversion import (
    ConversionSettings,
    ConvertedProjection,
    convert_block,
)
from tokenformer.convert.pretrained.conversion_report import ConversionReport, ProjectionReport
from tokenformer.convert.pretrained.source_comparison import compare_with_source
from tokenformer.convert.pretrained.token_construction import BALLAST, LINEAR_FORMS
from tokenformer.growth.model_from_tensors import build_model
from tokenformer.models.configuration import PROJECTIONS, TokenformerConfig
from tokenformer.models.language import TokenformerForCausalLM
from tokenformer.ops.pattention import pattention

RANDOM_SHAPE = (8, 128)
"""Random tokens to measure on if no text is given: sequences and length."""


@torch.no_grad()
def from_transformer(
    source: PreTrainedModel,
    batches: Sequence[Tensor] | None = None,
    *,
    held_out: Sequence[Tensor] | None = None,
    linear: str = "pair",
    ballast: float = BALLAST,
    on_layer: Callable[[int], None] = lambda done: None,
) -> tuple[TokenformerForCausalLM, ConversionReport]:
    """Return a TokenFormer that computes what `source` computes, and a report of its error.

    Args:
        source: a GPT-2, GPT-NeoX, Llama, Mistral or Qwen2 causal language model, or our own
            `TransformerForCausalLM`.
        batches: calibration data, token ids [B, T + 1] of text. It is required for models with RMS
            norms or gated MLPs, which are fitted to it.
        held_out: other text of the same form to compare the two models on; by default `batches`.
        linear: tokens of a linear projection: `pair`, two per channel, or `shift`, one, which is
            only exact in fp32.
        ballast: score of the ballast tokens, which keep the norm of the scores constant; see
            `token_construction`.
        on_layer: called with the number of converted layers.
    """
    if linear not in LINEAR_FORMS:
        raise ValueError(f"linear={linear!r} is unknown; choose one of {', '.join(LINEAR_FORMS)}")
    architecture = find_architecture(source.config)
    options = architecture.options(source.config)
    norm = PlainNorm(options.get("norm", "layer_norm"), options["norm_eps"])
    first = architecture.read_block(source, 0)
    if batches is None and (norm.kind == "rms_norm" or first.gate is not None):
        raise ValueError("batches is missing: RMS norms and gated MLPs are fitted to text")
    on_data = batches is not None
    batches = random_batches(source.config) if batches is None else batches
    statistics = collect_statistics(
        source, architecture, norm, [batch[:, :-1] for batch in batches]
    )
    head_dim = options["hidden_size"] // options["num_attention_heads"]
    approximate = TokenformerConfig(**options).approximate
    settings = ConversionSettings(norm, head_dim, approximate, linear, ballast, on_data)
    builder = TokenformerBuilder(torch.promote_types(source.dtype, torch.float32))
    for index in range(options["num_hidden_layers"]):
        for part in convert_block(
            architecture.read_block(source, index), statistics[index], settings
        ):
            builder.add(index, part, approximate)
        on_layer(index + 1)
    model = builder.model(options, tensors_outside_blocks(source, architecture)).to(source.device)
    report = ConversionReport(
        source.config.model_type,
        linear,
        source.num_parameters(),
        model.num_parameters(),
        builder.maps,
        "text" if on_data else "random tokens",
        compare_with_source(source, model, batches if held_out is None else held_out),
    )
    return model, report


def random_batches(config: Any) -> list[Tensor]:
    sequences, length = RANDOM_SHAPE
    length = min(length, config.max_position_embeddings)
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(config.vocab_size, (sequences, length + 1), generator=generator)]


class TokenformerBuilder:
    """Collects the converted projections, and builds the model and the report from them."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.tensors: dict[str, Tensor] = {}
        self.maps: list[ProjectionReport] = []
        self.scales: dict[str, list[float | None]] = {name: [] for name in PROJECTIONS}
        self.counts: dict[str, list[int]] = {name: [] for name in PROJECTIONS}

    def add(self, index: int, part: ConvertedProjection, approximate: str) -> None:
        layer = f"model.layers.{index}"
        prefix = "" if part.projection == "ffn" else "attention."
        name = f"{layer}.{prefix}{part.projection}"
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
        tiny = torch.finfo(part.target.dtype).tiny  # a projection may output zeros
        error = (found.double() - part.target).norm() / part.target.norm().clamp_min(tiny)
        self.maps.append(
            ProjectionReport(
                name,
                part.form,
                part.tokens.size,
                part.tokens.scale,
                part.parameters,
                keys.numel() + values.numel(),
                error.item(),
            )
        )

    def model(self, options: dict[str, Any], outside: dict[str, Tensor]) -> TokenformerForCausalLM:
        """Return the model; `outside` are the tensors outside the layers."""
        names = {"o": "output_tokens"}
        counts = {names.get(name, f"{name}_tokens"): found for name, found in self.counts.items()}
        config = TokenformerConfig(
            **options,
            norm_parameters="bias",
            scale_tokens=self.scales,
            **{name: found[0] if len(set(found)) == 1 else found for name, found in counts.items()},
        )
        outside = {name: tensor.to(self.dtype).clone() for name, tensor in outside.items()}
        return build_model(TokenformerForCausalLM, config, self.tensors | outside).eval()
