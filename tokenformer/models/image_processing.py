"""From an image to what a model of ours takes: size, channels and norm. Pillow is all it needs.

processor = TokenformerImageProcessor.for_size(28, num_channels=1)
pixel_values = processor(images=image, return_tensors="pt")["pixel_values"]     # [1, 1, 28, 28]
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers.image_processing_backends import PilBackend
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from tokenformer.models.block_configuration import STUB_MODULE
from tokenformer.models.configuration import (
    TokenformerVisionConfig,
    TransformerVisionConfig,
)

IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
BICUBIC = 3  # Pillow's number, so that Pillow is needed only where an image is
MODES = {1: "L", 3: "RGB"}
"""Pillow's name for so many channels."""


class TokenformerImageProcessor(PilBackend):
    """Resizes, crops the centre where asked to, and normalises. The mean has one number a channel,
    which tells how many channels there are; grey images become coloured and the reverse."""

    resample = BICUBIC
    image_mean = IMAGENET_MEAN
    image_std = IMAGENET_STD
    size = {"height": 224, "width": 224}  # noqa: RUF012
    do_resize = True
    do_rescale = True
    do_normalize = True

    @classmethod
    def for_size(
        cls,
        image_size: int,
        num_channels: int = 3,
        *,
        crop_share: float = 1.0,
        mean: list[float] | None = None,
        std: list[float] | None = None,
    ) -> "TokenformerImageProcessor":
        """For square images of `image_size`. With `crop_share` below 1, 0.875 for example, the
        shorter side becomes so much longer, and the centre is taken: ImageNet's usual measure."""
        if num_channels not in MODES:
            raise ValueError(f"num_channels={num_channels} is not 1 (grey) or 3 (colour)")
        square = {"height": image_size, "width": image_size}
        usual = num_channels == len(IMAGENET_MEAN)
        norm = {
            "image_mean": mean or (IMAGENET_MEAN if usual else [0.5]),
            "image_std": std or (IMAGENET_STD if usual else [0.5]),
        }
        if crop_share == 1:
            return cls(size=square, **norm)
        longer = {"shortest_edge": round(image_size / crop_share)}
        return cls(size=longer, do_center_crop=True, crop_size=square, **norm)

    def save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> Any:
        """As transformers does, with the stub that `auto_map` names unless a model brought it."""
        from tokenformer.models.model_card import STUB
        from tokenformer.models.saved_folder import PROCESSOR, write_stub

        folder = Path(save_directory)
        if not folder.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / STUB).exists():
                write_stub(folder, [PROCESSOR])
        return super().save_pretrained(save_directory, *args, **options)

    def to_dict(self) -> dict[str, Any]:
        output: dict[str, Any] = super().to_dict()
        if type(self) is TokenformerImageProcessor:
            name = f"{STUB_MODULE}.{type(self).__name__}"
            output["auto_map"] = {"AutoImageProcessor": name}
        return output

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoImageProcessor") -> None:
        """Nothing, as for our configurations: transformers would copy our source files."""

    @property
    def num_channels(self) -> int:
        return len(self.image_mean)

    @property
    def image_size(self) -> int:
        """The side of the square that comes out."""
        last = self.crop_size if self.do_center_crop else self.size
        return int(last["height"])

    def fit(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Pixels [H, W, C] resized and cropped as they would be, but not yet normalised."""
        side = self.image_size
        if pixels.shape[:2] == (side, side) and not self.do_center_crop:
            return pixels
        found = self(
            images=[pixels],
            do_rescale=False,
            do_normalize=False,
            input_data_format="channels_last",
        )
        fitted: npt.NDArray[np.uint8] = np.moveaxis(found["pixel_values"][0], 0, -1)
        return fitted

    def process_image(self, image: Any, **options: Any) -> npt.NDArray[Any]:
        """Of any kind and any number of channels, to [C, H, W]."""
        if hasattr(image, "convert"):  # a Pillow image
            image = image.convert(MODES[self.num_channels])
        pixels: npt.NDArray[Any] = super().process_image(image, **options)
        if pixels.shape[0] == 1 and self.num_channels == 3:
            pixels = np.repeat(pixels, 3, axis=0)
        return pixels


for _config in (TokenformerVisionConfig, TransformerVisionConfig):
    AutoImageProcessor.register(
        _config, image_processor_classes={"pil": TokenformerImageProcessor}, exist_ok=True
    )
