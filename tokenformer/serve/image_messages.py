"""Images in the messages of a chat, as OpenAI's API sends them: data URLs, decoded within limits.

    {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}

Other URLs are refused: a server that fetches them lets its clients into the network it is in.
"""

import binascii
import re
from base64 import b64decode
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from tokenformer.data.images import CorruptImageError, decode
from tokenformer.models.image_text_processing import IMAGE_TOKEN, TokenformerProcessor
from tokenformer.models.pixels import to_pillow
from tokenformer.serve.prompt import PromptError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Those of OpenAI's API. Pillow has dozens more, some of which start other programs."""
DATA_URL = re.compile(r"data:image/[\w.+-]+(;[\w.+-]+=[\w.+-]+)*;base64", re.IGNORECASE)
QUOTED = 60
"""Characters of a URL that an error quotes."""


@dataclass(frozen=True)
class MessageImage:
    name: str
    """Where it is in the request."""
    url: str


def split_images(
    messages: list[dict[str, Any]],
) -> tuple[list[dict[str, Any]], list[MessageImage]]:
    """Return the messages for a chat template, with `{"type": "image"}` in place of images, and the
    images in order."""
    images: list[MessageImage] = []

    def part(name: str, given: dict[str, Any]) -> dict[str, Any]:
        if given["type"] == "text":
            return given
        images.append(MessageImage(name, given["image_url"]["url"]))
        return {"type": "image"}

    def content(name: str, given: Any) -> Any:
        if isinstance(given, str):
            return given
        return [part(f"{name}.{index}", each) for index, each in enumerate(given)]

    split = [
        {**message, "content": content(f"messages.{index}.content", message["content"])}
        for index, message in enumerate(messages)
    ]
    return split, images


@dataclass(frozen=True)
class ImageReader:
    """Reads the images of a request for a vision-language model."""

    processor: TokenformerProcessor
    context: int
    max_images: int
    max_pixels: int

    def check(self, images: list[MessageImage]) -> None:
        """Refuse too many images before one is decoded."""
        if len(images) > self.max_images:
            raise PromptError(
                f"the request has {len(images)} images, more than --max_images {self.max_images}"
            )
        side = self.processor.image_processor.image_size
        positions = len(images) * self.processor.image_positions(side, side)
        if positions >= self.context:
            raise PromptError(
                f"{len(images)} images take {positions} tokens of the model's context "
                f"{self.context}, response included"
            )

    def insert(self, text: str, images: list[MessageImage]) -> tuple[str, Tensor | None]:
        """Return a prompt with the placeholders of its images, and their pixels [N, C, H, W]."""
        if (marked := text.count(IMAGE_TOKEN)) != len(images):
            raise PromptError(
                f"the prompt has {marked} times {IMAGE_TOKEN} for {len(images)} images; it marks "
                "the place of an image and cannot be part of a text"
            )
        if not images:
            return text, None
        pixels = torch.cat([self.pixels(image) for image in images])
        return text.replace(IMAGE_TOKEN, self.processor.image_text(*pixels.shape[2:])), pixels

    def pixels(self, image: MessageImage) -> Tensor:
        """Return the pixel values [1, C, H, W] of an image."""
        data = read_data_url(image)
        try:
            picture = to_pillow(decode(image.name, lambda: self.open(data)))
        except CorruptImageError as error:
            raise PromptError(str(error)) from None
        found: Tensor = self.processor.image_processor(picture, return_tensors="pt")["pixel_values"]
        return found

    def open(self, data: bytes) -> Any:
        from PIL import Image, UnidentifiedImageError

        try:
            image = Image.open(BytesIO(data), formats=FORMATS)
        except UnidentifiedImageError:
            raise ValueError(f"it is none of {', '.join(FORMATS)}") from None
        if image.width * image.height > self.max_pixels:
            raise ValueError(
                f"it has {image.width} x {image.height} pixels, more than --max_image_pixels "
                f"{self.max_pixels}"
            )
        return image


def read_data_url(image: MessageImage) -> bytes:
    header, comma, encoded = image.url.partition(",")
    if not (comma and DATA_URL.fullmatch(header)):
        shown = image.url if len(image.url) <= QUOTED else f"{image.url[:QUOTED]}..."
        raise PromptError(
            f"{image.name}: {shown!r} is not a data URL of an image, such as "
            "data:image/png;base64,...; this server fetches no URLs and reads no files"
        )
    try:
        return b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise PromptError(f"{image.name}: the data URL is not base64") from None
