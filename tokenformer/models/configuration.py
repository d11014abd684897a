"""Configurations of the models: language and vision, TokenFormer and Transformer.

A model's configuration combines a modality (`LanguageConfig`, `VisionConfig`) with a projection
family (`TokenConfig`, `MatrixConfig`). Two models of the same modality differ only in the latter.
"""

import math
from typing import Any, ClassVar

from transformers.models.auto.configuration_auto import AutoConfig

from tokenformer.errors import TokenformerError
from tokenformer.models.block_configuration import (
    INFERRED,
    BlockConfig,
    check_count,
    check_number,
)
from tokenformer.models.presets import (
    TOKENFORMER_PRESETS,
    TRANSFORMER_PRESETS,
    VISION_TOKENFORMER_PRESETS,
    VISION_TRANSFORMER_PRESETS,
)

PROJECTIONS = ("q", "k", "v", "o", "ffn")
TOKEN_OPTIONS = ("qkv_tokens", "output_tokens", "ffn_tokens", "q_tokens", "k_tokens", "v_tokens")

Tokens = int | list[int]
"""Number of parameter tokens: one for all layers, or one per layer."""

QUANTIZATION_METHOD = "tokenformer"
"""The `quant_method` of `TokenQuantization`."""
PROBLEM_TYPES = ("single_label_classification", "multi_label_classification", "regression")


class QuantizationError(TokenformerError, ValueError):
    """A quantization method that does not quantize parameter tokens."""


