"""Adapters of models with routed layers: the new tokens are active in every row."""

import copy

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file

from tests.adapters.test_token_adapters import ALL, layers_of, logits, randomize
from tests.support.adapters import make_base
from tokenformer import TokenAdapterConfig
from tokenformer.adapters.adapter_folder import AdapterFolder, attach_adapters
from tokenformer.adapters.adapter_layer import RoutedAdapterLayer
from tokenformer.adapters.adapter_model import base_fingerprint
from tokenformer.adapters.adapter_set import AdapterSet
from tokenformer.errors import AdapterError
from tokenformer.layers.router import ROUTERS, balance_routers, routers
from tokenformer.models.batch_decoder import BatchDecoder
from tokenformer.models.quantization import quantize_model
from tokenformer.ops import routed_pattention

CASES = [
    ("gated", "all", "l2_gelu"),
    ("learned", "all", "l2_gelu"),
    ("centroid", "chosen", "l2_gelu"),
    ("gated", "chosen", "gelu_l2"),
    ("gated", "chosen", "l1_gelu"),
]
cases = pytest.mark.parametrize(("router", "theta_norm", "theta"), CASES)
norms = pytest.mark.parametrize("norm", ["shared", "own"])


def make_sparse(router="gated", theta_norm="all", theta="l2_gelu", **options):
    """Groups of 5 tokens of 24, of which the last has 4, and dense q, k and v."""
    routing = {"group_size": 5, "active_groups": {"ffn": 2, "o": [None, 1]}, "routed_bias": True}
    routing |= {"router": router, "theta_norm": theta_norm, "theta": theta}
    base = make_base(**(routing | options))
    with torch.no_grad():
        for router in routers(base):
            router.bias.normal_(std=0.3)
    return base


def adapted(base, **options):
    return get_peft_model(base, TokenAdapterConfig(**{"num_tokens": 3} | options)).eval()


def state(model):
    """All tensors of the base: parameters and the biases of routers."""
    return {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): tensor.clone()
        for name, tensor in model.state_dict().items()
        if "token_adapter" not in name
    }


@cases
@norms
def test_a_new_adapter_changes_nothing(router, theta_norm, theta, norm, ids):
    base = make_sparse(router, theta_norm, theta).double()
    before = logits(base, ids)
    model = adapted(base, target_modules=ALL, norm=norm)
    assert sum(isinstance(layer, RoutedAdapterLayer) for layer in layers_of(model)) == 3
    torch.testing.assert_close(logits(model, ids), before, rtol=0, atol=1e-13)
    trained = model.train()(ids).logits
    torch.testing.assert_close(trained.detach(), before, rtol=0, atol=1e-13)


@cases
def test_values_and_gradients_are_those_of_a_masked_dense_layer(router, theta_norm, theta):
    """All scores of the layer, masked, beside those of the added tokens."""
    model = randomize(adapted(make_sparse(router, theta_norm, theta).double()))
    layer = layers_of(model)[0]
    base = layer.base_layer
    x = torch.randn(4, 9, 16, dtype=torch.float64, requires_grad=True)
    parts = [layer.token_adapter_keys["default"], layer.token_adapter_values["default"]]
    groups, gates = base.router(x, base.directions(), 2)
    expected = base.bias + routed_pattention(
        x,
        base.key_tokens,
        base.value_tokens,
        groups,
        group_size=5,
        norm=theta_norm,
        gates=gates,
        added=tuple(parts),
        scale_tokens=24 if theta_norm == "all" else 10,
        theta=theta,
        backend="reference",
    )
    found = layer(x)
    torch.testing.assert_close(found, expected)
    inputs = [x, *parts]
    torch.testing.assert_close(
        torch.autograd.grad(found.square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), inputs),
    )
    with torch.no_grad():  # native code, for few rows in fp32
        few = copy.deepcopy(layer).float()(x[0, :2].float())
    torch.testing.assert_close(few.double(), expected[0, :2], rtol=1e-4, atol=1e-5)


@norms
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("target", [["ffn", "o"], ["q"]])
def test_training_moves_not_a_bit_of_the_base(norm, router, target, ids):
    """Neither the routers, nor the biases of the load balancing, also where no adapter is."""
    base = make_sparse(router)
    before = state(base)
    model = adapted(base, target_modules=target, norm=norm).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    losses = []
    for _ in range(20):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert balance_routers(model) is None
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    after = state(model)
    assert before.keys() == after.keys()
    assert any("router.bias" in name for name in before)
    assert all(torch.equal(before[name], after[name]) for name in before)


@norms
def test_gradient_checkpointing(norm, ids):
    model = randomize(adapted(make_sparse(), target_modules=ALL, norm=norm)).train()
    model(ids, labels=ids).loss.backward()
    expected = [p.grad.clone() for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(ids, labels=ids).loss.backward()
    found = [p.grad for p in model.parameters() if p.requires_grad]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@norms
def test_autocast(norm, ids):
    model = randomize(adapted(make_sparse(), norm=norm)).train()
    plain = model(ids, labels=ids).loss
    with torch.autocast("cpu", torch.bfloat16):
        half = model(ids, labels=ids).loss
    half.backward()
    torch.testing.assert_close(half, plain, rtol=0.05, atol=0.05)
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


@norms
def test_saving_loading_and_switching_off(norm, ids, tmp_path):
    base = make_sparse()
    before = logits(base, ids)
    model = randomize(adapted(base, norm=norm))
    expected = logits(model, ids)
    assert not torch.allclose(expected, before, atol=1e-2)
    with model.disable_adapter():
        assert torch.equal(logits(model, ids), before)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in saved.values()) == 2 * 2 * 3 * 16
    loaded = PeftModel.from_pretrained(make_sparse(), tmp_path)
    assert torch.equal(logits(loaded, ids), expected)
    assert torch.equal(logits(loaded.unload(), ids), before)


