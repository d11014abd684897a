"""`tokenformer predict` and `evaluate --images`, with our classifier and one of transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification

from tokenformer import TokenformerForImageClassification, TokenformerVisionConfig
from tokenformer.cli import main
from tokenformer.models.image_processing import TokenformerImageProcessor

NAMES = {"dark": 30, "middling": 120, "light": 220}
CLASSES = {"id2label": dict(enumerate(NAMES)), "label2id": {n: i for i, n in enumerate(NAMES)}}


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Five noisy images of each of three classes, of different sizes."""
    random = np.random.default_rng(0)
    for name, shade in NAMES.items():
        home = tmp_path / "pictures" / "val" / name
        home.mkdir(parents=True)
        for number in range(5):
            noise = random.normal(shade, 60, (10 + number, 12, 3)).clip(0, 255)
            Image.fromarray(noise.astype(np.uint8)).save(home / f"{number} of {name}.png")
    return tmp_path / "pictures"


@pytest.fixture(params=["ours", "transformers"])
def classifier(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    folder = tmp_path / "classifier"
    shape: dict[str, Any] = {
        "image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "initializer_range": 0.5, **CLASSES,
    }  # fmt: skip
    if request.param == "ours":
        model: Any = TokenformerForImageClassification(TokenformerVisionConfig(**shape))
    else:
        model = ViTForImageClassification(ViTConfig(**shape, intermediate_size=32))
    with torch.no_grad():
        model.classifier.weight.normal_()
    model.save_pretrained(folder)
    TokenformerImageProcessor.for_size(8, 3).save_pretrained(folder)
    return folder


def logits_of(classifier: Path, files: list[Path]) -> torch.Tensor:
    """Resize and normalize one image at a time, without the image processor."""
    from transformers import AutoModelForImageClassification

    model = AutoModelForImageClassification.from_pretrained(classifier).eval()
    kept = json.loads((classifier / "preprocessor_config.json").read_text())
    mean, std = (np.float32(kept[name]) for name in ("image_mean", "image_std"))
    rows = []
    for file in files:
        image = Image.open(file).resize((8, 8), Image.Resampling.BICUBIC)
        values = (np.asarray(image, np.float32) / 255 - mean) / std
        with torch.no_grad():
            rows.append(model(torch.tensor(values).permute(2, 0, 1)[None]).logits[0])
    return torch.stack(rows)


def files_of(pictures: Path) -> tuple[list[Path], list[int]]:
    """Image files and the model's index of their class."""
    files = [file for name in sorted(NAMES) for file in sorted((pictures / "val" / name).iterdir())]
    return files, [list(NAMES).index(file.parent.name) for file in files]


def test_evaluate_equals_a_direct_computation(
    classifier: Path, pictures: Path, tmp_path: Path, capsys: Any
) -> None:
    files, labels = files_of(pictures)
    guesses = logits_of(classifier, files).argmax(1)
    assert len(guesses.unique()) > 1, "a model with different predictions"
    words = ["evaluate", str(classifier), "--images", str(pictures), "--batch_size", "4"]
    picture = tmp_path / "confusion.png"
    main([*words, "--json", "--confusion", str(picture)])
    found = json.loads(capsys.readouterr().out)["images"]
    assert found["images"] == 15
    assert found["top_1"] == int((guesses == torch.tensor(labels)).sum()) / 15
    assert found["top_5"] == 1.0, "of three classes"
    wanted = torch.nn.functional.cross_entropy(logits_of(classifier, files), torch.tensor(labels))
    assert found["loss"] == pytest.approx(wanted.item(), rel=1e-4)
    confusion = np.zeros((3, 3), int)
    np.add.at(confusion, (labels, guesses.numpy()), 1)
    assert found["confusion"] == confusion.tolist()
    assert found["classes"] == list(NAMES)
    assert picture.read_bytes().startswith(b"\x89PNG")
    main([*words, "--limit", "7"])
    printed = capsys.readouterr().out
    assert "val: 7 images, 3 classes" in printed
    assert "top-1 accuracy" in printed


def test_predict_prints_the_most_likely_classes(
    classifier: Path, pictures: Path, capsys: Any
) -> None:
    files = files_of(pictures)[0][3:7]
    shares = logits_of(classifier, files).softmax(1)
    main(["predict", str(classifier), *map(str, files), "--top", "2", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert list(answer) == [str(file) for file in files]
    for row, classes in zip(shares, answer.values(), strict=True):
        best = row.topk(2)
        assert [c["label"] for c in classes] == [list(NAMES)[i] for i in best.indices.tolist()]
        assert [c["share"] for c in classes] == pytest.approx(best.values.tolist(), rel=1e-4)
    main(["predict", str(classifier), str(files[0])])
    line = capsys.readouterr().out
    assert line.startswith(str(files[0]))
    assert all(name in line for name in NAMES), "three are printed by default"


def test_grayscale_and_color_models_take_either(tmp_path: Path, capsys: Any) -> None:
    random = np.random.default_rng(1)
    Image.fromarray(random.integers(256, size=(9, 9), dtype=np.uint8)).save(tmp_path / "grey.png")
    colours = random.integers(256, size=(9, 9, 4), dtype=np.uint8)
    Image.fromarray(colours, "RGBA").save(tmp_path / "rgba.png")
    for channels in (1, 3):
        config = TokenformerVisionConfig(
            image_size=8, patch_size=4, num_channels=channels, hidden_size=16,
            num_hidden_layers=1, num_attention_heads=2, num_labels=4,
        )  # fmt: skip
        folder = tmp_path / str(channels)
        TokenformerForImageClassification(config).save_pretrained(folder)
        TokenformerImageProcessor.for_size(8, channels).save_pretrained(folder)
        names = [str(tmp_path / name) for name in ("grey.png", "rgba.png")]
        main(["predict", str(folder), *names])
        assert len(capsys.readouterr().out.splitlines()) == 2


def test_grayscale_images_with_a_processor_of_transformers(
    classifier: Path, tmp_path: Path, capsys: Any
) -> None:
    from transformers import ViTImageProcessorPil

    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(classifier)
    for name, shade in NAMES.items():
        home = tmp_path / "grey" / "val" / name
        home.mkdir(parents=True)
        Image.new("L", (9, 9), shade).save(home / "grey.png")
        Image.new("RGB", (9, 9), (shade,) * 3).save(home / "same in colour.png")
    files = [str(home / f"{kind}.png") for kind in ("grey", "same in colour")]
    main(["predict", str(classifier), *files, "--json"])
    grey, colour = json.loads(capsys.readouterr().out).values()
    assert grey == colour
    main(["evaluate", str(classifier), "--images", str(tmp_path / "grey")])
    assert "6 images" in capsys.readouterr().out


def test_a_model_in_half_precision(classifier: Path, pictures: Path, capsys: Any) -> None:
    from transformers import AutoModelForImageClassification

    AutoModelForImageClassification.from_pretrained(
        classifier, dtype=torch.bfloat16
    ).save_pretrained(classifier)
    files = files_of(pictures)[0][:2]
    main(["predict", str(classifier), *map(str, files), "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert [sum(c["share"] for c in answer[str(file)]) for file in files] == pytest.approx([1, 1])
    main(["evaluate", str(classifier), "--images", str(pictures)])
    assert "15 images" in capsys.readouterr().out


def refused(words: list[str], capsys: Any) -> str:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    said: str = capsys.readouterr().err
    return said


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_invalid_input_is_an_error(
    classifier: Path, pictures: Path, tmp_path: Path, capsys: Any
) -> None:
    model = str(classifier)
    (tmp_path / "torn.png").write_bytes(b"\x89PNG\r\n\x1a\n torn")
    Image.new("1", (12_000, 12_000)).save(tmp_path / "huge.png")
    for words, message in (
        (["predict", model, str(tmp_path / "torn.png")], "torn.png cannot be read as an image"),
        (["predict", model, str(tmp_path / "huge.png")], "has 12000 x 12000 pixels, more than"),
        (["predict", model, str(tmp_path / "no.png")], "no.png"),
        (["predict", model, str(tmp_path / "torn.png"), "--top", "0"], "--top 0 must be at least"),
        (["evaluate", model, "--images", "digits"],
         "not know 10 of the 10 classes of the images: 0, 1, 2, 3, 4 and 5 more; its own are dark"),
        (["evaluate", model, "--images", "digits", "--labels_by_index"], "the model only 3"),
        (["evaluate", model, "--perplexity", "x", "--labels_by_index"], "--labels_by_index"),
        (["evaluate", model, "--images", "digits", "--tasks", "piqa"], "for a language model"),
        (["evaluate", model, "--images", "no/where/here"], "--images: no no/where/here"),
        (["evaluate", model, "--images", str(pictures)[:-1]], f"did you mean {pictures}?"),
        (["evaluate", model, "--perplexity", "x", "--confusion", "x.png"], "--confusion"),
        (["evaluate", model, "--images", "digits", "--confusion", str(tmp_path / "a" / "b")],
         f"--confusion: no {tmp_path / 'a'}"),
        (["evaluate", model, "--images", str(pictures), "--confusion", str(tmp_path / "a.doc")],
         "a.doc cannot be written"),
    ):  # fmt: skip
        assert message in refused(words, capsys), words
    (pictures / "val" / "dark" / "9.png").write_bytes(b"nothing")
    assert "9.png" in refused(["evaluate", model, "--images", str(pictures)], capsys)


def test_a_language_model_is_refused(parrot: Path, pictures: Path, capsys: Any) -> None:
    said = refused(["evaluate", str(parrot), "--images", str(pictures)], capsys)
    assert f"{parrot} is a language model, not an image classifier; use tokenformer gen" in said
    said = refused(["predict", str(parrot), str(pictures / "val" / "dark")], capsys)
    assert "is a language model" in said


def test_a_classifier_is_refused_as_a_language_model(classifier: Path, capsys: Any) -> None:
    for words in (["generate", "--prompt", "a"], ["evaluate", "--tasks", "piqa"]):
        said = refused([words[0], str(classifier), *words[1:]], capsys)
        assert "is an image classifier, not a language model; use tokenformer predict" in said
        assert said.count("\n") == 1


def test_classes_are_matched_by_name_or_on_request_by_index(
    classifier: Path, pictures: Path, capsys: Any
) -> None:
    words = ["evaluate", str(classifier), "--images", str(pictures), "--json"]
    main(words)
    by_name = json.loads(capsys.readouterr().out)["images"]
    (pictures / "val" / "dark").rename(pictures / "val" / "sombre")
    said = refused(words, capsys)
    assert "does not know 1 of the 3 classes of the images: sombre" in said
    assert "its own are dark, middling, light; " in said
    assert "--labels_by_index" in said
    (pictures / "val" / "sombre").rename(pictures / "val" / "0 dark")
    (pictures / "val" / "middling").rename(pictures / "val" / "1 middling")
    (pictures / "val" / "light").rename(pictures / "val" / "2 light")
    main([*words, "--labels_by_index"])
    by_index = json.loads(capsys.readouterr().out)["images"]
    assert by_index["classes"] == ["0 dark", "1 middling", "2 light"]
    assert by_index["confusion"] == by_name["confusion"]


def test_predict_follows_the_problem_type(classifier: Path, pictures: Path, capsys: Any) -> None:
    file = files_of(pictures)[0][0]
    [logits] = logits_of(classifier, [file])
    config = json.loads((classifier / "config.json").read_text())
    words = ["predict", str(classifier), str(file)]
    evaluate = ["evaluate", str(classifier), "--images", str(pictures)]
    for kind in ("multi_label_classification", "regression"):
        (classifier / "config.json").write_text(json.dumps({**config, "problem_type": kind}))
        main([*words, "--json", "--top", "2"])
        [rows] = json.loads(capsys.readouterr().out).values()
        if kind == "regression":
            assert [row["label"] for row in rows] == list(NAMES)
            assert [row["value"] for row in rows] == pytest.approx(logits.tolist(), rel=1e-4)
        else:
            shares = logits.sigmoid().topk(2).values.tolist()
            assert [row["share"] for row in rows] == pytest.approx(shares, rel=1e-4)
        main(words)
        assert ("%" in capsys.readouterr().out) == (kind != "regression")
        said = refused(evaluate, capsys)
        assert f"the model's problem_type is {kind}" in said
        assert said.count("\n") == 1
