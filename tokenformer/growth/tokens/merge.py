"""Merging two models, such as two fine-tunes of one, by combining their tokens.

    merged, report = tokenformer.merge(a, b)

Tokens that are bit-identical in both models are kept once. The others are a's own and b's own
tokens: they keep half of their value (`own="average"`, each layer becomes the mean of the two), or
all of it (`own="sum"`, which adds what b learned to a). The tokens of a keep their rows; b's own
tokens follow.

The scale is set so that every token keeps its weight. Theta divides by the mass of all scores (see
`token_usage`), so each token accounts for a part of the layer's scale in proportion to its mass,
and the merged scale is the sum of these parts:

    s = mean(s_a r_a(common), s_b r_b(common)) + s_a r_a(own) + s_b r_b(own)

where r is the share of a set of tokens in its layer's mass, estimated from the norms of the keys.
If b equals a, or is a grown by zero keys, s equals s_a and the merged model is exactly a. If both
added a few tokens to the same model, s stays close to s_a. Without common tokens it is s_a + s_b.

Routed layers are merged by whole groups (`group_merge`): a row chooses among the groups of both.
"""

import torch
from torch import Tensor

from tokenformer.growth.growth_report import GrowthReport
from tokenformer.growth.model_from_tensors import ModelT
from tokenformer.growth.parameter_mapping import NEW, ParameterMapping
from tokenformer.growth.tokens.group_merge import RoutedMerge
from tokenformer.growth.tokens.layer_merge import merge_layer
from tokenformer.growth.tokens.prefix import active_share
from tokenformer.growth.tokens.rewrite import replace_tokens
from tokenformer.growth.tokens.token_set import (
    TokenSet,
    check_tokenformer,
    token_layers,
)
from tokenformer.layers.routed_pattention import RoutedPattention
from tokenformer.models.backbone import BlockPreTrainedModel

CHOICES = {"embeddings": ("a", "b", "average"), "own": ("average", "sum")}
MUST_AGREE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "positions",
    "rotary_fraction",
    "rotary_base",
    "norm",
    "norm_parameters",
    "norm_eps",
    "final_norm_parameters",
    "residual",
    "hidden_act",
    "theta",
    "theta_eps",
    "tie_word_embeddings",
    "image_size",
    "patch_size",
    "num_channels",
    "pooling",
    "num_labels",
)
"""Configuration options that must be equal in both models."""
ROUTING = ("group_size", "router", "theta_norm", "routed_bias")
"""Further ones of routed models."""


@torch.no_grad()
def merge(
    a: ModelT, b: ModelT, *, embeddings: str = "average", own: str = "average"
) -> tuple[ModelT, GrowthReport]:
    """Return a model with the tokens of both, and a report of the changes to `a`.

    Args:
        a: a TokenFormer; neither model is changed.
        b: a TokenFormer of the same shape; token counts and scales may differ.
        embeddings: use the embeddings, learned positions and norms of `a`, of `b`, or their
            `average`.
        own: `average` or `sum`, how to combine tokens that only one model has.
    """
    for name, value in {"embeddings": embeddings, "own": own}.items():
        if value not in CHOICES[name]:
            raise ValueError(
                f"{name}={value!r} is unknown; choose one of {', '.join(CHOICES[name])}"
            )
    for model in (a, b):
        check_tokenformer(model, "can be merged", routed=True)
    check_mergeable(a, b)
    others = {name: tensor.to(a.device) for name, tensor in b.state_dict().items()}
    factor = 0.5 if own == "average" else 1.0
    replacements = {}
    routed: dict[str, RoutedMerge] = {}
    for name, (projection, module) in token_layers(a).items():
        other, rates = b.get_submodule(name), b.config.row_rates(*projection)
        if isinstance(module, RoutedPattention):
            routed[name] = RoutedMerge(name, module, other, factor)
            replacements[name] = routed[name].replacement(rates)
        else:
            pair = TokenSet.of(module), TokenSet.of(other, a.device)
            replacements[name] = merge_layer(*pair, module.theta, factor, rates)

    def combined(name: str, tensor: Tensor) -> tuple[Tensor, ParameterMapping]:
        for layer, merged in routed.items():
            if name.startswith(f"{layer}."):
                return merged.copy(name, tensor, others[name])
        if embeddings == "a":
            return tensor.clone(), ParameterMapping(name)
        if embeddings == "b":  # the optimizer of a has no state for these
            return others[name].clone(), ParameterMapping(name, torch.full((len(tensor),), NEW))
        return (tensor + others[name]) / 2, ParameterMapping(name, scale=0.5)

    with active_share(a, None):  # the report compares with the whole model
        return replace_tokens(
            a,
            replacements,
            method="merge",
            scale="combined",
            exact=None,
            learned_scale=a.config.learned_scale or b.config.learned_scale,
            copy=combined,
        )


def check_mergeable(a: BlockPreTrainedModel, b: BlockPreTrainedModel) -> None:
    """Raise ValueError with all differences if the models cannot be merged."""
    if type(a.config) is not type(b.config):
        raise ValueError(
            f"a {type(a).__name__} and a {type(b).__name__} cannot be merged; give two models of "
            "the same class"
        )
    names = [name for name in MUST_AGREE if hasattr(a.config, name)]
    if getattr(a.config, "positions", None) == "learned":
        names.append("max_position_embeddings")
    pairs = {name: (getattr(a.config, name), getattr(b.config, name)) for name in names}
    pairs["dtype"] = (a.dtype, b.dtype)
    if a.config.is_routed or b.config.is_routed:
        pairs |= {name: (getattr(a.config, name), getattr(b.config, name)) for name in ROUTING}
        pairs["routed layers"] = (routed_layers(a), routed_layers(b))
    differences = [f"{name} {x} and {y}" for name, (x, y) in pairs.items() if x != y]
    if differences:
        raise ValueError(f"models of different shape cannot be merged: {', '.join(differences)}")


def routed_layers(model: BlockPreTrainedModel) -> str:
    """Return the routed layers of a model, such as `ffn 0, ffn 1`; `none` without."""
    found = [
        f"{projection} {layer}"
        for (projection, layer), module in token_layers(model).values()
        if isinstance(module, RoutedPattention)
    ]
    return ", ".join(found) or "none"