def test_a_base_that_routes_otherwise_is_another_base(tmp_path):
    base = make_sparse()
    known = base_fingerprint(base)
    adapted(base).save_pretrained(tmp_path)
    assert base_fingerprint(base) == known, "attached adapters do not count"
    other = make_sparse()
    with torch.no_grad():
        next(routers(other)).bias[0] += 1
    with pytest.raises(AdapterError, match="load the base it was trained on"):
        PeftModel.from_pretrained(other, tmp_path)


@pytest.mark.parametrize("kinds", [("shared", "shared"), ("shared", "own"), ("own", "own")])
@pytest.mark.parametrize("theta_norm", ["all", "chosen"])
def test_every_sample_of_a_batch_has_an_adapter_of_its_own(kinds, theta_norm, ids):
    base = make_sparse(theta_norm=theta_norm)
    alone = {"__base__": logits(base, ids)}
    model = randomize(adapted(base, norm=kinds[0]))
    config = TokenAdapterConfig(num_tokens=2, target_modules=["ffn", "v"], norm=kinds[1])
    model.add_adapter("second", config)
    randomize(model, seed=7, name="second")
    for name in ("default", "second"):
        model.set_adapter(name)
        alone[name] = logits(model, ids)
    names = ["second", "__base__", "default", "second"]
    mixed = logits(model, ids, adapter_names=names)
    for row, name in enumerate(names):
        torch.testing.assert_close(mixed[row], alone[name][row], rtol=0, atol=1e-5)
    model.base_model.set_adapter(["default", "second"])
    assert not torch.allclose(logits(model, ids), alone["second"], atol=1e-3)


@norms
def test_decoding_equals_one_pass(norm, ids, tmp_path):
    """Through generate, and in a batch of a server whose sequences have other adapters."""
    model = randomize(adapted(make_sparse(), norm=norm), std=2.0)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(input_ids=ids[:1], attention_mask=ids[:1] >= 0, **options)
    assert torch.equal(logits(model, found)[0, 8:-1].argmax(-1), found[0, 9:])
    model.save_pretrained(tmp_path)
    base = make_sparse()
    plain = base.generate(input_ids=ids[:1], attention_mask=ids[:1] >= 0, **options)
    adapters = AdapterSet(base)
    adapters.load("a", AdapterFolder.read(tmp_path))
    decoder = BatchDecoder(base, 4, adapters.select)
    rows = [[int(decoder.add(ids[:1], name).argmax())] for name in ("a", None)]
    for _ in range(5):
        best, _ = decoder.step([row[-1] for row in rows])
        for row, each in zip(rows, best, strict=True):
            row.append(int(each.argmax()))
    assert rows == [found[0, 9:].tolist(), plain[0, 9:].tolist()]


@norms
def test_routed_layers_are_not_merged(norm, ids, tmp_path):
    model = randomize(adapted(make_sparse(), target_modules=["ffn", "q"], norm=norm))
    before = logits(model, ids)
    why = "is routed .config.active_groups." if norm == "shared" else "a norm of its own"
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ValueError, match=f"{why}.*keep .*attached"):
            merge()
        assert torch.equal(logits(model, ids), before)
    model.save_pretrained(tmp_path)
    attached = attach_adapters(make_sparse(), [AdapterFolder.read(tmp_path)])
    assert torch.equal(logits(attached, ids), before)


def test_dense_layers_of_a_sparse_model_are_merged(ids, tmp_path):
    model = randomize(adapted(make_sparse(), target_modules=["q", "v"]))
    before = logits(model, ids)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged, ids), before, rtol=0, atol=1e-5)
    assert merged.config.active_groups == make_sparse().config.active_groups
    merged.save_pretrained(tmp_path)
    loaded = type(merged).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits(loaded, ids), before, rtol=0, atol=1e-5)


@pytest.mark.parametrize("theta_norm", ["all", "chosen"])
@norms
def test_a_quantized_base(theta_norm, norm, ids):
    quantized = make_sparse(theta_norm=theta_norm)
    quantize_model(quantized, bits=8)
    before = logits(quantized, ids)
    model = adapted(copy.deepcopy(quantized), norm=norm)
    torch.testing.assert_close(logits(model, ids), before, rtol=0, atol=0.03)
    model.train()(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    mixed = logits(randomize(model.eval()), ids, adapter_names=["default", "__base__"] * 2)
    torch.testing.assert_close(mixed[::2], logits(model, ids)[::2], rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="quantized base"):
        model.merge_adapter()


def test_refusals_name_what_works():
    with pytest.raises(ValueError, match="use norm='own'"):
        adapted(make_sparse(theta="softmax", theta_norm="chosen"))
    thresholds = make_base(thresholds={"ffn": [0.01, 0.01]})
    with pytest.raises(ValueError, match=r"ffn skips tokens by a threshold.*use norm='own'"):
        adapted(thresholds)


def test_a_base_with_thresholds_takes_a_norm_of_its_own(ids):
    base = make_base(thresholds={"ffn": [0.01, 0.01]})
    before = logits(base, ids)
    model = adapted(base, norm="own")
    assert torch.equal(logits(model, ids), before)
    model.train()(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
