"""`tokenformer grow`: a trained model becomes a larger one, on disk."""

import sys
from itertools import cycle
from json import dumps, loads
from pathlib import Path
from typing import Any

from tokenformer.cli.model import resolve_folder, resolve_model
from tokenformer.cli.samples import BATCH_SIZE, LONGEST, check_samples, read_samples
from tokenformer.errors import InputError
from tokenformer.files import new_folder
from tokenformer.paths import exists, expand_user, is_local

LIGO, LIGO_STEPS = "ligo", 100


def grow_model(
    model: str,
    to: str | None = None,
    out: Path | None = None,
    method: str | None = None,
    init: str | None = None,
    scale: str | None = None,
    qkv_tokens: int | None = None,
    output_tokens: int | None = None,
    ffn_tokens: int | None = None,
    hidden_size: int | None = None,
    num_hidden_layers: int | None = None,
    intermediate_size: int | None = None,
    num_attention_heads: int | None = None,
    data: Path | None = None,
    steps: int | None = None,
    optimizer_state: str | None = None,
    old_rate: float | None = None,
    seed: int = 0,
    no_verify: bool = False,
    json: bool = False,
) -> None:
    """Make a trained model larger: a TokenFormer by tokens, knowing all it knew; a Transformer too.

    Args:
        model: A model folder, a run folder, a hub name or a checkpoint of a run. A checkpoint grows
            with its optimizer; --out is then a run that `tokenformer train RECIPE --out` continues.
        to: The size to grow to: a preset (354m, base, ...), for a TokenFormer of the same width and
            depth, or the folder of another model.
        out: A new folder for the grown model, with its tokenizer or image processor and
            growth.json, the report; it must be given.
        method: Of a Transformer: net2net, hypercloning and bert2bert_fpi, exact to whole multiples
            of the width; lemon, exact to any; block_padding, bert2bert_aki and stacking, not exact;
            ligo, learned on --data. By default net2net.
        init: How new tokens begin. zero, the default: zero keys, the output is exactly preserved.
            zero_value: random keys, zero values, exact where many are added. clone: copies of the
            old, exact. random: the output jumps.
        scale: frozen, current, anneal or learned; by default as the init needs.
        qkv_tokens: Instead of --to: tokens of each of the q, k and v projections.
        output_tokens: Instead of --to: tokens of each output projection.
        ffn_tokens: Instead of --to: tokens of each feed-forward layer.
        hidden_size: Instead of --to, of a Transformer: its width; heads and units follow.
        num_hidden_layers: Instead of --to, of a Transformer: its layers.
        intermediate_size: Instead of --to, of a Transformer: hidden units of each feed-forward
            layer.
        num_attention_heads: Instead of --to, of a Transformer: its heads; the width follows.
        data: Of --method ligo: a folder made by `tokenformer prepare` to learn on.
        steps: Of --method ligo: how long it learns; by default 100 steps of 8 sequences.
        optimizer_state: Of a checkpoint: keep the moments of what was there before (the default),
            give new entries the mean second moment, or reset all.
        old_rate: Factor on the learning rate of the tokens that were there before; 0 freezes them.
        seed: Seed of what is drawn.
        no_verify: Do not check the weights against checksums.json, nor for NaN and inf.
        json: Print the report as JSON.
    """
    if out is None:
        raise InputError("--out is missing; name a new folder for the grown model")
    is_checkpoint = exists(expand_user(model) / "manifest.json")
    source = expand_user(model) if is_checkpoint else resolve_folder(model)
    if not is_checkpoint and optimizer_state is not None:
        raise InputError(f"--optimizer_state {optimizer_state} is for a checkpoint of a run")
    if is_checkpoint and no_verify:
        raise InputError("--no_verify is for a model folder; a checkpoint is always verified")
    check_samples(data)
    if to is not None and is_local(to):
        to = resolve_model(to)
    of_tokens = {
        "old_rate": old_rate,
        "init": init,
        "scale": scale,
        "qkv_tokens": qkv_tokens,
        "output_tokens": output_tokens,
        "ffn_tokens": ffn_tokens,
    }
    learned = {} if method != LIGO else ligo_options(source, is_checkpoint, data, steps)
    for name, value in {"data": data, "steps": steps}.items():
        if value is not None and method != LIGO:
            raise InputError(f"--{name} {value} is for --method {LIGO}")
    of_widths = {
        "method": method,
        **learned,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "intermediate_size": intermediate_size,
        "num_attention_heads": num_attention_heads,
    }

    from safetensors import SafetensorError
    from transformers.utils import logging

    from tokenformer.growth.model_folder import grow_folder, grow_transformer_folder
    from tokenformer.models.configuration import (
        TokenformerConfig,
        TokenformerVisionConfig,
        TransformerConfig,
    )
    from tokenformer.models.loading import load_config

    families: dict[type, tuple[Any, dict[str, Any], dict[str, Any]]] = {
        TokenformerConfig: (grow_folder, of_tokens, of_widths),
        TokenformerVisionConfig: (grow_folder, of_tokens, of_widths),
        TransformerConfig: (grow_transformer_folder, of_widths, of_tokens),
    }
    logging.disable_progress_bar()
    try:
        if is_checkpoint:
            state = optimizer_state or "keep"
            report = grow_run(source, out, to, seed, state, {**of_tokens, **of_widths})
            show(report, out, json)
            return
        family = type(load_config(str(source)))
        if family not in families:
            raise InputError(f"{model} holds a model of another kind, {family.model_type}")
        grow, options, others = families[family]
        for name, value in others.items():
            if value is not None:
                raise InputError(f"--{name} {value} is not for a {family.model_type} model")
        given = {name: value for name, value in options.items() if value is not None}
        target = load_config(to) if to and Path(to).is_dir() else to
        if not isinstance(target, str | None | family):
            raise InputError(f"--to {to} is a {target.model_type}, {model} a {family.model_type}")
        with new_folder("--out", out) as folder:
            report = grow(source, folder, target, seed=seed, verify=not no_verify, **given)
    except (ValueError, SafetensorError) as error:
        raise InputError(" ".join(str(error).split())) from None
    except OSError as error:
        raise InputError(f"{error.filename or out}: {error.strerror or error}") from None
    finally:
        logging.enable_progress_bar()
    show(report, out, json)


