"""`tokenformer sparsify`: route each input of a trained model to a share of its tokens."""

import sys
from json import dumps
from pathlib import Path

from tokenformer.cli.model import model_errors, resolve_folder
from tokenformer.cli.prune import refuse
from tokenformer.cli.samples import LONGEST, check_samples, read_image_samples, read_samples
from tokenformer.errors import InputError
from tokenformer.files import new_folder

VALIDATION = "validation"
HELD_OUT_SEQUENCES = 64


def sparsify_model(
    model: str,
    active: float = 0.25,
    data: Path | None = None,
    out: Path | None = None,
    group_size: int = 32,
    method: str = "routing",
    projections: tuple[str, ...] = ("ffn",),
    distill: int = 0,
    distill_rate: float = 1e-4,
    split: str = "train",
    sequences: int = 256,
    length: int | None = None,
    images: str | None = None,
    seed: int = 0,
    no_verify: bool = False,
    json: bool = False,
) -> None:
    """Route each input of a trained model to a share of its parameter tokens; the rest is skipped.

    Args:
        model: A model folder, a run folder or a hub name.
        active: Share of the token groups of every layer that an input visits.
        data: A folder made by `tokenformer prepare`, to group the tokens and fit the routers on.
        out: New folder for the sparse model, its tokenizer or image processor, and the report,
            sparsity.json. Required.
        group_size: Tokens per group.
        method: routing, or threshold: skip every token that adds little to an output, without
            groups and routers.
        projections: Projections to make sparse: any of q, k, v, o, ffn.
        distill: Steps to then train the sparse model to match the dense one, on the same data.
        distill_rate: Peak learning rate of these steps.
        split: Split to fit on. The loss is measured on the validation split, if there is one.
        sequences: Number of sequences or images to fit on, spread over the split.
        length: Tokens per sequence; by default the model's context, at most 512.
        images: For an image classifier, instead of --data: an image source as in `tokenformer
            train`, such as a folder of images by class, or digits.
        seed: Seed of the groups.
        no_verify: Skip verifying the weights (checksums.json, NaN, inf).
        json: Print the report as JSON.
    """
    if out is None:
        raise InputError("--out is missing; name a new folder for the sparse model")
    if data is None and images is None:
        raise InputError("--data is missing; name a folder made by `tokenformer prepare`")
    for name, value in {"sequences": sequences, "length": length}.items():
        if value is not None and value < 1:
            raise InputError(f"--{name} {value} must be at least 1")
    source = resolve_folder(model)
    check_samples(data, images)

    from rich.console import Console

    from tokenformer.cli.progress import progress
    from tokenformer.data.corpus import Corpus
    from tokenformer.growth.model_folder import save_sparse_folder
    from tokenformer.growth.tokens.sparsify import sparsify
    from tokenformer.models.configuration import VisionConfig
    from tokenformer.models.loading import device, load_tokenformer

    with model_errors(out), new_folder("--out", out) as folder:
        loaded = load_tokenformer(source, verify=not no_verify).to(device())
        held_out = None
        if isinstance(loaded.config, VisionConfig):
            refuse(model, "an image classifier", data=data, length=length)
            assert images is not None
            batches = read_image_samples(images, source, loaded, count=sequences)
        else:
            refuse(model, "a language model", images=images)
            assert data is not None
            size = length or min(LONGEST, loaded.config.max_position_embeddings)
            vocabulary = loaded.config.vocab_size
            batches = read_samples(
                data, split=split, sequences=sequences, length=size, vocab_size=vocabulary
            )
            if VALIDATION in Corpus(data).splits:
                held_out = read_samples(
                    data,
                    split=VALIDATION,
                    sequences=HELD_OUT_SEQUENCES,
                    length=size,
                    vocab_size=vocabulary,
                )
        with progress(Console(stderr=True)) as show:
            sparse, report = sparsify(
                loaded,
                batches,
                active,
                group_size,
                method=method,
                projections=projections,
                held_out=held_out,
                distill_steps=distill,
                learning_rate=distill_rate,
                seed=seed,
                on_progress=show,
            )
        save_sparse_folder(sparse, report, source, folder)
    sys.stdout.write(
        (dumps(report.asdict(), indent=2) if json else f"{report}\nSaved to {out}") + "\n"
    )
