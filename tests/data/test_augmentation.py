"""Augmentation is a pure function of (seed, epoch, image); its pixels and targets."""

import numpy as np
import pytest
import torch
from PIL import Image

from tokenformer import TokenformerImageProcessor
from tokenformer.data.augmentation import mix, padded_crop, resized_crop
from tokenformer.data.augmentation_options import AugmentationOptions
from tokenformer.data.image_batches import ImageReader
from tokenformer.data.images import ArrayImages
from tokenformer.data.randaugment import OPERATIONS, randaugment

EVERYTHING = AugmentationOptions(
    crop="resized", flip=True, randaugment=2, mixup=0.8, cutmix=1.0, label_smoothing=0.1
)


def reader(channels: int = 3, *, count: int = 10, workers: int = 0) -> ImageReader:
    random = np.random.default_rng(0)
    pixels = random.integers(256, size=(count, 16, 16, channels), dtype=np.uint8)
    pictures = ArrayImages(pixels, np.arange(count) % 5)
    return ImageReader(pictures, TokenformerImageProcessor.for_size(16, channels), 5, workers)


@pytest.mark.parametrize("channels", [1, 3])
def test_samples_do_not_depend_on_batches_threads_or_the_process(channels: int) -> None:
    whole = reader(channels).training_batch(0, 24, 7, EVERYTHING)
    parts = [
        reader(channels, workers=2).training_batch(start, 8, 7, EVERYTHING)
        for start in (16, 0, 8)
    ]  # fmt: skip
    for start, part in zip((16, 0, 8), parts, strict=True):
        assert torch.equal(part.pixels, whole.pixels[start : start + 8])
        assert torch.equal(part.targets, whole.targets[start : start + 8])
    assert whole.pixels.shape == (24, channels, 16, 16)


def test_epochs_and_seeds_differ_and_an_epoch_has_every_image_once():
    plain = AugmentationOptions()
    first, second = (reader().training_batch(start, 10, 0, plain) for start in (0, 10))
    assert not torch.equal(first.pixels, second.pixels)
    for batch in (first, second):
        assert batch.targets.sum(0).tolist() == [2.0] * 5
    varied = AugmentationOptions(randaugment=2, crop="padded")
    of_seed = [reader(count=1).training_batch(0, 1, seed, varied).pixels for seed in (0, 1, 2)]
    of_epoch = [reader(count=1).training_batch(epoch, 1, 0, varied).pixels for epoch in (1, 2)]
    sampled = [*of_seed, *of_epoch]
    assert all(not torch.equal(a, b) for i, a in enumerate(sampled) for b in sampled[:i])


