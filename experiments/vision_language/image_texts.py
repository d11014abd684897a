"""Sets of images with text, made of Flickr8k: captions, and questions with answers.

- `other-images`: the captions, each of another photograph. What a model learns from it is what it
  learns without seeing.
- `image-questions`: questions about a photograph that its five captions answer by rule. An answer
  counts if at least two captions support it and none contradicts it.
- `other-images-questions`: the same, of another photograph.

At the scale `smoke` the images are scikit-learn's digits.
"""

import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

PEOPLE = ("men", "women", "people", "boys", "girls", "children", "kids", "adults", "players")
PERSON = ("man", "woman", "person", "boy", "girl", "child", "kid", "adult", "player", "guy", "lady")
OBJECTS: dict[str, tuple[str, ...]] = {
    "a dog": ("dog", "dogs", "puppy", "puppies"),
    "a child": ("boy", "boys", "girl", "girls", "child", "children", "kid", "kids", "baby"),
    "a man": ("man", "men", "guy", "guys"),
    "a woman": ("woman", "women", "lady", "ladies"),
    "a ball": ("ball", "balls", "football", "basketball"),
    "a bike": ("bike", "bikes", "bicycle", "bicycles", "bicyclist", "motorcycle", "motorbike"),
    "water": ("water", "ocean", "pool", "lake", "river", "sea", "wave", "waves"),
    "snow": ("snow", "snowy", "snowboarder", "snowboard", "skier"),
    "grass": ("grass", "grassy", "lawn"),
    "a beach": ("beach", "sand", "sandy", "shore"),
}
"""What a question asks for, and the words that name it."""
COLORED = ("dog", "shirt", "jacket", "hat", "dress", "ball", "car")
COLORS = ("black", "white", "brown", "tan", "red", "blue", "green", "yellow", "orange", "pink")
NUMBERS = {"two": 2, "three": 3, "four": 4}
COUNTS = ("none", "one", "two", "three", "four")
ENOUGH = 2
"""Captions that must support an answer."""
TRAINED_ON, HELD_OUT = "train", "validation"


class Question(NamedTuple):
    kind: str
    """is there, how many or what color: a table has a row for each."""
    text: str
    answer: str
    choices: tuple[str, ...]


def questions(captions: Sequence[str], number: int) -> Iterator[Question]:
    """Yield the questions that the captions of an image answer: one object that is there and one
    that is not, chosen by the number of the image, the people, and colors."""
    words = [re.findall("[a-z]+", caption.lower()) for caption in captions]
    choose = random.Random(number).choice
    mentions = {
        name: sum(any(word in names for word in each) for each in words)
        for name, names in OBJECTS.items()
    }
    for answer, names in (
        ("yes", [name for name, count in mentions.items() if count >= ENOUGH]),
        ("no", [name for name, count in mentions.items() if count == 0]),
    ):
        if names:
            yield Question("is there", f"Is there {choose(names)}?", answer, ("yes", "no"))
    counted = Counter(count_people(each) for each in words)
    people, support = counted.most_common(1)[0]
    if people is not None and support > len(words) / 2:
        yield Question("how many", "How many people are there?", COUNTS[people], COUNTS)
    for thing in COLORED:
        found = Counter(
            before for each in words for before in colors_of(thing, each) if before in COLORS
        )
        if len(found) == 1 and min(found.values()) >= ENOUGH:
            yield Question("what color", f"What color is the {thing}?", next(iter(found)), COLORS)


def count_people(words: Sequence[str]) -> int | None:
    """Return how many people a caption names; None if that is not clear."""
    total = 0
    for place, word in enumerate(words):
        before = words[max(0, place - 3) : place]
        if word in PEOPLE:
            counts = [NUMBERS[each] for each in before if each in NUMBERS]
            if len(counts) != 1:
                return None
            total += counts[0]
        elif word in PERSON:
            total += 1
        elif word in ("group", "crowd", "couple", "team", "family", "several", "many", "baby"):
            return None
    return total if total < len(COUNTS) else None


def colors_of(thing: str, words: Sequence[str]) -> list[str]:
    """Return the words right before a thing; of "black and white dog" none, which has two."""
    return [
        words[place - 1]
        for place, word in enumerate(words)
        if place and word == thing and (place < 2 or words[place - 2] != "and")
    ]


class Photograph(NamedTuple):
    image: bytes
    captions: list[str]


def write_image_text(name: str, folder: Path, source: Path | None) -> None:
    """Write a set as JSON lines and images; without a source, of stand-ins."""
    partial = folder.with_name(f"{folder.name}-partial")
    shutil.rmtree(partial, ignore_errors=True)
    for split in (TRAINED_ON, HELD_OUT):
        images = partial / split
        images.mkdir(parents=True)
        found = list(photographs(source, split))
        shift = len(found) // 2 if name.startswith("other-images") else 0
        lines = []
        for number, photograph in enumerate(found):
            image = f"{split}/{(number + shift) % len(found)}.jpg"
            (images / f"{number}.jpg").write_bytes(photograph.image)
            lines += rows_of(name, image, photograph.captions, number)
        text = "".join(json.dumps(row) + "\n" for row in lines)
        (partial / f"{split}.jsonl").write_text(text, encoding="utf-8")
    partial.rename(folder)


def rows_of(name: str, image: str, captions: list[str], number: int) -> Iterator[dict]:
    if not name.endswith("questions"):
        yield {"image": image, "captions": captions}
        return
    for question in questions(captions, number):
        messages = [
            {"role": "user", "content": f"<image>{question.text}"},
            {"role": "assistant", "content": question.answer},
        ]
        yield {"image": image, "messages": messages, "kind": question.kind}


def photographs(source: Path | None, split: str) -> Iterator[Photograph]:
    if source is None:
        yield from stand_ins(split)
        return
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(source / f"{split}.parquet", columns=["image", "captions"])
    for batch in table.to_batches(max_chunksize=256):
        for row in batch.to_pylist():
            yield Photograph(row["image"]["bytes"], row["captions"])


def stand_ins(split: str) -> Iterator[Photograph]:
    """Digits with made-up captions that all questions can be made of."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    rows = range(40) if split == TRAINED_ON else range(40, 60)
    for row in rows:
        is_even = digits.target[row] % 2 == 0
        text = "A black dog in the snow ." if is_even else "Two men play with a red ball ."
        pixels = (digits.images[row] * 15).astype("uint8")
        yield Photograph(encode_image(pixels), [text] * 5)


def encode_image(pixels: object) -> bytes:
    from PIL import Image

    buffer = BytesIO()
    Image.fromarray(pixels).convert("RGB").save(buffer, "PNG")  # type: ignore[arg-type]
    return buffer.getvalue()
