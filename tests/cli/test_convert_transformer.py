"""`tokenformer convert` of pretrained Transformers: folders in, TokenFormer folders out."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import tokenformer
from tokenformer.cli import main
from tokenformer.cli.convert import CONVERSIONS, PRETRAINED
from tokenformer.data.byte_tokenizer import END_OF_TEXT, VOCAB_SIZE, byte_tokenizer

SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": END_OF_TEXT,
}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Sources with a tokenizer, a text, and what is no source."""
    folder = tmp_path_factory.mktemp("shelf")
    torch.manual_seed(0)
    sources = {
        "gpt2": transformers.GPT2LMHeadModel(transformers.GPT2Config(**SHAPE)),
        "llama": transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**SHAPE, intermediate_size=24, num_key_value_heads=2)
        ),
        "baseline": tokenformer.TransformerForCausalLM(tokenformer.TransformerConfig(**SHAPE)),
        "opt": transformers.OPTForCausalLM(
            transformers.OPTConfig(
                vocab_size=61, hidden_size=32, num_hidden_layers=1, ffn_dim=32,
                num_attention_heads=4, word_embed_proj_dim=32,
            )
        ),
    }  # fmt: skip
    with torch.no_grad():
        for model in sources.values():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    sources["gpt2"].generation_config.max_new_tokens = 7
    for name, model in sources.items():
        model.save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    change(folder, "torn", {"transformer.h.1.mlp.c_fc.weight": None})
    change(folder, "bent", {"transformer.h.1.mlp.c_fc.weight": torch.zeros(3, 4)})
    (folder / "text.txt").write_text(Path(__file__).read_text())
    (folder / "short.txt").write_text("too short")
    return folder


def change(folder, name, tensors):
    """A copy of the GPT-2 with other tensors, or without some."""
    shutil.copytree(folder / "gpt2", folder / name)
    file = folder / name / "model.safetensors"
    whole = load_file(file) | tensors
    kept = {key: tensor for key, tensor in whole.items() if tensor is not None}
    save_file(kept, file, metadata={"format": "pt"})


@pytest.fixture
def home(shelf, tmp_path, monkeypatch):
    for path in shelf.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(words):
    main(words.split())


def test_a_folder_becomes_one_of_ours_with_tokenizer_generation_and_report(home, capsys):
    run("convert gpt2 --out ours --data text.txt")
    message = capsys.readouterr().out
    assert message.startswith("gpt2: ")
    assert "model.layers.*.attention.o" in message
    assert message.endswith("Saved to ours\n")
    model = transformers.AutoModelForCausalLM.from_pretrained("ours").eval()
    source = transformers.AutoModelForCausalLM.from_pretrained("gpt2").eval()
    assert isinstance(model, tokenformer.TokenformerForCausalLM)
    tokenizer = transformers.AutoTokenizer.from_pretrained("ours")
    ids = tokenizer("def main(", return_tensors="pt").input_ids
    with torch.no_grad():
        found, wanted = (m(ids).logits for m in (model, source))
    assert (found - wanted).norm() < 0.05 * wanted.norm()
    assert model.generation_config.max_new_tokens == 7
    report = json.loads(Path("ours/conversion.json").read_text())
    assert report["measured_on"] == "text"
    assert report["comparison"]["divergence"] < 0.01


