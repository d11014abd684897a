"""Vision-language models: attention and positions, generation, batches, labels, saving, Trainer."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageTextToText,
    AutoProcessor,
    Trainer,
    TrainingArguments,
    pipeline,
)

import tokenformer
from tests.support.image_text import (
    IMAGE_ID,
    POSITIONS,
    SIDE,
    image_run,
    make_halves,
    make_joint,
    make_processor,
    pictures,
    text_ids,
    train_new_tokens,
)
from tokenformer.data.byte_tokenizer import END_OF_TEXT
from tokenformer.models.accounting import (
    count_parameters,
    image_text_forward_flops,
    image_text_training_flops,
)
from tokenformer.models.native_decoder import decoder_of

MODES = ("routed", "shared", "projector")


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def images(count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, 3, SIDE, SIDE, generator=generator).to(dtype)


def stepwise(model: Any, ids: Tensor, prompt: int, **inputs: Any) -> Tensor:
    """Logits of the positions from `prompt` - 1 on, decoded one by one with a cache."""
    outputs = model(ids[:, :prompt], use_cache=True, **inputs)
    found = [outputs.logits[:, -1]]
    for position in range(prompt, ids.shape[1]):
        outputs = model(
            ids[:, position : position + 1], past_key_values=outputs.past_key_values, use_cache=True
        )
        found.append(outputs.logits[:, -1])
    return torch.stack(found, 1)


def test_cached_decoding_equals_one_forward(mode: str) -> None:
    model = train_new_tokens(make_joint(mode))
    ids = torch.tensor([[*b"see ", *image_run(), *image_run(), *b"two images"]])
    prompt = ids.shape[1] - 6
    whole = model(ids, pixel_values=images(2)).logits
    with torch.no_grad():
        found = stepwise(model, ids, prompt, pixel_values=images(2))
    torch.testing.assert_close(found, whole[:, prompt - 1 :], atol=1e-10, rtol=1e-10)


def test_images_that_are_cached_may_be_passed_again(mode: str) -> None:
    model = make_joint(mode)
    ids = torch.tensor([[*image_run(), *b"ab"]])
    with torch.no_grad():
        caches = [model(ids, pixel_values=images(1), use_cache=True) for _ in range(2)]
        again, without = (
            model(ids[:, -1:], past_key_values=cache.past_key_values, **given).logits
            for cache, given in zip(caches, ({"pixel_values": images(1)}, {}), strict=True)
        )
    assert torch.equal(again, without)


def test_a_second_image_can_follow_a_cached_turn(mode: str) -> None:
    model = train_new_tokens(make_joint(mode))
    first, second = [[*image_run(), *text] for text in (b"one", b"two")]
    whole = model(torch.tensor([first + second]), pixel_values=images(2)).logits
    pixels = images(2)
    with torch.no_grad():
        before = model(torch.tensor([first]), pixel_values=pixels[:1], use_cache=True)
        after = model(
            torch.tensor([second]),
            pixel_values=pixels[1:],
            past_key_values=before.past_key_values,
            use_cache=True,
        )
    torch.testing.assert_close(after.logits, whole[:, len(first) :], atol=1e-10, rtol=1e-10)


def test_rows_of_a_batch_do_not_depend_on_each_other(mode: str) -> None:
    """Several images, none and one; left padding."""
    model = train_new_tokens(make_joint(mode))
    texts = [
        [*b"a", *image_run(), *b"b", *image_run(), *b"c"],
        [*b"only text"],
        [*image_run(), *b"caption"],
    ]
    counts = [2, 0, 1]
    longest = max(map(len, texts))
    padded = [[END_OF_TEXT] * (longest - len(text)) + text for text in texts]
    mask = torch.tensor([[0] * (longest - len(t)) + [1] * len(t) for t in texts])
    pixels = images(3)
    whole = model(torch.tensor(padded), attention_mask=mask, pixel_values=pixels).logits
    ends = itertools.accumulate(counts)
    for row, (text, count, end) in enumerate(zip(texts, counts, ends, strict=True)):
        own = pixels[end - count : end] if count else None
        alone = model(torch.tensor([text]), pixel_values=own).logits[0]
        torch.testing.assert_close(whole[row, longest - len(text) :], alone, atol=1e-10, rtol=1e-10)


def test_attention_of_a_joint_model():
    """An image position attends to its own image, a text position to all before it."""
    model = train_new_tokens(make_joint("routed"))
    model.set_attn_implementation("eager")
    ids = torch.tensor([[*b"ab", *[IMAGE_ID] * POSITIONS, *[IMAGE_ID] * POSITIONS, *b"cd"]])
    weights = model(ids, pixel_values=images(2), output_attentions=True).attentions
    length = ids.shape[1]
    wanted = torch.ones(length, length, dtype=torch.bool).tril()
    for start in (2, 2 + POSITIONS):
        own = slice(start, start + POSITIONS)
        wanted[own] = False
        wanted[own, own] = True
    for layer in weights:
        assert torch.equal((layer[0] > 0).all(0), wanted)


def test_attention_kernels_agree(mode: str) -> None:
    model = train_new_tokens(make_joint(mode))
    ids = torch.tensor([[*b"ab", *image_run(), *b"cd"]] * 2)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    found = []
    for kernel in ("sdpa", "eager"):
        model.set_attn_implementation(kernel)
        found.append(model(ids, attention_mask=mask, pixel_values=images(2)).logits)
    torch.testing.assert_close(found[0][:, 2:], found[1][:, 2:], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("positions", ["rotary", "learned", "none"])
def test_images_keep_their_features_with_all_positions(positions: str) -> None:
    vision, _ = make_halves()
    torch.manual_seed(0)
    config = make_halves()[1].config.to_dict() | {"positions": positions}
    language = tokenformer.TokenformerForCausalLM(
        tokenformer.TokenformerConfig.from_dict(config)
    ).eval()
    joint, report = tokenformer.join_modalities(vision, language)
    assert report.vision_change < 1e-5
    ids = torch.tensor([[*b"ab", *image_run(), *b"cd"]])
    with torch.no_grad():
        whole = joint(ids, pixel_values=images(1)).logits[:, -3:]
        found = stepwise(joint, ids, ids.shape[1] - 2, pixel_values=images(1))
    torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("beams", [1, 2])
def test_generate_with_cache_equals_without(mode: str, beams: int) -> None:
    # fp32 decodes natively; beams that are nearly equal need fp64.
    dtype = torch.float32 if beams == 1 else torch.float64
    model = train_new_tokens(make_joint(mode, dtype))
    processor = make_processor(model)
    batch = processor(
        text=["<image>what", "and <image> or <image>?", "no image"],
        images=pictures(3),
        padding=True,
        return_tensors="pt",
    )
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": beams}
    cached, whole = (model.generate(**batch, **options, use_cache=use) for use in (True, False))
    assert torch.equal(cached, whole)
    static = model.generate(**batch, **options, cache_implementation="static")
    assert torch.equal(cached, static)


def test_logits_processors_accept_placeholders(mode: str) -> None:
    model = make_joint(mode, torch.float32)
    batch = make_processor(model)(text=["<image>"], images=pictures(1), return_tensors="pt")
    found = model.generate(
        **batch, max_new_tokens=6, repetition_penalty=1.5, no_repeat_ngram_size=1, do_sample=False
    )
    new = found[0, batch["input_ids"].shape[1] :].tolist()
    assert len(set(new)) == len(new)


def test_text_decodes_natively_as_in_the_language_model():
    """With and without images, the tokens after the prompt run in native code."""
    vision, language = make_halves()
    joint, _ = tokenformer.join_modalities(vision, language)
    prompt = text_ids("Once upon")
    options = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(joint.generate(prompt, **options), language.generate(prompt, **options))
    decoder, twin = decoder_of(joint), decoder_of(language)
    assert decoder is not None
    assert twin is not None
    first = joint.model.layers[0].attention.q
    assert decoder.blocks[0].q.n == first.num_tokens - first.vision_tokens
    batch = make_processor(joint)(text=["<image>a"], images=pictures(1), return_tensors="pt")
    native = joint.generate(**batch, **options)
    hook = joint.model.layers[0].register_forward_hook(lambda *_: None)  # needs eager mode
    eager = joint.generate(**batch, **options)
    hook.remove()
    assert torch.equal(native, eager)


def test_a_placeholder_inside_the_vocabulary_is_never_generated():
    model = make_joint("routed", torch.float32, image_token_id=7)
    with torch.no_grad():
        model.lm_head.weight[7] = 100 * model.lm_head.weight.abs().max()
    assert model.generation_config.suppress_tokens == [7]
    found = model.generate(text_ids("abc"), max_new_tokens=10, do_sample=False)
    assert 7 not in found[0, 3:]


def test_only_text_has_labels(mode: str) -> None:
    """Not images, and not the text right after one, which no text position predicts."""
    model = make_joint(mode)
    ids = torch.tensor([[*b"ab", *[IMAGE_ID] * POSITIONS, *b"cde"]])
    logits = model(ids, pixel_values=images(1)).logits
    loss = model(ids, pixel_values=images(1), labels=ids).loss
    predicted = [1, *range(2 + POSITIONS + 1, ids.shape[1])]
    log_probs = logits[0].log_softmax(-1)
    wanted = -torch.stack([log_probs[at - 1, ids[0, at]] for at in predicted]).mean()
    torch.testing.assert_close(loss, wanted.to(loss.dtype))


@pytest.mark.parametrize(
    ("ids", "count", "message"),
    [
        ([IMAGE_ID] * (POSITIONS - 1) + [65], 1, "1 images of 5 positions need 5 placeholders"),
        ([IMAGE_ID] * POSITIONS, 2, "need 10 placeholders"),
        ([*[IMAGE_ID] * 2, 65, *[IMAGE_ID] * (POSITIONS - 2)], 1, "must follow each other"),
        ([65, 66], 1, "the sequences have 0"),
    ],
)
def test_misplaced_placeholders_are_refused(ids: list[int], count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_joint()(torch.tensor([ids]), pixel_values=images(count))


def test_placeholders_without_images_are_refused():
    model = make_joint()
    with pytest.raises(ValueError, match="no pixel_values"):
        model(torch.tensor([image_run()]))
    with pytest.raises(ValueError, match=r"\[N, C, H, W\]"):
        model(torch.tensor([image_run()]), pixel_values=images(1)[0])
    with pytest.raises(ValueError, match="id 257, is not in the vocabulary of 257; give input_ids"):
        model(inputs_embeds=torch.zeros(1, 3, 32).double(), pixel_values=images(1))


@pytest.mark.parametrize("beams", [1, 2])
def test_embeddings_are_as_good_as_ids(mode: str, beams: int) -> None:
    """If the placeholder has an embedding: logits, loss and generation."""
    model = train_new_tokens(make_joint(mode, image_token_id=7))
    run = [7] * POSITIONS
    ids = torch.tensor([[*b"a", *run, *b"bc", *run, *b"d"], [*b"one here", *run, *b"b"]])
    pixels = images(3)
    embeds = model.get_input_embeddings()(ids)
    mask = torch.ones_like(ids)
    found = model(inputs_embeds=embeds, pixel_values=pixels, attention_mask=mask, labels=ids)
    wanted = model(ids, pixel_values=pixels, attention_mask=mask, labels=ids)
    assert torch.equal(found.logits, wanted.logits)
    assert torch.equal(found.loss, wanted.loss)
    options = {"max_new_tokens": 5, "num_beams": beams, "do_sample": False}
    inputs = {"pixel_values": pixels, "attention_mask": mask}
    whole = model.generate(ids, **inputs, **options)
    new = model.generate(inputs_embeds=embeds, **inputs, **options)
    assert torch.equal(new, whole[:, ids.shape[1] :])


def test_image_features_have_the_form_of_transformers(mode: str) -> None:
    model = make_joint(mode)
    model.set_attn_implementation("eager")
    found = model.get_image_features(images(2), output_hidden_states=True, output_attentions=True)
    assert found.last_hidden_state.shape == found.pooler_output.shape == (2, POSITIONS, 32)
    assert (len(found.hidden_states), len(found.attentions)) == (3, 2)
    assert torch.equal(found.pooler_output, found.last_hidden_state) == (mode != "projector")
    as_tuple = model.get_image_features(images(2), return_dict=False)
    assert torch.equal(as_tuple[0], found.last_hidden_state)


def test_other_image_sizes_take_other_numbers_of_positions():
    model = make_joint()
    pixels = torch.randn(1, 3, SIDE, 2 * SIDE, dtype=torch.float64)
    assert model.get_image_features(pixels).pooler_output.shape == (1, 1 + 2 * 4, 32)


def test_save_and_load(mode: str, tmp_path: Path) -> None:
    model = train_new_tokens(make_joint(mode, torch.float32))
    processor = make_processor(model)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    again = AutoProcessor.from_pretrained(tmp_path)
    assert type(again) is tokenformer.TokenformerProcessor
    assert type(AutoImageProcessor.from_pretrained(tmp_path)).__name__.startswith("Tokenformer")
    saved = AutoConfig.from_pretrained(tmp_path).to_dict()
    wanted = model.config.to_dict()
    assert {n: saved[n] for n in wanted if n != "_name_or_path"} == {
        n: value for n, value in wanted.items() if n != "_name_or_path"
    }
    text, given = ["<image>describe"], pictures(1)
    batch, twin = (p(text=text, images=given, return_tensors="pt") for p in (processor, again))
    assert torch.equal(batch["input_ids"], twin["input_ids"])
    assert torch.equal(model(**batch).logits, loaded(**twin).logits)
    trained = [{n for n, p in m.named_parameters() if p.requires_grad} for m in (model, loaded)]
    assert trained[0] == trained[1]
    assert loaded.generation_config.to_dict() == model.generation_config.to_dict()
    card = (tmp_path / "README.md").read_text()
    assert "pipeline_tag: image-text-to-text" in card
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is type(model.model)


def test_pipeline(tmp_path: Path) -> None:
    model = make_joint("routed", torch.float32)
    model.save_pretrained(tmp_path)
    make_processor(model).save_pretrained(tmp_path)
    ask = pipeline("image-text-to-text", model=str(tmp_path))
    image = pictures(1)[0]
    plain = ask(
        images=image, text="<image>", max_new_tokens=4, generate_kwargs={"do_sample": False}
    )
    assert plain[0]["generated_text"]
    message = {
        "role": "user",
        "content": [{"type": "image", "image": image}, {"type": "text", "text": "What is it?"}],
    }
    chat = ask(text=[message], max_new_tokens=4, return_full_text=False)
    assert isinstance(chat[0]["generated_text"], str)


def test_parameters_are_counted(mode: str) -> None:
    model = make_joint(mode)
    assert sum(count_parameters(model.config).values()) == model.num_parameters()


def test_flops_agree_with_the_counter(mode: str) -> None:
    """Of text with an image before it: each position with the tokens of its own modality."""
    from torch.utils.flop_counter import FlopCounterMode

    model = make_joint(mode, torch.float32)
    model.set_attn_implementation("eager")
    ids = torch.tensor([[*[IMAGE_ID] * POSITIONS, *b"some text"]])
    pixels = images(1, torch.float32)
    with FlopCounterMode(display=False) as counter:
        hidden = model.model(ids, pixel_values=pixels, use_cache=False).last_hidden_state
        model.lm_head(hidden[:, POSITIONS:])
    wanted = image_text_forward_flops(model.config, len(b"some text"))
    assert counter.get_total_flops() == sum(wanted.values())
    trained = image_text_training_flops(model.config, len(b"some text"))
    assert {n: 1 if n == "encoder" else 3 for n in wanted} == {
        name: flops / wanted[name] for name, flops in trained.items()
    }


@pytest.mark.parametrize("mode", MODES)
def test_the_preset_has_the_sizes_of_its_halves(mode: str) -> None:
    config = tokenformer.TokenformerImageTextConfig.from_preset("base+124m", mode=mode)
    with torch.device("meta"):
        model = tokenformer.TokenformerForImageTextToText(config)
    assert model.num_parameters() == sum(count_parameters(config).values())
    vision = tokenformer.TokenformerVisionConfig.from_preset("base")
    language = tokenformer.TokenformerConfig.from_preset("124m")
    halves = sum(count_parameters(language).values()) + sum(count_parameters(vision).values())
    halves -= count_parameters(vision)["head"]
    new = 768 * (768 + 1) * 2 if mode == "projector" else 12 * 5 * 64 * 2 * 768
    assert model.num_parameters() == halves + new


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "mixed"}, "mode='mixed'"),
        ({"new_tokens": -1}, "new_tokens=-1"),
        ({"new_tokens": {"q": 3}}, "new_tokens has the keys q"),
        ({"norm_parameters": "bias"}, "norms that both halves share"),
        ({"image_token_id": "image"}, "image_token_id='image'"),
        ({"vision_config": 3}, "vision_config is a int"),
        ({"learned_scale": True}, "learned_scale=True"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    config = tokenformer.TokenformerImageTextConfig
    with pytest.raises(ValueError, match=message):
        config(**{"hidden_size": 32, "num_attention_heads": 4} | options)


@pytest.mark.parametrize(
    "new", [0, {"q": 0, "k": 1, "v": 2, "o": [3, 0], "ffn": 5}], ids=["none", "by layer"]
)
def test_new_tokens_may_differ_by_layer_or_be_none(new: Any, tmp_path: Path) -> None:
    vision, language = make_halves()
    joint, report = tokenformer.join_modalities(vision, language, new_tokens=new)
    assert report.vision_change < 1e-5
    counts = [joint.config.parts(name, 1)[1] for name in ("q", "v", "o", "ffn")]
    assert counts == ([0] * 4 if new == 0 else [0, 2, 0, 5])
    joint.save_pretrained(tmp_path)
    again = tokenformer.TokenformerForImageTextToText.from_pretrained(tmp_path)
    assert again.config.new_tokens == joint.config.new_tokens


class Captions(Dataset[dict[str, Tensor]]):
    def __init__(self, processor: Any) -> None:
        batch = processor(
            text=["<image>red", "<image>dog"], images=pictures(2), return_tensors="pt"
        )
        self.rows = [
            {
                "input_ids": batch["input_ids"][i],
                "labels": batch["input_ids"][i],
                "pixel_values": batch["pixel_values"][i],
            }
            for i in range(2)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer(checkpointing: bool, mode: str, tmp_path: Path) -> None:
    model = make_joint(mode, torch.float32)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=12,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        gradient_checkpointing=checkpointing,
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1,
    )
    data = Captions(make_processor(model))
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < 0.8 * losses[0]


def test_gradient_checkpointing_gives_the_same_gradients(mode: str) -> None:
    ids = torch.tensor([[*image_run(), *b"cd"]])
    gradients = []
    for checkpointing in (False, True):
        model = make_joint(mode).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(ids, pixel_values=images(1), labels=ids).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name])


def test_every_trained_parameter_gets_a_gradient(mode: str) -> None:
    """Also the final norm of the images, whose gradient is zero: DDP waits for all of them."""
    model = make_joint(mode).train()
    ids = torch.tensor([[*image_run(), *b"cd"]])
    model(ids, pixel_values=images(1), labels=ids).loss.backward()
    assert not [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]


def test_quantization_of_routed_layers_is_refused():
    from tokenformer.models.quantization import quantize_model

    with pytest.raises(ValueError, match="routed by modality cannot be quantized"):
        quantize_model(make_joint("routed", torch.float32))
