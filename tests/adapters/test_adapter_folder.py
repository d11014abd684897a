"""Adapters from folders: found, checked, attached to a model."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file

from tests.support.adapters import make_adapter, make_base
from tokenformer.adapters.adapter_folder import AdapterFolder, attach_adapters
from tokenformer.adapters.adapter_layer import TokenAdapterLayer
from tokenformer.errors import AdapterError, TokenformerError
from tokenformer.layers import Pattention
from tokenformer.models.quantization import quantize_model
from tokenformer.paths import find_adapter

LORA = LoraConfig(r=2, target_parameters=["ffn.key_tokens", "ffn.value_tokens"])


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


def attach(folder, base=None):
    return attach_adapters(base or make_base(), [AdapterFolder.read(find_adapter(folder))])


@pytest.fixture
def saved(tmp_path):
    return make_adapter(make_base(), tmp_path / "adapter", seed=1)


def test_a_shared_norm_is_merged(saved, ids):
    expected = logits(PeftModel.from_pretrained(make_base(), saved), ids)
    model = attach(saved)
    assert not [module for module in model.modules() if isinstance(module, TokenAdapterLayer)]
    assert model.model.layers[0].ffn.num_tokens == 24 + 5
    assert type(model.model.layers[0].ffn) is Pattention
    assert torch.allclose(logits(model, ids), expected, atol=1e-6)
    assert not torch.allclose(expected, logits(make_base(), ids), atol=1e-3)
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["own", "lora"])
def test_others_stay_attached(kind, tmp_path, ids):
    options = {"config": LORA} if kind == "lora" else {"norm": "own"}
    saved = make_adapter(make_base(), tmp_path / "adapter", seed=1, **options)
    expected = logits(PeftModel.from_pretrained(make_base(), saved), ids)
    model = attach(saved)
    assert type(model.model.layers[0].ffn) is not Pattention
    assert torch.allclose(logits(model, ids), expected, atol=1e-6)
    assert not torch.allclose(expected, logits(make_base(), ids), atol=1e-3)


def test_a_quantized_base_stays_unmerged(saved, ids):
    base = make_base()
    quantize_model(base, 8)
    with pytest.warns(UserWarning, match="quantized"):
        model = attach(saved, base)
    expected = logits(attach(saved), ids)
    assert torch.allclose(logits(model, ids), expected, atol=0.05)
    assert [module for module in model.modules() if isinstance(module, TokenAdapterLayer)]


def test_several_are_active_together(tmp_path, ids):
    folders = [
        make_adapter(make_base(), tmp_path / f"a{seed}", seed=seed, targets=["ffn", "q"])
        for seed in range(2)
    ]
    together = PeftModel.from_pretrained(make_base(), folders[0], "a")
    together.load_adapter(folders[1], "b")
    together.base_model.set_adapter(["a", "b"])
    model = attach_adapters(make_base(), [AdapterFolder.read(folder) for folder in folders])
    assert model.model.layers[1].attention.q.num_tokens == 12 + 2 * 5
    assert torch.allclose(logits(model, ids), logits(together, ids), atol=1e-6)


def test_a_run_folder_has_its_adapter_inside(saved, tmp_path):
    inside = shutil.copytree(saved, tmp_path / "run" / "adapter")
    assert find_adapter(tmp_path / "run") == inside
    assert find_adapter(inside) == inside
    (tmp_path / "empty").mkdir()
    for name, why in [
        ("no/such/adapter", "does not exist"),
        ("gpt2", "does not exist"),  # never looked up on the hub
        (str(tmp_path / "adaptr"), "did you mean"),
        (str(saved / "adapter_config.json"), "is a file"),
        (str(tmp_path / "empty"), "not an adapter: it has no adapter_config.json"),
    ]:
        with pytest.raises(AdapterError, match=why) as error:
            find_adapter(name)
        assert "\n" not in str(error.value)
    make_base().save_pretrained(tmp_path / "model")
    with pytest.raises(AdapterError, match="a model, not an adapter"):
        find_adapter(tmp_path / "model")


def truncate(folder):
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def corrupt_header(folder):
    (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 200)


def pickle(folder):
    torch.save({}, folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()


def change(**options):
    def edit(folder):
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | options))

    return edit


def change_tensors(edit):
    def apply(folder):
        file = folder / "adapter_model.safetensors"
        tensors = load_file(file)
        edit(tensors)
        save_file(tensors, file)

    return apply


KEY = "base_model.model.model.layers.0.ffn.token_adapter_keys"


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "safetensors is missing"),
        (truncate, "damaged"),
        (corrupt_header, "damaged"),
        (pickle, "adapter_model.bin is a pickle"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "not valid JSON"),
        (lambda folder: (folder / "adapter_config.json").write_text("[]"), "JSON object"),
        (change(peft_type="PREFIX_TUNING"), "peft_type='PREFIX_TUNING' is not supported"),
        (change(peft_type=None), "peft_type=None"),
        (change(num_tokens=-1), "num_tokens=-1"),
        (change(num_tokens=6), "num_tokens=6, but .*token_adapter_keys has 5 rows"),
        (
            change_tensors(lambda tensors: tensors.update({KEY: tensors[KEY][:, :9].clone()})),
            r"wrong shape of .*\[5, 9\] instead of \[5, 16\]",
        ),
        (change(target_modules=["nothing"]), "nothing"),
        (change(base_fingerprint="0" * 16), "not on this model"),
        (change_tensors(lambda tensors: tensors.pop(KEY)), "missing .*token_adapter_keys"),
        (change_tensors(lambda tensors: tensors.update(other=torch.ones(1))), "other"),
        (change_tensors(lambda tensors: tensors[KEY].fill_(torch.nan)), "NaN or inf in"),
    ],
)
def test_a_damaged_adapter_is_refused_in_one_line(saved, damage, why):
    damage(saved)
    with pytest.raises(TokenformerError, match=why) as error:
        attach(saved)
    assert "\n" not in str(error.value)


def test_another_base_is_refused(saved, tmp_path):
    with pytest.raises(AdapterError, match="not on this model"):
        attach(saved, make_base(seed=1))
    lora = make_adapter(make_base(), tmp_path / "lora", config=LORA)
    with pytest.raises(AdapterError, match="wrong shape of"):
        attach(lora, make_base(ffn_tokens=20))


@pytest.mark.parametrize(
    "options",
    [
        {"megatron_config": {"hidden_size": 1}, "megatron_core": "this"},
        {"layer_replication": [[0, 2]]},
        {"bias": "all"},
        {"init_lora_weights": "pissa"},
        {"trainable_token_indices": [1]},
    ],
    ids=str,
)
def test_lora_that_changes_the_base_or_runs_code_is_refused(options, tmp_path):
    folder = make_adapter(make_base(), tmp_path / "lora", config=LORA)
    change(**options)(folder)
    with pytest.raises(AdapterError, match=next(iter(options))):
        AdapterFolder.read(folder)


def test_methods_without_layers_are_refused(tmp_path):
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2, num_layers=2)
    get_peft_model(make_base(), config).save_pretrained(tmp_path / "prefix")
    with pytest.raises(AdapterError, match="PREFIX_TUNING"):
        AdapterFolder.read(tmp_path / "prefix")


def test_a_failure_removes_what_was_attached(saved, tmp_path):
    other = make_adapter(make_base(), tmp_path / "other", seed=2)
    change_tensors(lambda tensors: tensors.pop(KEY))(other)
    model = AdapterFolder.read(saved).attach(make_base(), "first")
    with pytest.raises(AdapterError):
        AdapterFolder.read(other).attach(model, "second")
    assert list(model.peft_config) == ["first"]
    assert not any("second" in name for name, _ in model.named_parameters())


def test_sizes_are_checked_before_memory_is_allocated(saved, tmp_path):
    lora = tmp_path / "lora"
    wide = LoraConfig(r=2, target_modules=["lm_head"])
    get_peft_model(make_base(), wide).save_pretrained(lora, save_embedding_layers=False)
    for folder, option in ((saved, "num_tokens"), (lora, "r")):
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {option: 10**12}))
        with pytest.raises(AdapterError, match=f"{option}=1000000000000, but"):
            AdapterFolder.read(folder)


def test_an_adapter_without_the_fingerprint_of_its_base_is_refused(saved):
    file = saved / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_fingerprint": None}))
    with pytest.raises(AdapterError, match="base_fingerprint is missing"):
        AdapterFolder.read(saved)