class TokenConfig(BlockConfig):
    """Every projection is Pattention.

    Attributes:
        qkv_tokens, output_tokens, ffn_tokens: parameter tokens of each of the q, k and v
            projections, of the output projection and of the feed-forward layer: an int or one per
            layer. By default, as in the paper, the hidden size, the same, and four times that.
        q_tokens, k_tokens, v_tokens: override `qkv_tokens` for one projection.
        scale_tokens: the scale of layers where it differs from the token count, as after growth:
            `{"q" | "k" | "v" | "o" | "ffn": [a float or null per layer]}`.
        learned_scale: whether the scales are parameters, initialized to the values above.
        token_rates: learning rate factors of tokens, as growth may set them: `{"q" | "k" | "v" |
            "o" | "ffn": [a list of [number of tokens, factor], or null, per layer]}`.
        token_ages: which growth added each token, 1 for the first and 0 for tokens that the model
            started with: `{"q" | "k" | "v" | "o" | "ffn": [a list of [number of tokens, growth], or
            null, per layer]}`. None for a model that has not grown.
        theta, theta_eps: the modified softmax, and the epsilon added to its norm.
        active_groups: routes every input row to this many groups of the tokens of a projection, the
            others are skipped: `{"q" | "k" | "v" | "o" | "ffn": an int, or an int or null per
            layer}`. Projections that are not named, and layers with null, are dense.
        group_size: tokens per group.
        router: how groups are chosen: `gated`, by a linear layer whose scores also scale what the
            groups add; `learned`, by a linear layer; or `centroid`, by their mean keys.
        theta_norm: the scores in the norm of a routed projection: `all`, the default for theta
            `l2_gelu` and possible only there, or `chosen`, those of the chosen groups.
        balance_rate: how far the bias of a router moves per optimizer step to balance the load.
        routed_bias: whether routed projections add a learned vector, in place of the mean of the
            tokens that they skip.
        thresholds: a token that would add less than this to the output of a row is skipped:
            `{"q" | "k" | "v" | "o" | "ffn": [a float or null per layer]}`. For dense projections.
    """

    # Read by transformers: how `from_pretrained(..., tp_plan="auto")` shards the layers.
    base_model_tp_plan: ClassVar[dict[str, str] | None] = {
        **{f"layers.*.attention.{name}": "tokens" for name in "qkvo"},
        "layers.*.ffn": "tokens",
    }

    qkv_tokens: Tokens = INFERRED
    output_tokens: Tokens = INFERRED
    ffn_tokens: Tokens = INFERRED
    q_tokens: Tokens | None = None
    k_tokens: Tokens | None = None
    v_tokens: Tokens | None = None
    scale_tokens: dict[str, list[float | None]] | None = None
    learned_scale: bool = False
    token_rates: dict[str, list[list[list[float]] | None]] | None = None
    token_ages: dict[str, list[list[list[int]] | None]] | None = None
    theta: str = "l2_gelu"
    theta_eps: float = INFERRED
    active_groups: dict[str, Any] | None = None
    group_size: int = 32
    router: str = "gated"
    theta_norm: str = INFERRED
    balance_rate: float = 0.01
    routed_bias: bool = False
    thresholds: dict[str, list[float | None]] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        # transformers sets this before it applies a quantizer, from an argument or config.json.
        if name == "quantization_config":
            check_quantization(value)
        super().__setattr__(name, value)

    def tokens(self, projection: str, layer: int) -> int:
        """Number of parameter tokens of `projection` (q, k, v, o or ffn) in `layer`."""
        count = self._token_option(projection)
        return count[layer] if isinstance(count, list) else count

    def scale(self, projection: str, layer: int) -> float:
        """Scale of `projection` in `layer`, by default its token count."""
        scales = (self.scale_tokens or {}).get(projection)
        own = scales[layer] if scales else None
        return float(self.tokens(projection, layer) if own is None else own)

    def row_rates(self, projection: str, layer: int) -> list[float] | None:
        """Learning rate factor of each token of a layer; None if all are 1."""
        return self._rows("token_rates", projection, layer)

    def ages(self, projection: str, layer: int) -> list[int]:
        """The growth that added each token of a layer, 0 for those the model started with."""
        found = self._rows("token_ages", projection, layer)
        return [0] * self.tokens(projection, layer) if found is None else [int(n) for n in found]

    @property
    def growths(self) -> int:
        """How many growths have added tokens to this model."""
        runs = [runs for layers in (self.token_ages or {}).values() for runs in layers if runs]
        return max((int(age) for each in runs for _, age in each), default=0)

    def _rows(self, option: str, projection: str, layer: int) -> list[float] | None:
        """One value per token from an option that stores run lengths."""
        by_layer = (getattr(self, option) or {}).get(projection)
        runs = by_layer[layer] if by_layer else None
        if runs is None:
            return None
        return [value for count, value in runs for _ in range(int(count))]

    def active(self, projection: str, layer: int) -> int | None:
        """Groups that each row of `projection` in `layer` attends to; None for a dense one."""
        counts = (self.active_groups or {}).get(projection)
        return counts[layer] if isinstance(counts, list) else counts

    def groups(self, projection: str, layer: int) -> int:
        """Groups of the tokens of `projection` in `layer`."""
        return -(-self.tokens(projection, layer) // self.group_size)

    def threshold(self, projection: str, layer: int) -> float | None:
        """What a token of `projection` in `layer` must add to the output; None for any amount."""
        thresholds = (self.thresholds or {}).get(projection)
        return thresholds[layer] if thresholds else None

    @property
    def is_routed(self) -> bool:
        """Whether any projection is routed."""
        return has_entries(self.active_groups)

    @property
    def is_sparse(self) -> bool:
        """Whether any projection is routed or has a threshold."""
        return self.is_routed or has_entries(self.thresholds)

    def _token_option(self, projection: str) -> Tokens:
        if projection in ("o", "ffn"):
            return {"o": self.output_tokens, "ffn": self.ffn_tokens}[projection]
        own: Tokens | None = getattr(self, f"{projection}_tokens")
        return self.qkv_tokens if own is None else own

    def _fill(self) -> None:
        super()._fill()
        defaults = {
            "qkv_tokens": self.hidden_size,
            "output_tokens": self.hidden_size,
            "ffn_tokens": 4 * self.hidden_size,
        }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.theta_norm is None:
            self.theta_norm = "all" if self.theta == "l2_gelu" else "chosen"

    def _check(self) -> None:
        super()._check()
        for name in TOKEN_OPTIONS:
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, list | tuple):
                setattr(self, name, list(value))
                self._check_length(name, value)
            for count in value if isinstance(value, list | tuple) else [value]:
                check_count(name, count)
        check_number("theta_eps", self.theta_eps)
        self._check_numbers("scale_tokens", positive=True)
        self._check_rows("token_rates", "factors")
        self._check_rows("token_ages", "growths")
        self._check_groups()
        self._check_numbers("thresholds", positive=False)
        for name in (self.active_groups or {}).keys() & (self.thresholds or {}).keys():
            for layer in range(self.num_hidden_layers):
                if self.active(name, layer) is not None and self.threshold(name, layer) is not None:
                    raise ValueError(
                        f"{name} of layer {layer} is in active_groups and in thresholds; "
                        "it must be in one of them"
                    )

    def _check_numbers(self, option: str, *, positive: bool) -> None:
        """Check an option with a number or null per layer, by projection."""
        self._check_projections(option)
        for projection, numbers in (getattr(self, option) or {}).items():
            name = f"{option}[{projection!r}]"
            self._check_length(name, numbers)
            for number in numbers:
                if number is not None:
                    check_number(name, number, positive=positive)

    def _check_projections(self, option: str) -> None:
        value = getattr(self, option)
        if not isinstance(value, dict | None):
            raise ValueError(
                f"{option}={value!r} must be None or a dict with the keys {', '.join(PROJECTIONS)}"
            )
        for projection in value or {}:
            if projection not in PROJECTIONS:
                raise ValueError(
                    f"{option} has the unknown key {projection!r}; "
                    f"choose from {', '.join(PROJECTIONS)}"
                )

    def _check_groups(self) -> None:
        check_count("group_size", self.group_size)
        check_number("balance_rate", self.balance_rate)
        self._check_projections("active_groups")
        for projection, counts in (self.active_groups or {}).items():
            name = f"active_groups[{projection!r}]"
            if isinstance(counts, list | tuple):
                self._check_length(name, counts)
                self.active_groups = {**(self.active_groups or {}), projection: list(counts)}
            differ = isinstance(counts, list | tuple) or isinstance(
                self._token_option(projection), list
            )
            for layer in range(self.num_hidden_layers if differ else 1):
                if (count := self.active(projection, layer)) is None:
                    continue
                check_count(name, count)
                if count > (most := self.groups(projection, layer)):
                    raise ValueError(
                        f"{name}={count} of layer {layer} must be at most {most}, the groups of "
                        f"{self.group_size} of its {self.tokens(projection, layer)} tokens"
                    )
        if self.is_routed and self.theta_norm == "all" and self.theta != "l2_gelu":
            raise ValueError(
                f"theta_norm='all' with theta={self.theta!r} would need the scores of all tokens; "
                "it must be 'chosen'"
            )

    def _check_rows(self, option: str, what: str) -> None:
        """Check an option that stores run lengths of one value per token."""
        for projection, by_layer in (getattr(self, option) or {}).items():
            if projection not in PROJECTIONS:
                raise ValueError(f"{option} has the unknown key {projection!r}")
            name = f"{option}[{projection!r}]"
            self._check_length(name, by_layer)
            for layer in range(self.num_hidden_layers):
                values = self._rows(option, projection, layer)
                for value in values or []:
                    check_number(name, value)
                if values is not None and len(values) != self.tokens(projection, layer):
                    raise ValueError(
                        f"{name} of layer {layer} has {what} for {len(values)} tokens; "
                        f"the layer has {self.tokens(projection, layer)}"
                    )

    def _check_length(self, name: str, values: Any) -> None:
        if not isinstance(values, list | tuple) or len(values) != self.num_hidden_layers:
            raise ValueError(
                f"{name}={values} must have one entry per layer, {self.num_hidden_layers} in all"
            )


