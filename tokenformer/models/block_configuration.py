"""The base of all configurations: options of the blocks, and how options are checked.

Options left at None take a value implied by the variant or another option, so a saved configuration
is complete.
"""

import difflib
import math
from dataclasses import fields
from typing import Any, ClassVar, TypeVar

from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging

from tokenformer.models.presets import preset

logger = logging.get_logger(__name__)

VARIANT_DEFAULTS: dict[str, dict[str, Any]] = {
    "released": {"hidden_act": "gelu", "positions": "rotary", "theta_eps": 0.0},
    "paper": {"hidden_act": "gelu_tanh", "positions": "none", "theta_eps": 1e-5},
}
CHOICES: dict[str, tuple[str | bool, ...]] = {
    "variant": tuple(VARIANT_DEFAULTS),
    "positions": ("rotary", "learned", "none"),
    "norm": ("layer_norm", "rms_norm"),
    "norm_parameters": ("none", "bias", "weight", "weight_bias"),
    "final_norm_parameters": ("none", "bias", "weight", "weight_bias"),
    "residual": ("sequential", "parallel"),
    "hidden_act": ("gelu", "gelu_tanh"),
    "theta": ("l2_gelu", "gelu_l2", "l1_gelu", "softmax"),
    "router": ("centroid", "learned", "gated"),
    "theta_norm": ("all", "chosen"),
    "routed_bias": (True, False),
    "mlp": ("gelu", "swiglu"),
    "pooling": ("class", "mean"),
    "mode": ("routed", "shared", "projector"),
    "learned_scale": (True, False),
    "tie_word_embeddings": (True, False),
    "use_cache": (True, False),
}

# Names that other libraries use for our options.
SYNONYMS = {
    **dict.fromkeys(("num_layers", "n_layers", "n_layer", "depth"), "num_hidden_layers"),
    **dict.fromkeys(("num_heads", "n_heads", "n_head"), "num_attention_heads"),
    **dict.fromkeys(("num_kv_heads", "n_kv_heads"), "num_key_value_heads"),
    **dict.fromkeys(("d_model", "dim", "hidden_dim", "embed_dim", "n_embd"), "hidden_size"),
    **dict.fromkeys(("layer_norm_eps", "rms_norm_eps", "layer_norm_epsilon"), "norm_eps"),
    **dict.fromkeys(("rope_theta", "rotary_emb_base"), "rotary_base"),
    **dict.fromkeys(("rotary_pct", "partial_rotary_factor", "rotary_frac"), "rotary_fraction"),
    **dict.fromkeys(("hidden_activation", "activation_function"), "hidden_act"),
    **dict.fromkeys(
        ("n_positions", "n_ctx", "block_size", "max_seq_len", "max_sequence_length"),
        "max_position_embeddings",
    ),
}

SHADOWED = "_shadowed"
"""The attribute for keys of config.json that have the name of a method."""
STUB_MODULE = "modeling_tokenformer"
"""The module that `save_pretrained` of a model writes next to the weights."""


class StubMap(dict[str, str]):
    """The `auto_map` of a configuration that is saved together with the stub."""


INFERRED: Any = None
"""The default of an option that is inferred from other options."""

SomeConfig = TypeVar("SomeConfig", bound="BlockConfig")


