"""Options of image augmentation, without importing torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass
class AugmentationOptions:
    """Augmentation of training images, none by default. It depends on (seed, epoch, image) only."""

    crop: Literal["none", "padded", "resized"] = "none"
    """`padded`: pad by an eighth and crop the original size. `resized`: crop a random area of at
    least `smallest_crop` and resize it."""
    smallest_crop: float = 0.08
    """Smallest share of the area that a resized crop takes."""
    flip: bool = False
    """Flip half of the images horizontally."""
    randaugment: int = 0
    """RandAugment operations per image; 2 is usual."""
    magnitude: float = 9.0
    """Magnitude of those operations, 0 to 10."""
    magnitude_std: float = 0.5
    """Standard deviation of the magnitude."""
    mixup: float = 0.0
    """Alpha of the Beta distribution of mixup, such as 0.8; 0 to disable."""
    cutmix: float = 0.0
    """The same for CutMix. If both are set, each is applied to half of the images."""
    label_smoothing: float = 0.0
    """Probability that is spread evenly over all classes."""

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
