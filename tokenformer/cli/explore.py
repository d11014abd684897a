"""`tokenformer explore`: a page that shows what each parameter token does."""

import shutil
import signal
import sys
import tempfile
from contextlib import ExitStack, closing, suppress
from json import dumps, loads
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenformer.cli.model import IMAGE_TEXT, kind_of, model_errors, resolve_folder
from tokenformer.cli.progress import ShowProgress, progress
from tokenformer.cli.samples import LONGEST, Samples, check_samples, image_samples, text_samples
from tokenformer.cli.serve import address, bind
from tokenformer.errors import DataError, InputError
from tokenformer.files import new_folder
from tokenformer.paths import exists, expand_user

if TYPE_CHECKING:
    from torch import Tensor

    from tokenformer.interpret.site import Example
    from tokenformer.interpret.token_index import TokenIndex
    from tokenformer.interpret.vocabulary import Vocabulary

INDEX = "index"
"""The folder of the index in the site."""


def explore(
    model: str,
    data: Path | None = None,
    out: Path | None = None,
    images: str | None = None,
    split: str | None = None,
    sequences: int = 1000,
    length: int | None = None,
    examples: int = 6,
    contexts: int = 8,
    threshold: float = 0.5,
    serve: bool = False,
    port: int = 8080,
    before: str | None = None,
    no_verify: bool = False,
    json: bool = False,
) -> None:
    """Write a page that shows what each parameter token of a model does, or serve it live.

    The page opens from disk, without a server or a network. A command that was interrupted goes on
    where it stopped.

    Args:
        model: A model folder, a run folder or a hub name of a TokenFormer.
        data: A folder made by `tokenformer prepare`, to read text from.
        out: New folder for the page, with the index of all tokens in its folder index. Required
            without --serve.
        images: For an image classifier, instead of --data: an image source as in `tokenformer
            train`, such as a folder of images by class, or digits.
        split: Split to read; by default the held-out one (validation) if there is one, else train.
        sequences: Number of sequences or images to read, spread over the split.
        length: Tokens per sequence; by default the model's context, at most 512.
        examples: Number of inputs with a score map of their own.
        contexts: Number of contexts to show per token.
        threshold: A token fires where its weight is at least this.
        serve: Serve the page on 127.0.0.1 with the live model: type a text, switch tokens off and
            see the loss and the continuation change. Serves an existing --out.
        port: Port for --serve; 0 picks a free one.
        before: For --serve, another model to compare with, such as the one before growth.
        no_verify: Skip verifying the weights (checksums.json, NaN, inf).
        json: Print a summary as JSON.
    """
    check_options(out, serve, before, sequences=sequences, length=length, contexts=contexts)
    if examples < 0:
        raise InputError(f"--examples {examples} must be 0 or more")
    if not 0 < threshold < float("inf"):
        raise InputError(f"--threshold {threshold} must be above 0")
    out, data = (None if path is None else expand_user(path) for path in (out, data))
    source = resolve_folder(model)
    other = None if before is None else resolve_folder(before)
    check_kinds(model, source, before, other)
    check_samples(data, images)
    with ExitStack() as stack:
        listener = stack.enter_context(closing(bind("127.0.0.1", port))) if serve else None
        if out is None:
            out = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "site"
        with model_errors(out):
            loaded, reader = load(source, verify=not no_verify)
            earlier = None if other is None else load(other, verify=not no_verify)[0]
            if serve:
                from tokenformer.serve.explorer import check_live

                check_live(loaded, earlier)
            if serve and exists(out):
                check_site(out, loaded)
            else:
                options = sequences, length, split
                samples = open_samples(data, images, source, loaded, reader, *options)
                name = public_title(model)
                build(loaded, reader, name, samples, out, examples, contexts, threshold)
        if not serve:
            sys.stdout.write(summary(out, json) + "\n")
            return
        from tokenformer.serve.explorer import Explorer

        with model_errors(out):
            explorer = Explorer(loaded, reader, out, earlier)
        assert listener is not None
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # to delete the temporary folder
        with suppress(KeyboardInterrupt):
            sys.stdout.write(f"Exploring {model} at {address(listener)}; press Ctrl-C to stop\n")
            sys.stdout.flush()
            explorer.run(listener)


def check_options(out: Path | None, serve: bool, before: str | None, **counts: int | None) -> None:
    if out is None and not serve:
        raise InputError("--out is missing; name a new folder for the page, or use --serve")
    if out is not None and exists(expand_user(out)) and not serve:
        raise InputError(f"--out {out} already exists; name a new folder")
    if before is not None and not serve:
        raise InputError(f"--before {before} is for --serve")
    for name, value in counts.items():
        if value is not None and value < 1:
            raise InputError(f"--{name} {value} must be at least 1")


def check_kinds(model: str, source: Path, before: str | None, other: Path | None) -> None:
    """Refuse a vision-language model, by its config.json."""
    for name, folder in ((model, source), (f"--before {before}", other)):
        if folder is not None and kind_of(folder) == IMAGE_TEXT:
            raise InputError(
                f"{name} is {IMAGE_TEXT}, which cannot be explored; explore the vision or the "
                "language model that it was joined from"
            )


def load(source: Path, *, verify: bool) -> "tuple[Any, Vocabulary]":
    """Return a TokenFormer and how its ids read."""
    from tokenformer.errors import first_line
    from tokenformer.interpret.vocabulary import Vocabulary
    from tokenformer.models.configuration import VisionConfig
    from tokenformer.models.loading import device, load_tokenformer

    model = load_tokenformer(source, verify=verify).to(device())
    if isinstance(model.config, VisionConfig):
        return model, Vocabulary()

    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # transformers can raise anything on a damaged folder
        raise InputError(
            f"the tokenizer of {source} cannot be loaded: {first_line(error)}"
        ) from error
    return model, Vocabulary(tokenizer)


