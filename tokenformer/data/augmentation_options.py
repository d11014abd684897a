"""What may be done to training images. Plain data: no torch here."""

from dataclasses import dataclass
from typing import Literal


@dataclass
class AugmentationOptions:
    """How training images vary; by default not at all. Drawn from (seed, epoch, image) alone."""

    crop: Literal["none", "padded", "resized"] = "none"
    """A random part of the image padded by an eighth; or a random part of it of any size above
    `smallest_crop`, resized."""
    smallest_crop: float = 0.08
    """Smallest share of the image's area that a resized crop takes."""
    flip: bool = False
    """Mirror half of the images, left to right."""
    randaugment: int = 0
    """Operations of RandAugment on every image; 2 is usual."""
    magnitude: float = 9.0
    """Of those operations, out of 10."""
    magnitude_std: float = 0.5
    mixup: float = 0.0
    """Alpha of the Beta distribution that images are blended by, such as 0.8; 0 for none."""
    cutmix: float = 0.0
    """The same for rectangles of one image put into another. Where both are given, each mixes half
    of the images."""
    label_smoothing: float = 0.0
    """Share of the target that all classes share evenly."""

    def __post_init__(self) -> None:
        for name in ("randaugment", "magnitude_std", "mixup", "cutmix"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if not 0 <= self.magnitude <= 10:
            raise ValueError(f"magnitude={self.magnitude} must be from 0 to 10")
        if not 0 < self.smallest_crop <= 1:
            raise ValueError(f"smallest_crop={self.smallest_crop} must be above 0 and at most 1")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing={self.label_smoothing} must be from 0 to below 1")
