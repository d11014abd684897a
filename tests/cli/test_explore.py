"""`tokenformer explore`: a folder with a page that opens from disk; or one line and nothing."""

import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request

import pytest
import torch
from PIL import Image

import tokenformer
from tests.support.growth import trained_tokenformer
from tests.support.image_text import make_joint
from tests.support.processes import LIMIT, START, started, wait_until
from tokenformer.cli import main
from tokenformer.data.byte_tokenizer import VOCAB_SIZE, byte_tokenizer
from tokenformer.data.image_sources import load_images
from tokenformer.interpret import Token, TokenIndex, Vocabulary
from tokenformer.interpret.index_tokens import small_pictures
from tokenformer.models.image_processing import TokenformerImageProcessor
from tokenformer.serve.explorer import Explorer

TEXT = "The quick brown fox — naïve, perhaps — jumps over the <b>lazy</b> dog.\n" * 80


@pytest.fixture
def home(tmp_path, make_config, capsys, monkeypatch):
    """A folder with the grown model `small` and the corpus `data`."""
    model, _ = trained_tokenformer(make_config, vocab_size=VOCAB_SIZE)
    grown, _ = tokenformer.grow(model, ffn_tokens=150)
    grown.save_pretrained(tmp_path / "small")
    byte_tokenizer().save_pretrained(tmp_path / "small")
    (tmp_path / "text.txt").write_text(TEXT)
    main(["prepare", str(tmp_path / "text.txt"), "--out", str(tmp_path / "data")])
    copy_with_other_tokenizer(tmp_path / "data", tmp_path / "other")
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def other_models(home, capsys):
    """Models of other kinds beside `small`: `classifier` and `joint`."""
    save_classifier(home / "classifier")
    make_joint(dtype=torch.float32).save_pretrained(home / "joint")
    capsys.readouterr()


def save_classifier(folder):
    """An untrained classifier of the digits, with a class token and four patches."""
    torch.manual_seed(0)
    config = tokenformer.TokenformerVisionConfig(
        image_size=8, patch_size=4, num_channels=1, num_labels=10, hidden_size=16,
        num_hidden_layers=1, num_attention_heads=2, initializer_range=0.3,
    )  # fmt: skip
    tokenformer.TokenformerForImageClassification(config).save_pretrained(folder)
    TokenformerImageProcessor.for_size(8, 1).save_pretrained(folder)


