"""Token adapters as peft is used: exactness, training, saving, merging, mixed batches."""

import copy
import json
import subprocess
import sys

import peft
import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file

from tests.support.adapters import make_base
from tokenformer import TokenAdapterConfig, TokenformerForCausalLM, grow
from tokenformer.adapters import TokenAdapterLayer
from tokenformer.adapters.adapter_model import base_fingerprint
from tokenformer.errors import AdapterError

ALL = ["ffn", "q", "k", "v", "o"]


def randomize(model, seed=0, name="default", std=0.5):
    """Give an adapter random tokens, as if it had been trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in layers_of(model):
            for part in (layer.token_adapter_keys, layer.token_adapter_values):
                if name in part:
                    shape = part[name].shape
                    part[name].copy_(std * torch.randn(shape, generator=generator))
    return model


def layers_of(model) -> list[TokenAdapterLayer]:
    return [module for module in model.modules() if isinstance(module, TokenAdapterLayer)]


def logits(model, ids, **options):
    with torch.no_grad():
        return model(ids, **options).logits


def weights(model) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix("base_model.model.").replace(
            ".base_layer", ""
        ): parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if "token_adapter" not in name
    }


def adapted(base, **options):
    return get_peft_model(base, TokenAdapterConfig(**{"num_tokens": 5} | options)).eval()


@pytest.mark.parametrize("norm", ["shared", "own"])
@pytest.mark.parametrize("theta", ["l2_gelu", "gelu_l2", "l1_gelu", "softmax"])
def test_a_new_adapter_changes_nothing(norm, theta, ids):
    base = make_base(theta=theta)
    before = logits(base, ids)
    config = TokenAdapterConfig(num_tokens=5, target_modules=ALL, norm=norm)
    if norm == "shared" and theta == "softmax":
        with pytest.raises(ValueError, match="use norm='own'"):
            get_peft_model(base, config)
        return
    model = get_peft_model(base, config)
    assert len(layers_of(model)) == 10
    torch.testing.assert_close(logits(model, ids), before, rtol=0, atol=2e-6)
    with torch.enable_grad():
        trained = model.train()(ids).logits
    torch.testing.assert_close(trained.detach(), before, rtol=0, atol=2e-6)


@pytest.mark.parametrize("norm", ["shared", "own"])
def test_training_moves_the_adapter_and_not_a_bit_of_the_base(norm, base, ids):
    before = weights(base)
    model = adapted(base, target_modules=ALL, norm=norm).train()
    new = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trainable) == 20
    assert all("token_adapter_" in name for name in trainable)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    losses = []
    for _ in range(30):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    after = weights(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for name, parameter in model.named_parameters():
        if name in new:
            assert not torch.equal(parameter, new[name]), f"{name} trains"


def test_gradients_are_those_of_the_grown_model(base, ids):
    """Concatenated tokens of a frozen layer, against the same tokens of a larger model."""
    model = randomize(adapted(base, target_modules=ALL)).train()
    model(ids, labels=ids).loss.backward()
    larger = copy.deepcopy(model).merge_and_unload().train()
    larger.requires_grad_(True)
    larger(ids, labels=ids).loss.backward()
    for layer, (name, grown) in zip(layers_of(model), pattentions(larger), strict=True):
        for added, tokens in (
            (layer.token_adapter_keys["default"], grown.key_tokens),
            (layer.token_adapter_values["default"], grown.value_tokens),
        ):
            expected = tokens.grad[-5:]
            torch.testing.assert_close(added.grad, expected, rtol=1e-4, atol=1e-7, msg=name)


def pattentions(model):
    from tokenformer import Pattention

    return [(name, m) for name, m in model.named_modules() if isinstance(m, Pattention)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inference_equals_the_merged_model(dtype, ids):
    model = randomize(adapted(make_base().to(dtype), target_modules=ALL))
    found = logits(model, ids)
    merged = copy.deepcopy(model).merge_and_unload()
    assert type(merged) is TokenformerForCausalLM
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(found, logits(merged, ids), rtol=0, atol=tolerance)
    assert not torch.allclose(found, logits(make_base().to(dtype), ids), atol=0.2)


def test_a_merged_model_is_an_ordinary_larger_tokenformer(base, ids, tmp_path):
    model = randomize(adapted(base, target_modules=["ffn", "q"]))
    before = logits(model, ids)
    merged = model.merge_and_unload()
    assert (merged.config.ffn_tokens, merged.config.q_tokens) == (29, 17)
    assert merged.config.scale_tokens == {"q": [12.0, 12.0], "ffn": [24.0, 24.0]}
    merged.save_pretrained(tmp_path)
    loaded = TokenformerForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(loaded, ids), before, rtol=0, atol=1e-5)
    grown, report = grow(loaded, ffn_tokens=40)
    assert report.max_output_change < 1e-5
    assert grown.config.ffn_tokens == 40


def test_merging_and_unmerging_gives_the_base_back(base, ids):
    before, bits = logits(base, ids), weights(base)
    model = randomize(adapted(base, target_modules=ALL))
    with_adapter = logits(model, ids)
    model.merge_adapter()
    torch.testing.assert_close(logits(model, ids), with_adapter, rtol=0, atol=1e-5)
    with model.disable_adapter():
        torch.testing.assert_close(logits(model, ids), before, rtol=0, atol=0)
    model.unmerge_adapter()
    after = weights(model)
    assert all(torch.equal(bits[name], after[name]) for name in bits)
    torch.testing.assert_close(logits(model, ids), with_adapter, rtol=0, atol=0)


def test_adapters_add_up(base, ids):
    model = randomize(adapted(base), seed=1)
    model.add_adapter("second", TokenAdapterConfig(num_tokens=3, target_modules=["ffn", "v"]))
    randomize(model, seed=7, name="second")
    model.base_model.set_adapter(["default", "second"])
    together = logits(model, ids)
    merged = copy.deepcopy(model).merge_and_unload()
    torch.testing.assert_close(logits(merged, ids), together, rtol=0, atol=1e-5)
    one_by_one = copy.deepcopy(model).merge_and_unload(adapter_names=["second"])
    assert one_by_one.config.ffn_tokens == 27
    assert one_by_one.config.v_tokens == 15


def test_a_saved_adapter_has_the_new_rows_alone(base, ids, tmp_path):
    model = randomize(adapted(base))
    expected = logits(model, ids)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in saved.values()) == 2 * 2 * 5 * 16
    options = json.loads((tmp_path / "adapter_config.json").read_text())
    assert options["peft_type"] == "TOKEN_ADAPTER"
    assert len(options["base_fingerprint"]) == 16
    loaded = PeftModel.from_pretrained(make_base(), tmp_path)
    torch.testing.assert_close(logits(loaded, ids), expected, rtol=0, atol=0)
    assert not any(p.requires_grad for p in loaded.parameters())
    trainable = PeftModel.from_pretrained(make_base(), tmp_path, is_trainable=True)
    assert any(p.requires_grad for p in trainable.parameters())
    half = PeftModel.from_pretrained(make_base().to(torch.bfloat16), tmp_path)
    torch.testing.assert_close(logits(half, ids).float(), expected, rtol=0, atol=0.1)


def test_another_base_is_refused(base, tmp_path):
    adapted(base).save_pretrained(tmp_path)
    with pytest.raises(AdapterError, match="load the base it was trained on"):
        PeftModel.from_pretrained(make_base(seed=1), tmp_path)
    transformer = peft_base()
    with pytest.raises(TypeError, match="needs a TokenFormer"):
        get_peft_model(transformer, TokenAdapterConfig())


def peft_base():
    from tokenformer import TransformerConfig, TransformerForCausalLM

    sizes = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return TransformerForCausalLM(TransformerConfig(**sizes, intermediate_size=32))


def test_a_corrupt_adapter_is_not_loaded(base, tmp_path):
    adapted(base).save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(Exception, match=r"(?i)incomplete|invalid|corrupt|header"):
        PeftModel.from_pretrained(make_base(), tmp_path)


def test_switching_and_deleting(base, ids):
    before = logits(base, ids)
    model = randomize(adapted(base))
    first = logits(model, ids)
    model.add_adapter("second", TokenAdapterConfig(num_tokens=3))
    randomize(model, seed=7, name="second")
    model.set_adapter("second")
    second = logits(model, ids)
    assert not torch.allclose(first, second, atol=1e-3)
    with model.disable_adapter():
        torch.testing.assert_close(logits(model, ids), before, rtol=0, atol=0)
    model.set_adapter("default")
    torch.testing.assert_close(logits(model, ids), first, rtol=0, atol=0)
    model.delete_adapter("second")
    assert all(list(layer.token_adapter_keys) == ["default"] for layer in layers_of(model))
    torch.testing.assert_close(logits(model.unload(), ids), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("norms", "theta"),
    [
        (("shared", "shared"), "l2_gelu"),
        (("own", "own"), "l2_gelu"),
        (("shared", "own"), "gelu_l2"),
        (("own", "own"), "softmax"),
    ],
)
def test_every_sample_of_a_batch_has_an_adapter_of_its_own(norms, theta, ids):
    base = make_base(theta=theta)
    plain = logits(base, ids)
    model = randomize(adapted(base, norm=norms[0]))
    config = TokenAdapterConfig(num_tokens=3, target_modules=["ffn", "v"], norm=norms[1])
    model.add_adapter("second", config)
    randomize(model, seed=7, name="second")
    alone = {"__base__": plain}
    for name in ("default", "second"):
        model.set_adapter(name)
        alone[name] = logits(model, ids)
    names = ["second", "__base__", "default", "second"]
    mixed = logits(model, ids, adapter_names=names)
    for row, name in enumerate(names):
        torch.testing.assert_close(mixed[row], alone[name][row], rtol=0, atol=1e-5)
    model.set_adapter("default")
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.mul_(-2)  # what autograd does not see
    changed = logits(model, ids, adapter_names=names)
    torch.testing.assert_close(changed[2], logits(model, ids)[2], rtol=0, atol=1e-5)
    model(ids, labels=ids, adapter_names=names).loss.backward()  # after calls without gradients
    with pytest.raises(ValueError, match="no adapter 'third'"):
        model(ids, adapter_names=["third"] * 4)
    with pytest.raises(ValueError, match="2 names for 4 samples"):
        model(ids, adapter_names=["second"] * 2)


def test_generation_with_mixed_adapters(base, ids):
    model = randomize(adapted(base), std=2.0)
    model.add_adapter("second", TokenAdapterConfig(num_tokens=3))
    randomize(model, seed=7, name="second")
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = []
    for row, name in enumerate(("default", "second")):
        model.set_adapter(name)
        expected.append(model.generate(input_ids=ids[row : row + 1], **options)[0])
    found = model.generate(input_ids=ids[:2], adapter_names=["default", "second"], **options)
    assert torch.equal(found, torch.stack(expected))


def test_a_quantized_base(base, ids):
    from tokenformer.models.quantization import quantize_model

    quantized = copy.deepcopy(base)
    quantize_model(quantized, bits=8)
    before = logits(quantized, ids)
    for norm in ("shared", "own"):
        model = adapted(copy.deepcopy(quantized), norm=norm)
        torch.testing.assert_close(logits(model, ids), before, rtol=0, atol=0.02)
        model.train()(ids, labels=ids).loss.backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
        with pytest.raises(ValueError, match="quantized base"):
            model.merge_adapter()


def test_a_merge_that_fails_changes_nothing(base, ids):
    model = randomize(adapted(base))
    config = TokenAdapterConfig(num_tokens=3, target_modules=["v"], norm="own")
    model.add_adapter("second", config)
    randomize(model, seed=7, name="second")
    model.base_model.set_adapter(["default", "second"])
    before = logits(model, ids)
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ValueError, match="norm of its own"):
            merge()
        assert not any(layer.merged for layer in layers_of(model))
        torch.testing.assert_close(logits(model, ids), before, rtol=0, atol=0)


def test_every_part_of_a_merged_model_knows_its_tokens(base, ids, tmp_path):
    model = randomize(adapted(base))
    model.merge_adapter()
    with pytest.raises(ValueError, match="call unmerge_adapter first"):
        model.add_adapter("second", TokenAdapterConfig())
    unloaded = model.unload()
    assert unloaded.config.ffn_tokens == unloaded.model.config.ffn_tokens == 29
    assert unloaded.config._attn_implementation == base.config._attn_implementation
    unloaded.save_pretrained(tmp_path)
    loaded = TokenformerForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(loaded, ids), logits(unloaded, ids), rtol=0, atol=1e-6)


def test_saved_modules_follow_the_names_of_the_samples(ids):
    base = make_base(tie_word_embeddings=False)
    plain = logits(base, ids)
    model = randomize(adapted(base, modules_to_save=["lm_head"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(0.5)
    alone = logits(model, ids)
    mixed = logits(model, ids, adapter_names=["default", "__base__", "default", "__base__"])
    torch.testing.assert_close(mixed[::2], alone[::2], rtol=0, atol=1e-5)
    torch.testing.assert_close(mixed[1::2], plain[1::2], rtol=0, atol=1e-5)


class TestFingerprint:
    def test_other_adapters_and_saved_modules_do_not_count(self, base, tmp_path):
        adapted(make_base()).save_pretrained(tmp_path)
        model = adapted(base, modules_to_save=["norm"])
        model.load_adapter(tmp_path, adapter_name="second")
        prints = {config.base_fingerprint for config in model.peft_config.values()}
        assert len(prints) == 2  # the norm that the first one replaces is not part of its base
        assert model.peft_config["second"].base_fingerprint == base_fingerprint(make_base())

    def test_a_replaced_module_is_not_part_of_the_base(self, base, tmp_path):
        adapted(base, modules_to_save=["norm"]).save_pretrained(tmp_path)
        other = make_base()
        with torch.no_grad():
            other.model.norm.weight.add_(1)
        PeftModel.from_pretrained(other, tmp_path)
        with torch.no_grad():
            other = make_base()
            other.model.layers[0].ffn.key_tokens.add_(1)
        with pytest.raises(AdapterError):
            PeftModel.from_pretrained(other, tmp_path)

    def test_one_configuration_serves_several_bases(self):
        config = TokenAdapterConfig(num_tokens=2)
        first = get_peft_model(make_base(), config).peft_config["default"].base_fingerprint
        second = get_peft_model(make_base(seed=1), config).peft_config["default"].base_fingerprint
        assert first != second

    def test_bases_that_cannot_be_compared(self, base, tmp_path):
        from tokenformer.models.quantization import quantize_model

        adapted(base).save_pretrained(tmp_path / "plain")
        quantized = make_base()
        quantize_model(quantized, bits=8)
        adapted(copy.deepcopy(quantized)).save_pretrained(tmp_path / "quantized")
        for folder, other, why in (
            ("plain", quantized, "quantized"),
            ("quantized", make_base(seed=1), "quantized"),
            ("plain", make_base().half(), "fp16"),
        ):
            with pytest.warns(UserWarning, match=f"because one of them is {why}"):
                PeftModel.from_pretrained(other, tmp_path / folder)


def test_layers_start_with_tokens_of_their_own(base):
    config = {"norm": "own", "init": "random", "init_seed": 3}
    first, second = (
        layer.token_adapter_keys["default"] for layer in layers_of(adapted(base, **config))
    )
    assert not torch.allclose(first, second)
    again = layers_of(adapted(make_base(), **config))[0].token_adapter_keys["default"]
    assert torch.equal(first, again)


def test_images():
    from tokenformer import TokenformerForImageClassification, TokenformerVisionConfig

    config = TokenformerVisionConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_labels=3,
    )
    base = TokenformerForImageClassification(config).eval()
    pixels = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        before = base(pixels).logits
    model = get_peft_model(base, TokenAdapterConfig(num_tokens=4, target_modules=ALL))
    with torch.no_grad():
        torch.testing.assert_close(model(pixels).logits, before, rtol=0, atol=1e-6)
    merged = randomize(model).merge_and_unload()
    assert merged.config.ffn_tokens == config.ffn_tokens + 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_tokens": 0}, "num_tokens=0 must be at least 1"),
        ({"norm": "mine"}, "norm='mine' is unknown; choose one of shared, own"),
        ({"init": "ones"}, "init='ones' is unknown"),
        ({"target_modules": ".*ffn", "layers_to_transform": [0]}, "need a list in target_modules"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        TokenAdapterConfig(**options)


def test_only_pattention_layers_are_targets(base):
    with pytest.raises(TypeError, match=r"is a \w*Embedding\w*; tokens can be added"):
        get_peft_model(base, TokenAdapterConfig(target_modules=["embed_tokens"]))


def test_an_adapter_of_124m_is_small(tmp_path):
    """It does not depend on the tokens of the base, of which this one has few."""
    from tokenformer import TokenformerConfig

    few = {"vocab_size": 64, "qkv_tokens": 4, "output_tokens": 4, "ffn_tokens": 4}
    base = TokenformerForCausalLM(TokenformerConfig.from_preset("124m", **few))
    get_peft_model(base, TokenAdapterConfig()).save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 2.5e6


def test_gradient_checkpointing(base, ids):
    model = randomize(adapted(base, target_modules=ALL)).train()
    model(ids, labels=ids).loss.backward()
    expected = [p.grad.clone() for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(ids, labels=ids).loss.backward()
    found = [p.grad for p in model.parameters() if p.requires_grad]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


class TestRegistration:
    def test_the_enum_has_one_more_member(self):
        from peft import PeftType

        member = PeftType("TOKEN_ADAPTER")
        assert member is PeftType.TOKEN_ADAPTER is PeftType["TOKEN_ADAPTER"]
        assert isinstance(member, PeftType)
        assert member == "TOKEN_ADAPTER"
        assert member in list(PeftType)
        assert peft.get_peft_config({"peft_type": "TOKEN_ADAPTER"}).num_tokens == 32

    def test_importing_twice_registers_once(self):
        from tokenformer.adapters import TokenAdapterModel
        from tokenformer.adapters.peft_registration import add_peft_type, register

        before = list(peft.PeftType)
        assert add_peft_type("LORA") is peft.PeftType.LORA
        register(TokenAdapterConfig, TokenAdapterModel)
        assert list(peft.PeftType) == before

    @pytest.mark.slow
    @pytest.mark.parametrize("imports", ["import tokenformer, peft", "import peft, tokenformer"])
    def test_an_adapter_loads_without_naming_its_config(self, imports, base, tmp_path):
        """In a new process that imports the two packages in either order."""
        adapted(base).save_pretrained(tmp_path)
        code = f"{imports}; print(peft.PeftConfig.from_pretrained({str(tmp_path)!r}).num_tokens)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.split()[-1:] == ["5"], done.stderr


def test_peft_finds_the_base_of_an_adapter(base, ids, tmp_path):
    base.save_pretrained(tmp_path / "base")
    base = type(base).from_pretrained(tmp_path / "base")
    adapted(base).save_pretrained(tmp_path / "adapter")
    model = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert torch.equal(model(ids).logits, base(ids).logits)


def test_a_model_with_an_adapter_is_not_saved_as_one_without(base, tmp_path):
    model = adapted(base)
    with pytest.raises(ValueError, match="merge_and_unload"):
        model.get_base_model().save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    model.merge_and_unload().save_pretrained(tmp_path)