def test_without_augmentation_batches_match_the_processor():
    plain = reader()
    batch = plain.training_batch(0, 10, 0, AugmentationOptions())
    held_out = plain.plain_batch(list(range(10)))
    assert {row.sum().item() for row in batch.pixels} == {
        row.sum().item() for row in held_out.pixels
    }
    images = [Image.fromarray(plain.pictures.picture(i)[0]) for i in range(10)]
    expected = plain.processor(images=images, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(held_out.pixels, expected.float(), rtol=1e-5, atol=1e-5)


def test_pictures_of_other_sizes_and_channels_are_fitted():
    pixels = np.full((1, 40, 30, 1), 200, np.uint8)
    rgb = ImageReader(
        ArrayImages(pixels, np.zeros(1)), TokenformerImageProcessor.for_size(16, 3), 1
    )
    assert rgb.plain_batch([0]).pixels.shape == (1, 3, 16, 16)
    gray = ImageReader(
        ArrayImages(np.repeat(pixels, 3, 3), np.zeros(1)),
        TokenformerImageProcessor.for_size(16, 1, crop_share=0.8),
        1,
    )
    found = gray.plain_batch([0]).pixels
    torch.testing.assert_close(found, torch.full((1, 1, 16, 16), 200 / 127.5 - 1))
    lazy = gray.held_out(4, 100)
    assert [len(batch) for batch in lazy] == [1]
    assert torch.equal(lazy[0].to("cpu").pixels, found)


def test_targets_are_distributions():
    smooth = AugmentationOptions(label_smoothing=0.1)
    target = reader().training_batch(0, 1, 0, smooth).targets[0]
    assert sorted(target.tolist()) == pytest.approx([0.02] * 4 + [0.92])
    both = reader().training_batch(0, 40, 0, EVERYTHING).targets
    torch.testing.assert_close(both.sum(1), torch.ones(40))
    assert (both.max(1).values < 0.9).any()


def test_mixup_and_cutmix_return_the_share_of_the_first_image():
    black, white = np.zeros((20, 20, 1), np.float32), np.full((20, 20, 1), 255, np.float32)
    for options in (AugmentationOptions(mixup=1.0), AugmentationOptions(cutmix=1.0)):
        random = np.random.default_rng(0)
        for _ in range(20):
            made, share = mix(black, white, options, random)
            assert made.mean() / 255 == pytest.approx(1 - share, abs=1e-5)
            assert (len(np.unique(made)) <= 2) if options.cutmix else (np.ptp(made) < 1e-3)
    assert (black == 0).all()


def test_crops_are_parts_of_the_picture():
    pixels = np.arange(256, dtype=np.uint8).reshape(16, 16, 1)
    random = np.random.default_rng(0)
    crops = {padded_crop(pixels, random).tobytes() for _ in range(50)}
    assert len(crops) > 10
    for _ in range(10):
        found = resized_crop(pixels, 8, 0.08, random)
        assert found.shape == (8, 8, 1)
        assert (np.diff(found[:, :, 0].astype(int), axis=0) >= 0).all()  # rows in their order
    whole = resized_crop(pixels, 16, 1.0, np.random.default_rng(0))
    assert np.abs(whole.astype(int) - pixels).mean() < 20


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_changes_a_picture_more_at_a_larger_magnitude(name: str, mode: str) -> None:
    x = np.linspace(20, 200, 32, dtype=np.uint8)
    pixels = np.add.outer(x // 2, x // 2)
    pixels[::4, ::3] //= 2  # something to sharpen
    colors = np.stack([pixels, pixels // 2, 255 - pixels], axis=-1)
    image = Image.fromarray(colors).convert(mode)
    before = np.asarray(image).astype(int)

    def change(level: float) -> float:
        after = OPERATIONS[name](image, level)
        assert (after.mode, after.size) == (image.mode, image.size)
        return float(np.abs(np.asarray(after).astype(int) - before).mean())

    if name == "color" and mode == "L":
        assert change(1.0) == 0  # there is no color
    else:
        assert change(1.0) > 0
        assert change(1.0) >= change(0.3) - 1e-9


def test_randaugment_at_magnitude_zero_leaves_geometry_alone():
    image = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16))
    for name in ("shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness"):
        assert np.array_equal(np.asarray(OPERATIONS[name](image, 0.0)), np.asarray(image)), name
    random = np.random.default_rng(0)
    sampled = [randaugment(image, random, count=2, magnitude=9, deviation=0.5) for _ in range(20)]
    assert len({one.tobytes() for one in sampled}) >= 8  # a quarter is unchanged


def test_options_are_checked():
    for options in ({"mixup": -1.0}, {"magnitude": 11.0}, {"label_smoothing": 1.0},
                    {"smallest_crop": 0.0}):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(options))):
            AugmentationOptions(**options)


def test_a_prefetched_batch_is_the_same_and_not_made_twice(monkeypatch) -> None:
    plain, ahead = reader(), reader(workers=2)
    made: list[object] = []
    sample = ImageReader.sample
    monkeypatch.setattr(
        ImageReader, "sample", lambda self, *a: (made.append(a[0]), sample(self, *a))[1]
    )
    ahead.prefetch(40, 8, 7, EVERYTHING)
    ahead.prefetch(16, 8, 7, EVERYTHING)  # cancels the first
    expected = ahead.training_batch(16, 8, 7, EVERYTHING)
    assert len([key for key in made if key in ahead.keys(16, 8, 7)]) == 8
    assert torch.equal(expected.pixels, plain.training_batch(16, 8, 7, EVERYTHING).pixels)
    other = ahead.training_batch(24, 8, 7, EVERYTHING)  # not the prefetched one
    assert torch.equal(other.targets, plain.training_batch(24, 8, 7, EVERYTHING).targets)
