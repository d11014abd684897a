"""Adapters of one model, chosen per sequence: each gets what its adapter gives alone."""

import pytest
import torch
from peft import LoraConfig, PeftModel

from tests.support.adapters import make_adapter, make_base
from tests.support.decoding import record_native_decoding
from tokenformer import TransformerConfig, TransformerForCausalLM
from tokenformer.adapters.adapter_folder import AdapterFolder
from tokenformer.adapters.adapter_set import AdapterSet
from tokenformer.errors import AdapterError
from tokenformer.models.batch_decoder import BatchDecoder
from tokenformer.models.quantization import quantize_model

PROMPTS = [torch.randint(61, (1, n), generator=torch.Generator().manual_seed(n)) for n in (3, 9, 1)]


def read(folder):
    return AdapterFolder.read(folder)


def alone(model, ids, count=8, **options):
    options |= {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    output = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=count, **options)
    return output[0, ids.shape[1] :].tolist()


def together(decoder, requests, count=8):
    tokens = [[int(decoder.add(ids, adapter).argmax())] for ids, adapter in requests]
    for _ in range(count - 1):
        logits, _ = decoder.step([each[-1] for each in tokens])
        for each, row in zip(tokens, logits, strict=True):
            each.append(int(row.argmax()))
    while len(decoder):
        decoder.remove(0)
    return tokens


@pytest.fixture
def folders(tmp_path):
    """Adapters of other sizes, layers and norms."""
    kinds = {
        "a": {},
        "a.b/c": {"num_tokens": 3, "targets": ["ffn", "v"]},
        "type": {"norm": "own", "num_tokens": 4},
    }
    return {
        name: make_adapter(make_base(), tmp_path / f"adapter{seed}", seed=seed, **options)
        for seed, (name, options) in enumerate(kinds.items())
    }


def check_mixed(base, adapters, folders, reference=make_base):
    """Every sequence of mixed batches against a model that has only its adapter."""
    expected = {}
    for name in (None, *folders):
        model = reference()
        if name is not None:
            model = PeftModel.from_pretrained(model, folders[name])
        expected[name] = [alone(model, ids) for ids in PROMPTS]
    assert len({str(each) for each in expected.values()}) == len(expected)
    names = (None, *folders)
    mixed = [(names[(row + shift) % len(names)]) for shift in (0, 2) for row in range(len(names))]
    decoder = BatchDecoder(base, 16, adapters.select)
    for choice in (mixed, ["a", "a", "a"], [names[-1]] * 2, [None, None]):
        requests = [(row % 3, name) for row, name in enumerate(choice)]
        found = together(decoder, [(PROMPTS[place], name) for place, name in requests])
        assert found == [expected[name][place] for place, name in requests]


@pytest.mark.parametrize("theta", ["l2_gelu", "gelu_l2"])
def test_mixed_batches(theta, tmp_path):
    def reference():
        return make_base(theta=theta)

    kinds = [{}, {"num_tokens": 3, "targets": ["ffn", "v"]}, {"norm": "own", "num_tokens": 4}]
    folders = {
        name: make_adapter(reference(), tmp_path / name, seed=seed, **options)
        for seed, (name, options) in enumerate(zip(["a", "b", "c"], kinds, strict=True))
    }
    base = reference()
    adapters = AdapterSet(base)
    for name, folder in folders.items():
        adapters.load(name, read(folder))
    check_mixed(base, adapters, folders, reference)


def test_weights_are_shared_and_the_base_stays_native(folders, monkeypatch):
    base = make_base()
    adapters = AdapterSet(base)
    for name, folder in folders.items():
        adapters.load(name, read(folder))
    own = {parameter.data_ptr() for parameter in base.parameters()}
    shared = {p.data_ptr() for n, p in adapters.adapted.named_parameters() if "token_" not in n}
    assert shared <= own
    plain = {p.data_ptr() for n, p in adapters.adapted.named_parameters() if "base_layer" in n}
    assert plain <= own
    assert adapters.mixes
    native = record_native_decoding(monkeypatch)
    with adapters.select([None, None]) as model:
        assert model is base
        alone(model, PROMPTS[0])
    assert native[0] is False  # the prompt
    assert len(set(native[1:])) == 1


