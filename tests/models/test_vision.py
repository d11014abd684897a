"""The image classifiers: sizes, shapes, conventions of timm and Hugging Face."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    Trainer,
    TrainingArguments,
    pipeline,
)

import tokenformer
from tests.support.classifiers import make_classifier, random_images, vision_config_class
from tokenformer.layers import PatchEmbedding
from tokenformer.models.accounting import (
    count_parameters,
    image_forward_flops,
    image_training_flops,
)
from tokenformer.models.model_classes import MODEL_CLASSES

WITHOUT_FINAL_NORM = {
    ("tokenformer", "base-match"): 86_446_312,
    ("tokenformer", "base"): 114_757_864,
    ("tokenformer", "large-match"): 304_005_096,
    ("tokenformer", "large"): 404_668_392,
    ("transformer", "base"): 86_446_312,
    ("transformer", "large"): 304_005_096,
}


@pytest.mark.parametrize(("family", "name"), WITHOUT_FINAL_NORM)
def test_presets_have_the_published_sizes(family: str, name: str) -> None:
    config = vision_config_class(family).from_preset(name)
    with torch.device("meta"):
        built = MODEL_CLASSES[type(config)](config).num_parameters()
    assert built == WITHOUT_FINAL_NORM[family, name] + 2 * config.hidden_size
    assert built == sum(count_parameters(config).values())


def test_every_preset_is_checked():
    of_tokens = {("tokenformer", name) for name in tokenformer.TokenformerVisionConfig.presets}
    of_matrices = {("transformer", name) for name in tokenformer.TransformerVisionConfig.presets}
    assert of_tokens | of_matrices == WITHOUT_FINAL_NORM.keys()


@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_counts_follow_the_options(family: str, pooling: str) -> None:
    model = make_classifier(
        family, pooling=pooling, norm_parameters="bias", final_norm_parameters="weight"
    )
    assert sum(count_parameters(model.config).values()) == model.num_parameters()


def test_flops_agree_with_the_counter(family: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = make_classifier(family, attn_implementation="eager").float()
    with FlopCounterMode(display=False) as counter:
        model(random_images().float())
    assert counter.get_total_flops() == 3 * sum(image_forward_flops(model.config).values())
    assert sum(image_training_flops(model.config).values()) == 3 * sum(
        image_forward_flops(model.config).values()
    )


@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_the_head_classifies_the_pooled_token(family: str, pooling: str) -> None:
    model = make_classifier(family, pooling=pooling)
    features = model.forward_features(random_images())
    assert features.shape == (3, 10 if pooling == "class" else 9, 16)
    pooled = features[:, 0] if pooling == "class" else features.mean(1)
    expected = pooled @ model.classifier.weight.T + model.classifier.bias
    torch.testing.assert_close(model(random_images()).logits, expected)
    torch.testing.assert_close(model.forward_head(features), expected)


def test_every_patch_sees_every_other(family: str) -> None:
    """No causal mask: the last patch moves the first patch's features, and the reverse."""
    model = make_classifier(family, pooling="mean")
    for changed, seen in ((8, 0), (0, 8)):
        batch = random_images()
        row, column = divmod(changed, 3)
        before = model.forward_features(batch)[:, seen]
        batch[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 1
        assert (model.forward_features(batch)[:, seen] - before).abs().min() > 1e-6


def test_positions_tell_patches_apart(family: str) -> None:
    """Swapping two patches moves the mean; without positions it would not."""
    model, batch = make_classifier(family, pooling="mean"), random_images()
    swapped = batch.clone()
    swapped[..., 0:4, 0:4], swapped[..., 8:12, 8:12] = batch[..., 8:12, 8:12], batch[..., 0:4, 0:4]
    difference = (model(batch).logits - model(swapped).logits).abs().max()
    assert difference > 1e-3
    with torch.no_grad():
        model.model.embed_patches.positions.zero_()
    torch.testing.assert_close(model(batch).logits, model(swapped).logits)


def test_other_image_sizes_get_interpolated_positions(family: str) -> None:
    model = make_classifier(family)
    embed = model.model.embed_patches
    with torch.no_grad():  # a table that is linear in the row, so that its stretching is known
        embed.positions[1:] = torch.arange(3.0).repeat_interleave(3)[:, None].double()
    stretched = embed._positions_for(6, 3)
    assert torch.equal(stretched[0], embed.positions[0])
    rows = stretched[1:].unflatten(0, (6, 3))[:, :, 0]
    assert (rows.diff(dim=0) > 0).all()
    torch.testing.assert_close(rows[:, 0], rows[:, 2])
    torch.testing.assert_close(rows.mean(), torch.tensor(1.0).double(), atol=1e-6, rtol=0)
    assert model(random_images(24)).logits.shape == (3, 5)
    with pytest.raises(ValueError, match="13 x 13 cannot be cut into patches of 4 x 4"):
        model(random_images(13))
    with pytest.raises(ValueError, match=r"must be \[B, 2, H, W\]"):
        model(torch.zeros(1, 3, 12, 12).double())


def test_labels_may_be_classes_or_distributions(family: str) -> None:
    model = make_classifier(family, problem_type="single_label_classification")
    classes = torch.tensor([0, 4, 2])
    hard = model(random_images(), labels=classes).loss
    soft = model(random_images(), labels=nn.functional.one_hot(classes, 5).float()).loss
    torch.testing.assert_close(hard, soft)
    logits = model(random_images()).logits.float()
    torch.testing.assert_close(hard, nn.functional.cross_entropy(logits, classes))


def test_drop_path_acts_in_training_alone(family: str) -> None:
    still, model = make_classifier(family), make_classifier(family, drop_path_rate=0.5)
    model.load_state_dict(still.state_dict())
    torch.testing.assert_close(model(random_images()).logits, still(random_images()).logits)
    model.train()
    sampled = [model(random_images()).logits for _ in range(8)]
    assert len({round(float(logits.sum().detach()), 6) for logits in sampled}) > 1
    assert isinstance(model.model.layers[0].drop_path, nn.Identity)  # the rate rises from 0
    assert model.model.layers[1].drop_path.rate == 0.5


def test_drop_path_keeps_the_mean():
    from tokenformer.layers import DropPath

    torch.manual_seed(0)
    layer = DropPath(0.25).train()
    dropped = layer(torch.ones(20_000, 3, 2))
    assert dropped.unique().tolist() == pytest.approx([0, 4 / 3])
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.02)
    assert (dropped.flatten(1).std(1) == 0).all()  # whole samples