def ligo_options(
    model: Path, is_checkpoint: bool, data: Path | None, steps: int | None
) -> dict[str, Any]:
    """What LiGO learns from, and how long."""
    from tokenformer.errors import DataError
    from tokenformer.models.weight_files import read_object

    if data is None:
        raise InputError(f"--method {LIGO} learns from data; give --data FOLDER")
    steps = LIGO_STEPS if steps is None else steps
    if steps < 1:
        raise InputError(f"--steps {steps} must be at least 1")
    if is_checkpoint:
        config = loads((model / "state.json").read_text(encoding="utf-8"))["state"]["config"]
    else:
        config = read_object(model, "config.json")
    try:
        batches = read_samples(
            data,
            split="train",
            sequences=steps * BATCH_SIZE,
            length=min(LONGEST, config.get("max_position_embeddings", LONGEST)),
            vocab_size=config.get("vocab_size", 0),
        )
    except DataError as error:
        raise InputError(f"--data {data}: {error}") from None
    return {"batches": cycle(batches), "steps": steps}


def grow_run(
    path: Path, out: Path, to: str | None, seed: int, state: str, options: dict[str, Any]
) -> Any:
    """A checkpoint to the beginning of a new run."""
    from tokenformer.errors import CheckpointError
    from tokenformer.train.options import GrowthOptions
    from tokenformer.train.training_state import grow_saved

    sizes = {name: value for name, value in options.items() if value is not None}
    own = {
        name: sizes.pop(name) for name in ("init", "scale", "method", "old_rate") if name in sizes
    }
    told = GrowthOptions(to=to, sizes=sizes, seed=seed, optimizer_state=state, **own)  # type: ignore[arg-type]
    try:
        with new_folder("--out", out) as folder:
            return grow_saved(path, folder, told)
    except CheckpointError as error:
        raise InputError(str(error)) from None


def show(report: Any, out: Path, json: bool) -> None:
    text = dumps(report.asdict(), indent=2) if json else f"{report}\nKept in {out}"
    sys.stdout.write(text + "\n")
