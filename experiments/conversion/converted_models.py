"""Convert a source model, train the results further, and compare every model with the source."""

import copy
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

import tokenformer
from experiments.conversion.source_model import train_model
from tokenformer.convert.pretrained.distillation import distill_model
from tokenformer.convert.pretrained.from_transformer import from_transformer
from tokenformer.convert.pretrained.source_comparison import compare_with_source
from tokenformer.data.batches import fixed_batches
from tokenformer.data.standard_library import standard_library

if TYPE_CHECKING:
    from experiments.conversion import Conversion

Row = dict[str, Any]


class ConvertedModels:
    """The models that are made of one source, a row of figures each."""

    def __init__(self, job: "Conversion", source: Path) -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.job, self.length = job, job.source.length
        self.source = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
        self.texts = standard_library()
        train_text, held_out = self.texts
        sizes = {"batch_size": 8, "length": self.length}
        self.batches = fixed_batches(train_text, count=16, **sizes)
        self.measured = fixed_batches(held_out, count=32, **sizes)

    def rows(self) -> Iterator[Row]:
        job = self.job
        yield self.row("source", self.source)
        models = {}
        for linear in ("pair", "shift"):
            if job.source.kind != "llama":  # its maps are fitted to data
                yield self.converted_row(f"{linear}, without data", linear, None)[0]
            row, models[linear] = self.converted_row(linear, linear, self.batches)
            yield row
            half = copy.deepcopy(models[linear]).bfloat16()
            yield self.row(f"{linear}, in bf16", half)
        inputs = [batch[:, :-1] for batch in self.batches]
        smaller, _ = tokenformer.prune(models["pair"], inputs, keep=0.9)
        yield self.row("pair, a tenth pruned", smaller)
        models["random"] = random_model(models["pair"].config)
        yield self.row("random", models["random"])
        rates = {"source": job.rate, "pair": job.rate, "shift": job.rate, "random": job.fresh_rate}
        for name in ("pair", "random"):
            rate = job.distillation_rate if name == "pair" else job.fresh_rate
            yield self.row(f"{name}, distilled", self.distilled(models[name], rate))
        for name, rate in rates.items():
            model = self.source if name == "source" else models[name]
            yield self.row(f"{name}, continued", self.continued(model, rate))

    def row(self, name: str, model: Any) -> Row:
        comparison = compare_with_source(self.source, model, self.measured)
        return {"name": name, "parameters": model.num_parameters(), **asdict(comparison)}

    def converted_row(self, name: str, linear: str, batches: Any) -> tuple[Row, Any]:
        model, report = from_transformer(self.source, batches, linear=linear)
        errors = {part.name: float(f"{part.error:.2e}") for part in report.maps}
        return self.row(name, model) | {"errors": errors}, model

    def distilled(self, model: Any, rate: float) -> Any:
        student = copy.deepcopy(model)
        distill_model(
            student,
            self.source,
            *self.texts,
            steps=self.job.more,
            length=self.length,
            learning_rate=rate,
        )
        return student

    def continued(self, model: Any, rate: float) -> Any:
        trained = copy.deepcopy(model)
        train_model(
            trained, self.texts, length=self.length, steps=self.job.more, rate=rate, batch_size=8
        )
        return trained


def random_model(config: Any) -> Any:
    """Build a model with as many tokens and the usual norms, scales and random weights."""
    torch.manual_seed(0)
    kept = (
        *("q_tokens", "k_tokens", "v_tokens", "output_tokens", "ffn_tokens"),
        *("num_key_value_heads", "positions", "tie_word_embeddings"),
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
        *("max_position_embeddings", "bos_token_id", "eos_token_id"),
    )
    options = {name: getattr(config, name) for name in kept}
    return tokenformer.TokenformerForCausalLM(tokenformer.TokenformerConfig(**options))