def test_options_are_checked():
    config = tokenformer.TokenformerVisionConfig
    assert config(num_classes=7).num_labels == config(num_labels=7).num_classes == 7
    for options, message in (
        ({"image_size": 30}, "image_size=30 must be a multiple of patch_size=16"),
        ({"pooling": "max"}, "pooling='max' is unknown; choose one of class, mean"),
        ({"drop_path_rate": 1.0}, "drop_path_rate=1.0 must be below 1"),
        ({"intermediate_size": 8}, "is an option of TransformerVisionConfig only"),
        ({"depth": 8}, "did you mean 'num_hidden_layers'"),
        ({"num_channels": 0}, "num_channels=0 must be a whole number"),
    ):
        with pytest.raises(ValueError, match=message):
            config(**options)


def test_hidden_states_attentions_and_checkpointing(family: str) -> None:
    model = make_classifier(family, attn_implementation="eager")
    found = model(random_images(), output_hidden_states=True, output_attentions=True)
    assert len(found.hidden_states) == 3
    assert found.attentions[0].shape == (3, 2, 10, 10)
    torch.testing.assert_close(found.attentions[0].sum(-1), torch.ones(3, 2, 10).double())
    labels = torch.tensor([0, 1, 2])
    gradients = []
    for recompute in (False, True):
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        model.zero_grad()
        model(random_images(), labels=labels).loss.backward()
        gradients.append(model.model.embed_patches.project.weight.grad.clone())
    torch.testing.assert_close(*gradients)


def test_every_parameter_has_a_first_value(family: str) -> None:
    """Also if built on the meta device and initialized module by module, as in a run."""
    from tokenformer.train.parallel.meta_init import init_weights

    with torch.device("meta"):
        model = MODEL_CLASSES[vision_config_class(family)](make_classifier(family).config)
    init_weights(model, 0, torch.device("cpu"))
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert model.model.embed_patches.class_token.std().item() == pytest.approx(0.02, rel=0.6)
    assert model.classifier.bias.abs().max() == 0


def test_saved_and_loaded_by_the_auto_classes(family: str, tmp_path: Path) -> None:
    model = make_classifier(family).float()
    model.config.id2label = dict(enumerate("abcde"))
    model.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is type(model.config)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    torch.testing.assert_close(
        loaded(random_images().float()).logits, model(random_images().float()).logits
    )
    assert type(AutoModel.from_pretrained(tmp_path)) is type(model.model)
    smaller = AutoModelForImageClassification.from_pretrained(
        tmp_path, num_labels=3, ignore_mismatched_sizes=True
    )
    assert smaller.num_classes == 3


