"""Images with captions or conversations: every kind of source, bad images, encoding and order."""

import json
import logging
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.image_text import (
    IMAGE_ID,
    POSITIONS,
    SIDE,
    image_run,
    make_joint,
    make_processor,
    pictures,
)
from tokenformer.data.byte_tokenizer import END_OF_TEXT
from tokenformer.data.image_sources import load_images
from tokenformer.data.image_text import ImageText, ImageTextSet, Turn
from tokenformer.data.image_text_batches import IGNORED, ImageTextEncoder, ImageTextReader
from tokenformer.data.image_text_sources import (
    image_text_splits,
    load_captions,
    load_image_text,
)
from tokenformer.errors import DataError

CHAT = [
    {"role": "user", "content": "<image>What is it?"},
    {"role": "assistant", "content": "A dog."},
]
LLAVA = [{"from": "human", "value": "<image>What is it?"}, {"from": "gpt", "value": "A dog."}]


def save_pictures(folder: Path, count: int = 3) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    for index, picture in enumerate(pictures(count)):
        picture.save(folder / f"{index}.png")
    return [f"{index}.png" for index in range(count)]


def write_lines(file: Path, rows: list[Any]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def jsonl(folder: Path, text: dict[str, Any], count: int = 3) -> Path:
    names = save_pictures(folder / "images", count)
    write_lines(folder / "train.jsonl", [{"image": f"images/{name}", **text} for name in names])
    return folder


@pytest.fixture(scope="module")
def encoder() -> ImageTextEncoder:
    return ImageTextEncoder(make_processor(make_joint("projector")), length=40)


def test_flickr8k(real_data: Any) -> None:
    splits = load_image_text(str(real_data("image-text/flickr8k")))
    assert len(splits.train) == 30_000
    assert splits.held_out is not None
    assert len(splits.held_out) == 5_000
    sample = splits.train.sample(7)
    assert sample.images[0].shape == (96, 96, 3)
    assert [turn.role for turn in sample.turns] == ["caption"]
    captions, split = load_captions(str(real_data("image-text/flickr8k")))
    assert split == "validation"
    assert len(captions.captions(0)) == 5


def test_tiny_imagenet_is_a_set_of_classes(real_data: Any) -> None:
    found = load_images(str(real_data("image/tiny-imagenet")))
    assert (len(found.train), len(found.held_out), len(found.classes)) == (24_000, 2_000, 200)
    assert found.train.picture(5)[0].shape == (64, 64, 3)


@pytest.mark.parametrize(
    ("text", "turns"),
    [
        ({"caption": " one "}, [Turn("caption", "<image>one")]),
        ({"captions": ["one", "two"]}, [Turn("caption", "<image>one")]),
        ({"messages": CHAT}, [Turn("user", "<image>What is it?"), Turn("assistant", "A dog.")]),
        (
            {"conversations": LLAVA},
            [Turn("user", "<image>What is it?"), Turn("assistant", "A dog.")],
        ),
    ],
)
def test_json_lines(text: dict[str, Any], turns: list[Turn], tmp_path: Path) -> None:
    found = image_text_splits(str(jsonl(tmp_path, text)))["train"]
    assert len(found) == 3 * len(text.get("captions", [0]))
    sample = found.sample(0)
    assert sample.turns == turns
    np.testing.assert_array_equal(sample.images[0], np.asarray(pictures(1)[0]))


def test_parts_of_a_message_mark_the_images(tmp_path: Path) -> None:
    save_pictures(tmp_path, 2)
    content = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": [*content, {"type": "image"}]}, CHAT[1]]
    write_lines(tmp_path / "train.jsonl", [{"images": ["0.png", "1.png"], "messages": messages}])
    sample = image_text_splits(str(tmp_path))["train"].sample(0)
    assert sample.turns[0].text == "a<image>b<image>"
    assert len(sample.images) == 2


def test_images_beside_text_files(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("val", 1)):
        for name in save_pictures(tmp_path / split, count):
            (tmp_path / split / name).with_suffix(".txt").write_text("one\n\n two \n")
    splits = load_image_text(str(tmp_path))
    assert (len(splits.train), len(splits.held_out or [])) == (6, 2)
    assert splits.train.sample(1).turns == [Turn("caption", "<image>two")]


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_datasets(kind: str, tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict(
        {"image": pictures(3), "caption": ["a", "b", "c"]},
        features=datasets.Features(
            {"image": datasets.Image(), "caption": datasets.Value("string")}
        ),
    )
    if kind == "parquet":
        rows.to_parquet(tmp_path / "train-00000-of-00001.parquet")
    else:
        datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path)
    found = image_text_splits(str(tmp_path))["train"]
    assert len(found) == 3
    np.testing.assert_array_equal(found.sample(2).images[0], np.asarray(pictures(3)[2]))


def test_held_out_images_keep_all_their_captions(tmp_path: Path) -> None:
    splits = load_image_text(str(jsonl(tmp_path, {"captions": ["a", "b"]}, 10)), held_out_share=0.3)
    assert splits.held_out is not None
    assert (len(splits.train), len(splits.held_out)) == (14, 6)
    train, held_out = (
        {splits.train.sample(i).images[0].tobytes() for i in range(14)},
        {splits.held_out.sample(i).images[0].tobytes() for i in range(6)},
    )
    assert len(train) == 7
    assert not train & held_out


@pytest.mark.parametrize("kind", ["path", "bytes"])
def test_rows_of_the_same_image_are_held_out_together(kind: str, tmp_path: Path) -> None:
    """Conversations of LLaVA: three rows for each of ten images, shuffled."""
    names = save_pictures(tmp_path / "images", 10) * 3
    order = np.random.default_rng(0).permutation(30).tolist()
    rows = [{"image": f"images/{names[n]}", "conversations": LLAVA} for n in order]
    if kind == "path":
        rows[0]["image"] = "./" + rows[0]["image"]
        write_lines(tmp_path / "train.jsonl", rows)
    else:
        for row in rows:
            row["image"] = {"bytes": (tmp_path / row["image"]).read_bytes(), "path": None}
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / "train.parquet")
    splits = load_image_text(str(tmp_path), held_out_share=0.3)
    assert splits.held_out is not None
    assert (len(splits.train), len(splits.held_out)) == (21, 9)
    train, held_out = (
        {each.sample(i).images[0].tobytes() for i in range(len(each))}
        for each in (splits.train, splits.held_out)
    )
    assert (len(train), len(held_out), len(train & held_out)) == (7, 3, 0)