class BlockConfig(PreTrainedConfig):
    """Width, depth, heads and norms of the blocks of a model.

    Attributes:
        variant: `released`, as the authors' weights, or `paper`, as the paper's own figures:
            tanh GELU, eps 1e-5 on the norm of the scores, and another initialization.
        norm, norm_parameters, norm_eps: options of the two norms in every block.
        final_norm_parameters: parameters of the norm before the output head.
        residual: `sequential` or `parallel`.
        hidden_act: `gelu` (exact) or `gelu_tanh`.
        initializer_range: standard deviation of embeddings and, if released, of key tokens.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {}

    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int = INFERRED
    variant: str = "released"
    norm: str = "layer_norm"
    norm_parameters: str = "none"
    norm_eps: float = 1e-5
    final_norm_parameters: str = "weight_bias"
    residual: str = "sequential"
    hidden_act: str = INFERRED
    initializer_range: float = 0.02

    @classmethod
    def from_preset(cls: type[SomeConfig], name: str, **changes: Any) -> SomeConfig:
        """Return a published size by name; keyword arguments change any option."""
        return cls(**{**preset(name, cls.presets), **changes})

    @classmethod
    def option_names(cls) -> list[str]:
        """Return the options of this model with their aliases, without the fields that every
        configuration of transformers has."""
        common = {field.name for field in fields(PreTrainedConfig)}
        own = [field.name for field in fields(cls) if field.name not in common]
        return [*own, *cls.attribute_map, *cls.attribute_map.values(), "attn_implementation"]

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build from config.json. Keys that the constructor refuses as misspelled options are kept
        as attributes and saved again, because other tools annotate config.json."""
        foreign = {name: config_dict[name] for name in config_dict if cls._misspelling(name)}
        known = {name: value for name, value in config_dict.items() if name not in foreign}
        found = super().from_dict(known, **kwargs)
        config, unused = found if isinstance(found, tuple) else (found, {})
        for name, value in foreign.items():
            meant = cls._closest_option(name)
            if meant and getattr(config, meant) != value:
                logger.warning_once(
                    f"{name}={value!r} has no effect; "
                    f"the option is {meant}={getattr(config, meant)!r}"
                )
            setattr(config, name, kwargs.get(name, value))
            unused.pop(name, None)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        """Keep a key of config.json with the name of a method, such as `tokens`, without replacing
        the method; it is saved again."""
        if callable(getattr(type(self), name, None)):
            self.__dict__.setdefault(SHADOWED, {})[name] = value
        else:
            super().__setattr__(name, value)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def key_value_size(self) -> int:
        """Channels of the keys, and of the values, over all heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def approximate(self) -> str:
        """The `approximate` argument of torch's GELU."""
        return "tanh" if self.hidden_act == "gelu_tanh" else "none"

    def __post_init__(self, **others: Any) -> None:
        names = {field.name for field in fields(self)}
        for other in others:
            if problem := self._misspelling(other):
                raise ValueError(problem)
        self._check_choices("variant")
        for name, value in VARIANT_DEFAULTS[self.variant].items():
            if name in names and getattr(self, name) is None:
                setattr(self, name, value)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        self._fill()
        self._check()
        self._check_derived(others)
        self.auto_map: dict[str, str] = {}  # TRL reads it from every configuration
        super().__post_init__(**others)

    def save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> None:
        """Save as transformers does. Without a model there is no stub in the folder, so an
        `auto_map` that points to it is left out."""
        mapped = self.auto_map
        to_stub = any(f"{name}".startswith(f"{STUB_MODULE}.") for name in (mapped or {}).values())
        if to_stub and not isinstance(mapped, StubMap):
            self.auto_map = {}
        try:
            super().save_pretrained(save_directory, *args, **options)
        finally:
            self.auto_map = mapped

    def to_dict(self) -> dict[str, Any]:
        output: dict[str, Any] = super().to_dict()
        output.update(output.pop(SHADOWED, {}))
        if not output.get("auto_map"):
            output.pop("auto_map", None)
        return output

    @classmethod
    def _misspelling(cls, name: str) -> str | None:
        """Return the problem with a key that is not an option. Unknown keys are accepted, as
        transformers requires, except those that are clearly meant to be one of our options: they
        would be silently ignored."""
        names = {field.name for field in fields(cls)}
        if name in names or cls._is_derived(name):
            return None
        for family in cls.families():
            if name in {field.name for field in fields(family)}:
                return f"{name!r} is an option of {family.__name__} only"
        meant = cls._closest_option(name)
        return f"{name!r} is not an option; did you mean {meant!r}?" if meant else None

    @classmethod
    def _closest_option(cls, name: str) -> str | None:
        """Return the option that a name is a synonym or a misspelling of."""
        names = [field.name for field in fields(cls)]
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.85)
        meant = SYNONYMS.get(name) or next(iter(near), None)
        return meant if meant in names else None

    @classmethod
    def _is_derived(cls, name: str) -> bool:
        found = getattr(cls, name, None)
        return isinstance(found, property) and found.fset is None

    def _check_derived(self, others: dict[str, Any]) -> None:
        """Remove derived values such as `head_dim`, which other tools write into config.json."""
        for name in [name for name in others if self._is_derived(name)]:
            given, own = others.pop(name), getattr(self, name)
            if given != own:
                raise ValueError(
                    f"{name}={given!r} is not an option; the other options imply {own!r}"
                )

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing. transformers calls this after following `auto_map`, and would copy our source
        files into every saved folder."""

    @classmethod
    def families(cls) -> list[type["BlockConfig"]]:
        """Return the configurations of this modality, which differ in the projections."""
        return []

    def _fill(self) -> None:
        """Set options whose default depends on others."""

    def _check(self) -> None:
        self._check_choices(*(name for name in CHOICES if hasattr(self, name)))
        for name in (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
        ):
            check_count(name, getattr(self, name))
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of "
                f"num_attention_heads={self.num_attention_heads}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        check_number("norm_eps", self.norm_eps)
        check_number("initializer_range", self.initializer_range)

    def _check_choices(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) not in CHOICES[name]:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is unknown; "
                    f"choose one of {', '.join(map(str, CHOICES[name]))}"
                )


def check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r} must be a whole number of at least 1")


def check_number(name: str, value: Any, *, positive: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (positive and value == 0):
        least = "above 0" if positive else "of at least 0"
        raise ValueError(f"{name}={value!r} must be a finite number {least}")
