"""`tokenformer prune` and `merge`: real folders in, real folders out, or one line and nothing."""

import json

import pytest
import torch
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
)

import tokenformer
from tests.support.commands import error_line
from tests.support.growth import trained_routed, trained_tokenformer
from tests.support.image_text import make_joint, make_processor, pictures, train_new_tokens
from tokenformer.cli import main
from tokenformer.cli.samples import read_samples
from tokenformer.data.byte_tokenizer import VOCAB_SIZE, byte_tokenizer
from tokenformer.data.image_batches import ImageReader
from tokenformer.data.image_sources import load_images
from tokenformer.models.image_processing import TokenformerImageProcessor

TEXT = "The quick brown fox — naïve, perhaps — jumps over the lazy dog.\n" * 60


@pytest.fixture
def home(tmp_path, make_config, capsys):
    """A folder with the models `small` and `grown` and the corpus `data`."""
    model, _ = trained_tokenformer(make_config, vocab_size=VOCAB_SIZE)
    grown, _ = tokenformer.grow(model, ffn_tokens=[150, 96])
    for name, each in (("small", model), ("grown", grown)):
        each.save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    (tmp_path / "text.txt").write_text(TEXT)
    main(["prepare", str(tmp_path / "text.txt"), "--out", str(tmp_path / "data")])
    capsys.readouterr()
    return tmp_path


def run(home, monkeypatch, *arguments):
    monkeypatch.chdir(home)
    main([str(word) for word in arguments])


def logits(path):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path)(input_ids=torch.arange(40)[None]).logits


def test_half_of_the_tokens_with_the_tokenizer_and_the_report(home, monkeypatch, capsys):
    run(home, monkeypatch, "prune", "small", "--data", "data", "--keep", 0.5, "--out", "half")
    assert "Saved to half" in capsys.readouterr().out
    stored = AutoModelForCausalLM.from_pretrained(home / "half")
    assert stored.config.ffn_tokens == 48
    assert AutoTokenizer.from_pretrained(home / "half")("prune")["input_ids"] == list(b"prune")
    report = json.loads((home / "half" / "growth.json").read_text())
    assert (report["method"], report["exact"]) == ("prune", False)
    model = AutoModelForCausalLM.from_pretrained(home / "small")
    batches = read_samples(
        home / "data", split="train", sequences=128, length=64, vocab_size=VOCAB_SIZE
    )
    assert {tuple(batch.shape)[1] for batch in batches} == {64}
    expected, _ = tokenformer.prune(model, batches, keep=0.5)
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameter, stored.get_parameter(name)), "in memory as on disk"


def test_zero_keys_go_without_data_and_sizes_by_number(home, monkeypatch, capsys):
    run(home, monkeypatch, "prune", "grown", "--out", "less", "--json")
    report = json.loads(capsys.readouterr().out)
    assert report["exact"]
    assert torch.equal(logits(home / "less"), logits(home / "small"))
    sizes = ["--qkv_tokens", 20, "--output_tokens", 10, "--ffn_tokens", 40, "--refit=false"]
    run(home, monkeypatch, "prune", "grown", "--data", "data", *sizes, "--out", "new")
    config = AutoModelForCausalLM.from_pretrained(home / "new").config
    assert (config.qkv_tokens, config.output_tokens, config.ffn_tokens) == (20, 10, 40)


def test_two_folders_become_one(home, monkeypatch, capsys):
    run(home, monkeypatch, "merge", "small", "grown", "--out", "both", "--json")
    report = json.loads(capsys.readouterr().out)
    assert report["method"] == "merge"
    assert torch.allclose(logits(home / "both"), logits(home / "small"), atol=1e-5)
    assert AutoModelForCausalLM.from_pretrained(home / "both").config.ffn_tokens == [150, 96]
    assert AutoTokenizer.from_pretrained(home / "both")("join")["input_ids"] == list(b"join")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("prune small --keep 0.5 --out new", "--data is missing"),
        ("prune small --keep 0.5 --data data", "--out is missing"),
        ("prune small --keep 2 --data data --out new", "keep=2.0 must be above 0"),
        ("prune small --keep 0.5 --data text.txt --out new", "text.txt"),
        ("prune small --keep 0.5 --data small --out new", "holds no prepared corpus"),
        ("prune small --keep 0.5 --data data --split test --out new", "no split 'test'"),
        ("prune small --keep 0.5 --data data --length 99999 --out new", "needs 100000"),
        ("prune small --keep 0.5 --data data --sequences 0 --out new", "--sequences 0"),
        ("prune small --ffn_tokens 97 --data data --out new", "cannot enlarge"),
        ("prune data --out new", "has no config.json"),
        ("prune small --out grown", "already exists"),
        ("merge small ./absent --out new", "merge: no ./absent"),
        ("merge small grown", "--out is missing"),
        ("merge small grown --out data", "already exists"),
        ("merge small grown --embeddings c --out new", "embeddings='c' is unknown"),
    ],
)
def test_refusals_are_one_line_and_leave_nothing(home, monkeypatch, capsys, arguments, message):
    before = sorted(path.name for path in home.iterdir())
    with pytest.raises(SystemExit) as end:
        run(home, monkeypatch, *arguments.split())
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert error.count("\n") == 1
    assert message in error
    assert sorted(path.name for path in home.iterdir()) == before


