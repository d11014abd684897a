"""Captions by a vision-language model: their perplexity, the gain from seeing, generated captions
against references, and retrieval by likelihood.

    result = measure_captions(model, processor, captions, limit=500)

- Bits per byte of the reference captions given the right image, another image, and no image. The
  difference is what the model gains from seeing.
- BLEU and CIDEr-D of greedy captions against all references of an image (`caption_scores`).
- Retrieval among `group` images: the share of images for which their own first caption is the most
  likely one, and of captions for which the right image makes them most likely.

Rows that show the same image count as one image with all their captions.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer.data.image_text import (
    CAPTION,
    IMAGE_TOKEN,
    ImageText,
    ImageTextSet,
    Turn,
    digest,
)
from tokenformer.data.image_text_batches import EncodedSample, ImageTextEncoder, ImageTextReader
from tokenformer.data.images import CorruptImageError
from tokenformer.errors import DataError
from tokenformer.evaluate.caption_scores import bleu, cider
from tokenformer.models.image_text import IGNORED, TokenformerForImageTextToText
from tokenformer.models.image_text_processing import TokenformerProcessor
from tokenformer.models.pixels import Pixels

GROUP = 10
"""Images that a caption is compared with in retrieval."""
BATCH_SIZE = 32
LONGEST = 100
"""Tokens of a generated caption."""
TEXT_LENGTH = 256
"""Tokens of a reference caption; longer ones are cut."""


@dataclass(frozen=True)
class CaptionScores:
    images: int
    captions: int
    bits_per_byte: float
    bits_per_byte_wrong_image: float | None
    """None if there is no other image."""
    bits_per_byte_no_image: float
    token_perplexity: float
    bleu: list[float]
    """BLEU-1 to BLEU-4."""
    cider: float
    text_retrieval: float | None
    image_retrieval: float | None
    """Shares of the images and captions that are retrieved first among `group`; None for one."""
    group: int
    generated: list[str]

    def asdict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        scores = "  ".join(f"{score:.3f}" for score in self.bleu)
        return "\n".join(
            [
                f"{self.images:,} images, {self.captions:,} captions",
                f"bits per byte            {self.bits_per_byte:.4f}",
                f"  with another image     {shown(self.bits_per_byte_wrong_image, '.4f')}",
                f"  without an image       {self.bits_per_byte_no_image:.4f}",
                f"token perplexity         {self.token_perplexity:,.3f}",
                f"BLEU-1 to BLEU-4         {scores}",
                f"CIDEr-D                  {self.cider:.3f}",
                f"caption among {self.group:<2}         {shown(self.text_retrieval, '.1%')}",
                f"image among {self.group:<2}           {shown(self.image_retrieval, '.1%')}",
            ]
        )


def shown(value: float | None, form: str) -> str:
    return "not measured: there is only one image" if value is None else format(value, form)


@dataclass(frozen=True)
class Loss:
    nats: float
    tokens: int
    bytes: int


@torch.no_grad()
def measure_captions(
    model: TokenformerForImageTextToText,
    processor: TokenformerProcessor,
    captions: ImageTextSet,
    *,
    limit: int | None = None,
    batch_size: int | None = None,
    group: int = GROUP,
    on_images: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> CaptionScores:
    """Measure a model in eval mode on the first `limit` images. `on_images` gets what is measured,
    and how many of how many images are done."""
    measure = CaptionMeasure(model, processor, batch_size or BATCH_SIZE)
    images, references = read_images(captions, limit)
    count = len(images)
    pairs = [(index, text) for index, several in enumerate(references) for text in several]
    losses: list[Loss | None] = []
    for shift in (0, 1, None):
        if shift == 1 and count == 1:
            losses.append(None)
            continue
        wanted = [
            measure.caption(None if shift is None else images[(index + shift) % count], text)
            for index, text in pairs
        ]
        losses.append(measure.loss(wanted, lambda n: on_images("perplexity", n, len(pairs))))
    generated = []
    for start in range(0, count, measure.batch_size):
        generated += measure.generate(images[start : start + measure.batch_size])
        on_images("captions", len(generated), count)
    by_text, by_image = None, None
    if min(group, count) > 1:
        firsts = [several[0] for several in references]
        by_text, by_image = measure.retrieval(images, firsts, group, on_images)
    right, wrong, none = losses
    assert right is not None
    assert none is not None
    return CaptionScores(
        images=count,
        captions=len(pairs),
        bits_per_byte=bits(right),
        bits_per_byte_wrong_image=None if wrong is None else bits(wrong),
        bits_per_byte_no_image=bits(none),
        token_perplexity=math.exp(min(700.0, right.nats / right.tokens)),
        bleu=bleu(generated, references),
        cider=cider(generated, references),
        text_retrieval=by_text,
        image_retrieval=by_image,
        group=min(group, count),
        generated=generated,
    )


def bits(loss: Loss) -> float:
    return loss.nats / math.log(2) / max(1, loss.bytes)


def read_images(captions: ImageTextSet, limit: int | None) -> tuple[list[Pixels], list[list[str]]]:
    """Return the first images, each once, and all captions of each. With `on_corrupt="skip"`,
    without unreadable ones."""
    images: list[Pixels] = []
    references: list[list[str]] = []
    places: dict[tuple[tuple[int, ...], bytes], int] = {}
    for rows in captions.groups(most=1):
        if limit is not None and len(images) >= limit:
            break
        texts = [text for row in rows for text in captions.captions(row)]
        if not texts or not captions.images(captions.rows[rows[0]]):
            continue  # nothing to measure
        try:
            image = captions.image(rows[0])
        except CorruptImageError as error:
            captions.handle(rows[0], error)
            continue
        # Copies of a file have other paths; to the model they are the same image.
        place = places.setdefault((image.shape, digest(image.tobytes())), len(images))
        if place == len(images):
            images.append(image)
            references.append([])
        references[place] += texts
    if not images:
        raise DataError(f"{captions.name} has no image that can be read, with captions")
    return images, references


class CaptionMeasure:
    """A model with the batches it is measured on."""

    def __init__(
        self, model: TokenformerForImageTextToText, processor: TokenformerProcessor, batch_size: int
    ) -> None:
        self.model, self.processor, self.batch_size = model, processor, batch_size
        self.encoder = ImageTextEncoder(processor, TEXT_LENGTH)
        # Text alone is cut where it is after an image, so that the same text is measured.
        after_image = model.config.max_position_embeddings - len(self.encoder.image_run)
        self.encoder.length = min(TEXT_LENGTH, after_image)
        self.reader = ImageTextReader([], self.encoder)  # type: ignore[arg-type]

    def caption(self, image: Pixels | None, text: str) -> Callable[[], EncodedSample]:
        """Return what encodes a caption of an image, or the same text alone, when it is needed."""
        if image is None:
            return lambda: self.text_alone(text)
        turn = Turn(CAPTION, IMAGE_TOKEN + text)
        return lambda: self.encoder.encode(ImageText([image], [turn]))

    def text_alone(self, text: str) -> EncodedSample:
        """Encode a caption after the begin of text, as it follows an image."""
        found = self.encoder.encode(ImageText([], [Turn(CAPTION, text)]))
        begin = self.encoder.image_run[-1]
        return EncodedSample([begin, *found.ids], [IGNORED, *found.labels], [], found.target_bytes)

    def loss(
        self, samples: Sequence[Callable[[], EncodedSample]], on_samples: Callable[[int], None]
    ) -> Loss:
        nats, tokens, size, done = 0.0, 0, 0, 0
        for encoded, losses, counts in self.losses(samples):
            nats += losses.sum().item()
            tokens += int(counts.sum())
            size += sum(sample.target_bytes for sample in encoded)
            done += len(encoded)
            on_samples(done)
        return Loss(nats, tokens, size)

    def losses(
        self, samples: Sequence[Callable[[], EncodedSample]]
    ) -> Iterator[tuple[list[EncodedSample], Tensor, Tensor]]:
        """Yield samples in batches, with the loss of each in nats, and its number of tokens."""
        for start in range(0, len(samples), self.batch_size):
            encoded = [encode() for encode in samples[start : start + self.batch_size]]
            batch = self.reader.batch(encoded).to(self.model.device)
            hidden = self.model.model(
                input_ids=batch.ids, pixel_values=batch.pixels, use_cache=False
            ).last_hidden_state[:, :-1]
            labels = self.model.text_labels(batch.labels, batch.ids)[:, 1:]
            rows = labels != IGNORED
            logits = self.model.lm_head(hidden[rows]).float()
            each = torch.zeros(labels.shape, device=labels.device)
            each[rows] = F.cross_entropy(logits, labels[rows], reduction="none")
            yield encoded, each.sum(1), rows.sum(1)

    def generate(self, images: Sequence[Pixels]) -> list[str]:
        """Return a greedy caption of each image."""
        pixels = torch.stack([torch.from_numpy(self.encoder.pixels(image)) for image in images])
        ids = torch.tensor([self.encoder.image_run] * len(images), device=self.model.device)
        room = self.model.config.max_position_embeddings - ids.shape[1]
        found = self.model.generate(
            ids,
            pixel_values=pixels.to(self.model.device),
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max(1, min(LONGEST, room)),
            do_sample=False,
            pad_token_id=self.encoder.end,
        )
        decoded: list[str] = self.processor.batch_decode(
            found[:, ids.shape[1] :], skip_special_tokens=True
        )
        return [text.strip() for text in decoded]

    def retrieval(
        self,
        images: list[Pixels],
        texts: list[str],
        group: int,
        on_images: Callable[[str, int, int], None],
    ) -> tuple[float, float]:
        """Return the shares of images whose own caption is the most likely in their group, and of
        captions whose own image makes them most likely. Groups are of consecutive images; a last
        one that is smaller is left out, unless it is the only one."""
        size = min(group, len(images))
        by_text = by_image = total = 0
        for start in range(0, len(images) - size + 1, size):
            members = range(start, start + size)
            samples = [self.caption(images[i], texts[j]) for i in members for j in members]
            losses = torch.cat([found for _, found, _ in self.losses(samples)]).view(size, size)
            own = torch.arange(size, device=losses.device)
            by_text += int((losses.argmin(1) == own).sum())
            by_image += int((losses.argmin(0) == own).sum())
            total += size
            on_images("retrieval", total, len(images))
        return by_text / total, by_image / total
