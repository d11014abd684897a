"""Configurations of the image classifiers: the TokenFormer and its twin, the Vision Transformer."""

from typing import Any, ClassVar

from transformers.models.auto.configuration_auto import AutoConfig

from tokenformer.models.block_configuration import BlockConfig, check_count, check_number
from tokenformer.models.presets import VISION_TOKENFORMER_PRESETS, VISION_TRANSFORMER_PRESETS
from tokenformer.models.projection_configuration import MatrixConfig, TokenConfig

PROBLEM_TYPES = ("single_label_classification", "multi_label_classification", "regression")


class VisionConfig(BlockConfig):
    """What the two classifiers have in common.

    Attributes:
        image_size, patch_size, num_channels: of the images the positions are made for; images of
            another size, of whole patches, get interpolated ones.
        pooling: what is classified: `class`, a class token that stands before the patches, or
            `mean`, the mean over the patches, without a class token.
        drop_path_rate: chance that the last block leaves out a branch for an image of a training
            batch; it rises evenly from 0 in the first.
        num_labels: classes; timm's name for it, `num_classes`, means the same.
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
        """Patches along a side."""
        return self.image_size // self.patch_size

    @property
    def patch_channels(self) -> int:
        """Numbers in a patch."""
        return self.num_channels * self.patch_size**2

    @property
    def class_tokens(self) -> int:
        return int(self.pooling == "class")

    @property
    def num_positions(self) -> int:
        return self.class_tokens + self.grid_size**2

    def drop_path(self, layer: int) -> float:
        """The chance that `layer` leaves out a branch."""
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


class TokenformerVisionConfig(TokenConfig, VisionConfig):
    """An image classifier whose every projection is Pattention."""

    model_type = "tokenformer_vision"
    presets = VISION_TOKENFORMER_PRESETS


class TransformerVisionConfig(MatrixConfig, VisionConfig):
    """The same classifier with linear projections and a two-layer MLP: a Vision Transformer."""

    model_type = "tokenformer_transformer_vision"
    presets = VISION_TRANSFORMER_PRESETS


for _config in (TokenformerVisionConfig, TransformerVisionConfig):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