def test_without_a_tokenizer_it_succeeds_and_says_so(home, capsys):
    shutil.copytree("gpt2", "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    run("convert bare --out ours")
    assert capsys.readouterr().out.endswith(
        "\nno tokenizer found: give --tokenizer FILE, or copy its files into the folder\n"
        "Saved to ours\n"
    )


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"temperature": 0.9, "top_p": 0.6}, {"temperature": 0.9, "top_p": 0.6, "do_sample": True}),
        ({"length_penalty": 2.0}, {"length_penalty": None, "do_sample": None}),
    ],
    ids=["Llama 2's", "of beams without any"],
)
def test_generation_settings_that_transformers_reads_but_does_not_write(home, settings, kept):
    shutil.copytree("gpt2", "loose")
    file = Path("loose/generation_config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    run("convert loose --out ours")
    found = transformers.GenerationConfig.from_pretrained("ours")
    assert {name: getattr(found, name) for name in kept} == kept
    assert found.eos_token_id == END_OF_TEXT


def test_distillation_brings_it_closer_and_json_says_so(home, capsys):
    """Every step is a real one of the loop; a Llama is what needs them."""
    run("convert llama --out ours --distill text.txt --steps 40 --json")
    report = json.loads(capsys.readouterr().out)
    before, after = report["comparison"], report["distilled"]["comparison"]
    assert report["distilled"]["steps"] == 40
    assert after["divergence"] < before["divergence"]
    assert after["source_loss"] == before["source_loss"]
    assert math.isfinite(report["max_error"])
    assert {entry["form"] for entry in report["maps"]} == {"pair", "fitted"}


def test_before_and_after_distillation_are_measured_on_the_same_text(home, capsys):
    (home / "other.txt").write_text("Another text, of other letters. " * 40)
    run("convert llama --out ours --data text.txt --distill other.txt --steps 1 --json")
    report = json.loads(capsys.readouterr().out)
    after = report["distilled"]["comparison"]
    assert after["source_loss"] == report["comparison"]["source_loss"]


def test_weights_as_gpt2_was_published(home, capsys):
    """Named from within its core, with the causal masks of its time, in the words of its time."""
    Path("old").mkdir()
    tensors = {
        name.removeprefix("transformer."): tensor
        for name, tensor in load_file("gpt2/model.safetensors").items()
    }
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 32, 32).tril() for layer in range(2)}
    save_file(tensors | masks, "old/model.safetensors", metadata={"format": "pt"})
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "n_ctx": 32}
    config = {"model_type": "gpt2", "vocab_size": VOCAB_SIZE, "eos_token_id": END_OF_TEXT, **sizes}
    Path("old/config.json").write_text(json.dumps(config))
    run("convert old --out ours")
    run("convert gpt2 --out new")
    first, second = (load_file(f"{name}/model.safetensors") for name in ("ours", "new"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_prepared_text_serves_and_our_own_twin_is_a_source(home, capsys):
    (home / "texts").mkdir()
    lines = (home / "text.txt").read_text().splitlines()
    for place in range(20):
        (home / "texts" / f"{place}.txt").write_text("\n".join(lines[place::20]))
    run("prepare texts --out shards --validation 0.2")
    run("convert baseline --out ours --data shards")
    assert "tokenformer_transformer: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("llama --out new", "--data is missing: RMS norms and gated MLPs are fitted to text"),
        ("gpt2 --out new --data short.txt", "--data short.txt is too short"),
        ("gpt2 --out new --data absent.txt", "--data absent.txt: it cannot be read"),
        ("gpt2 --out new --data gpt2", "--data gpt2: gpt2 holds no prepared corpus"),
        ("gpt2 --out new --steps 5", "--steps 5 needs --distill DATA"),
        ("gpt2 --out new --distill text.txt --steps 0", "--steps 0 must be at least 1"),
        ("gpt2 --out new --distill text.txt --linear shift", "shift cannot be distilled"),
        ("gpt2 --out new --linear thirds", "linear='thirds' is unknown; choose one of pair, shift"),
        ("gpt2 --out new --weights last", "--weights last does not apply to a source of kind gpt2"),
        ("torn --out new", "torn cannot be loaded: missing transformer.h.1.mlp.c_fc.weight"),
        (
            "bent --out new",
            "wrong shape of transformer.h.1.mlp.c_fc.weight [3, 4] instead of [32, 128]",
        ),
        ("opt --out new", "kind opt; supported kinds are released, "),
    ],
)
def test_refusals_are_one_line_and_leave_nothing(home, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        run(f"convert {arguments}")
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(home.glob("*new*"))


def test_the_command_knows_every_architecture_that_the_converter_knows():
    from tokenformer.convert.pretrained.architectures import ARCHITECTURES

    known = {kind for (kind, _), entry in CONVERSIONS.items() if entry is PRETRAINED}
    assert known == set(ARCHITECTURES)