def test_one_image_cannot_be_held_out(tmp_path: Path) -> None:
    save_pictures(tmp_path, 1)
    write_lines(tmp_path / "train.jsonl", [{"image": "0.png", "caption": "a"}] * 5)
    with pytest.raises(DataError, match="1 image is too few to hold some out"):
        load_image_text(str(tmp_path))


def test_groups_connect_through_rows_of_several_images() -> None:
    rows = [{"images": each, "caption": "a"} for each in ("a", ["b", "c"], None, ["d", "a"], "c")]
    assert ImageTextSet("set", rows).groups() == [[0, 3], [1, 4], [2]]
    assert ImageTextSet("set", [*rows, {"images": ["c", "d"], "caption": "a"}]).groups() == [
        [0, 1, 3, 4, 5],
        [2],
    ]
    assert ImageTextSet("set", rows).groups(most=1) == [[0], [1], [2], [3], [4]]


def test_a_skipped_image_is_not_replaced_by_a_held_out_one(tmp_path: Path) -> None:
    jsonl(tmp_path, {"caption": "a"}, 10)
    whole = load_image_text(str(tmp_path), held_out_share=0.5)
    assert whole.held_out is not None
    held_out = {whole.held_out.sample(i).images[0].tobytes() for i in range(5)}
    for index in range(10):
        picture = tmp_path / "images" / f"{index}.png"
        if np.asarray(Image.open(picture)).tobytes() not in held_out:
            picture.write_bytes(b"broken")
            break
    splits = load_image_text(str(tmp_path), held_out_share=0.5, on_corrupt="skip")
    for index in range(5):
        assert splits.train.sample(index).images[0].tobytes() not in held_out


def test_rows_of_a_mix_may_lack_the_image(tmp_path: Path) -> None:
    """As in LLaVA's mix of conversations with and without an image."""
    save_pictures(tmp_path, 1)
    alone = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    rows = [{"id": 1, "conversations": alone}, {"id": 2, "image": "0.png", "conversations": LLAVA}]
    write_lines(tmp_path / "train.jsonl", rows)
    found = image_text_splits(str(tmp_path))["train"]
    assert [len(found.sample(index).images) for index in range(2)] == [0, 1]
    assert found.sample(0).turns == [Turn("user", "Hi"), Turn("assistant", "Hello")]


