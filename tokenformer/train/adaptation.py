"""Ways to adapt a trained model: what trains, and what is exported.

    adaptation = make_adaptation(options, base="runs/text/model", seed=0)
    adaptation.attach(model)                            # freezes the base, in place
    adaptation.export(model, Path("runs/python/adapter"), preprocessor)

Adapters are those of peft, injected into the model, so a checkpoint of peft's library loads what is
exported. The model itself is what trains: it has the same forward pass, hooks and blocks as
without an adapter.
"""

import importlib.util
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tokenformer import files
from tokenformer.errors import CheckpointError, TokenformerError
from tokenformer.growth.tokens.token_set import token_layers
from tokenformer.installation import install_hint
from tokenformer.layers.quantized import QuantizedPattention
from tokenformer.models.configuration import TokenConfig
from tokenformer.models.seeds import named_seed
from tokenformer.train.checkpoint.tensors import not_finite
from tokenformer.train.export import export
from tokenformer.train.options import ADAPTED_LAYERS, AdapterOptions
from tokenformer.train.parallel.ranks import Ranks
from tokenformer.train.sparse_rows import TokenRates

TOKENS = ("key_tokens", "value_tokens")
LABELS = "labels.json"
"""Names of the classes of an adapter with a classifier of its own, in its folder."""


class FullTraining:
    """All parameters train; the result is an ordinary model."""

    def attach(self, model: Any) -> None:
        """Nothing is frozen."""

    def trained_parameters(self, model: Any) -> int:
        return count(model)

    def export(self, model: Any, folder: Path, preprocessor: Any) -> None:
        export(model, preprocessor, folder)


class SparseRows:
    """The chosen tokens train in place (`train.row_rates`); the result is an ordinary model."""

    def __init__(
        self, options: AdapterOptions, rates: TokenRates, unfrozen: tuple[str, ...]
    ) -> None:
        self.options, self.rates, self.unfrozen = options, rates, unfrozen
        self.base_rates: TokenRates | None = None

    def attach(self, model: Any) -> None:
        names = [
            f"{name}.{part}" for name in adapted_layers(model, self.options) for part in TOKENS
        ]
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in names or name.partition(".")[0] in self.unfrozen)
        self.base_rates = model.config.token_rates
        model.config.token_rates = self.rates

    def trained_parameters(self, model: Any) -> int:
        total = count(model)
        for (projection, block), layer in token_layers(model).values():
            if layer.key_tokens.requires_grad:
                frozen = model.config.row_rates(projection, block).count(0.0)
                total -= frozen * (layer.in_features + layer.out_features)
        return total

    def export(self, model: Any, folder: Path, preprocessor: Any) -> None:
        """The rates of this run are not those of the model."""
        model.config.token_rates = self.base_rates
        try:
            export(model, preprocessor, folder)
        finally:
            model.config.token_rates = self.rates