def open_samples(
    data: Path | None,
    images: str | None,
    source: Path,
    model: Any,
    vocabulary: "Vocabulary",
    sequences: int,
    length: int | None,
    split: str | None,
) -> Samples:
    from tokenformer.data.corpus import open_corpus
    from tokenformer.models.configuration import VisionConfig

    if isinstance(model.config, VisionConfig):
        if images is None or data is not None:
            raise InputError(f"{source} is an image classifier; use --images instead of --data")
        if length is not None:
            raise InputError(f"--length {length} is for text; leave it out with --images")
        return image_samples(images, source, model, count=sequences, split=split)
    if data is None or images is not None:
        raise InputError(f"{source} is a language model; use --data FOLDER")
    context = model.config.max_position_embeddings
    if length is not None and length > context:
        raise InputError(f"--length {length} is beyond the model's context of {context} tokens")
    splits = open_corpus(data, vocabulary.tokenizer, model.config.vocab_size).splits
    found = split or ("validation" if "validation" in splits else "train")
    return text_samples(
        data,
        split=found,
        sequences=sequences,
        length=length or min(LONGEST, context),
        vocab_size=model.config.vocab_size,
    )


def public_title(model: str) -> str:
    from tokenformer.models.model_card import public_name

    return public_name(model)


def build(
    model: Any,
    vocabulary: "Vocabulary",
    name: str,
    samples: Samples,
    out: Path,
    examples: int,
    contexts: int,
    threshold: float,
) -> None:
    """Write the site to a new folder. The index is made beside it and moved into it."""
    from rich.console import Console

    from tokenformer.interpret.context_weights import context_weights
    from tokenformer.interpret.site import write_site
    from tokenformer.interpret.site_data import SiteData

    kept = out.with_name(f".{out.name}.index")
    with progress(Console(stderr=True)) as show, new_folder("--out", out) as folder:
        index = make_index(model, vocabulary, samples, kept, contexts, threshold, show)
        weights = context_weights(
            model,
            index,
            lambda numbers: samples.read(numbers).to(model.device),
            lambda done, total: show("reading the contexts again", done, total),
        )
        parameters = sum(each.numel() for each in model.parameters())
        site = SiteData(index, weights, vocabulary, name, samples.title, parameters)
        numbers = spread(samples.count, examples)
        maps = (example(model, samples.read([number])) for number in numbers)  # one in memory
        write_site(folder, site, maps, lambda done, total: show("writing the page", done, total))
        shutil.copytree(kept, folder / INDEX)
    shutil.rmtree(kept, ignore_errors=True)


def example(model: Any, inputs: "Tensor") -> "Example":
    """Return the score maps of an input, its logits and, of a text, the direct effects on the most
    likely ones."""
    import torch

    from tokenformer.interpret.score_map import direct_effects, score_maps

    inputs = inputs.to(model.device)
    maps = score_maps(model, inputs)
    with torch.no_grad():
        logits = model(**{model.main_input_name: inputs}).logits
    effects = direct_effects(model, maps, logits.argmax(-1)) if inputs.ndim == 2 else None
    return maps, logits, effects


def spread(total: int, count: int) -> list[int]:
    """Return at most `count` different numbers below `total`, evenly spread."""
    count = min(count, total)
    return [total * n // count for n in range(count)]


def make_index(
    model: Any,
    vocabulary: "Vocabulary",
    samples: Samples,
    folder: Path,
    contexts: int,
    threshold: float,
    show: ShowProgress,
) -> "TokenIndex":
    """Return the index, finished by an earlier call if it is of the same model and inputs."""
    from tokenformer.interpret.index_tokens import (
        digest_of,
        fingerprint,
        index_tokens,
        progress_folder,
    )
    from tokenformer.interpret.token_index import TokenIndex

    if exists(folder):
        try:
            index = TokenIndex.load(folder)
            kept = next(iter(index.layers.values())).top_weights.shape[1]
            found = index.summary
            options = found.threshold, kept, found.model, found.inputs
            if options == (threshold, contexts, fingerprint(model), digest_of(samples)):
                shutil.rmtree(progress_folder(folder), ignore_errors=True)
                return index
        except DataError:
            pass
        shutil.rmtree(folder)
    return index_tokens(
        model,
        samples,
        out=folder,
        vocabulary=vocabulary,
        threshold=threshold,
        contexts=contexts,
        on_batch=lambda done: show("reading what fires each token", done, len(samples)),
    )


def check_site(out: Path, model: Any) -> None:
    """Raise unless the folder has a site of this model."""
    from tokenformer.interpret.index_tokens import fingerprint
    from tokenformer.interpret.token_index import SUMMARY

    try:
        found = loads((out / INDEX / SUMMARY).read_text(encoding="utf-8"))["model"]
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"--out {out} is not a page of this command; name a new folder") from None
    if found != fingerprint(model):
        raise InputError(f"--out {out} is the page of another model; name a new folder")


def summary(out: Path, json: bool) -> str:
    from tokenformer.interpret.token_index import SUMMARY

    found = loads((out / INDEX / SUMMARY).read_text(encoding="utf-8"))
    if json:
        return dumps({"page": str(out / "index.html"), **found}, indent=2)
    read = f"{found['samples']:,} samples, {found['positions']:,} positions"
    return f"Read {read}\nSaved to {out}; open {out / 'index.html'} in a browser"