def copy_with_other_tokenizer(corpus, out):
    """A corpus whose ids mean something else."""
    shutil.copytree(corpus, out)
    file = out / "tokenizer" / "tokenizer.json"
    stored = json.loads(file.read_text())
    vocabulary = stored["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(stored))


def explore(*words):
    main(["explore", *map(str, words)])


def piece(site, name):
    """The value of a piece of data."""
    text = (site / "data" / f"{name}.js").read_text()
    found = re.fullmatch(r'TF\.take\("([^"]+)",(.*)\)\n', text)
    assert found[1] == name
    return json.loads(found[2])


SMALL = ("--sequences", 30, "--length", 32, "--split", "train")


def test_a_sparse_model(home, make_config, capsys):
    """The live page, too, reads weights and switches tokens off."""
    config = make_config(
        "tokenformer", vocab_size=VOCAB_SIZE, group_size=8, active_groups={"ffn": 2}
    )
    model = tokenformer.TokenformerForCausalLM(config).eval()
    model.save_pretrained("sparse")
    byte_tokenizer().save_pretrained("sparse")
    explore("sparse", "--data", "data", "--out", "site", *SMALL, "--examples", 1)
    assert "open site/index.html" in capsys.readouterr().out
    layers = {layer["name"]: layer for layer in piece(home / "site", "site")["layers"]}
    assert layers["0.ffn"]["tokens"] == 44
    vocabulary = Vocabulary(byte_tokenizer())
    explorer = Explorer(model, vocabulary, home / "site")
    found = explorer.answer({"text": "The quick", "off": ["0.ffn.3"]})
    assert [run["name"] for run in found["runs"]] == ["all tokens on", "switched off"]


def test_the_page_has_what_the_index_has(home, capsys):
    explore("small", "--data", "data", "--out", "site", *SMALL, "--examples", 2)
    assert "open site/index.html" in capsys.readouterr().out
    site = home / "site"
    assert sorted(path.name for path in home.iterdir()) == [
        "data", "other", "site", "small", "text.txt",
    ]  # fmt: skip
    index = TokenIndex.load(site / "index")
    overview = piece(site, "site")
    assert overview["model"] == "small"
    assert (overview["positions"], overview["source"]) == (30 * 32, "data, train")
    assert [layer["name"] for layer in overview["layers"]] == list(index.layers)
    vocabulary = Vocabulary(byte_tokenizer())
    for layer in overview["layers"]:
        found, table = index.layers[layer["name"]], piece(site, f"table-{layer['name']}")
        count = layer["tokens"]
        assert count == len(found) == len(table["snippets"]) == len(table["words"])
        assert layer["curve"][-1] == pytest.approx(1)
        assert sum(row[1] for row in layer["ages"]) == count
        frequency = torch.tensor(table["frequency"]).double()
        torch.testing.assert_close(frequency, found.frequency, rtol=0.01, atol=1e-9)
        chunk, details = overview["chunk"], []
        for n in range(0, count, chunk):
            details += piece(site, f"tokens-{layer['name']}-{n // chunk}")
        assert len(details) == count
        for number in (0, count - 1):
            contexts = index.contexts(Token(layer["name"], number), vocabulary)
            for shown, kept in zip(details[number]["contexts"], contexts, strict=True):
                runs = shown[3]
                assert "".join(text for text, _ in runs) == kept.before + kept.fired + kept.after
                fired = [text for text, level in runs if level >= 10]
                assert fired == [kept.fired]
    example = piece(site, "example-1")
    assert len(example["texts"]) == len(example["positions"]) == len(example["next"])
    model = tokenformer.TokenformerForCausalLM.from_pretrained("small").eval()
    ids = torch.tensor([byte_tokenizer()("".join(example["texts"]))["input_ids"]])
    chances = model(input_ids=ids).logits[0].softmax(-1)
    assert len(example["then"]) == len(example["texts"]) - 1
    label, chance = example["then"][0]
    following = int(ids[0, len(example["texts"][0].encode())])
    assert label == vocabulary.label(following)
    assert chance == pytest.approx(chances[0, following].item(), rel=0.01)
    assert piece(site, "live") is None
    page = (site / "index.html").read_text()
    for name in re.findall(r'(?:src|href)="([^"#]+)"', page):
        assert (site / name).exists(), name
    for path in site.glob("*.*"):
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", path.read_text()), path.name


def explore_in(folder, *words):
    os.chdir(folder)
    explore(*words)


@pytest.mark.slow
def test_an_interrupted_page_is_made_as_if_it_was_not(home, capsys):
    """Killed once the index is there, the same command writes the page from it."""
    words = ["small", "--data", "data", *SMALL, "--out"]
    index = home / ".site.index" / "index.json"
    arguments = (str(home), *words, "site")
    process = multiprocessing.get_context(START).Process(target=explore_in, args=arguments)
    process.start()
    try:
        assert wait_until(index.exists)
    finally:
        process.kill()
        process.join(LIMIT)
    assert not (home / "site").exists()
    stamp = index.stat().st_mtime_ns
    explore(*words, "site")
    assert (home / "site" / "index" / "index.json").stat().st_mtime_ns >= stamp
    explore(*words, "whole")
    for path in (home / "whole" / "data").iterdir():
        assert (home / "site" / "data" / path.name).read_bytes() == path.read_bytes(), path.name
    assert sorted(p.name for p in home.glob(".*")) == []


def test_an_index_of_other_text_is_not_used(home):
    """Left by a command that was killed: as many samples of the same model, but shorter."""
    explore("small", "--data", "data", "--out", "site", *SMALL)
    shutil.copytree(home / "site" / "index", home / ".new.index")
    shorter = ["--sequences", 30, "--length", 31, "--split", "train"]
    explore("small", "--data", "data", "--out", "new", *shorter)
    assert piece(home / "new", "site")["positions"] == 30 * 31


def test_a_classifier_is_explored_on_images(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_classifier("model")
    explore("model", "--images", "digits", "--sequences", 20, "--out", "site", "--json")
    report = json.loads(capsys.readouterr().out)
    assert (report["samples"], report["grid"]) == (20, [2, 2])
    site = tmp_path / "site"
    overview = piece(site, "site")
    assert (overview["image"], overview["classTokens"]) == ([1, 8, 8, 2, 2], 1)
    assert overview["positions"] - overview["samples"] == 20 * 4, "patches"
    context = piece(site, "tokens-0.ffn-0")[0]["contexts"][0]
    assert len(context[3]) == 5, "the class token and four patches"
    assert context[3][context[2]] == "9" or context[0] < max(
        row[0] for row in piece(site, "tokens-0.ffn-0")[0]["contexts"]
    )
    assert piece(site, "table-0.ffn")["tops"][0] == context[1:]
    images = piece(site, "images-0")
    assert len(images) <= 20
    assert len(piece(site, "example-0")["classes"]) == 3


@pytest.mark.parametrize(
    ("split", "shown", "count"), [(None, "validation", 180), ("train", "train", 1617)]
)
def test_images_are_of_the_split(tmp_path, capsys, split, shown, count):
    """By default those that training holds out."""
    save_classifier(tmp_path / "model")
    words = [] if split is None else ["--split", split]
    explore(tmp_path / "model", "--images", "digits", "--out", tmp_path / "site", *words,
            "--sequences", 2000, "--examples", 1)  # fmt: skip
    overview = piece(tmp_path / "site", "site")
    assert (overview["source"], overview["samples"]) == (f"digits, {shown}", count)
    pictures = getattr(load_images("digits"), "train" if split else "held_out")
    pixels = torch.stack([torch.tensor(pictures.picture(n)[0]) for n in range(count)])
    expected = {each.numpy().tobytes() for each in small_pictures(pixels.permute(0, 3, 1, 2))}
    samples = TokenIndex.load(tmp_path / "site" / "index").samples
    assert {each.numpy().tobytes() for each in samples} <= expected


def test_splits_of_images_have_their_own_names(tmp_path):
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            Image.new("L", (8, 8), 99).save(folder / "1.png")
    save_classifier(tmp_path / "model")
    words = ["--images", tmp_path / "images", "--examples", 1, "--out"]
    explore(tmp_path / "model", *words, tmp_path / "site")
    assert piece(tmp_path / "site", "site")["source"] == "images, val"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("small --data data", "--out is missing"),
        ("small --data data --out small", "--out small already exists"),
        ("small --out new", "small is a language model; use --data"),
        ("small --images digits --out new", "small is a language model; use --data"),
        ("small --data absent --out new", "--data: no absent"),
        ("small --data small --out new", "holds no prepared corpus"),
        ("small --data data --split test --out new", "no split 'test'"),
        ("small --data data --length 65 --out new", "beyond the model's context of 64 tokens"),
        ("small --data data --serve --port 0 --before classifier", "--before is an image class"),
        ("small --data data --serve --port 0 --before joint", "--before joint is a vision-lang"),
        ("classifier --images digits --serve --port 0", "--serve needs a language model"),
        ("classifier --images digits --serve --port 0 --out new", "--serve needs a language"),
        ("classifier --images digits --split nonsense --out new", "digits has no split 'nonse"),
        ("classifier --images digits --length 9 --out new", "--length 9 is for text"),
        ("joint --data data --out new", "joint is a vision-language model, which cannot be exp"),
        ("small --data data --threshold 0 --out new", "--threshold 0.0 must be above 0"),
        ("small --data other --out new", "prepare the text with the model's tokenizer"),
        ("small --data data --sequences 0 --out new", "--sequences 0"),
        ("small --data data --before small --out new", "--before small is for --serve"),
        ("small --serve --port 0 --out data", "--out data is not a page"),
        ("data --data data --out new", "has no config.json"),
    ],
)
def test_refusals_are_one_line_and_leave_nothing(home, other_models, capsys, arguments, message):
    before = sorted(path.name for path in home.iterdir())
    with pytest.raises(SystemExit) as end:
        explore(*arguments.split())
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert error.count("\n") == 1
    assert message in error
    assert sorted(path.name for path in home.iterdir()) == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_live_page_ends_at_once_and_leaves_nothing(home, name, tmp_path_factory):
    """It can be stopped as soon as it says that it is up; its temporary page is deleted."""
    temporary = tmp_path_factory.mktemp("temporary")
    words = ["explore", "small", "--data", "data", *map(str, SMALL), "--serve", "--port", "0"]
    command = [sys.executable, "-m", "tokenformer", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with started(command, env=environment, **pipes) as process:
        line = process.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+", line)[0]
        with urllib.request.urlopen(f"{address}/data/site.js", timeout=60) as answer:
            assert answer.read().startswith(b"TF.take(")
        process.send_signal(getattr(signal, name))
        _, error = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, error
    assert list(temporary.iterdir()) == []
