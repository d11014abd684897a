"""Convert small pretrained Transformers to TokenFormers and compare them with random weights.

    python experiments/from-transformer/study.py --out runs/from-transformer

Claim: a converted Transformer with layer norms keeps its loss before any training, a Llama loses
little, and both can be trained further. A GPT-NeoX, a GPT-2 and a Llama of transformers, four
layers of width 128, train on the bytes of Python's standard library for `--steps` steps. Each is
converted; the result and a TokenFormer of the same size with random weights then train for `--more`
steps, by distillation from the source or on the text. All losses are on held-out files. Takes half
an hour on one core, most of it for the sources, which are saved. Output: a table and a row of JSON
per model (results.jsonl). Results: docs/results/conversion.md.
"""

import argparse
import copy
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import tokenformer
from tokenformer.convert.pretrained.distillation import distill_model
from tokenformer.convert.pretrained.from_transformer import from_transformer
from tokenformer.convert.pretrained.source_comparison import compare_with_source
from tokenformer.data.batches import fixed_batches
from tokenformer.data.byte_tokenizer import END_OF_TEXT, VOCAB_SIZE
from tokenformer.data.standard_library import standard_library
from tokenformer.train.loop import Loop, train
from tokenformer.train.options import OptimizerOptions, RunOptions, ScheduleOptions
from tokenformer.train.task import LanguageTask

LENGTH = 128
RATE, DISTILLATION_RATE = 2e-3, 3e-5
"""For random weights, and for a trained model."""
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": END_OF_TEXT,
}
KINDS = ("gpt_neox", "gpt2", "llama")


def new_source(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SHAPE, **dropout))
    if kind == "gpt_neox":
        config = transformers.GPTNeoXConfig(**SHAPE, intermediate_size=512)
        return transformers.GPTNeoXForCausalLM(config)
    own = {"intermediate_size": 352, "num_key_value_heads": 2, "tie_word_embeddings": True}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, **own))


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


class Study:
    def __init__(self, out: Path, steps: int, more: int, rate: float) -> None:
        self.out, self.steps, self.more, self.rate = out, steps, more, rate
        self.train_tokens, self.held_out = standard_library()
        self.batches = fixed_batches(self.train_tokens, batch_size=8, length=LENGTH, count=16)
        self.measured = fixed_batches(self.held_out, batch_size=8, length=LENGTH, count=32)
        self.results: list[dict[str, Any]] = []

    def train(self, model: Any, steps: int, rate: float, batch_size: int) -> None:
        loop = Loop(
            TransformersTask(model, self.train_tokens, self.held_out, length=LENGTH),
            OptimizerOptions(learning_rate=rate),
            ScheduleOptions(warmup_steps=min(50, steps // 10)),
            RunOptions(
                steps=steps, batch_size=batch_size, validate_every=steps, validation_sequences=1
            ),
        )
        train(loop, lambda row: None)

    def source(self, kind: str) -> Any:
        folder = self.out / kind
        if not (folder / "config.json").exists():
            model = new_source(kind)
            self.train(model, self.steps, RATE, batch_size=16)
            model.save_pretrained(folder)
        return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()

    def report(self, kind: str, name: str, source: Any, model: Any, **more: Any) -> None:
        comparison = compare_with_source(source, model, self.measured)
        row = {
            "kind": kind,
            "name": name,
            "parameters": model.num_parameters(),
            **asdict(comparison),
        }
        self.results.append(row | more)
        print(
            f"{kind:9} {name:32} {row['parameters']:>9,} parameters  "
            f"{comparison.loss / math.log(2):.4f} bits per byte  "
            f"divergence {comparison.divergence:.2e}  agreement {comparison.agreement:.2%}",
            flush=True,
        )

    def distill(self, kind: str, name: str, source: Any, model: Any, rate: float) -> None:
        student = copy.deepcopy(model)
        texts = (self.train_tokens, self.held_out)
        distill_model(student, source, *texts, steps=self.more, length=LENGTH, learning_rate=rate)
        self.report(kind, f"{name}, distilled", source, student)

    def continue_training(self, kind: str, name: str, source: Any, model: Any, rate: float) -> None:
        trained = copy.deepcopy(model)
        self.train(trained, self.more, rate, batch_size=8)
        self.report(kind, f"{name}, continued", source, trained)

    def run(self, kind: str) -> None:
        source = self.source(kind)
        self.report(kind, "source", source, source)
        models = {}
        for linear in ("pair", "shift"):
            if kind != "llama":
                model, _ = from_transformer(source, linear=linear)
                self.report(kind, f"{linear}, without data", source, model)
            models[linear], report = from_transformer(source, self.batches, linear=linear)
            errors = {part.name: part.error for part in report.maps}
            self.report(kind, linear, source, models[linear], errors=errors)
            half = copy.deepcopy(models[linear]).bfloat16()
            self.report(kind, f"{linear}, in bf16", source, half)
        inputs = [batch[:, :-1] for batch in self.batches]
        smaller, _ = tokenformer.prune(models["pair"], inputs, keep=0.9)
        self.report(kind, "pair, a tenth pruned", source, smaller)
        fresh = random_model(models["pair"].config)
        self.report(kind, "random", source, fresh)
        if self.more:
            self.distill(kind, "pair", source, models["pair"], DISTILLATION_RATE)
            self.distill(kind, "random", source, fresh, RATE)
            self.continue_training(kind, "source", source, source, self.rate)
            self.continue_training(kind, "pair", source, models["pair"], self.rate)
            self.continue_training(kind, "shift", source, models["shift"], self.rate)
            self.continue_training(kind, "random", source, fresh, RATE)


def random_model(config: Any) -> Any:
    """Build a model with as many tokens and the usual norms, scales and random weights."""
    torch.manual_seed(0)
    tokens = ("q_tokens", "k_tokens", "v_tokens", "output_tokens", "ffn_tokens")
    kept = ("num_key_value_heads", "positions", "tie_word_embeddings")
    options = {name: getattr(config, name) for name in (*tokens, *kept, *SHAPE)}
    return tokenformer.TokenformerForCausalLM(tokenformer.TokenformerConfig(**options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/from-transformer"))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--steps", type=int, default=1000, help="training steps of the sources")
    parser.add_argument(
        "--more", type=int, default=60, help="training steps after conversion; 0 for none"
    )
    parser.add_argument(
        "--rate", type=float, default=1e-4, help="learning rate of continued training"
    )
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    options.out.mkdir(parents=True, exist_ok=True)
    study = Study(options.out, options.steps, options.more, options.rate)
    for kind in options.kinds:
        study.run(kind)
        text = "".join(json.dumps(row) + "\n" for row in study.results)
        (options.out / "results.jsonl").write_text(text)


if __name__ == "__main__":
    main()
