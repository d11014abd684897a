"""Indexing all tokens of a model: one pass over a corpus of any size, in bounded memory.

    index = index_tokens(model, batches)                    # token ids [B, T], or images
    index = index_tokens(model, batches, out="index")       # saves it; resumes after a kill

With `out`, progress is saved beside the folder every half minute. The same call after a kill skips
the batches that were done and ends with the same index, bit for bit at the same thread count.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from tokenformer.errors import DataError, InputError
from tokenformer.files import fsync, lock_folder
from tokenformer.growth.model_inputs import check_batch
from tokenformer.growth.tokens.token_usage import observe_inputs
from tokenformer.interpret.firing import FiringSums, LayerFiring
from tokenformer.interpret.score_map import lens_rows, patch_rows_and_columns
from tokenformer.interpret.token_index import IndexSummary, LayerIndex, TokenIndex
from tokenformer.interpret.token_name import WRITERS, full_names, named_layers
from tokenformer.interpret.token_relations import Ranked, nearest, promoted_and_suppressed
from tokenformer.interpret.vocabulary import Vocabulary
from tokenformer.layers.pattention import Pattention

SECONDS_BETWEEN_SAVES = 30.0
BATCHES_BETWEEN_SWEEPS = 64
"""How often samples without a top context are dropped."""
PICTURE_SIDE = 64
"""Images are kept at this size at most."""
PROGRESS = "progress.safetensors"
STATE = "state"


@torch.no_grad()
def index_tokens(
    model: PreTrainedModel,
    batches: Iterable[Tensor],
    *,
    out: Path | str | None = None,
    vocabulary: Vocabulary | None = None,
    threshold: float = 0.5,
    contexts: int = 8,
    words: int = 10,
    neighbors: int = 6,
    save_every: float = SECONDS_BETWEEN_SAVES,
    on_batch: Callable[[int], None] = lambda done: None,
) -> TokenIndex:
    """Return the index of every token of every layer of a TokenFormer.

    Args:
        model: a language model or an image classifier, with its head.
        batches: token ids [B, T] or images [B, C, H, W], all of one T or size.
        out: a new folder to save the index to.
        vocabulary: for the text in the table that is saved.
        threshold: a token fires where its weight is at least this.
        contexts: strongest contexts kept per token, at most one per sample.
        words: promoted and suppressed words kept per token.
        neighbors: nearest tokens kept, by key and by value.
        save_every: seconds between saves of the progress.
        on_batch: called with the number of batches done.
    """
    for name, count in {"contexts": contexts, "words": words, "neighbors": neighbors}.items():
        if count < 1:
            raise ValueError(f"{name}={count} must be at least 1")
    layers = named_layers(model)
    lens_rows(model)  # a model without a head fails now
    run = IndexRun(model, layers, threshold, contexts)
    progress: AbstractContextManager[SavedProgress | None] = nullcontext()
    if out is not None:
        progress = SavedProgress(run, Path(out), save_every)
    with progress as saved:
        run.add_all(batches, saved, on_batch)
        index = run.finish(words, neighbors)
        if saved is not None:
            index.save(saved.out, vocabulary)
            saved.delete()
    return index


class IndexRun:
    """One pass over the batches. Its state is a dict of tensors and one of counts."""

    def __init__(
        self, model: PreTrainedModel, layers: dict[str, Pattention], threshold: float, contexts: int
    ) -> None:
        self.model, self.layers, self.threshold = model, layers, threshold
        self.contexts = contexts
        self.fingerprint = fingerprint(model)
        self.sums = {n: FiringSums.zeros(each.num_tokens, contexts) for n, each in layers.items()}
        self.samples: dict[int, Tensor] = {}
        self.seen = self.positions = self.batches = 0
        self.digest = ""
        """Of all batches so far, so that a resumed run notices others."""
        self.shape: tuple[int, ...] = ()
        self.grid: tuple[int, int] | None = None

    def add_all(
        self,
        batches: Iterable[Tensor],
        saved: "SavedProgress | None",
        on_batch: Callable[[int], None],
    ) -> None:
        done, digest = self.batches, ""
        for number, batch in enumerate(batches, 1):
            digest = chained_digest(digest, batch)
            if number < done:
                continue
            if number == done:
                if digest != self.digest:
                    raise InputError(
                        "the batches differ from those that the saved progress was made with; "
                        f"give the same ones, or delete {saved.folder if saved else ''}"
                    )
                continue
            self.add(batch)
            self.digest, self.batches = digest, number
            if number % BATCHES_BETWEEN_SWEEPS == 0:
                self.sweep()
            if saved is not None:
                saved.save_if_due()
            on_batch(number)
        if not self.batches:
            raise ValueError("batches is empty; there is nothing to index")

    def add(self, batch: Tensor) -> None:
        check_batch(self.model, batch)
        if self.shape and tuple(batch.shape[1:]) != self.shape:
            raise ValueError(
                f"a batch has samples of {[*batch.shape[1:]]}, those before {[*self.shape]}; "
                "all samples must have one shape"
            )
        self.shape, names = tuple(batch.shape[1:]), full_names(self.model)
        self.grid = patch_rows_and_columns(self.model, batch)
        lengths: list[int] = []

        def observer(name: str) -> Callable[[Tensor], None]:
            firing = LayerFiring(self.layers[name], self.threshold, self.sums[name])

            def observe(x: Tensor) -> None:
                firing.add(x, self.seen)
                lengths.append(x.shape[0] * x.shape[1])

            return observe

        observe_inputs(self.model, [batch], {names[name]: observer(name) for name in self.layers})
        kept = batch.to(torch.int32).cpu() if batch.ndim == 2 else small_pictures(batch)
        self.samples |= {self.seen + row: sample.clone() for row, sample in enumerate(kept)}
        self.seen += len(batch)
        self.positions += lengths[0]

    def sweep(self) -> None:
        """Drop the samples that are no token's top context."""
        used = torch.cat([sums.top_samples.flatten() for sums in self.sums.values()]).unique()
        self.samples = {n: self.samples[n] for n in used.tolist() if n >= 0}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        self.sweep()
        tensors = {
            f"{name}/{field}": tensor
            for name, sums in self.sums.items()
            for field, tensor in sums.tensors().items()
        }
        tensors |= {f"sample/{number}": sample for number, sample in self.samples.items()}
        counts = ("seen", "positions", "batches", "digest", "shape", "grid")
        return tensors, {**self.options(), **{name: getattr(self, name) for name in counts}}

    def options(self) -> dict[str, Any]:
        """What a saved state must agree with."""
        return {
            "fingerprint": self.fingerprint,
            "threshold": self.threshold,
            "contexts": self.contexts,
        }

    def restore(self, tensors: dict[str, Tensor], counts: dict[str, Any]) -> None:
        for name, sums in self.sums.items():
            for field in sums.tensors():
                setattr(sums, field, tensors[f"{name}/{field}"])
        for key, tensor in tensors.items():
            kind, _, number = key.partition("/")
            if kind == "sample":
                self.samples[int(number)] = tensor
        self.samples = dict(sorted(self.samples.items()))
        self.seen, self.positions = counts["seen"], counts["positions"]
        self.batches, self.digest = counts["batches"], counts["digest"]
        self.shape = tuple(counts["shape"])
        self.grid = None if counts["grid"] is None else tuple(counts["grid"])

    def finish(self, words: int, neighbors: int) -> TokenIndex:
        self.sweep()
        config = self.model.config
        labels = () if self.grid is None else tuple(config.id2label.values())
        summary = IndexSummary(
            self.fingerprint,
            config.model_type,
            self.positions,
            self.seen,
            self.batches,
            self.threshold,
            self.grid,
            tuple(str(label) for label in labels),
            self.digest,
        )
        head = lens_rows(self.model)
        found = {
            name: self.layer_index(name, layer, head, words, neighbors)
            for name, layer in self.layers.items()
        }
        numbers = sorted(self.samples)
        samples = torch.stack([self.samples[number] for number in numbers])
        return TokenIndex(summary, found, samples, torch.tensor(numbers))

    def layer_index(
        self, name: str, layer: Pattention, head: Tensor, words: int, neighbors: int
    ) -> LayerIndex:
        block, _, projection = name.partition(".")
        keys, values = layer.key_tokens.detach(), layer.value_tokens.detach()
        none = Ranked(torch.empty(len(keys), 0).long(), torch.empty(len(keys), 0))
        lens = (none, none)
        if projection in WRITERS:
            lens = promoted_and_suppressed(values, head, words)
        return LayerIndex(
            self.positions,
            **self.sums[name].tensors(),
            value_lengths=values.double().norm(dim=1).cpu(),
            key_lengths=keys.double().norm(dim=1).cpu(),
            ages=torch.tensor(self.model.config.ages(projection, int(block))),
            promoted=lens[0].ids,
            promoted_by=lens[0].scores,
            suppressed=lens[1].ids,
            suppressed_by=lens[1].scores,
            **relations("like_key", nearest(keys, neighbors)),
            **relations("like_value", nearest(values, neighbors)),
        )


