"""Interventions compute what the layer would without, or with other weights of, some tokens."""

import pytest
import torch

import tokenformer
from tests.support.parrot import SENTENCE, save_parrot
from tokenformer.data.byte_tokenizer import byte_tokenizer
from tokenformer.interpret import continue_text, edit, effect, intervene, score_maps
from tokenformer.interpret.token_name import Token, named_layers

IDS = torch.arange(24).view(2, 12)


def outputs(model, name, ids=IDS):
    """The output of one layer in a forward pass."""
    found = []
    layer = named_layers(model)[name]
    with torch.no_grad():
        hook = layer.register_forward_hook(lambda _, x, y: found.append(y))
        logits = model(input_ids=ids).logits
        hook.remove()
    return found[0], logits


@pytest.mark.parametrize("theta", ["l2_gelu", "gelu_l2", "l1_gelu", "softmax"])
@pytest.mark.parametrize("name", ["0.q", "1.v", "0.o", "1.ffn"])
def test_off_scaled_and_pinned(make_model, theta, name):
    model = make_model("tokenformer", theta=theta)
    each = score_maps(model, IDS, [name])[name]
    weights = each.weights.clone()
    weights[..., 3] = 0
    weights[..., 5] *= -2.5
    weights[..., 7] = 0.8
    change = {
        "off": [f"{name}.3"],
        "scale": {Token(name, 5): -2.5},
        "pin": {f"{name}.7": 0.8},
    }
    before, logits = outputs(model, name)
    torch.testing.assert_close(before, each.output)
    with intervene(model, **change):
        after, changed = outputs(model, name)
    torch.testing.assert_close(after, weights @ each.values)
    assert not torch.allclose(changed, logits)
    assert torch.equal(outputs(model, name)[1], logits), "restored bit for bit"


def test_blocks_nest_and_are_undone_after_an_error(make_model):
    model = make_model("tokenformer")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    _, logits = outputs(model, "0.q")
    found = []

    def fail_inside():
        with intervene(model, scale={"0.ffn.1": 2}, pin={"0.q.1": 1}):
            found.append(outputs(model, "0.q")[1])
            with intervene(model, off=["0.ffn.1"]):
                found.append(outputs(model, "0.q")[1])
            assert torch.equal(outputs(model, "0.q")[1], found[0])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    doubled, off = found
    assert not torch.allclose(off, doubled)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(outputs(model, "0.q")[1], logits)


def test_an_edited_copy_is_the_model_under_the_intervention(make_model, tmp_path):
    model = make_model("tokenformer").float()
    change = {"off": ["0.ffn.3", "1.q.2"], "scale": {"1.ffn.0": 0.25}}
    with intervene(model, **change):
        _, expected = outputs(model, "0.q")
    edited = edit(model, **change)
    assert torch.equal(outputs(edited, "0.q")[1], expected)
    assert not torch.allclose(outputs(model, "0.q")[1], expected), "the original is unchanged"
    edited.save_pretrained(tmp_path)
    loaded = tokenformer.TokenformerForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(outputs(loaded, "0.q")[1], expected)
    with pytest.raises(ValueError, match="pin cannot be made permanent"):
        edit(model, pin={"0.q.1": 1.0})


def test_a_token_has_one_intervention(make_model):
    model = make_model("tokenformer")
    with (
        pytest.raises(ValueError, match=r"0\.q\.1 is given twice"),
        intervene(model, off=["0.q.1"], scale={Token("0.q", 1): 2}),
    ):
        pass
    with pytest.raises(ValueError, match=r"0\.q has 24 tokens"), intervene(model, off=["0.q.24"]):
        pass


@pytest.fixture(scope="module")
def parrot(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parrot")
    save_parrot(folder)
    return tokenformer.TokenformerForCausalLM.from_pretrained(folder).eval()


def test_the_effect_on_a_continuation_whatever_decodes_it(parrot):
    """`generate` runs in native code where it can; the reference runs the whole text each time."""
    tokenizer, count = byte_tokenizer(), 12
    off = [f"{n}.ffn.{i}" for n in (0, 1) for i in range(0, 64, 2)]
    found = effect(
        parrot,
        lambda model: continue_text(model, tokenizer, "Say ", max_new_tokens=count),
        off=off,
    )
    assert found.before == SENTENCE[4:].encode()[:count].decode(errors="replace")
    assert found.after != found.before
    ids = torch.tensor([list(b"Say ")])
    with torch.no_grad(), intervene(parrot, off=off):
        for _ in range(count):
            best = parrot(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, best], 1)
    assert found.after == tokenizer.decode(ids[0, 4:], skip_special_tokens=True)
