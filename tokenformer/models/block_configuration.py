"""What the configurations of all models share: the blocks, and how options are checked.

A model is a modality (`LanguageConfig`, `VisionConfig`) with a family of projections
(`TokenConfig`, `MatrixConfig`): all four are `BlockConfig`s, and the configuration of a model
inherits from one of each. Options left at None take the value the variant or another option
implies; what is saved is complete.
"""

import difflib
import math
from dataclasses import fields
from typing import Any, ClassVar, TypeVar

from transformers.configuration_utils import PreTrainedConfig

from tokenformer.models.presets import preset

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
    "mlp": ("gelu", "swiglu"),
    "pooling": ("class", "mean"),
    "learned_scale": (True, False),
    "tie_word_embeddings": (True, False),
    "use_cache": (True, False),
}

# How other libraries call what is called otherwise here.
MISNOMERS = {
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

FOLLOWS: Any = None
"""The default of an option that takes the value another option implies."""

SomeConfig = TypeVar("SomeConfig", bound="BlockConfig")


class BlockConfig(PreTrainedConfig):
    """Width, depth, heads and norms of the blocks that every model of ours is made of.

    Attributes:
        variant: `released`, the authors' weights, or `paper`, the code base of the paper's figures:
            tanh GELU, eps 1e-5 on the norm of the scores, and another initialisation.
        norm, norm_parameters, norm_eps: of the two norms in every block.
        final_norm_parameters: of the norm before the output head.
        residual: `sequential` or `parallel`.
        hidden_act: `gelu` (exact) or `gelu_tanh`.
        initializer_range: standard deviation of embeddings and, as released, of key tokens.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {}

    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int = FOLLOWS
    variant: str = "released"
    norm: str = "layer_norm"
    norm_parameters: str = "none"
    norm_eps: float = 1e-5
    final_norm_parameters: str = "weight_bias"
    residual: str = "sequential"
    hidden_act: str = FOLLOWS
    initializer_range: float = 0.02

    @classmethod
    def from_preset(cls: type[SomeConfig], name: str, **changes: Any) -> SomeConfig:
        """A published size by name, with any option changed."""
        return cls(**{**preset(name, cls.presets), **changes})

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def key_value_size(self) -> int:
        """Channels of the keys and of the values, all their heads together."""
        return self.num_key_value_heads * self.head_dim

    @property
    def approximate(self) -> str:
        """The GELU by torch's name."""
        return "tanh" if self.hidden_act == "gelu_tanh" else "none"

    def __post_init__(self, **others: Any) -> None:
        names = {field.name for field in fields(self)}
        self._refuse_misnomers(names, others)
        self._check_choices("variant")
        for name, value in VARIANT_DEFAULTS[self.variant].items():
            if name in names and getattr(self, name) is None:
                setattr(self, name, value)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        self._fill()
        self._check()
        super().__post_init__(**others)

    def _refuse_misnomers(self, names: set[str], others: dict[str, Any]) -> None:
        """Unknown keys are let through, as transformers asks of every configuration, but not those
        that are plainly meant for an option of ours: they would be ignored in silence."""
        for other, value in others.items():
            derived = getattr(type(self), other, None)
            if isinstance(derived, property) and derived.fset is None:
                raise ValueError(f"{other}={value!r} is not an option; it follows from others")
            for family in self.families():
                if other in {field.name for field in fields(family)}:
                    raise ValueError(f"{other!r} is an option of {family.__name__} alone")
            near = difflib.get_close_matches(other, names, n=1, cutoff=0.85)
            if meant := MISNOMERS.get(other) or next(iter(near), None):
                raise ValueError(f"{other!r} is not an option; did you mean {meant!r}?")

    @classmethod
    def families(cls) -> list[type["BlockConfig"]]:
        """The configurations of this modality, which differ in the projections."""
        return []

    def _fill(self) -> None:
        """Options whose default depends on others."""

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
