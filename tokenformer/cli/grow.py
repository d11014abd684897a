"""`tokenformer grow`: a trained model becomes a larger one, on disk."""

import sys
from itertools import cycle
from json import dumps, loads
from pathlib import Path
from typing import Any

from tokenformer.cli.errors import InputError
from tokenformer.cli.folder import new_folder
from tokenformer.cli.samples import BATCH_SIZE, LONGEST, read_samples

LIGO, LIGO_STEPS = "ligo", 100


def grow_model(
    model: Path,
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
    json: bool = False,
) -> None:
    """Make a trained model larger: a TokenFormer by tokens, knowing all it knew; a Transformer too.

    Args:
        model: A model folder, a run (its model), or a checkpoint of a run. A checkpoint grows with
            its optimizer; --out is then a run that `tokenformer train RECIPE --out` goes on with.
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
        json: Print the report as JSON.
    """
    if out is None:
        raise InputError("--out is missing; name a new folder for the grown model")
    is_checkpoint = (model / "manifest.json").exists()
    if not is_checkpoint:
        if (model / "model" / "config.json").exists():
            model = model / "model"
        if not (model / "config.json").exists():
            raise InputError(f"{model} is not a model folder: it has no config.json")
        if optimizer_state is not None:
            raise InputError(f"--optimizer_state {optimizer_state} is for a checkpoint of a run")
    of_tokens = {
        "old_rate": old_rate,
        "init": init,
        "scale": scale,
        "qkv_tokens": qkv_tokens,
        "output_tokens": output_tokens,
        "ffn_tokens": ffn_tokens,
    }
    learned = {} if method != LIGO else ligo_options(model, is_checkpoint, data, steps)
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
    from transformers import AutoConfig
    from transformers.utils import logging

    from tokenformer.growth.folder import grow_folder, grow_transformer_folder
    from tokenformer.models.configuration import TokenformerConfig, TransformerConfig
    from tokenformer.models.vision_configuration import TokenformerVisionConfig

    families: dict[type, tuple[Any, dict[str, Any], dict[str, Any]]] = {
        TokenformerConfig: (grow_folder, of_tokens, of_widths),
        TokenformerVisionConfig: (grow_folder, of_tokens, of_widths),
        TransformerConfig: (grow_transformer_folder, of_widths, of_tokens),
    }
    logging.disable_progress_bar()
    try:
        if is_checkpoint:
            state = optimizer_state or "keep"
            report = grow_run(model, out, to, seed, state, {**of_tokens, **of_widths})
            show(report, out, json)
            return
        family = type(AutoConfig.from_pretrained(model, trust_remote_code=False))
        if family not in families:
            raise InputError(f"{model} holds a model of another kind, {family.model_type}")
        grow, options, others = families[family]
        for name, value in others.items():
            if value is not None:
                raise InputError(f"--{name} {value} is not for a {family.model_type} model")
        given = {name: value for name, value in options.items() if value is not None}
        target = family.from_pretrained(to) if to and Path(to).is_dir() else to
        with new_folder("--out", out) as folder:
            report = grow(model, folder, target, seed=seed, **given)
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
    from tokenformer.data.errors import DataError

    if data is None:
        raise InputError(f"--method {LIGO} learns from data; give --data FOLDER")
    steps = LIGO_STEPS if steps is None else steps
    if steps < 1:
        raise InputError(f"--steps {steps} must be at least 1")
    file = model / ("state.json" if is_checkpoint else "config.json")
    found = loads(file.read_text(encoding="utf-8"))
    config = found["state"]["config"] if is_checkpoint else found
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
    from tokenformer.train.options import GrowthOptions
    from tokenformer.train.ranks import CheckpointError
    from tokenformer.train.seam import grow_saved

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