def relations(name: str, found: Ranked) -> dict[str, Tensor]:
    return {name: found.ids, f"{name}_by": found.scores}


def progress_folder(out: Path) -> Path:
    """Return the folder beside an index that holds the progress of making it."""
    return out.with_name(f".{out.name}.progress")


class SavedProgress(AbstractContextManager["SavedProgress"]):
    """The state of a run on disk, beside the folder of its index."""

    def __init__(self, run: IndexRun, out: Path, seconds: float) -> None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise InputError(f"{out} already exists; name a new folder for the index")
        self.run, self.out, self.seconds = run, out, seconds
        self.folder = progress_folder(out)
        self.saved = time.monotonic()

    def __enter__(self) -> "SavedProgress":
        self.lock = lock_folder(self.folder)
        try:
            self.lock.__enter__()
        except BlockingIOError:
            raise InputError(f"another process is making this index, in {self.folder}") from None
        try:
            self.restore()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self.lock.__exit__(None, None, None)

    def restore(self) -> None:
        file = self.folder / PROGRESS
        if not file.exists():
            return
        try:
            with safe_open(file, framework="pt") as stored:
                counts = json.loads(stored.metadata()[STATE])
                tensors = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{file} cannot be read: {error}; delete {self.folder}") from None
        for name, value in self.run.options().items():
            if counts[name] != value:
                what = "model" if name == "fingerprint" else f"{name}={counts[name]}"
                raise InputError(
                    f"{self.folder} has the progress of another {what}; delete it to start again"
                )
        self.run.restore(tensors, counts)

    def save_if_due(self) -> None:
        if time.monotonic() - self.saved < self.seconds:
            return
        tensors, counts = self.run.state()
        unfinished = self.folder / f".{PROGRESS}.tmp"
        save_file(tensors, unfinished, metadata={STATE: json.dumps(counts)})
        fsync(unfinished)
        unfinished.replace(self.folder / PROGRESS)
        fsync(self.folder)
        self.saved = time.monotonic()

    def delete(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def small_pictures(images: Tensor) -> Tensor:
    """Return normalized images as 8-bit pixels, each stretched to the whole range, at most
    `PICTURE_SIDE` wide and high."""
    pixels = images.detach().float().cpu()
    side = max(pixels.shape[-2:])
    if side > PICTURE_SIDE:
        size = [max(1, round(n * PICTURE_SIDE / side)) for n in pixels.shape[-2:]]
        pixels = F.interpolate(pixels, size, mode="area")
    low, high = (find(pixels, (1, 2, 3), keepdim=True) for find in (torch.amin, torch.amax))
    return ((pixels - low) / (high - low).clamp_min(1e-9) * 255).round().to(torch.uint8)


def digest_of(batches: Iterable[Tensor]) -> str:
    """Return the hash by which an index knows the batches that it was made from."""
    return reduce(chained_digest, batches, "")


def chained_digest(before: str, batch: Tensor) -> str:
    data = batch.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{before} {data.dtype} {tuple(data.shape)}".encode())
    digest.update(data.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def fingerprint(model: PreTrainedModel) -> str:
    """Return a hash of the weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(data.numpy().tobytes())
    return digest.hexdigest()