def has_entries(option: dict[str, Any] | None) -> bool:
    """Whether an option by projection names any layer. Does not go through the layers, whose number
    a damaged configuration may state as billions."""
    values = (option or {}).values()
    return any(
        entry is not None
        for value in values
        for entry in (value if isinstance(value, list | tuple) else [value])
    )


def check_quantization(config: Any) -> None:
    """Refuse torchao, bitsandbytes and others: they replace `nn.Linear`, which a model of parameter
    tokens does not have."""
    if config is None:
        return
    found = config.get("quant_method") if isinstance(config, dict) else config.quant_method
    method = getattr(found, "value", found)
    if method != QUANTIZATION_METHOD:
        raise QuantizationError(
            f"quantization method {method!r} does not quantize parameter tokens; "
            "use quantization_config=tokenformer.TokenQuantization()"
        )


class MatrixConfig(BlockConfig):
    """Linear projections and a two-layer MLP: the Transformer baseline.

    Attributes:
        mlp: `gelu`, two matrices as in GPT, or `swiglu`, three as in Llama.
        intermediate_size: hidden units of the MLP; by default 4 d, or for SwiGLU 8 d / 3 rounded up
            to a multiple of 64, which has about the same number of parameters.
    """

    mlp: str = "gelu"
    intermediate_size: int = INFERRED

    def _fill(self) -> None:
        super()._fill()
        if self.intermediate_size is None:
            gated = 64 * math.ceil(8 * self.hidden_size / 3 / 64)
            self.intermediate_size = gated if self.mlp == "swiglu" else 4 * self.hidden_size

    def _check(self) -> None:
        super()._check()
        check_count("intermediate_size", self.intermediate_size)