def test_pipeline_and_image_processor(tmp_path: Path) -> None:
    model = make_classifier("tokenformer", num_channels=1).float()
    model.save_pretrained(tmp_path)
    tokenformer.TokenformerImageProcessor.for_size(12, 1).save_pretrained(tmp_path)
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    gray = Image.fromarray(np.arange(144, dtype=np.uint8).reshape(12, 12))
    pixels = processor(images=gray, return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 1, 12, 12)
    torch.testing.assert_close(pixels[0, 0, 0, :3], torch.tensor([0.0, 1.0, 2.0]) / 127.5 - 1)
    classify = pipeline("image-classification", str(tmp_path))
    rgb = gray.resize((40, 30)).convert("RGB")
    found = classify(rgb, top_k=5)
    expected = model(processor(images=rgb, return_tensors="pt")["pixel_values"]).logits
    assert found[0]["label"] == f"LABEL_{expected.argmax()}"
    assert sum(row["score"] for row in found) == pytest.approx(1, abs=1e-5)


def test_the_processor_crops_the_center():
    processor = tokenformer.TokenformerImageProcessor.for_size(224, crop_share=0.875)
    picture = np.zeros((256, 256, 3), np.uint8)
    picture[16:240, 16:240] = 255
    pixels = processor(images=Image.fromarray(picture), return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 3, 224, 224)
    assert pixels.min() > 2  # only white is left
    with pytest.raises(ValueError, match="num_channels=2 must be 1"):
        tokenformer.TokenformerImageProcessor.for_size(8, 2)


class Stripes(Dataset):
    """Two classes: bright above, bright below."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Any]:
        label = index % 2
        image = torch.zeros(1, 8, 8)
        image[:, 4 * label : 4 * label + 4] = 1
        return {"pixel_values": image, "labels": label}


def test_trainer_trains(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = vision_config_class(family)(
        image_size=8, patch_size=4, num_channels=1, hidden_size=16,
        num_hidden_layers=1, num_attention_heads=2, num_classes=2,
    )  # fmt: skip
    arguments = TrainingArguments(
        str(tmp_path), max_steps=30, per_device_train_batch_size=8, learning_rate=1e-2,
        report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(MODEL_CLASSES[type(config)](config), arguments, train_dataset=Stripes())
    trainer.train()
    predicted = trainer.predict(Stripes()).predictions.argmax(1)
    assert (predicted == np.arange(32) % 2).all()


PROBLEMS = {
    "single_label_classification": torch.tensor([0, 4, 2, 1]),
    "multi_label_classification": torch.tensor([[1.0, 0, 0, 1, 0], [0, 1, 1, 0, 0]]).repeat(2, 1),
    "regression": torch.linspace(-1, 1, 20).reshape(4, 5),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_loss_follows_the_problem_type(family: str, problem: str) -> None:
    """The loss of transformers' ViT, and over accumulated batches that of one large batch."""
    from transformers.loss.loss_utils import ForSequenceClassificationLoss

    model, labels = make_classifier(family, problem_type=problem), PROBLEMS[problem]
    batch = random_images(count=4)
    logits = model(batch).logits.float()
    whole = model(batch, labels=labels).loss
    expected = ForSequenceClassificationLoss(labels, logits, model.config)
    torch.testing.assert_close(whole, expected)
    items = labels.numel()  # as Trainer counts them
    parts = [
        model(batch[rows], labels=labels[rows], num_items_in_batch=items).loss
        for rows in (slice(0, 1), slice(1, 4))
    ]
    torch.testing.assert_close(sum(parts), whole)


def test_problem_type_is_inferred_as_vit_does(family: str, tmp_path: Path) -> None:
    for problem in ("single_label_classification", "multi_label_classification"):
        model = make_classifier(family)
        model(random_images(count=4), labels=PROBLEMS[problem])
        assert model.config.problem_type == problem
    one = make_classifier(family, num_classes=1)
    loss = one(random_images(), labels=torch.tensor([0.5, -1.0, 2.0])).loss
    assert one.config.problem_type == "regression"
    errors = one(random_images()).logits.squeeze(1).float() - torch.tensor([0.5, -1.0, 2.0])
    torch.testing.assert_close(loss, errors.square().mean())
    with pytest.raises(ValueError, match="problem_type='multi_label' is unknown; choose one of"):
        make_classifier(family, problem_type="multi_label")


def test_input_embeddings_are_the_patches(family: str) -> None:
    model = make_classifier(family)
    embed = model.model.embed_patches
    assert model.get_input_embeddings() is model.model.get_input_embeddings() is embed
    model.enable_input_require_grads()
    assert model.get_input_embeddings()(random_images()).requires_grad
    other = PatchEmbedding(12, 4, 2, 16).double()
    model.set_input_embeddings(other)
    assert model.model.embed_patches is other
