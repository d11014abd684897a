"""Turns images into the pixel values of a model: size, channels and normalization, with Pillow.

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
from tokenformer.models.configuration import TokenformerVisionConfig, TransformerVisionConfig
from tokenformer.models.image_text_configuration import TokenformerImageTextConfig
from tokenformer.models.pixels import Pixels, convert_channels, to_pillow, to_pixels

IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
BICUBIC = 3  # Pillow's constant, without importing Pillow


class TokenformerImageProcessor(PilBackend):
    """Resizes, optionally crops the center, and normalizes.

    The length of `image_mean` is the number of channels; grayscale images are converted to RGB and
    vice versa.
    """

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
        """A processor to square images of `image_size`. With `crop_share` below 1, such as 0.875,
        the shorter side is resized to `image_size / crop_share` and the center is cropped: the
        usual ImageNet evaluation."""
        if num_channels not in (1, 3):
            raise ValueError(f"num_channels={num_channels} must be 1 (grayscale) or 3 (RGB)")
        square = {"height": image_size, "width": image_size}
        is_rgb = num_channels == 3
        norm = {
            "image_mean": mean or (IMAGENET_MEAN if is_rgb else [0.5]),
            "image_std": std or (IMAGENET_STD if is_rgb else [0.5]),
        }
        if crop_share == 1:
            return cls(size=square, **norm)
        resized = {"shortest_edge": round(image_size / crop_share)}
        return cls(size=resized, do_center_crop=True, crop_size=square, **norm)

    def save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> Any:
        """Save as transformers does, with the stub that `auto_map` names if a model has not."""
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
        """Do nothing, as for our configurations: transformers would copy our source files."""

    @property
    def num_channels(self) -> int:
        return len(self.image_mean)

    @property
    def image_size(self) -> int:
        """The side of the square output."""
        output = self.crop_size if self.do_center_crop else self.size
        return int(output["height"])

    def convert_channels(self, pixels: Pixels) -> Pixels:
        """Convert [H, W, 1 or 3] to the channels of the model."""
        return convert_channels(pixels, self.num_channels)

    def fit(self, pixels: Pixels) -> Pixels:
        """Resize and crop pixels [H, W, C] without normalizing them."""
        side = self.image_size
        if pixels.shape[:2] == (side, side) and not self.do_center_crop:
            return pixels
        output = self(
            images=[pixels],
            do_rescale=False,
            do_normalize=False,
            input_data_format="channels_last",
        )
        fitted: Pixels = np.moveaxis(output["pixel_values"][0], 0, -1)
        return fitted

    def to_pixel_values(self, pixels: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Rescale and normalize fitted pixels [H, W, C], 0 to 255: -> [C, H, W]."""
        rescaled = self.rescale(np.moveaxis(pixels, -1, 0), self.rescale_factor)
        values: npt.NDArray[np.float32] = self.normalize(rescaled, self.image_mean, self.image_std)
        return values

    def process_image(self, image: Any, **options: Any) -> npt.NDArray[Any]:
        """Return an image of any type, with 1 or 3 channels, as [C, H, W] of the model."""
        if hasattr(image, "convert"):  # a Pillow image
            image = to_pillow(self.convert_channels(to_pixels(image)))
        pixels: npt.NDArray[Any] = super().process_image(image, **options)
        if pixels.shape[0] not in (1, 3):  # `normalize` reports it
            return pixels
        return np.moveaxis(self.convert_channels(np.moveaxis(pixels, 0, -1)), -1, 0)


for _config in (TokenformerVisionConfig, TransformerVisionConfig, TokenformerImageTextConfig):
    AutoImageProcessor.register(
        _config, image_processor_classes={"pil": TokenformerImageProcessor}, exist_ok=True
    )
