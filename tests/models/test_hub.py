"""Saving, loading, the Auto classes, the lazy import and pipelines."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    pipeline,
)

import tokenformer
from tokenformer.data.byte_tokenizer import END_OF_TEXT, VOCAB_SIZE, byte_tokenizer

Make = Callable[..., Any]

CLASSES = {
    "tokenformer": (
        tokenformer.TokenformerConfig,
        tokenformer.TokenformerModel,
        tokenformer.TokenformerForCausalLM,
    ),
    "transformer": (
        tokenformer.TransformerConfig,
        tokenformer.TransformerModel,
        tokenformer.TransformerForCausalLM,
    ),
}
OPTIONS = [
    {},
    {"tie_word_embeddings": False, "positions": "learned", "norm_parameters": "weight_bias"},
    {"num_key_value_heads": 2, "residual": "parallel", "variant": "paper"},
]


def saved_names(folder: Path) -> set[str]:
    names: list[str] = []
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names += tensors.keys()
    assert len(names) == len(set(names))
    return set(names)


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """But for the order of sums, which depends on where in memory the weights lie."""
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_saved_model_comes_back_through_the_auto_classes(
    make_model: Make, family: str, tmp_path: Path, options: dict[str, Any]
) -> None:
    model = make_model(family, **options)
    config_class, base_class, causal_class = CLASSES[family]
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.bin"))
    parameters = dict(model.named_parameters())
    assert saved_names(tmp_path) == set(parameters)
    tied = options.get("tie_word_embeddings", True)
    assert ("lm_head.weight" not in saved_names(tmp_path)) == tied

    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(loaded) is causal_class
    assert type(loaded.config) is config_class
    assert type(AutoConfig.from_pretrained(tmp_path)) is config_class
    assert loaded.dtype == torch.float64
    assert not loaded.training
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    ids = torch.randint(61, (2, 7))
    weights = dict(model.state_dict())
    assert {name: torch.equal(w, weights[name]) for name, w in loaded.state_dict().items()} == (
        dict.fromkeys(weights, True)
    )
    same(loaded(ids).logits, model(ids).logits)

    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is base_class
    assert not hasattr(base, "lm_head")
    hidden = base(ids).last_hidden_state
    same(hidden, model.model(ids).last_hidden_state)
    same(hidden @ model.lm_head.weight.T, model(ids).logits)


def test_tied_weights_stay_one_after_loading(make_model: Make, family: str, tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        loaded.model.embed_tokens.weight.add_(1.0)
    assert torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight)
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()


def test_headless_checkpoint_serves_a_model_with_a_head(
    make_model: Make, family: str, tmp_path: Path
) -> None:
    """And the other way round, which the test above does: the prefix is added and removed."""
    model = make_model(family)
    model.model.save_pretrained(tmp_path)
    assert "embed_tokens.weight" in saved_names(tmp_path)
    ids = torch.randint(61, (2, 7))
    loaded = CLASSES[family][2].from_pretrained(tmp_path)
    same(loaded(ids).logits, model(ids).logits)


def test_shards_and_dtypes(make_model: Make, family: str, tmp_path: Path) -> None:
    model = make_model(family).float()
    model.save_pretrained(tmp_path, max_shard_size="12KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert saved_names(tmp_path) == {name for name, _ in model.named_parameters()}
    whole = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert whole.dtype == torch.float32
    for name, parameter in model.named_parameters():
        assert torch.equal(whole.get_parameter(name), parameter)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    ids = torch.randint(61, (2, 7))
    assert half(ids).logits.isfinite().all()
    half.save_pretrained(tmp_path / "half")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


def test_scales_reach_the_layers_and_survive(make_model: Make, tmp_path: Path) -> None:
    scales = {
        "q": [3.0, None],
        "k": [None, 5.5],
        "v": [7.0, 8.0],
        "o": [None, 2.0],
        "ffn": [400.0, 0.5],
    }
    counts = {"q": 24, "k": 24, "v": 24, "o": 20, "ffn": 44}
    model = make_model("tokenformer", scale_tokens=scales)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["scale_tokens"] == scales
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.scale_tokens == scales
    for index, layer in enumerate(loaded.model.layers):
        found = {name: getattr(layer.attention, name).scale_tokens for name in "qkvo"}
        found["ffn"] = layer.ffn.scale_tokens
        assert found == {name: scales[name][index] or counts[name] for name in counts}
    ids = torch.randint(61, (2, 7))
    same(loaded(ids).logits, model(ids).logits)
    plain = make_model("tokenformer")
    plain.load_state_dict(model.state_dict())
    assert (plain(ids).logits - model(ids).logits).abs().max() > 1e-3


def test_wrong_token_count_is_not_loaded_silently(make_model: Make, tmp_path: Path) -> None:
    make_model("tokenformer").save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"ffn\.key_tokens|size mismatch|mismatch"):
        AutoModelForCausalLM.from_pretrained(tmp_path, ffn_tokens=50)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Saved tiny models of both families, as a Python literal for the processes below."""
    shape = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    folders = []
    for config_class, _, causal_class in CLASSES.values():
        folder = tmp_path_factory.mktemp(causal_class.__name__) / "model"
        causal_class(config_class(**shape)).save_pretrained(folder)
        folders.append((str(folder), causal_class.__name__))
    return repr(folders)