def test_other_tokenizers_shapes_and_vocabularies_are_told(home, monkeypatch, capsys, make_config):
    twin = tokenformer.TransformerForCausalLM(make_config("transformer"))
    twin.save_pretrained(home / "twin")
    for arguments in (("prune", "twin"), ("merge", "small", "twin")):
        with pytest.raises(SystemExit):
            run(home, monkeypatch, *arguments, "--out", "new")
        assert "twin is a tokenformer_transformer model, not a" in capsys.readouterr().err
    other, _ = trained_tokenformer(make_config, num_hidden_layers=3)
    other.save_pretrained(home / "other")
    with pytest.raises(SystemExit):
        run(home, monkeypatch, "merge", "small", "other", "--out", "new")
    message = capsys.readouterr().err
    assert f"vocab_size {VOCAB_SIZE} and 61, num_hidden_layers 2 and 3" in message
    with pytest.raises(SystemExit):
        run(home, monkeypatch, "prune", "other", "--data", "data", "--keep", 0.5, "--out", "new")
    assert "the model one of 61" in capsys.readouterr().err
    tokenizer = home / "grown" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    with pytest.raises(SystemExit):
        run(home, monkeypatch, "merge", "small", "grown", "--out", "new")
    assert "models with different tokenizers" in capsys.readouterr().err
    assert not (home / "new").exists()


def test_sparse_folders(home, monkeypatch, capsys, make_config):
    model, _ = trained_routed(make_config, vocab_size=VOCAB_SIZE)
    for name in ("one", "two"):
        model.save_pretrained(home / name)
        byte_tokenizer().save_pretrained(home / name)
        for layer in model.model.layers:
            layer.ffn.key_tokens.data[:32] *= 1.5  # half of the groups of the second model
    run(home, monkeypatch, "prune", "one", "--data", "data", "--keep", 0.5, "--out", "half")
    half = AutoModelForCausalLM.from_pretrained(home / "half")
    assert (half.config.ffn_tokens, half.config.active_groups) == (32, {"ffn": 3})
    assert half.model.layers[0].ffn.router.weight.shape[0] == 4
    assert logits(home / "half").isfinite().all()
    run(home, monkeypatch, "merge", "one", "two", "--out", "both")
    both = AutoModelForCausalLM.from_pretrained(home / "both")
    assert (both.config.ffn_tokens, both.config.active_groups) == (96, {"ffn": 5})
    assert logits(home / "both").isfinite().all()
    capsys.readouterr()
    run(home, monkeypatch, "prune", "one", "--data", "data", "--out", "used", "--json")
    report = json.loads(capsys.readouterr().out)
    assert report["scale"] == "frozen"
    prune = ["prune", "one", "--out", "none"]
    for words, line in (
        ([*prune, "--ffn_tokens", "32"], "--data is missing: model.layers.0.ffn is routed"),
        ([*prune, "--ffn_tokens", "30", "--data", "data"], "use 24 or 32"),
        (["merge", "one", "small", "--out", "none"], "routed layers ffn 0, ffn 1 and none"),
    ):
        assert line in error_line(words, capsys)
    assert not (home / "none").exists()


@pytest.fixture
def classifier(tmp_path):
    torch.manual_seed(0)
    config = tokenformer.TokenformerVisionConfig(
        image_size=8, patch_size=4, num_channels=1, num_labels=10, hidden_size=16,
        num_hidden_layers=2, num_attention_heads=2, initializer_range=0.3,
    )  # fmt: skip
    model = tokenformer.TokenformerForImageClassification(config)
    model.save_pretrained(tmp_path / "classifier")
    TokenformerImageProcessor.for_size(8, 1).save_pretrained(tmp_path / "classifier")
    return tmp_path / "classifier"


