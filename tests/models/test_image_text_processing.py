"""The processor of vision-language models: placeholders, batches, chats, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import tokenformer
from tests.support.image_text import (
    IMAGE_ID,
    PATCH,
    SIDE,
    image_run,
    make_joint,
    make_processor,
    pictures,
)
from tokenformer.data.byte_tokenizer import END_OF_TEXT, byte_tokenizer


@pytest.fixture(scope="module")
def processor() -> Any:
    return make_processor(make_joint("projector"))


def test_an_image_becomes_placeholders_and_the_begin_of_text(processor: Any) -> None:
    batch = processor(text="a<image>b", images=pictures(1)[0], return_tensors="pt")
    assert batch["input_ids"].tolist() == [[*b"a", *image_run(), *b"b"]]
    assert batch["attention_mask"].all()
    assert batch["pixel_values"].shape == (1, 3, SIDE, SIDE)


def test_images_can_be_nested_by_text(processor: Any) -> None:
    text, given = ["<image><image>", "none", "<image>"], pictures(3)
    options: dict[str, Any] = {"text": text, "padding": True, "return_tensors": "pt"}
    flat = processor(images=given, **options)
    nested = processor(images=[given[:2], [], given[2:]], **options)
    missing = processor(images=[given[:2], None, given[2:]], **options)
    assert torch.equal(flat["pixel_values"], nested["pixel_values"])
    assert torch.equal(flat["input_ids"], nested["input_ids"])
    assert torch.equal(flat["pixel_values"], missing["pixel_values"])
    assert flat["input_ids"][1, 0] == END_OF_TEXT  # padded on the left
    assert not flat["attention_mask"][1, 0]


def test_text_alone_has_no_pixels(processor: Any) -> None:
    assert set(processor(text="only text")) == {"input_ids", "attention_mask"}


def test_decoding_skips_the_placeholders(processor: Any) -> None:
    batch = processor(text=["<image>a dog"], images=pictures(1))
    assert processor.batch_decode(batch["input_ids"], skip_special_tokens=True) == ["a dog"]


def test_chats(processor: Any) -> None:
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "image", "image": pictures(1)[0]},
                {"type": "text", "text": "Who?"},
            ],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "A dog."}]},
        {"role": "user", "content": "And now?"},
    ]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    assert text == "user: <image>Who?\nassistant: A dog.<|endoftext|>user: And now?\nassistant: "
    batch = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt"
    )
    assert batch["input_ids"][0].tolist().count(IMAGE_ID) == len(image_run()) - 1
    assert batch["pixel_values"].shape == (1, 3, SIDE, SIDE)


def conversation(answer: str, images: int, number: int = 0) -> list[dict[str, Any]]:
    shown = [{"type": "image", "image": each} for each in pictures(images, number)]
    return [
        {"role": "user", "content": [*shown[:1], {"type": "text", "text": "Who?"}, *shown[1:]]},
        {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        {"role": "user", "content": [{"type": "text", "text": "And?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "No."}]},
    ]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("images", [[1], [0], [2], [1, 3], [0, 2, 1]])
def test_the_mask_of_the_assistant_is_over_its_answers(
    images: list[int], side: str, processor: Any
) -> None:
    answers = [f"It is {'a dog ' * count}." for count in images]
    chats = [conversation(*each) for each in zip(answers, images, range(3), strict=False)]
    batch = processor.apply_chat_template(
        chats if len(chats) > 1 else chats[0],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        return_assistant_tokens_mask=True,
        processor_kwargs={"padding": True, "padding_side": side},
    )
    assert set(batch) - {"pixel_values"} == {"input_ids", "attention_mask", "assistant_masks"}
    mask = torch.as_tensor(batch["assistant_masks"]).bool()
    for ids, chosen, answer in zip(batch["input_ids"], mask, answers, strict=True):
        wanted = [*answer.encode(), END_OF_TEXT, *b"No.", END_OF_TEXT]
        assert ids[chosen].tolist() == wanted
    assert int((batch["input_ids"] == IMAGE_ID).sum()) == sum(images) * (len(image_run()) - 1)


def test_replacements_are_described_as_by_transformers(processor: Any) -> None:
    text, given = ["a<image>b<image>", "c", "<image>"], pictures(3)
    assert "text_replacement_offsets" not in processor(text=text, images=given)
    found = processor(text=text, images=given, return_text_replacement_offsets=True)
    expanded = [processor.image_text(SIDE, SIDE)] * 3
    _, wanted = processor.get_text_with_replacements(list(text), expanded)
    assert found["text_replacement_offsets"] == wanted


def test_the_number_of_images_must_agree(processor: Any) -> None:
    with pytest.raises(ValueError, match="the text has 1 times <image> for 2 images"):
        processor(text="<image>", images=pictures(2))
    with pytest.raises(ValueError, match="the text has 1 times <image> for 0 images"):
        processor(text="<image>")
    with pytest.raises(ValueError, match=r"\[1, 0\] times <image> for \[0, 1\] images"):
        processor(text=["<image>", "x"], images=[[], pictures(1)])
    with pytest.raises(ValueError, match="text is missing"):
        processor(images=pictures(1))


def test_the_tokenizer_must_agree_with_the_model() -> None:
    config = make_joint("projector", image_token_id=300).config
    with pytest.raises(ValueError, match="join the models with image_token_id=257"):
        tokenformer.TokenformerProcessor.for_model(config, byte_tokenizer())
    with pytest.raises(ValueError, match="has no token <image>"):
        tokenformer.TokenformerProcessor(None, byte_tokenizer())


def test_the_tokenizer_alone_still_loads(processor: Any, tmp_path: Path) -> None:
    processor.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.convert_tokens_to_ids("<image>") == IMAGE_ID
    again = tokenformer.TokenformerProcessor.from_pretrained(tmp_path)
    assert (again.patch_size, again.class_tokens) == (PATCH, 1)
    assert again.chat_template == processor.chat_template