LOAD = """
for folder, name in FOLDERS:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == name, type(model)
    assert type(model).__module__ == "tokenformer.models.language"
    assert type(AutoConfig.from_pretrained(folder)) is type(model.config)
    assert type(AutoModel.from_pretrained(folder)) is type(model.model)
"""
AUTO = "from transformers import AutoConfig, AutoModel, AutoModelForCausalLM\n"
ORDERS = {
    "tokenformer first, and it costs no import": """
import importlib, sys
import tokenformer
importlib.reload(tokenformer)
assert set(tokenformer.__all__) <= set(dir(tokenformer))
assert not {"torch", "transformers", "numpy"} & set(sys.modules)
finders = [finder for finder in sys.meta_path if "TriggerFinder" in type(finder).__name__]
assert len(finders) == 3, finders  # Auto classes, tensor parallelism, adapters, once each
"""
    + AUTO
    + LOAD,
    "transformers first": "import transformers\nimport tokenformer\n" + AUTO + LOAD,
    "Auto classes first": AUTO + "import tokenformer\n" + LOAD,
    "a model class touched first": """
import tokenformer
assert tokenformer.TokenformerForCausalLM.__name__ == "TokenformerForCausalLM"
"""
    + AUTO
    + LOAD,
    # Every model of transformers imports modeling_layers, which imports the Auto classes halfway.
    "another model first": """
import tokenformer
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
"""
    + AUTO
    + LOAD
    + """
small = GPTNeoXConfig(
    vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
)
assert type(AutoModelForCausalLM.from_config(small)) is GPTNeoXForCausalLM
""",
}


FAST = ("tokenformer first, and it costs no import", "transformers first")


@pytest.mark.parametrize(
    "order", [pytest.param(o, marks=[] if o in FAST else [pytest.mark.slow]) for o in ORDERS]
)
def test_auto_classes_in_a_fresh_process(folders: str, order: str) -> None:
    program = f"FOLDERS = {folders}\n{ORDERS[order]}\nprint('loaded')"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "loaded"


def test_pipeline_in_a_fresh_process(make_model: Make, tmp_path: Path) -> None:
    """A folder of ours, transformers, and `import tokenformer`: nothing else."""
    model = make_model("tokenformer", vocab_size=VOCAB_SIZE, eos_token_id=END_OF_TEXT).float()
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    program = f"""
import tokenformer
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

folder = {str(tmp_path)!r}
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
write = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
print(write("So", max_new_tokens=9, do_sample=False, return_tensors=True)[0]["generated_token_ids"])
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    ids = model.generate(torch.tensor([[*b"So"]]), max_new_tokens=9, do_sample=False)
    assert json.loads(run.stdout) == ids[0].tolist()


def test_every_public_name_resolves() -> None:
    assert len(tokenformer.__all__) == len(set(tokenformer.__all__)) >= 10
    for name in tokenformer.__all__:
        value = getattr(tokenformer, name)
        assert value.__name__ == name
        assert name in dir(tokenformer)
    assert "__version__" in dir(tokenformer)
    with pytest.raises(AttributeError, match=r"'tokenformer' has no attribute 'Tokenfromer'"):
        tokenformer.Tokenfromer  # noqa: B018
    with pytest.raises(ImportError):
        exec("from tokenformer import Tokenfromer")


def test_text_generation_pipeline(make_model: Make, family: str, tmp_path: Path) -> None:
    words = ["<eos>", "<unk>", *(f"w{index}" for index in range(59))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>", pad_token="<eos>"
    )
    model = make_model(family, tie_word_embeddings=False, eos_token_id=None).float()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("w3 w1").input_ids == [5, 3]

    generator = pipeline("text-generation", model=str(tmp_path), device="cpu")
    assert type(generator.model) is CLASSES[family][2]
    prompts = ["w1 w2 w3", "w5"]
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    singly = [generator(prompt, **settings)[0]["generated_text"] for prompt in prompts]
    generator.tokenizer.padding_side = "left"
    batched = generator(prompts, batch_size=2, **settings)
    assert [answer[0]["generated_text"] for answer in batched] == singly
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        for _ in range(6):
            ids = torch.cat((ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)), 1)
        generated = generator(prompt, return_tensors=True, **settings)[0]["generated_token_ids"]
        assert list(generated) == ids[0].tolist()
