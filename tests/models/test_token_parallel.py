"""Models with tokens sharded over two processes match one process."""

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.support.processes import run_processes, whole
from tokenformer import (
    TokenformerConfig,
    TokenformerForCausalLM,
    TokenformerForImageClassification,
    TokenformerVisionConfig,
)
from tokenformer.growth.tokens.prefix import set_active_share
from tokenformer.layers.sharded import ShardedPattention
from tokenformer.models.token_parallel import shard_tokens

BLOCKS: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "qkv_tokens": 23,  # uneven
    "output_tokens": 20,
    "ffn_tokens": 45,
    "learned_scale": True,
}
IDS = torch.arange(24).reshape(2, 12) % 61


def large(model: Any) -> Any:
    """With weights large enough that every part moves the output."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "scale_tokens" not in name:
                parameter.normal_(std=0.5, generator=generator)
    return model


def language_model(**options: Any) -> Any:
    return large(TokenformerForCausalLM(TokenformerConfig(vocab_size=61, **BLOCKS, **options)))


def vision_model() -> Any:
    config = TokenformerVisionConfig(
        image_size=8, patch_size=4, num_channels=1, num_labels=3, **BLOCKS
    )
    return large(TokenformerForImageClassification(config))


def losses_and_gradients(model: Any, **inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    outputs = model(**inputs)
    outputs.loss.backward()
    return outputs.logits.detach(), {n: whole(p.grad) for n, p in model.named_parameters()}


def assert_same(model: Any, sharded: Any, **inputs: Tensor) -> None:
    logits, gradients = losses_and_gradients(model, **inputs)
    our_logits, our_gradients = losses_and_gradients(sharded, **inputs)
    torch.testing.assert_close(our_logits, logits, rtol=1e-10, atol=1e-10)
    assert our_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(our_gradients[name], gradient, rtol=1e-8, atol=1e-10, msg=name)


def compare_spread_models() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = language_model(residual="parallel").double()
    sharded = copy.deepcopy(model)
    shard_tokens(sharded, mesh)
    layer = sharded.model.layers[0].ffn
    assert isinstance(layer, ShardedPattention)
    assert layer.num_tokens == 45
    assert len(layer.key_tokens.to_local()) == (23, 22)[mesh.get_rank()]
    assert_same(model, sharded, input_ids=IDS, labels=IDS)
    for share in (0.3, 0.8, None):  # of the first only the first process has tokens
        for some in (model, sharded):
            set_active_share(some, share)
        assert_same(model, sharded, input_ids=IDS, labels=IDS)
    for some in (model, sharded):
        some.gradient_checkpointing_enable({"use_reentrant": False})
        some.train()
    assert_same(model, sharded, input_ids=IDS, labels=IDS)

    model = vision_model().double()
    sharded = copy.deepcopy(model)
    shard_tokens(sharded, mesh)
    pictures = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(1)).double()
    assert_same(model, sharded, pixel_values=pictures, labels=torch.tensor([0, 1, 2]))


def compare_loaded_models(folder: Path) -> None:
    model = TokenformerForCausalLM.from_pretrained(folder)
    with warnings.catch_warnings():
        # Newer: distributed_config=DistributedConfig(tp_plan="auto"), which it is passed on as.
        warnings.simplefilter("ignore", FutureWarning)
        sharded = TokenformerForCausalLM.from_pretrained(folder, tp_plan="auto")
    assert len(sharded.model.layers[0].ffn.key_tokens.to_local()) < 45
    with torch.no_grad():
        torch.testing.assert_close(sharded(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    assert_equal_text(model, sharded)
    sharded.save_pretrained(folder / "again")
    again = TokenformerForCausalLM.from_pretrained(folder / "again")
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name


def assert_equal_text(model: Any, sharded: Any) -> None:
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(
        sharded.generate(IDS[:1, :4], **options), model.generate(IDS[:1, :4], **options)
    )


def compare_models(folder: Path) -> None:
    compare_spread_models()
    compare_loaded_models(folder)


def test_two_processes_match_one(tmp_path):
    """In one go, since most of the time goes into starting the processes: loss and gradients of
    models sharded by us, then logits and text of one that transformers has loaded by its plan."""
    language_model().save_pretrained(tmp_path)
    run_processes(2, compare_models, tmp_path, tmp_path)
