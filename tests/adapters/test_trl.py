"""Token adapters with TRL: an SFT run trains the adapter on completions and saves it."""

import pytest
import torch
from peft import PeftModel

from tests.support.adapters import make_base
from tokenformer import TokenAdapterConfig, TokenformerForCausalLM
from tokenformer.data.byte_tokenizer import byte_tokenizer

trl = pytest.importorskip("trl", reason="trl is not installed")


@pytest.mark.parametrize("norm", ["shared", "own"])
def test_supervised_fine_tuning(norm, tmp_path):
    from datasets import Dataset

    make_base(vocab_size=257, max_position_embeddings=64).save_pretrained(tmp_path / "base")
    base = TokenformerForCausalLM.from_pretrained(tmp_path / "base")
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    rows = [{"prompt": "one two ", "completion": "three"}, {"prompt": "a ", "completion": "b"}]
    trainer = trl.SFTTrainer(
        base,
        args=trl.SFTConfig(
            str(tmp_path / "run"),
            max_steps=4,
            per_device_train_batch_size=2,
            learning_rate=3e-2,
            lr_scheduler_type="constant",
            logging_steps=1,
            bf16=False,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(rows * 2),
        processing_class=byte_tokenizer(),
        peft_config=TokenAdapterConfig(num_tokens=4, norm=norm),
    )
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert float(losses[-1]) < float(losses[0])
    trained = trainer.model.eval()
    for name, weight in trained.state_dict().items():
        if "token_adapter" not in name:
            original = name.removeprefix("base_model.model.").replace(".base_layer", "")
            assert torch.equal(weight, before[original]), name
    trainer.save_model(str(tmp_path / "adapter"))
    again = PeftModel.from_pretrained(
        TokenformerForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
    )
    ids = torch.randint(257, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(again.eval()(ids).logits, trained(ids).logits)
        with again.disable_adapter():
            assert not torch.allclose(again(ids).logits, trained(ids).logits, atol=1e-3)
