"""Growing the plain Transformer: the baselines for token growth, by name.

    grown, report = tokenformer.grow(model, hidden_size=1536, method="net2net")

| method          | width                                 | depth           | output              |
|-----------------|---------------------------------------|-----------------|---------------------|
| `net2net`       | random units copied, output divided   | identity layers | exact for multiples |
| `block_padding` | new parameters around the old block   | new layers      | changes             |
| `hypercloning`  | every matrix tiled, whole factors     | none            | exact               |
| `bert2bert_fpi` | as `net2net`                          | stacked layers  | exact for multiples |
| `bert2bert_aki` | new rows from the next layer          | stacked layers  | changes             |
| `stacking`      | none                                  | stacked layers  | changes             |
| `lemon`         | units copied, output split unequally  | identity layers | exact at any width  |
| `ligo`          | learned on data                       | learned on data | changes             |

Widths that are a multiple of the old one are exact for `net2net` and `bert2bert_fpi`; stacked
layers never are. Each method is a function from an `Expansion` to `GrownWeights` in a file of its
own; its keyword arguments are the options of the method.
"""

from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any

from torch import Tensor

from tokenformer.growth.growth_report import ChangedPart, GrowthReport
from tokenformer.growth.model_from_tensors import ModelT, build_model
from tokenformer.growth.probe import output_change
from tokenformer.growth.transformer.bert2bert import advanced_knowledge, function_preserving
from tokenformer.growth.transformer.block_padding import block_padding
from tokenformer.growth.transformer.expansion import Expansion, GrownWeights
from tokenformer.growth.transformer.hypercloning import hypercloning
from tokenformer.growth.transformer.lemon import lemon
from tokenformer.growth.transformer.ligo import ligo
from tokenformer.growth.transformer.net2net import net2net
from tokenformer.growth.transformer.stacking import stacking
from tokenformer.growth.transformer.target_config import SIZES, target_config
from tokenformer.models.accounting import count_parameters
from tokenformer.models.configuration import TransformerConfig
from tokenformer.models.language import TransformerForCausalLM

METHODS: dict[str, Callable[..., GrownWeights]] = {
    "net2net": net2net,
    "block_padding": block_padding,
    "hypercloning": hypercloning,
    "bert2bert_fpi": function_preserving,
    "bert2bert_aki": advanced_knowledge,
    "stacking": stacking,
    "lemon": lemon,
    "ligo": ligo,
}


def grow_transformer(
    model: ModelT,
    to: str | TransformerConfig | None = None,
    *,
    method: str = "net2net",
    seed: int = 0,
    **options: Any,
) -> tuple[ModelT, GrowthReport]:
    """Return a larger Transformer initialized from `model`, and a report.

    Args:
        model: a TransformerForCausalLM; it is not changed.
        to: a preset name or a configuration.
        method: one of the table above.
        seed: seed of the random choices and initialization.
        **options: instead of `to`, any of hidden_size, num_hidden_layers, intermediate_size,
            num_attention_heads and num_key_value_heads; the others grow in proportion. Also
            the options of the method: `noise` (net2net, hypercloning), `unevenness` (lemon),
            `batches`, `steps` and `learning_rate` (ligo).
    """
    if not isinstance(model, TransformerForCausalLM):
        raise TypeError(
            f"only a TransformerForCausalLM grows by {method}, not a {type(model).__name__}"
        )
    sizes = {name: options.pop(name) for name in SIZES if name in options}
    check_method(method, options)
    before = model.config
    after = target_config(before, to, sizes)
    old = {name: parameter.detach() for name, parameter in model.named_parameters()}
    grown = METHODS[method](Expansion(type(model), before, after, old, seed), **options)
    larger = build_model(type(model), grown.config, grown.parameters)
    larger.train(model.training)
    report = GrowthReport(
        method=method,
        init=None,
        seed=seed,
        exact=grown.exact,
        parts=changed_parts(old, grown.parameters),
        parameters_before=sum(count_parameters(before).values()),
        parameters_after=sum(count_parameters(after).values()),
        mappings=grown.mappings,
    )
    report.pair(model, larger)
    report.max_output_change = output_change(model, larger, seed)
    return larger, report


def check_method(method: str, options: Iterable[str]) -> None:
    """Raise if there is no such method, or if it has no option of one of these names."""
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown; choose one of {', '.join(METHODS)}")
    known = [name for name in signature(METHODS[method]).parameters if name != "expansion"]
    for name in options:
        if name not in known:
            raise ValueError(
                f"{name!r} is not an option of {method}; its options are "
                f"{', '.join([*known, *SIZES])}"
            )


def changed_parts(old: dict[str, Tensor], new: dict[str, Tensor]) -> list[ChangedPart]:
    """Return the parameters that are new or have another shape."""
    parts = []
    for name, tensor in new.items():
        before = tuple(old[name].shape) if name in old else ()
        if before != tuple(tensor.shape):
            parts.append(ChangedPart(name.removesuffix(".weight"), before, tuple(tensor.shape)))
    return parts
