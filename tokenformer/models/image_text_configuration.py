"""The configuration of vision-language models: a language model joined with a vision model.

    vision = TokenformerVisionConfig.from_preset("base")
    text = TokenformerConfig.from_preset("124m")
    config = TokenformerImageTextConfig.from_parts(vision, text, new_tokens=64, mode="routed")

Its own options are those of the language model, `vision_config` holds those of the vision model.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers.models.auto.configuration_auto import AutoConfig

from tokenformer.models.block_configuration import INFERRED, BlockConfig, check_count
from tokenformer.models.configuration import (
    CONFIG_CLASSES,
    PROJECTIONS,
    LanguageConfig,
    TokenConfig,
    TokenformerConfig,
    TokenformerVisionConfig,
    Tokens,
)
from tokenformer.models.presets import (
    IMAGE_TEXT_PRESETS,
    TOKENFORMER_PRESETS,
    VISION_TOKENFORMER_PRESETS,
    preset,
)

JOINED_OPTIONS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "residual",
    "norm",
    "norm_parameters",
    "norm_eps",
    "hidden_act",
    "theta",
    "theta_eps",
)
"""Options that both halves must agree on where they share their layers."""
NOT_OF_TEXT = (
    *("model_type", "architectures", "transformers_version", "dtype", "auto_map"),
    *("token_rates", "token_ages"),  # of the language tokens alone
)


class TokenformerImageTextConfig(TokenConfig, LanguageConfig):
    """A vision-language model. The options of a `TokenformerConfig` are those of its language
    half, and its token options count the language tokens.

    Attributes:
        vision_config: the vision half, a `TokenformerVisionConfig` or its dict.
        mode: `routed`, image positions attend to vision and new tokens and text positions to
            language and new tokens; `shared`, every position attends to all tokens; `projector`,
            a frozen vision encoder and a projector before the language model, as in LLaVA.
        new_tokens: tokens of every layer that belong to neither half: an int, or `{"q" | "k" | "v"
            | "o" | "ffn": an int, or one per layer}`. Unused in mode `projector`.
        projector_size: hidden units of the projector; by default the hidden size.
        image_token_index: id that marks the positions of an image in the text; `image_token_id` is
            an alias. By default the first id after the vocabulary, which the model has no embedding
            for and cannot generate.
    """

    model_type = "tokenformer_image_text"
    presets = IMAGE_TEXT_PRESETS
    sub_configs: ClassVar[dict[str, Any]] = {"vision_config": TokenformerVisionConfig}
    base_model_tp_plan: ClassVar[dict[str, str] | None] = None
    # As in LLaVA: a field called `image_token_id` would have to be inside the vocabulary.
    attribute_map: ClassVar[dict[str, str]] = {"image_token_id": "image_token_index"}

    vision_config: Any = INFERRED
    mode: str = "routed"
    new_tokens: int | dict[str, Tokens] = 64
    projector_size: int = INFERRED
    image_token_index: int = INFERRED

    @classmethod
    def from_parts(
        cls, vision: TokenformerVisionConfig, text: TokenformerConfig, **options: Any
    ) -> "TokenformerImageTextConfig":
        """Join the configurations of a vision and a language model."""
        own = {name: value for name, value in text.to_dict().items() if name not in NOT_OF_TEXT}
        return cls(**own | {"vision_config": vision.to_dict()} | options)

    @classmethod
    def from_preset(cls, name: str, **changes: Any) -> "TokenformerImageTextConfig":
        """Return a published pair of sizes by name; keyword arguments change any option of the
        joint model or of its language half."""
        sizes = preset(name, cls.presets)
        vision = TokenformerVisionConfig(**preset(sizes["vision"], VISION_TOKENFORMER_PRESETS))
        text = TokenformerConfig(**preset(sizes["language"], TOKENFORMER_PRESETS))
        return cls.from_parts(vision, text, **changes)

    @classmethod
    def families(cls) -> list[type[BlockConfig]]:
        return [TokenformerImageTextConfig]

    @property
    def is_joined(self) -> bool:
        """Whether images pass through the layers of the language model, beside the text."""
        return self.mode != "projector"

    def parts(self, projection: str, layer: int) -> tuple[int, int, int]:
        """Number of vision, new and language tokens of a projection, in the order of its rows."""
        language = super().tokens(projection, layer)
        if not self.is_joined:
            return 0, 0, language
        new = self.new_tokens
        counts: Tokens = new[projection] if isinstance(new, Mapping) else new
        count = counts[layer] if isinstance(counts, list) else counts
        return self.vision_config.tokens(projection, layer), count, language

    def tokens(self, projection: str, layer: int) -> int:
        """Number of parameter tokens of `projection`, of both halves and new."""
        return sum(self.parts(projection, layer))

    def scale(self, projection: str, layer: int) -> float:
        """Scale of the language half; for `shared` the sum of both, by which every token keeps its
        weight (see `growth/tokens/merge.py`)."""
        scale = self.language_scale(projection, layer)
        if self.mode == "shared":
            return scale + self.vision_scale(projection, layer)
        return scale

    def language_scale(self, projection: str, layer: int) -> float:
        """Scale of the language half."""
        scales = (self.scale_tokens or {}).get(projection)
        own = scales[layer] if scales else None
        return float(super().tokens(projection, layer) if own is None else own)

    def vision_scale(self, projection: str, layer: int) -> float:
        """Scale of the vision half."""
        found: float = self.vision_config.scale(projection, layer)
        return found

    def __post_init__(self, **others: Any) -> None:
        if "image_token_id" in others:
            self.image_token_index = others.pop("image_token_id")
        super().__post_init__(**others)

    def _fill(self) -> None:
        super()._fill()
        if self.vision_config is None:
            same = {name: getattr(self, name) for name in JOINED_OPTIONS}
            self.vision_config = TokenformerVisionConfig(**same)
        if isinstance(self.vision_config, Mapping):
            options = {**self.vision_config}
            self.vision_config = TokenformerVisionConfig.from_dict(options)
        if self.projector_size is None:
            self.projector_size = self.hidden_size
        if self.image_token_index is None:
            self.image_token_index = self.vocab_size

    def _check(self) -> None:
        if not isinstance(self.vision_config, TokenformerVisionConfig):
            raise ValueError(
                f"vision_config is a {type(self.vision_config).__name__}; "
                "it must be a TokenformerVisionConfig or its dict"
            )
        self._check_choices("mode")  # which decides what else is checked
        self._check_new_tokens()
        if self.is_joined:
            self._check_joined()
        super()._check()
        check_count("projector_size", self.projector_size)
        marker = self.image_token_index
        if not isinstance(marker, int) or isinstance(marker, bool) or marker < 0:
            raise ValueError(f"image_token_id={marker!r} must be a token id, from 0")

    def _check_new_tokens(self) -> None:
        new = self.new_tokens
        if isinstance(new, Mapping) and set(new) != set(PROJECTIONS):
            raise ValueError(
                f"new_tokens has the keys {', '.join(map(str, new))}; it must be a number or have "
                f"the keys {', '.join(PROJECTIONS)}"
            )
        for name, counts in new.items() if isinstance(new, Mapping) else [("", new)]:
            label = f"new_tokens[{name!r}]" if name else "new_tokens"
            if isinstance(counts, list | tuple):
                self._check_length(label, counts)
            for count in counts if isinstance(counts, list | tuple) else [counts]:
                if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                    raise ValueError(f"{label}={count!r} must be a whole number of at least 0")

    def _check_joined(self) -> None:
        different = [
            f"{name} {getattr(self, name)} and {getattr(self.vision_config, name)}"
            for name in JOINED_OPTIONS
            if getattr(self, name) != getattr(self.vision_config, name)
        ]
        if different:
            raise ValueError(
                f"mode={self.mode!r} needs equal language and vision models, and they have "
                f"different {'; '.join(different)}; use mode='projector'"
            )
        if self.norm_parameters != "none":
            raise ValueError(
                f"norm_parameters={self.norm_parameters!r}: norms that both halves share cannot "
                f"have parameters; use mode='projector'"
            )
        if self.learned_scale or self.vision_config.learned_scale:
            raise ValueError(
                f"learned_scale=True is not supported by mode={self.mode!r}; use mode='projector'"
            )


CONFIG_CLASSES[TokenformerImageTextConfig.model_type] = TokenformerImageTextConfig
AutoConfig.register(
    TokenformerImageTextConfig.model_type, TokenformerImageTextConfig, exist_ok=True
)