def test_adapters_come_and_go(folders):
    base = make_base()
    adapters = AdapterSet(base)
    decoder = BatchDecoder(base, 4, adapters.select)
    found = {}
    for name, folder in folders.items():
        adapters.load(name, read(folder))
        (found[name],) = together(decoder, [(PROMPTS[1], name)])
    with pytest.raises(AdapterError, match="an adapter 'a' already"):
        adapters.load("a", read(folders["a"]))
    adapters.remove("a")
    assert not any(".adapter0" in name for name, _ in adapters.adapted.named_parameters())
    assert together(decoder, [(PROMPTS[1], "type")]) == [found["type"]]
    adapters.load("a", read(folders["type"]))  # another one with the name of before
    assert together(decoder, [(PROMPTS[1], "a")]) == [found["type"]]
    for name in ("a", "a.b/c", "type"):
        adapters.remove(name)
    assert adapters.adapted is None
    assert together(decoder, [(PROMPTS[1], None)]) == [alone(make_base(), PROMPTS[1])]


def test_one_that_does_not_fit_changes_nothing(folders, tmp_path):
    base = make_base()
    adapters = AdapterSet(base)
    other = make_adapter(make_base(seed=3), tmp_path / "other")
    for count in (0, 1):
        with pytest.raises(AdapterError, match="not on this model"):
            adapters.load("other", read(other))
        assert len(adapters.names) == count
        if not count:
            adapters.load("a", read(folders["a"]))
    lora = LoraConfig(r=2, target_parameters=["ffn.key_tokens"])
    saved = make_adapter(make_base(), tmp_path / "lora", config=lora)
    with pytest.raises(AdapterError, match="token adapters and LoRA"):
        adapters.load("lora", read(saved))
    decoder = BatchDecoder(base, 4, adapters.select)
    assert together(decoder, [(PROMPTS[0], None)]) == [alone(make_base(), PROMPTS[0])]


def test_a_quantized_base(folders):
    base, reference = make_base(), make_base()
    for model in (base, reference):
        quantize_model(model, 8)
    adapters = AdapterSet(base)
    with pytest.warns(UserWarning, match="quantized"):
        adapters.load("a", read(folders["a"]))
    with pytest.warns(UserWarning, match="quantized"):
        adapted = PeftModel.from_pretrained(reference, folders["a"])
    expected = alone(adapted, PROMPTS[1])
    decoder = BatchDecoder(base, 4, adapters.select)
    assert together(decoder, [(PROMPTS[1], "a"), (PROMPTS[1], None)])[0] == expected


def test_lora_on_parameters_takes_turns(tmp_path):
    config = LoraConfig(r=2, target_parameters=["ffn.key_tokens", "ffn.value_tokens"])
    base = make_base()
    adapters = AdapterSet(base)
    expected = {None: alone(make_base(), PROMPTS[1])}
    for seed, name in enumerate("ab"):
        folder = make_adapter(make_base(), tmp_path / name, seed=seed, config=config)
        adapters.load(name, read(folder))
        expected[name] = alone(PeftModel.from_pretrained(make_base(), folder), PROMPTS[1])
    assert not adapters.mixes
    decoder = BatchDecoder(base, 4, adapters.select)
    for name in ("a", None, "b", "a"):
        found = together(decoder, [(PROMPTS[1], name), (PROMPTS[1], name)])
        assert found == [expected[name]] * 2
    with pytest.raises(ValueError, match="cannot mix"), adapters.select(["a", "b"]):
        pass


def test_lora_on_layers_mixes(tmp_path):
    def reference():
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        return TransformerForCausalLM(TransformerConfig(vocab_size=61, **sizes)).eval()

    config = LoraConfig(r=2, target_modules=["q", "v"])
    folders = {
        name: make_adapter(reference(), tmp_path / name, seed=seed, config=config, std=2.0)
        for seed, name in enumerate("ab")
    }
    base = reference()
    adapters = AdapterSet(base)
    for name, folder in folders.items():
        adapters.load(name, read(folder))
    check_mixed(base, adapters, folders, reference)


@pytest.mark.parametrize("replaced", ["lm_head", "norm"])
def test_an_adapter_that_replaces_a_module_leaves_others_as_they_are(replaced, tmp_path):
    """Peft cannot mix it with others in a batch, so a batch has one adapter."""
    folders = {"plain": make_adapter(make_base(), tmp_path / "plain", seed=1)}
    folders["head"] = make_adapter(
        make_base(), tmp_path / "head", seed=2, modules_to_save=[replaced]
    )
    adapters = AdapterSet(make_base())
    for name, folder in folders.items():
        adapters.load(name, read(folder))
    assert not adapters.mixes
    decoder = BatchDecoder(adapters.base, 4, adapters.select)
    for name in ("plain", "head", None, "plain"):
        model = make_base()
        if name is not None:
            model = PeftModel.from_pretrained(model, folders[name])
        expected = [alone(model, ids) for ids in PROMPTS[:2]]
        assert together(decoder, [(ids, name) for ids in PROMPTS[:2]]) == expected
    with pytest.raises(ValueError, match="cannot mix"), adapters.select(["plain", "head"]):
        pass
