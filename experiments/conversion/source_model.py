"""Small pretrained Transformers of transformers' own classes: built, and trained on bytes."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from tokenformer.data.byte_tokenizer import END_OF_TEXT, VOCAB_SIZE
from tokenformer.data.corpus import TokenIds
from tokenformer.train.loop import Loop, train
from tokenformer.train.options import OptimizerOptions, RunOptions, ScheduleOptions
from tokenformer.train.task import LanguageTask


def new_source(kind: str, width: int, layers: int, length: int) -> Any:
    """Return a model with random weights."""
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": length,
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": END_OF_TEXT,
    }
    if kind == "gpt2":
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **dropout))
    if kind == "gpt_neox":
        config = transformers.GPTNeoXConfig(**shape, intermediate_size=4 * width)
        return transformers.GPTNeoXForCausalLM(config)
    own = {
        "intermediate_size": 11 * width // 4,  # three matrices instead of two
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **own))


class SummedLoss(nn.Module):
    """Summed loss of any causal language model of transformers, from token ids [B, T + 1]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


@dataclass
class TransformersTask(LanguageTask):
    def __post_init__(self) -> None:
        self.module = SummedLoss(self.model)
        self.tokens_per_sample = self.length
        self.chance_loss = math.log(self.model.config.vocab_size)
        self.flops_per_sample = 6 * self.model.num_parameters() * self.length
        self.least_activation_bytes = 0  # accounting supports only our own models


def train_model(
    model: Any,
    texts: tuple[TokenIds, TokenIds],
    *,
    length: int,
    steps: int,
    rate: float,
    batch_size: int,
) -> None:
    """Train any causal language model in place on the first text; the second is held out."""
    loop = Loop(
        TransformersTask(model, *texts, length=length),
        OptimizerOptions(learning_rate=rate),
        ScheduleOptions(warmup_steps=min(50, steps // 10)),
        RunOptions(
            steps=steps, batch_size=batch_size, validate_every=steps, validation_sequences=1
        ),
    )
    train(loop, lambda row: None)