def test_missing_captions_are_left_out(tmp_path: Path) -> None:
    save_pictures(tmp_path, 1)
    rows = [{"image": "0.png", "captions": [None, "a", None, "b"]}, {"image": "0.png"}]
    found = ImageTextSet("set", rows, tmp_path)
    turns = [found.sample(index).turns[0].text for index in range(len(found))]
    assert turns == ["<image>a", "<image>b"]
    assert (found.captions(0), found.captions(1)) == (["a", "b"], [])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", [{"image": "gone/1.png", "caption": "a"}])
    with pytest.raises(DataError, match=r"image gone/1.png of row 0 of .* does not exist"):
        image_text_splits(str(tmp_path))["train"].sample(0)


def test_the_bytes_of_an_image_may_be_a_column(tmp_path: Path) -> None:
    content = (tmp_path / save_pictures(tmp_path, 1)[0]).read_bytes()
    sample = ImageTextSet("set", [{"jpg": content, "txt": "a"}]).sample(0)
    np.testing.assert_array_equal(sample.images[0], np.asarray(pictures(1)[0]))


def test_a_corrupt_image_is_refused_or_skipped(tmp_path: Path, caplog: Any) -> None:
    jsonl(tmp_path, {"captions": ["a", "b"]})
    (tmp_path / "images" / "1.png").write_bytes(b"not a png")
    with pytest.raises(DataError, match=r"row 1 of .*cannot be read as an image"):
        image_text_splits(str(tmp_path))["train"].sample(2)
    found = image_text_splits(str(tmp_path), "skip")["train"]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            sample = found.sample(2)
            assert sample.images[0].tobytes() == found.sample(4).images[0].tobytes()
    assert found.skipped == {1}
    assert len(caplog.records) == 1


def test_a_path_outside_the_folder_is_refused(tmp_path: Path) -> None:
    save_pictures(tmp_path, 1)
    (tmp_path / "set").mkdir()
    write_lines(tmp_path / "set" / "train.jsonl", [{"image": "../0.png", "caption": "a"}])
    with pytest.raises(DataError, match="leaves the folder"):
        image_text_splits(str(tmp_path / "set"))["train"].sample(0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"picture": "x", "caption": "a"}, "needs a column of images"),
        ({"image": "0.png", "label": 3}, "one of captions"),
        (
            {"image": "0.png", "messages": [{"role": "user", "content": "x"}]},
            "no message of an ass",
        ),
        ({"image": "0.png", "messages": ["hello"]}, "without role and content"),
        (
            {"image": "0.png", "messages": [{"role": "u", "content": [{"type": "x"}]}]},
            "neither text",
        ),
        ({"image": "0.png", "caption": "<image> or <image>"}, "2 times <image> for 1 images"),
        ({"image": "0.png", "caption": None}, "holds no text"),
        ({"image": None, "caption": "<image>"}, "1 times <image> for 0 images"),
    ],
)
def test_bad_rows_are_named(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_pictures(tmp_path, 1)
    write_lines(tmp_path / "train.jsonl", [row])
    with pytest.raises(DataError, match=message):
        image_text_splits(str(tmp_path))["train"].sample(0)


@pytest.mark.parametrize("line", ["not json", "[1]"])
def test_bad_lines_are_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"image": null, "caption": "a"}\n\n' + line)
    with pytest.raises(DataError, match=r"train\.jsonl, line 3 is not"):
        image_text_splits(str(tmp_path))


def test_an_empty_folder_says_what_it_looked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no images with text: no train\.parquet"):
        image_text_splits(str(tmp_path))


def test_captions_are_encoded_with_the_end_of_text(encoder: ImageTextEncoder) -> None:
    image = np.zeros((20, 24, 3), np.uint8)
    found = encoder.encode(ImageText([image], [Turn("caption", "<image>dog")]))
    assert found.ids == [*image_run(), *b"dog", END_OF_TEXT]
    assert found.labels == [IGNORED] * (POSITIONS + 1) + [*b"dog", END_OF_TEXT]
    assert found.pixels[0].shape == (3, SIDE, SIDE)
    assert found.target_bytes == 3


