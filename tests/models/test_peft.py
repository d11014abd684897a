"""LoRA on parameter tokens by peft: trained by Trainer, saved, loaded, merged, grown."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import tokenformer

Make = Callable[..., Any]
TARGETS = {
    "all": ["key_tokens", "value_tokens"],
    "ffn": ["ffn.key_tokens", "ffn.value_tokens"],
    "values": ["q.value_tokens", "v.value_tokens"],
}
IDS = torch.arange(2 * 9).view(2, 9)


@pytest.fixture
def base(make_model: Make, tmp_path: Path) -> Callable[[], Any]:
    """base(): the same model from its folder each time."""
    make_model("tokenformer").float().save_pretrained(tmp_path / "base")
    return lambda: AutoModelForCausalLM.from_pretrained(tmp_path / "base")


def train(model: Any, folder: Path, checkpointing: bool) -> list[float]:
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(61, (1, 12)).repeat(16, 1)]
    options = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1}
    arguments = TrainingArguments(
        str(folder),
        max_steps=8,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        gradient_checkpointing=checkpointing,
        **options,
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    trainer.save_model(str(folder))
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("targets", TARGETS)
def test_adapter_trains_saves_loads_and_merges(base: Any, tmp_path: Path, targets: str) -> None:
    model = base()
    before = {name: value.clone() for name, value in model.named_parameters()}
    plain = model(IDS).logits
    options = LoraConfig(r=4, target_parameters=TARGETS[targets], task_type="CAUSAL_LM")
    adapted = get_peft_model(model, options)
    assert torch.equal(adapted(IDS).logits, plain), "an adapter begins as nothing"
    losses = train(adapted, tmp_path / "adapter", checkpointing=targets == "ffn")
    assert losses[-1] < 0.97 * losses[0]
    logits = adapted.eval()(IDS).logits
    assert (logits - plain).abs().max() > 0.01

    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as file:
        assert all(".lora_" in name for name in file.keys())  # noqa: SIM118
    loaded = PeftModel.from_pretrained(base(), tmp_path / "adapter")
    torch.testing.assert_close(loaded(IDS).logits, logits)
    with loaded.disable_adapter():
        assert torch.equal(loaded(IDS).logits, plain)

    merged = loaded.merge_and_unload()
    assert type(merged) is tokenformer.TokenformerForCausalLM
    torch.testing.assert_close(merged(IDS).logits, logits)
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    changed = {n for n, value in merged.named_parameters() if not torch.equal(value, before[n])}
    assert changed == {n for n in before if any(n.endswith(end) for end in TARGETS[targets])}
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(again(IDS).logits, merged(IDS).logits)
    _, report = tokenformer.grow(again, ffn_tokens=60)
    assert report.max_output_change < 1e-5


def test_unsupported_uses_are_refused(base: Any) -> None:
    """As docs/guides/lora.md has it; where peft learns one of these, the page should say so."""
    tokens = TARGETS["ffn"]
    with pytest.raises(ValueError, match="does not work with lora_dropout"):
        get_peft_model(base(), LoraConfig(target_parameters=tokens, lora_dropout=0.1))
    with pytest.raises(ValueError, match="does not work with use_dora"):
        get_peft_model(base(), LoraConfig(target_parameters=tokens, use_dora=True))
    with pytest.raises(ValueError, match=r"Pattention.* is not supported"):
        get_peft_model(base(), LoraConfig(target_modules=["ffn"]))
    adapted = get_peft_model(base(), LoraConfig(target_parameters=tokens))
    with pytest.raises(TypeError, match="merge it first"):
        tokenformer.grow(adapted, ffn_tokens=60)
    embedding = LoraConfig(target_modules=["embed_tokens"], init_lora_weights=False)
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        adapted = get_peft_model(base(), embedding).eval()
    logits = adapted(IDS).logits
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        merged = adapted.merge_and_unload()
    assert (merged(IDS).logits - logits).abs().max() > 1, "merging changes the output head too"
