"""Captions measured with the right image, another and none; retrieval; both commands."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from tests.support.image_text import SIDE, image_run, make_halves, make_joint, make_processor
from tokenformer.cli import main
from tokenformer.data.byte_tokenizer import END_OF_TEXT, byte_tokenizer
from tokenformer.data.image_text import ImageTextSet
from tokenformer.data.image_text_sources import load_captions
from tokenformer.evaluate.captions import measure_captions

COLORS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (20, 40, 230)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("captions")
    rows = []
    for name, color in COLORS.items():
        Image.new("RGB", (SIDE, SIDE), color).save(folder / f"{name}.png")
        rows.append({"image": f"{name}.png", "captions": [name, f"a {name} square"]})
    (folder / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: Any) -> Path:
    """The folder of a model that has learned to name the colours."""
    joint = make_joint("routed", torch.float32).train()
    processor = make_processor(joint)
    images = [Image.new("RGB", (SIDE, SIDE), color) for color in COLORS.values()]
    batch = processor(
        text=[f"<image>{name}<|endoftext|>" for name in COLORS],
        images=images,
        return_tensors="pt",
        padding=True,
        padding_side="right",
    )
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(joint.parameters(), lr=5e-3)
    for _ in range(200):
        loss = joint(**batch, labels=labels).loss
        if loss < 0.03:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.03
    folder = tmp_path_factory.mktemp("seeing")
    joint.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def test_perplexity_is_that_of_one_caption_after_the_other(data: Path) -> None:
    model = make_joint("routed", torch.float64)
    processor = make_processor(model)
    captions, _ = load_captions(str(data))
    found = measure_captions(model, processor, captions, batch_size=4)
    sums = {"bits_per_byte": 0.0, "bits_per_byte_wrong_image": 0.0, "bits_per_byte_no_image": 0.0}
    size = 0
    for row in range(3):
        for text in captions.captions(row):
            own, size = [*text.encode(), END_OF_TEXT], size + len(text)
            for name, shown in zip(sums, (row, (row + 1) % 3, None), strict=True):
                prefix = [END_OF_TEXT] if shown is None else image_run()
                pixels = None
                if shown is not None:
                    picture = captions.image(shown)
                    pixels = processor.image_processor(picture, return_tensors="pt")["pixel_values"]
                logits = model(torch.tensor([prefix + own]), pixel_values=pixels).logits[0]
                scored = logits[len(prefix) - 1 : -1]
                sums[name] += F.cross_entropy(scored, torch.tensor(own), reduction="sum").item()
    for name, nats in sums.items():
        assert getattr(found, name) == pytest.approx(nats / math.log(2) / size, rel=1e-5), name
    assert (found.images, found.captions, found.group) == (3, 6, 3)


def test_a_model_that_sees_gains_from_the_image(seeing: Path, data: Path, capsys: Any) -> None:
    main(["evaluate", str(seeing), "--captions", str(data), "--json"])
    found = json.loads(capsys.readouterr().out)["captions"]
    assert found["generated"] == ["red", "green", "blue"]
    assert found["bits_per_byte"] < found["bits_per_byte_wrong_image"]
    assert found["text_retrieval"] == found["image_retrieval"] == 1.0
    assert found["bleu"][0] == 1.0
    main(["evaluate", str(seeing), "--captions", str(data), "--limit", "2"])
    printed = capsys.readouterr().out
    assert "2 images, 4 captions" in printed
    assert "CIDEr-D" in printed


def test_rows_of_one_image_are_one_image(data: Path, tmp_path: Path) -> None:
    """A row for each caption, some of copies of the file, and the image of the next row the same:
    as if every image had one row."""
    model = make_joint("routed", torch.float64)
    processor = make_processor(model)
    captions, _ = load_captions(str(data))
    rows = []
    for number, name in enumerate(COLORS):
        for copy, text in enumerate(captions.captions(number)):
            picture = Image.open(data / f"{name}.png")
            file = f"{name}.png" if name == "red" else f"{name}-{copy}.png"
            picture.save(tmp_path / file)
            rows.append({"image": file, "caption": text})
    rows += [{"caption": "without an image"}, {"image": "red.png", "caption": None}]
    found = measure_captions(model, processor, ImageTextSet("set", rows, tmp_path))
    assert found.asdict() == measure_captions(model, processor, captions).asdict()
    rows = [{"image": "red.png", "caption": text} for text in "ab"] + rows[3:]
    found = measure_captions(model, processor, ImageTextSet("set", rows, tmp_path), limit=1)
    assert (found.images, found.captions) == (1, 2)


def test_one_image_has_no_other(data: Path, seeing: Path, capsys: Any) -> None:
    command = ["evaluate", str(seeing), "--captions", str(data), "--limit", "1"]
    main(command)
    assert capsys.readouterr().out.count("not measured: there is only one image") == 3
    main([*command, "--json"])
    found = json.loads(capsys.readouterr().out)["captions"]
    assert found["bits_per_byte_wrong_image"] is None
    assert found["text_retrieval"] is found["image_retrieval"] is None


def test_unreadable_images_follow_the_policy(seeing: Path, tmp_path: Path, capsys: Any) -> None:
    pictures = [np.full((SIDE, SIDE, 3), shade, np.uint8) for shade in (0, 200)]
    for number, picture in enumerate(pictures):
        Image.fromarray(picture).save(tmp_path / f"{number}.png")
    (tmp_path / "1.png").write_bytes(b"broken")
    rows = [{"image": f"{number}.png", "caption": "x"} for number in range(2)]
    model = make_joint("routed", torch.float32)
    processor = make_processor(model)
    found = measure_captions(model, processor, ImageTextSet("set", rows, tmp_path, "skip"))
    assert found.images == 1
    from tokenformer.errors import DataError

    with pytest.raises(DataError, match="row 1 of set cannot be read"):
        measure_captions(model, processor, ImageTextSet("set", rows, tmp_path))
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluate = ["evaluate", str(seeing), "--captions", str(tmp_path)]
    main([*evaluate, "--on_corrupt", "skip"])
    assert "1 images, 1 captions" in capsys.readouterr().out
    assert "image 1.png of row 1 of" in fails(capsys, *evaluate)
    message = fails(capsys, "evaluate", seeing, "--images", "digits", "--on_corrupt", "skip")
    assert "--on_corrupt skip needs --captions" in message


@pytest.mark.parametrize("prompt", [[], ["--prompt", "<image>"], ["--prompt", ""]])
def test_generate_about_an_image(prompt: list[str], seeing: Path, data: Path, capsys: Any) -> None:
    for name in COLORS:
        image = ["--image", str(data / f"{name}.png")]
        main(["generate", str(seeing), *image, *prompt, "--greedy", "--json"])
        assert json.loads(capsys.readouterr().out)[0]["added"] == name
        main(["generate", str(seeing), *image, *prompt, "--greedy"])
        assert capsys.readouterr().out.removeprefix("<image>") == f"{name}\n"


def test_generation_stays_in_the_context(seeing: Path, data: Path, capsys: Any) -> None:
    image = ["--image", str(data / "red.png")]
    main(["generate", str(seeing), *image, "--prompt", "x" * 240, "--max_new_tokens", "50"])
    assert "at most 10 tokens fit" in capsys.readouterr().err


def fails(capsys: Any, *words: Any) -> str:
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    assert end.value.code == 2
    return str(capsys.readouterr().err)


def test_bad_input_is_one_line(seeing: Path, data: Path, tmp_path: Path, capsys: Any) -> None:
    image = data / "red.png"
    generate = ["generate", seeing, "--image"]
    assert "no " in fails(capsys, *generate, tmp_path / "missing.png")
    (tmp_path / "bad.png").write_bytes(b"x")
    assert "cannot be read as an image" in fails(capsys, *generate, tmp_path / "bad.png")
    for url in ("https://host/a.png", "data:image/png;base64,AAAA"):
        assert "URLs are not fetched" in fails(capsys, *generate, url)
    assert "more than once" in fails(capsys, *generate, image, "--prompt", "<image><image>")
    assert "take 306 positions" in fails(capsys, *generate, image, "--prompt", "x" * 300)
    assert "--bits is for language models" in fails(capsys, *generate, image, "--bits", 8)
    assert "is a vision-language model" in fails(capsys, "predict", seeing, image)
    language = make_halves()[1]
    language.save_pretrained(tmp_path / "language")
    byte_tokenizer().save_pretrained(tmp_path / "language")
    message = fails(capsys, "generate", tmp_path / "language", "--image", image)
    assert "is a language model, not a vision-language model" in message
    evaluate = ["evaluate", seeing, "--captions"]
    assert "--captions: no " in fails(capsys, *evaluate, "./missing")
    assert "use one" in fails(capsys, *evaluate, data, "--images", "digits")
    assert "use one" in fails(capsys, *evaluate, data, "--tasks", "paper")
    assert "cannot be used with --captions" in fails(capsys, *evaluate, data, "--bits", 8)
