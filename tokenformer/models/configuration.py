"""Configurations of the language models: the TokenFormer and its plain-Transformer twin.

What the two share is in `LanguageConfig`, so a comparison differs in the projections alone. Options
left at None take the value the variant or another option implies; what is saved is complete.
"""

import difflib
import math
from dataclasses import fields
from typing import Any, ClassVar, TypeVar

from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import AutoConfig

from tokenformer.models.presets import TOKENFORMER_PRESETS, TRANSFORMER_PRESETS, preset

PROJECTIONS = ("q", "k", "v", "o", "ffn")
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

Tokens = int | list[int]
"""A number of parameter tokens: one for all layers, or one per layer."""

SomeConfig = TypeVar("SomeConfig", bound="LanguageConfig")


class LanguageConfig(PreTrainedConfig):
    """What the TokenFormer and the Transformer have in common.

    Attributes:
        variant: `released`, the authors' weights, or `paper`, the code base of the paper's figures:
            tanh GELU, eps 1e-5 on the norm of the scores, no positions, and another initialisation.
        positions: `rotary` (on `rotary_fraction` of each head, with `rotary_base`), `learned`
            (`max_position_embeddings` of them) or `none`.
        norm, norm_parameters, norm_eps: of the two norms in every block.
        final_norm_parameters: of the norm before the output head.
        residual: `sequential` or `parallel`.
        hidden_act: `gelu` (exact) or `gelu_tanh`.
        initializer_range: standard deviation of embeddings and, as released, of key tokens.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    vocab_size: int = 50304
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int = FOLLOWS
    max_position_embeddings: int = 2048
    variant: str = "released"
    positions: str = FOLLOWS
    rotary_fraction: float = 0.25
    rotary_base: float = 10000.0
    norm: str = "layer_norm"
    norm_parameters: str = "none"
    norm_eps: float = 1e-5
    final_norm_parameters: str = "weight_bias"
    residual: str = "sequential"
    hidden_act: str = FOLLOWS
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
    use_cache: bool = True
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 0
    pad_token_id: int | None = None

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
    def rotary_dim(self) -> int:
        """Channels of each head that rotate."""
        return int(self.head_dim * self.rotary_fraction)

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
            for family in LanguageConfig.__subclasses__():
                if other in {field.name for field in fields(family)}:
                    raise ValueError(f"{other!r} is an option of {family.__name__} alone")
            near = difflib.get_close_matches(other, names, n=1, cutoff=0.85)
            if meant := MISNOMERS.get(other) or next(iter(near), None):
                raise ValueError(f"{other!r} is not an option; did you mean {meant!r}?")

    def _fill(self) -> None:
        """Options whose default depends on others."""

    def _check(self) -> None:
        self._check_choices(*(name for name in CHOICES if hasattr(self, name)))
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
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
        check_number("rotary_base", self.rotary_base, positive=True)
        check_number("rotary_fraction", self.rotary_fraction, positive=True)
        if self.rotary_fraction > 1:
            raise ValueError(f"rotary_fraction={self.rotary_fraction} must be in (0, 1]")
        if self.positions == "rotary" and (self.rotary_dim < 2 or self.rotary_dim % 2):
            raise ValueError(
                f"rotary_fraction={self.rotary_fraction} of head_dim={self.head_dim} is "
                f"{self.rotary_dim} channels; it must be an even number, at least 2"
            )

    def _check_choices(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) not in CHOICES[name]:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is unknown; "
                    f"choose one of {', '.join(map(str, CHOICES[name]))}"
                )


class TokenformerConfig(LanguageConfig):
    """A language model whose every projection is Pattention.

    Attributes:
        qkv_tokens, output_tokens, ffn_tokens: parameter tokens of each of the q, k and v
            projections, of the output projection and of the feed-forward layer: an int or one per
            layer. By default, as in the paper, the hidden size, the same, and four times that.
        q_tokens, k_tokens, v_tokens: override `qkv_tokens` for one projection.
        scale_tokens: the scale of every layer that does not have its token count for scale, as
            growth leaves it: `{"q" | "k" | "v" | "o" | "ffn": [a float or null per layer]}`.
        learned_scale: whether the scales are parameters; those above are then their first values.
        token_rates: factors on the learning rate of some tokens, as growth may leave them: `{"q" |
            "k" | "v" | "o" | "ffn": [runs of [how many tokens, factor], or null, per layer]}`.
        theta, theta_eps: the modified softmax and what is added to its norm.
    """

    model_type = "tokenformer"
    presets = TOKENFORMER_PRESETS

    qkv_tokens: Tokens = FOLLOWS
    output_tokens: Tokens = FOLLOWS
    ffn_tokens: Tokens = FOLLOWS
    q_tokens: Tokens | None = None
    k_tokens: Tokens | None = None
    v_tokens: Tokens | None = None
    scale_tokens: dict[str, list[float | None]] | None = None
    learned_scale: bool = False
    token_rates: dict[str, list[list[list[float]] | None]] | None = None
    theta: str = "l2_gelu"
    theta_eps: float = FOLLOWS

    def tokens(self, projection: str, layer: int) -> int:
        """How many parameter tokens `projection` (q, k, v, o or ffn) has in `layer`."""
        count = self._token_option(projection)
        return count[layer] if isinstance(count, list) else count

    def scale(self, projection: str, layer: int) -> float:
        """The scale of that layer: its own, or its token count."""
        scales = (self.scale_tokens or {}).get(projection)
        own = scales[layer] if scales else None
        return float(self.tokens(projection, layer) if own is None else own)

    def row_rates(self, projection: str, layer: int) -> list[float] | None:
        """A factor on the learning rate of each token of that layer; None if all are 1."""
        by_layer = (self.token_rates or {}).get(projection)
        runs = by_layer[layer] if by_layer else None
        if runs is None:
            return None
        return [rate for count, rate in runs for _ in range(int(count))]

    def _token_option(self, projection: str) -> Tokens:
        if projection in ("o", "ffn"):
            return {"o": self.output_tokens, "ffn": self.ffn_tokens}[projection]
        own: Tokens | None = getattr(self, f"{projection}_tokens")
        return self.qkv_tokens if own is None else own

    def _fill(self) -> None:
        defaults = {
            "qkv_tokens": self.hidden_size,
            "output_tokens": self.hidden_size,
            "ffn_tokens": 4 * self.hidden_size,
        }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def _check(self) -> None:
        super()._check()
        for name in [field.name for field in fields(self) if field.name.endswith("_tokens")]:
            value = getattr(self, name)
            if name == "scale_tokens" or value is None:
                continue
            if isinstance(value, list | tuple):
                setattr(self, name, list(value))
                self._check_length(name, value)
            for count in value if isinstance(value, list | tuple) else [value]:
                check_count(name, count)
        check_number("theta_eps", self.theta_eps)
        if not isinstance(self.scale_tokens, dict | None):
            raise ValueError(
                f"scale_tokens={self.scale_tokens!r} must be None or a dict with the keys "
                f"{', '.join(PROJECTIONS)}"
            )
        for projection, scales in (self.scale_tokens or {}).items():
            if projection not in PROJECTIONS:
                raise ValueError(
                    f"scale_tokens has the unknown key {projection!r}; "
                    f"choose from {', '.join(PROJECTIONS)}"
                )
            name = f"scale_tokens[{projection!r}]"
            self._check_length(name, scales)
            for scale in scales:
                if scale is not None:
                    check_number(name, scale, positive=True)

        self._check_rates()

    def _check_rates(self) -> None:
        for projection, by_layer in (self.token_rates or {}).items():
            if projection not in PROJECTIONS:
                raise ValueError(f"token_rates has the unknown key {projection!r}")
            name = f"token_rates[{projection!r}]"
            self._check_length(name, by_layer)
            for layer in range(self.num_hidden_layers):
                rates = self.row_rates(projection, layer)
                for rate in rates or []:
                    check_number(name, rate)
                if rates is not None and len(rates) != self.tokens(projection, layer):
                    raise ValueError(
                        f"{name} of layer {layer} is of {len(rates)} tokens; the layer has "
                        f"{self.tokens(projection, layer)}"
                    )

    def _check_length(self, name: str, values: Any) -> None:
        if not isinstance(values, list | tuple) or len(values) != self.num_hidden_layers:
            raise ValueError(
                f"{name}={values} must have one entry per layer, {self.num_hidden_layers} in all"
            )


class TransformerConfig(LanguageConfig):
    """The same language model with linear projections and a two-layer MLP.

    Attributes:
        mlp: `gelu`, GPT's two matrices, or `swiglu`, Llama's three.
        intermediate_size: hidden units of the MLP; by default 4 d, or for SwiGLU 8 d / 3 rounded up
            to a multiple of 64, which has about the same number of parameters.
    """

    model_type = "tokenformer_transformer"
    presets = TRANSFORMER_PRESETS

    mlp: str = "gelu"
    intermediate_size: int = FOLLOWS

    def _fill(self) -> None:
        if self.intermediate_size is None:
            gated = 64 * math.ceil(8 * self.hidden_size / 3 / 64)
            self.intermediate_size = gated if self.mlp == "swiglu" else 4 * self.hidden_size

    def _check(self) -> None:
        super()._check()
        check_count("intermediate_size", self.intermediate_size)


def check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r} must be a whole number of at least 1")


def check_number(name: str, value: Any, *, positive: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (positive and value == 0):
        least = "above 0" if positive else "of at least 0"
        raise ValueError(f"{name}={value!r} must be a finite number {least}")


for _config in (TokenformerConfig, TransformerConfig):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