class LanguageConfig(BlockConfig):
    """Options that both language models share.

    Attributes:
        positions: `rotary` (on `rotary_fraction` of each head, with `rotary_base`), `learned`
            (`max_position_embeddings` of them) or `none`; the default depends on the variant.
    """

    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    vocab_size: int = 50304
    max_position_embeddings: int = 2048
    positions: str = INFERRED
    rotary_fraction: float = 0.25
    rotary_base: float = 10000.0
    tie_word_embeddings: bool = True
    use_cache: bool = True
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 0
    pad_token_id: int | None = None

    @classmethod
    def families(cls) -> list[type[BlockConfig]]:
        return [TokenformerConfig, TransformerConfig]

    @property
    def rotary_dim(self) -> int:
        """Rotated channels of each head."""
        return int(self.head_dim * self.rotary_fraction)

    def _check(self) -> None:
        super()._check()
        check_count("vocab_size", self.vocab_size)
        check_count("max_position_embeddings", self.max_position_embeddings)
        check_number("rotary_base", self.rotary_base, positive=True)
        check_number("rotary_fraction", self.rotary_fraction, positive=True)
        if self.rotary_fraction > 1:
            raise ValueError(f"rotary_fraction={self.rotary_fraction} must be in (0, 1]")
        if self.positions == "rotary" and (self.rotary_dim < 2 or self.rotary_dim % 2):
            raise ValueError(
                f"rotary_fraction={self.rotary_fraction} of head_dim={self.head_dim} is "
                f"{self.rotary_dim} channels; it must be an even number, at least 2"
            )


class VisionConfig(BlockConfig):
    """Options that both image classifiers share.

    Attributes:
        image_size, patch_size, num_channels: the image shape that positions are learned for. They
            are interpolated for other sizes, which must be a multiple of the patch size.
        pooling: `class`, classify a class token before the patches, or `mean`, classify the mean
            over the patches without a class token.
        drop_path_rate: probability that the last block drops a branch for a training image; it
            rises linearly from 0 in the first block.
        num_labels: number of classes; timm's `num_classes` is an alias.
        problem_type: `single_label_classification`, `multi_label_classification` or `regression`;
            by default it is inferred from the first labels, as transformers does.
    """

    attribute_map: ClassVar[dict[str, str]] = {"num_classes": "num_labels"}

    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3
    pooling: str = "class"
    drop_path_rate: float = 0.0

    @classmethod
    def families(cls) -> list[type[BlockConfig]]:
        return [TokenformerVisionConfig, TransformerVisionConfig]

    @property
    def grid_size(self) -> int:
        """Patches per side."""
        return self.image_size // self.patch_size

    @property
    def patch_channels(self) -> int:
        """Values per patch."""
        return self.num_channels * self.patch_size**2

    @property
    def class_tokens(self) -> int:
        return int(self.pooling == "class")

    @property
    def num_positions(self) -> int:
        return self.class_tokens + self.grid_size**2

    def drop_path(self, layer: int) -> float:
        """Probability that `layer` drops a branch."""
        return self.drop_path_rate * layer / max(1, self.num_hidden_layers - 1)

    def __post_init__(self, **others: Any) -> None:
        if "num_classes" in others:
            others["num_labels"] = others.pop("num_classes")
        super().__post_init__(**others)
        check_count("num_labels", self.num_labels)

    def _check(self) -> None:
        super()._check()
        for name in ("image_size", "patch_size", "num_channels"):
            check_count(name, getattr(self, name))
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size={self.image_size} must be a multiple of patch_size={self.patch_size}"
            )
        if self.problem_type not in (None, *PROBLEM_TYPES):
            raise ValueError(
                f"problem_type={self.problem_type!r} is unknown; "
                f"choose one of {', '.join(PROBLEM_TYPES)}"
            )
        check_number("drop_path_rate", self.drop_path_rate)
        if self.drop_path_rate >= 1:
            raise ValueError(f"drop_path_rate={self.drop_path_rate} must be below 1")


class TokenformerConfig(TokenConfig, LanguageConfig):
    """A language model whose every projection is Pattention."""

    model_type = "tokenformer"
    presets = TOKENFORMER_PRESETS


class TransformerConfig(MatrixConfig, LanguageConfig):
    """The same language model with linear projections and a two-layer MLP."""

    model_type = "tokenformer_transformer"
    presets = TRANSFORMER_PRESETS


class TokenformerVisionConfig(TokenConfig, VisionConfig):
    """An image classifier whose every projection is Pattention."""

    model_type = "tokenformer_vision"
    presets = VISION_TOKENFORMER_PRESETS


class TransformerVisionConfig(MatrixConfig, VisionConfig):
    """The same classifier with linear projections and a two-layer MLP: a Vision Transformer."""

    model_type = "tokenformer_transformer_vision"
    presets = VISION_TRANSFORMER_PRESETS


CONFIG_CLASSES: dict[str, type[BlockConfig]] = {
    config_class.model_type: config_class
    for config_class in (
        TokenformerConfig,
        TransformerConfig,
        TokenformerVisionConfig,
        TransformerVisionConfig,
    )
}
"""The configuration class of each `model_type`."""

for _model_type, _config in CONFIG_CLASSES.items():
    AutoConfig.register(_model_type, _config, exist_ok=True)