class PeftAdapter:
    """Tokens or low-rank updates from peft; the base is frozen, and the result is its adapter."""

    def __init__(
        self, options: AdapterOptions, base: str, seed: int, unfrozen: tuple[str, ...]
    ) -> None:
        if importlib.util.find_spec("peft") is None:
            raise TokenformerError(f"method {options.method} needs peft: {install_hint('peft')}")
        self.options, self.base, self.seed, self.unfrozen = options, base, seed, unfrozen
        self.peft_model: Any = None

    def attach(self, model: Any) -> None:
        from peft import get_peft_model

        about = {
            "base_model_name_or_path": self.base,
            "modules_to_save": [*self.unfrozen] or None,
            "task_type": "CAUSAL_LM" if hasattr(model, "lm_head") else None,
        }
        model.name_or_path = self.base
        with torch.random.fork_rng(devices=[]), peft_warnings():
            torch.manual_seed(named_seed(self.seed, "adapter"))
            self.peft_model = get_peft_model(model, self.config(model, about))

    def config(self, model: Any, about: dict[str, Any]) -> Any:
        options = self.options
        if options.method == "tokens":
            from tokenformer.adapters import TokenAdapterConfig

            return TokenAdapterConfig(
                num_tokens=options.tokens,
                target_modules=options.layers or ["ffn"],
                layers_to_transform=options.blocks,
                norm=options.norm,
                init_seed=self.seed,
                **about,
            )
        from peft import LoraConfig

        arguments: dict[str, Any] = {**low_rank_targets(model, options), **about}
        alpha: Any = 2 * options.rank if options.alpha is None else options.alpha
        return LoraConfig(r=options.rank, lora_alpha=alpha, use_rslora=options.rslora, **arguments)

    def trained_parameters(self, model: Any) -> int:
        return count(model)

    def export(self, model: Any, folder: Path, preprocessor: Any) -> None:
        """Write the adapter as peft does. Collective: rank 0 gathers the shards and writes."""
        path, ranks = Path(folder), Ranks()
        task = f"export {path} cannot be written"
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        with ranks.together(task):
            if name := not_finite(trained):
                raise CheckpointError(f"{name} holds a NaN or an infinity")
        whole: dict[str, Tensor] = {}
        for name, tensor in trained.items():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            whole[f"base_model.model.{name}"] = full.detach().cpu()
        with ranks.together(task):
            if ranks.first:
                unfinished = files.start_folder(path, siblings=escape(path.name))
                try:
                    self.write(model, whole, unfinished)
                    files.finish_folder(unfinished, path)
                except BaseException:
                    files.discard_folder(unfinished)
                    raise

    def write(self, model: Any, tensors: dict[str, Tensor], folder: Path) -> None:
        with peft_warnings():
            self.peft_model.save_pretrained(folder, state_dict=tensors, save_embedding_layers=False)
        if self.unfrozen:
            labels = [model.config.id2label[index] for index in range(model.config.num_labels)]
            files.write_atomic(folder / LABELS, json.dumps(labels, indent=1) + "\n")


Adaptation = FullTraining | SparseRows | PeftAdapter


@contextmanager
def peft_warnings() -> Iterator[None]:
    """Silence what peft warns of our models, and of its use of transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def check_adaptation(model: Any, options: AdapterOptions) -> None:
    """Raise if the method cannot adapt this model."""
    is_tokens = isinstance(model.config, TokenConfig)
    if options.method in ("tokens", "sparse") and not is_tokens:
        raise ValueError(
            f"adapter.method={options.method} trains parameter tokens, which a "
            f"{type(model).__name__} does not have; use lora or full"
        )
    quantized = any(isinstance(module, QuantizedPattention) for module in model.modules())
    if quantized and options.method != "tokens":
        raise ValueError(
            f"adapter.method={options.method} cannot train a quantized model; use tokens, or the "
            "model it was quantized from"
        )
    blocks = model.config.num_hidden_layers
    for block in options.blocks or []:
        if not 0 <= block < blocks:
            raise ValueError(
                f"adapter.blocks: there is no block {block}; there are 0 to {blocks - 1}"
            )


def adapted_layers(
    model: Any, options: AdapterOptions, default: tuple[str, ...] = ("ffn",)
) -> list[str]:
    """Return the full names of the layers that the options choose."""
    wanted = options.layers or default
    chosen = range(model.config.num_hidden_layers) if options.blocks is None else options.blocks
    names = []
    for index, block in enumerate(model.model.layers):
        for name, _ in block.named_modules():
            if index in chosen and name.rpartition(".")[2] in wanted:
                names.append(f"model.layers.{index}.{name}")
    return names


def low_rank_targets(model: Any, options: AdapterOptions) -> dict[str, list[str]]:
    """Return the matrices to update as arguments of `LoraConfig`: the keys and values of tokens,
    which are parameters, or the weights of a Transformer, which are modules."""
    layers = adapted_layers(model, options, ADAPTED_LAYERS)
    if isinstance(model.config, TokenConfig):
        return {
            "target_parameters": [
                f"{n}.{p}" for n in layers for p in ("key_tokens", "value_tokens")
            ]
        }
    return {
        "target_modules": [
            f"{layer}.{inner}" if inner else layer
            for layer in layers
            for inner, module in model.get_submodule(layer).named_modules()
            if isinstance(module, nn.Linear)
        ]
    }