def test_conversations_are_encoded_as_the_chat_template_writes_them(
    encoder: ImageTextEncoder,
) -> None:
    image = np.zeros((20, 24, 3), np.uint8)
    turns = [Turn("user", "<image>Who?"), Turn("assistant", "A dog."), Turn("user", "And?")]
    turns.append(Turn("assistant", "No."))
    found = ImageTextEncoder(encoder.processor, 200).encode(ImageText([image], turns))
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "image", "image": Image.fromarray(image)},
                {"type": "text", "text": "Who?"},
            ],
        },
        {"role": "assistant", "content": "A dog."},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "No."},
    ]
    wanted = encoder.processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=False
    )
    assert found.ids == wanted["input_ids"][0]
    np.testing.assert_array_equal(found.pixels[0], wanted["pixel_values"][0])
    labelled = bytes(label for label in found.labels if 0 <= label < END_OF_TEXT)
    assert labelled == b"A dog.No."
    assert found.labels.count(END_OF_TEXT) == 2


def test_long_text_is_cut_with_the_images_after_the_cut(encoder: ImageTextEncoder) -> None:
    images = [np.zeros((20, 24, 3), np.uint8)] * 2
    turns = [Turn("caption", f"<image>{'x' * 50}<image>y")]
    found = encoder.encode(ImageText(images, turns))
    assert found.ids == [*image_run(), *b"x" * 40]
    assert len(found.pixels) == 1
    assert found.target_bytes == 40


@pytest.mark.parametrize(
    ("context", "wanted", "images"),
    [
        (100, [*image_run(), *b"ab", *image_run(), *b"cd", END_OF_TEXT], 2),
        (2 * len(image_run()) + 4, [*image_run(), *b"ab", *image_run(), *b"cd"], 2),
        (2 * len(image_run()) + 1, [*image_run(), *b"ab"], 1),
        (len(image_run()) - 1, [], 0),
    ],
)
def test_what_exceeds_the_context_is_cut(
    context: int, wanted: list[int], images: int, encoder: ImageTextEncoder
) -> None:
    pictures = [np.zeros((20, 24, 3), np.uint8)] * 2
    sample = ImageText(pictures, [Turn("caption", "<image>ab<image>cd")])
    found = ImageTextEncoder(encoder.processor, 40, context).encode(sample)
    assert found.ids == wanted
    assert len(found.labels) == len(wanted)
    assert len(found.pixels) == images


def make_reader(folder: Path, encoder: ImageTextEncoder, workers: int = 0) -> ImageTextReader:
    rows = [
        {"images": [name] * (index % 3), "caption": "x" * index}
        for index, name in enumerate(save_pictures(folder, 7), 0)
    ]
    return ImageTextReader(ImageTextSet("set", rows[:], folder), encoder, workers)


def test_batches_are_padded_and_hold_all_images(tmp_path: Path, encoder: ImageTextEncoder) -> None:
    reader = make_reader(tmp_path, encoder)
    batch = reader.plain_batch([1, 2, 3])
    assert batch.pixels is not None
    assert len(batch.pixels) == int((batch.ids == IMAGE_ID).sum()) // POSITIONS == 1 + 2 + 0
    assert (batch.labels[2, 4:] == IGNORED).all()
    assert reader.plain_batch([0, 3]).pixels is None


@pytest.mark.parametrize("workers", [0, 2])
def test_the_order_is_a_function_of_seed_and_position(
    workers: int, tmp_path: Path, encoder: ImageTextEncoder
) -> None:
    reader = make_reader(tmp_path, encoder, workers)
    whole = reader.training_batch(0, 14, seed=3)
    texts = [bytes(label for label in row if 0 <= label < 256) for row in whole.labels.tolist()]
    assert sorted(texts[:7]) == sorted(texts[7:]) == [b"x" * count for count in range(7)]
    for first, count in ((0, 4), (4, 9), (13, 1)):
        reader.prefetch(first, count, seed=3)
        part = reader.training_batch(first, count, seed=3)
        again = [bytes(label for label in row if 0 <= label < 256) for row in part.labels.tolist()]
        assert again == texts[first : first + count]
    other = reader.training_batch(0, 7, seed=4)
    assert not torch.equal(other.labels, whole.labels[:7])


def test_held_out_samples_do_not_depend_on_the_batch_size(
    tmp_path: Path, encoder: ImageTextEncoder
) -> None:
    reader = make_reader(tmp_path, encoder)
    for size in (1, 3, 9):
        batches = reader.held_out(size, 4)
        assert [index for batch in batches for index in batch.indices] == [0, 2, 4, 6]
        assert sum(len(batch.to("cpu")) for batch in batches) == 4