def test_a_classifier_is_pruned_on_images_and_joined(classifier, monkeypatch, capsys):
    home = classifier.parent
    words = ["prune", "classifier", "--images", "digits", "--sequences", 200, "--keep", 0.5]
    run(home, monkeypatch, *words, "--out", "half")
    stored = AutoModelForImageClassification.from_pretrained(home / "half")
    assert stored.config.ffn_tokens == 32
    assert (home / "half" / "preprocessor_config.json").exists()
    whole = AutoModelForImageClassification.from_pretrained(classifier)
    reader = ImageReader(
        load_images("digits").train, AutoImageProcessor.from_pretrained(classifier), 10
    )
    batches = [batch.to("cpu").pixels for batch in reader.held_out(8, 200)]
    expected, _ = tokenformer.prune(whole, batches, keep=0.5)
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(parameter, stored.get_parameter(name))
    run(home, monkeypatch, "merge", "classifier", "classifier", "--out", "joined")
    joined = AutoModelForImageClassification.from_pretrained(home / "joined")
    with torch.no_grad():
        torch.testing.assert_close(joined(batches[0]).logits, whole(batches[0]).logits)


def test_a_classifier_in_half_precision_is_pruned_and_one_without_processor_refused(
    classifier, monkeypatch, capsys
):
    words = ["prune", "classifier", "--images", "digits", "--sequences", 20, "--keep", 0.5]
    half = AutoModelForImageClassification.from_pretrained(classifier, dtype=torch.bfloat16)
    half.save_pretrained(classifier)
    run(classifier.parent, monkeypatch, *words, "--out", "small")
    small = AutoModelForImageClassification.from_pretrained(classifier.parent / "small")
    assert (small.config.ffn_tokens, small.dtype) == (32, torch.bfloat16)
    (classifier / "preprocessor_config.json").unlink()
    with pytest.raises(SystemExit):
        run(classifier.parent, monkeypatch, *words, "--out", "none")
    assert "the image processor of classifier cannot be loaded" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--keep", "0.5"], "--images is missing"),
        (["--keep", "0.5", "--data", "."], "--data does not apply: classifier is an image"),
        (["--keep", "0.5", "--images", "no/where/here"], "--images: no no/where/here"),
    ],
)
def test_what_a_classifier_is_not_pruned_by(classifier, monkeypatch, capsys, words, message):
    with pytest.raises(SystemExit):
        run(classifier.parent, monkeypatch, "prune", "classifier", *words, "--out", "none")
    assert message in capsys.readouterr().err
    assert not (classifier.parent / "none").exists()


def test_a_language_model_is_not_pruned_on_images(home, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(home, monkeypatch, "prune", "small", "--images", "digits", "--out", "none")
    assert "--images does not apply: small is a language model" in capsys.readouterr().err


def test_a_vision_language_model(tmp_path, monkeypatch, capsys):
    joint = train_new_tokens(make_joint("routed", torch.float32))
    joint.save_pretrained(tmp_path / "joint")
    make_processor(joint).save_pretrained(tmp_path / "joint")
    for number, picture in enumerate(pictures(4)):
        (tmp_path / "data").mkdir(exist_ok=True)
        picture.save(tmp_path / "data" / f"{number}.png")
        (tmp_path / "data" / f"{number}.txt").write_text(f"picture {number}\nanother one\n")
    half = ["--image_text", "data", "--keep", 0.5, "--parts", "vision", "new", "--out", "half"]
    run(tmp_path, monkeypatch, "prune", "joint", *half)
    assert "Saved to half" in capsys.readouterr().out
    smaller = AutoModelForImageTextToText.from_pretrained(tmp_path / "half").eval()
    assert smaller.config.parts("q", 0) == (10, 4, 24)
    batch = AutoProcessor.from_pretrained(tmp_path / "half")(
        text="<image>a", images=pictures(1), return_tensors="pt"
    )
    assert smaller(**batch).logits.isfinite().all()
    assert "Pruned" in (tmp_path / "half" / "README.md").read_text()
    run(tmp_path, monkeypatch, "prune", "joint", "--out", "same", "--json")
    assert json.loads(capsys.readouterr().out)["exact"]
    prune = ["prune", "joint", "--out", "none", "--keep", "0.5"]
    for options, line in (
        ([], "--image_text is missing: without data only unused tokens"),
        (["--image_text", "./missing"], "--image_text: no ./missing"),
        (["--data", "data"], "--data does not apply: joint is a vision-language model"),
        (["--ffn_tokens", "9"], "--ffn_tokens does not apply"),
        (["--parts", "tail"], "--parts"),
        (["--on_corrupt", "skip"], "--on_corrupt skip needs --image_text"),
    ):
        assert line in error_line([*prune, *options], capsys)
    (tmp_path / "data" / "0.png").write_bytes(b"broken")
    on_data = [*prune, "--image_text", "data"]
    assert "image 0.png of row 0 of data cannot be read" in error_line(on_data, capsys)
    assert not (tmp_path / "none").exists()
    run(tmp_path, monkeypatch, *on_data, "--on_corrupt", "skip")
    assert (tmp_path / "none" / "config.json").exists()
