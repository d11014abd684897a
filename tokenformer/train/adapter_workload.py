"""The data and models of a run that adapts a trained model.

It wraps the workload of the new data. The kept data is a workload too, of which only the held-out
samples are used. Checkpoints hold what trains; the base is loaded again from `model.start_from` and
must be the same.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tokenformer.errors import AdapterError, DataError
from tokenformer.growth.tokens.token_set import token_layers
from tokenformer.layers.quantized import QuantizedPattention
from tokenformer.layers.router import routing_biases
from tokenformer.models.fingerprint import fingerprint
from tokenformer.train.adaptation import (
    Adaptation,
    FullTraining,
    PeftAdapter,
    SparseRows,
    adapted_layers,
    check_adaptation,
)
from tokenformer.train.image_workload import ImageWorkload
from tokenformer.train.options import Recipe
from tokenformer.train.parallel.ranks import Ranks
from tokenformer.train.run_record import ADAPTER, MODEL
from tokenformer.train.sparse_rows import TokenRates, rates_of_best, token_scores
from tokenformer.train.task import Task
from tokenformer.train.text_workload import TextWorkload
from tokenformer.train.trained_part import TrainedPart

SAMPLES = 64
"""Sequences or images of each corpus on which the use of tokens is measured."""
BASE = "base"
"""The fingerprint of the base in the state of a checkpoint."""


class AdapterWorkload:
    def __init__(self, recipe: Recipe) -> None:
        options, start = recipe.adapter, recipe.model.start_from
        if start is None:
            raise ValueError("model.start_from is missing; name the model to adapt")
        self.recipe, self.options, self.start = recipe, options, start
        self.data = data_workload(recipe)
        self.kept: TextWorkload | ImageWorkload | None = None
        if options.keep is not None:
            self.kept = kept_workload(recipe, self.data)
        self.unit, self.train = self.data.unit, self.data.train
        self.export_name = ADAPTER if options.is_saved_apart else MODEL
        self.adaptation: Adaptation = FullTraining()
        self.base: str | None = None
        """The fingerprint of the base; None if it is trained itself."""

    def first_model(self) -> Any:
        model = self.load_base()
        rates: TokenRates | None = None
        if self.options.method == "sparse":
            # Every rank measures the same; on different devices sums may differ in the last bits.
            rates = Ranks().share(self.choose_rows(model))
        return self.attach(model, rates)

    def saved_model(self, state: dict[str, Any]) -> Any:
        if not self.options.freezes_base:
            return self.data.saved_model(state)
        model = self.load_base()
        if state.get(BASE) != self.base:
            raise AdapterError(
                f"the run adapts a model with the weights {state.get(BASE)}, but "
                f"model.start_from={self.start} now has {self.base}; restore that model, or name "
                "another --out"
            )
        return self.attach(model, state["config"].get("token_rates"))

    def load_base(self) -> Any:
        model = self.data.load_base(self.start, self.recipe.model.family, self.recipe.run.seed)
        check_adaptation(model, self.options)
        if isinstance(self.kept, TextWorkload):
            self.kept.check_tokenizer(self.start, model)
        if self.options.freezes_base:
            self.base = weights_of_base(model, self.data.unfrozen)
        return model

    def attach(self, model: Any, rates: TokenRates | None) -> Any:
        options = self.options
        if options.method == "sparse":
            assert rates is not None
            self.adaptation = SparseRows(options, rates, self.data.unfrozen)
        elif options.is_saved_apart:
            seed = self.recipe.run.seed
            self.adaptation = PeftAdapter(options, self.start, seed, self.data.unfrozen)
        self.adaptation.attach(model)
        return model

    def choose_rows(self, model: Any) -> TokenRates:
        """Return the rates of the existing tokens: 1 for those to train, 0 for the others."""
        assert self.kept is not None
        options = self.options
        places = {name: place for name, (place, _) in token_layers(model).items()}
        places = {name: places[name] for name in adapted_layers(model, options)}
        new, kept = (part.inputs(model, SAMPLES) for part in (self.data, self.kept))
        scores = token_scores(model, new, kept, places)
        blocks = model.config.num_hidden_layers
        return rates_of_best(scores, places, blocks, options.count_rows)

    def task(self, model: Any) -> Task:
        task = self.data.task(model)
        if self.options.freezes_base:
            task.trained = TrainedPart(model)
        if self.kept is not None:
            task.kept = self.kept.task(model)
        return task

    def state(self) -> dict[str, Any]:
        return {BASE: self.base}

    def token_batches(self) -> Iterator[Tensor] | None:
        return self.data.token_batches()

    def preprocessor(self, model: Any) -> Any:
        return self.data.preprocessor(model)

    def export(self, model: Any, folder: Path) -> None:
        self.adaptation.export(model, folder, self.preprocessor(model))

    def notes(self, model: Any) -> list[str]:
        trained = self.trained_parameters(model)
        notes = [f"{trained:,} of these parameters train, by method {self.options.method}"]
        if self.data.unfrozen:
            notes.append("The images have other classes than the model: its classifier trains too")
        return [*notes, *self.data.notes(model)]

    def trained_parameters(self, model: Any) -> int:
        return self.adaptation.trained_parameters(model)


def data_workload(recipe: Recipe) -> TextWorkload | ImageWorkload:
    return TextWorkload(recipe) if recipe.data.images is None else ImageWorkload(recipe)


def kept_workload(
    recipe: Recipe, data: TextWorkload | ImageWorkload
) -> TextWorkload | ImageWorkload:
    """Return the workload of the kept data, which must fit the model and its head."""
    keep = recipe.adapter.keep
    if isinstance(data, TextWorkload):
        return TextWorkload(replace(recipe, data=replace(recipe.data, corpus=keep)))
    kept = ImageWorkload(replace(recipe, data=replace(recipe.data, images=keep)))
    if list(kept.classes) != list(data.classes):
        raise DataError(
            f"adapter.keep={keep} has other classes than {recipe.data.images}; a classifier can "
            "only be measured on its own classes"
        )
    return kept


def weights_of_base(model: nn.Module, unfrozen: tuple[str, ...]) -> str | None:
    """Return the fingerprint of the model without the modules that are trained whole."""
    if any(isinstance(module, QuantizedPattention) for module in model.modules()):
        return fingerprint(model.state_dict().items())
    weights = [*model.named_parameters(), *routing_biases(model)]
    return fingerprint(
        (name, one) for name, one in weights if name.partition(".")[0] not in unfrozen
    )
