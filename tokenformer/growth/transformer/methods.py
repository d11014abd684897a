"""Growing the plain Transformer: the rivals of token growth, by name.

    grown, report = tokenformer.grow(model, hidden_size=1536, method="net2net")

| method          | width                                 | depth           | output              |
|-----------------|---------------------------------------|-----------------|---------------------|
| `net2net`       | random units copied, output divided   | identity layers | exact to a multiple |
| `block_padding` | fresh parameters around the old block | fresh layers    | jumps               |
| `hypercloning`  | every matrix tiled, whole factors     | none            | exact               |
| `bert2bert_fpi` | as `net2net`                          | stacked layers  | exact to a multiple |
| `bert2bert_aki` | new rows from the next layer          | stacked layers  | jumps               |
| `stacking`      | none                                  | stacked layers  | jumps               |
| `lemon`         | units copied, output split unequally  | identity layers | exact at any width  |
| `ligo`          | learned on data                       | learned on data | jumps               |

Each method is a function from an `Expansion` to a `Grown`, in a file of its own; its keyword
arguments are the options of the method.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any

from tokenformer.growth.assembly import assemble
from tokenformer.growth.growth_report import GrowthReport, Part
from tokenformer.growth.probe import output_change
from tokenformer.growth.transformer.bert2bert import advanced_knowledge, function_preserving
from tokenformer.growth.transformer.block_padding import block_padding
from tokenformer.growth.transformer.expansion import Expansion, Grown
from tokenformer.growth.transformer.hypercloning import hypercloning
from tokenformer.growth.transformer.lemon import lemon
from tokenformer.growth.transformer.ligo import ligo
from tokenformer.growth.transformer.net2net import net2net
from tokenformer.growth.transformer.stacking import stacking
from tokenformer.growth.transformer.target_config import SIZES, target_config
from tokenformer.models.accounting import count_parameters
from tokenformer.models.configuration import TransformerConfig
from tokenformer.models.language import TransformerForCausalLM

METHODS: dict[str, Callable[..., Grown]] = {
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
    model: Any,
    to: str | TransformerConfig | None = None,
    *,
    method: str = "net2net",
    seed: int = 0,
    **options: Any,
) -> tuple[Any, GrowthReport]:
    """A larger Transformer that begins with what `model` knows, and a report. `model` itself is
    left alone.

    Args:
        model: a TransformerForCausalLM.
        to: a preset, or a configuration.
        method: one of the table above.
        seed: of what is drawn.
        **options: instead of `to`, any of hidden_size, num_hidden_layers, intermediate_size,
            num_attention_heads and num_key_value_heads, the others following in proportion; and
            the options of the method: `noise` (net2net, hypercloning), `unevenness` (lemon),
            `batches`, `steps` and `learning_rate` (ligo).
    """
    if not isinstance(model, TransformerForCausalLM):
        raise TypeError(f"this grows a TransformerForCausalLM, not a {type(model).__name__}")
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown; choose one of {', '.join(METHODS)}")
    sizes = {name: options.pop(name) for name in SIZES if name in options}
    check_options(method, options)
    before = model.config
    after = target_config(before, to, sizes)
    old = {name: parameter.detach() for name, parameter in model.named_parameters()}
    grown = METHODS[method](Expansion(type(model), before, after, old, seed), **options)
    larger = assemble(type(model), grown.config, grown.parameters)
    larger.train(model.training)
    report = GrowthReport(
        method=method,
        init=None,
        seed=seed,
        exact=grown.exact,
        parts=changed_parts(old, grown.parameters),
        parameters_before=sum(count_parameters(before).values()),
        parameters_after=sum(count_parameters(after).values()),
        origins=grown.origins,
    )
    report.pair(model, larger)
    report.max_output_change = output_change(model, larger, seed)
    return larger, report


def check_options(method: str, options: dict[str, Any]) -> None:
    known = [name for name in signature(METHODS[method]).parameters if name != "expansion"]
    for name in options:
        if name not in known:
            raise ValueError(
                f"{name} is no option of {method}; it has {', '.join(known) or 'none'}, "
                f"and sizes are {', '.join(SIZES)}"
            )


def changed_parts(old: dict[str, Any], new: dict[str, Any]) -> list[Part]:
    """What has another shape than before, or was not there."""
    parts = []
    for name, tensor in new.items():
        before = tuple(old[name].shape) if name in old else ()
        if before != tuple(tensor.shape):
            parts.append(Part(name.removesuffix(".weight"), before, tuple(tensor.shape)))
    return parts
