"""Joining a vision and a language model into one vision-language model.

    model, report = tokenformer.join_modalities(vision, language, new_tokens=64, mode="routed")

Every Pattention of the joint model holds the vision tokens, new tokens and the language tokens, in
this order. New tokens have zero keys and leave the scale, so they change nothing until they are
trained. Modes:

- `routed`: image positions attend to vision and new tokens, text positions to language and new
  tokens. Image features are those of the vision model, and text alone is processed as by the
  language model, up to rounding.
- `shared`: every position attends to all tokens, which is the paper's idea. The scale is the sum of
  both, the rule of `merge` for tokens that the models do not have in common, by which every token
  keeps its weight. The outputs of both models change, and the report says how much.
- `projector`: the baseline in the style of LLaVA. The vision model is a frozen encoder, whose
  features pass through a new MLP and take the place of embeddings. Nothing is joined, so the models
  may differ in width and depth.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenformer.growth.model_from_tensors import build_model
from tokenformer.growth.model_inputs import random_batch
from tokenformer.growth.probe import logits, relative_change
from tokenformer.growth.tokens.token_counts import check_not_quantized
from tokenformer.growth.tokens.token_set import TokenSet, token_layers
from tokenformer.layers.pattention import Pattention
from tokenformer.models.accounting import count_parameters
from tokenformer.models.image_text import TokenformerForImageTextToText
from tokenformer.models.image_text_configuration import (
    JOINED_OPTIONS,
    TokenformerImageTextConfig,
)
from tokenformer.models.language import TokenformerForCausalLM
from tokenformer.models.seeds import named_seed
from tokenformer.models.vision import TokenformerForImageClassification

PARTS = ("vision", "new", "language")
"""The tokens of a joint layer, in the order of its rows."""


@dataclass(frozen=True)
class JoinReport:
    mode: str
    new_tokens: int
    seed: int
    parameters_vision: int
    parameters_language: int
    parameters_joint: int
    vision_change: float
    """Largest change of an image feature on random images, relative to the largest feature."""
    language_change: float
    """Largest change of a logit on random text, relative to the largest logit."""

    def asdict(self) -> dict[str, Any]:
        return asdict(self)

    def save(self, path: Path | str) -> None:
        Path(path).write_text(json.dumps(self.asdict(), indent=2) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        new = "" if self.mode == "projector" else f", {self.new_tokens} new tokens a layer"
        return "\n".join(
            [
                f"{self.parameters_vision:,} + {self.parameters_language:,} -> "
                f"{self.parameters_joint:,} parameters ({self.mode}{new})",
                f"largest change of the image features   {self.vision_change:.1e}",
                f"largest change of the logits of text   {self.language_change:.1e}",
            ]
        )


@torch.no_grad()
def join_modalities(
    vision: TokenformerForImageClassification,
    language: TokenformerForCausalLM,
    new_tokens: int = 64,
    mode: str = "routed",
    *,
    image_token_id: int | None = None,
    projector_size: int | None = None,
    vision_rate: float | None = None,
    language_rate: float | None = None,
    seed: int = 0,
) -> tuple[TokenformerForImageTextToText, JoinReport]:
    """Return a vision-language model of both, and a report of what changed.

    Args:
        vision: an image classifier; its classifier is left out. Neither model is changed.
        language: a language model of the same width and depth, except for `projector`.
        new_tokens: tokens to add to every layer, for alignment. Unused for `projector`.
        mode: `routed`, `shared` or `projector`.
        image_token_id: the id of `<image>`; by default the first id after the vocabulary.
        projector_size: hidden units of the projector, by default the language model's hidden size.
        vision_rate: factor on the learning rate of the vision tokens; 0 freezes them.
        language_rate: the same for the language tokens.
        seed: seed of the values of new tokens, and of the projector.
    """
    check_parts(vision, language, mode)
    options = {"image_token_id": image_token_id, "projector_size": projector_size}
    config = TokenformerImageTextConfig.from_parts(
        vision.config, language.config, new_tokens=new_tokens, mode=mode, **options
    )
    set_part_rates(config, vision=vision_rate, language=language_rate)
    with torch.device("meta"):
        empty = TokenformerForImageTextToText(config)
    tensors = {
        name: tensor.clone()
        for name, tensor in language.state_dict().items()
        if name in empty.state_dict()
    }
    fill = join_layers if config.is_joined else project_features
    fill(tensors, empty, vision, language, seed)
    tensors = {name: tensor.to(language.device) for name, tensor in tensors.items()}
    model = build_model(TokenformerForImageTextToText, config, tensors)
    model.generation_config = type(language.generation_config).from_dict(
        language.generation_config.to_dict() | suppressed(model)
    )
    model.train(language.training)
    return model, report_join(vision, language, model, seed)


def suppressed(model: TokenformerForImageTextToText) -> dict[str, Any]:
    """Return the generation options that keep a placeholder with an embedding from being
    generated."""
    found = getattr(model.generation_config, "suppress_tokens", None)
    return {} if found is None else {"suppress_tokens": found}


def join_layers(
    tensors: dict[str, Tensor],
    empty: TokenformerForImageTextToText,
    vision: TokenformerForImageClassification,
    language: TokenformerForCausalLM,
    seed: int,
) -> None:
    """Add the joint token layers, and the patch embedding and final norm of the vision model."""
    device = language.device
    of_vision, of_language = token_layers(vision), token_layers(language)
    for name, (place, layer) in token_layers(empty).items():
        a = TokenSet.of(of_vision[name][1], device)
        b = TokenSet.of(of_language[name][1])
        new = empty.config.parts(*place)[1]
        keys = b.keys.new_zeros(new, layer.in_features)
        tensors[f"{name}.key_tokens"] = torch.cat([a.keys, keys, b.keys])
        values = new_values(empty, layer, name, new, seed).to(b.values)
        tensors[f"{name}.value_tokens"] = torch.cat([a.values, values, b.values])
    state = vision.state_dict()
    for ours, theirs in (("images.embed", "embed_patches"), ("images.norm", "norm")):
        for name, tensor in state.items():
            if name.startswith(f"model.{theirs}."):
                renamed = name.replace(f"model.{theirs}.", f"model.{ours}.", 1)
                tensors[renamed] = tensor.clone()


def new_values(
    empty: TokenformerForImageTextToText, layer: Pattention, name: str, count: int, seed: int
) -> Tensor:
    """Return the values of new tokens, with the standard deviation of a fresh layer."""
    generator = torch.Generator().manual_seed(named_seed(seed, name))
    std = empty.token_stds(layer)[1]
    return torch.empty(count, layer.out_features).normal_(std=std, generator=generator)


def project_features(
    tensors: dict[str, Tensor],
    empty: TokenformerForImageTextToText,
    vision: TokenformerForImageClassification,
    language: TokenformerForCausalLM,
    seed: int,
) -> None:
    """Add the vision model as an encoder, and a new projector."""
    for name, tensor in vision.state_dict().items():
        if name.startswith("model."):
            tensors[f"model.images.encoder.{name.removeprefix('model.')}"] = tensor.clone()
    for name, parameter in empty.model.images.projector.named_parameters():
        generator = torch.Generator().manual_seed(named_seed(seed, name))
        made = torch.zeros(parameter.shape)
        if parameter.ndim == 2:  # unit variance in, unit variance out
            made.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
        tensors[f"model.images.projector.{name}"] = made.to(language.dtype)


def set_part_rates(config: TokenformerImageTextConfig, **rates: float | None) -> None:
    """Set the learning rate factors of the vision, new or language tokens of every layer, in the
    configuration; None is 1."""
    given = [rates.get(part) for part in PARTS]
    factors = [1.0 if rate is None else rate for rate in given]
    if any(rate < 0 for rate in factors):
        raise ValueError(f"rates {rates} of tokens must not be negative; 0 freezes")
    if not config.is_joined and factors[1:] != [1.0, 1.0]:
        raise ValueError(
            f"rates {rates}: mode='projector' has one set of tokens; freeze it with the training "
            "loop's rates"
        )
    if set(factors) == {1.0} or not config.is_joined:
        config.token_rates = None
        return
    config.token_rates = {
        projection: [
            [[count, rate] for count, rate in zip(counts, factors, strict=True) if count]
            for layer in range(config.num_hidden_layers)
            for counts in [config.parts(projection, layer)]
        ]
        for projection in ("q", "k", "v", "o", "ffn")
    }


def check_parts(vision: Any, language: Any, mode: str) -> None:
    """Raise for models of the wrong kind, or that cannot be joined in this mode."""
    for model, kind, name in (
        (vision, TokenformerForImageClassification, "vision"),
        (language, TokenformerForCausalLM, "language"),
    ):
        if hasattr(model, "peft_config"):
            raise TypeError(
                f"{name} has an adapter attached; merge it first: model.merge_and_unload()"
            )
        if type(model) is not kind:
            raise TypeError(f"{name} is a {type(model).__name__}; give a {kind.__name__}")
        check_not_quantized(model.config)
    if vision.dtype != language.dtype:
        raise ValueError(
            f"the vision model has dtype {vision.dtype}, the language model {language.dtype}; "
            "load both in one"
        )
    if mode == "projector":
        return
    different = [
        f"{name} ({getattr(vision.config, name)} and {getattr(language.config, name)})"
        for name in JOINED_OPTIONS
        if getattr(vision.config, name) != getattr(language.config, name)
    ]
    if different:
        raise ValueError(
            f"the vision and the language model differ in {', '.join(different)}, and a joint "
            "model has one of each. Token counts may differ, width and depth may not: train one of "
            "the models at the size of the other, or use mode='projector'"
        )
    if language.config.theta == "softmax":
        raise ValueError(
            "with theta softmax a token with a zero key has a weight, so new tokens would change "
            "the output; use mode='projector'"
        )


def report_join(
    vision: TokenformerForImageClassification,
    language: TokenformerForCausalLM,
    model: TokenformerForImageTextToText,
    seed: int,
) -> JoinReport:
    images = random_batch(vision, seed)
    trained = vision.training, model.training
    vision.eval()
    model.eval()
    before = vision.forward_features(images)
    moved = images.to(model.device)
    after = model.get_image_features(moved).last_hidden_state
    vision.train(trained[0])
    model.train(trained[1])
    text = random_batch(language, seed)
    changed = relative_change(logits(language, text), logits(model, text))
    of_vision, of_language, of_joint = (
        sum(count_parameters(each.config).values()) for each in (vision, language, model)
    )
    return JoinReport(
        mode=model.config.mode,
        new_tokens=model.config.parts("ffn", 0)[1],
        seed=seed,
        parameters_vision=of_vision,
        parameters_language=of_language,
        parameters_joint=of_joint,
        vision_change=relative_change(before, after.to(before.device)),
        language_change=changed,
    )
