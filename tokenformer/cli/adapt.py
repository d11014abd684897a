"""`tokenformer adapt`: fine-tune a trained model on new data, by added tokens or another method.

The options become a recipe with a section `adapter`, which `tokenformer train` trains; so a run of
this command resumes after a kill, runs under torchrun, and its config.yaml is a recipe.
"""

from pathlib import Path
from typing import Literal

from tokenformer.cli.adapt_job import AdaptJob, is_prepared, print_result
from tokenformer.cli.model import read_config, resolve_model
from tokenformer.errors import InputError, one_line
from tokenformer.paths import exists, expand_user, is_local, missing_message
from tokenformer.train.options import (
    AdapterOptions,
    DataOptions,
    ModelOptions,
    OptimizerOptions,
    Recipe,
    RunOptions,
    ScheduleOptions,
)

Method = Literal["tokens", "lora", "full", "sparse"]
FAMILIES: dict[str, tuple[Literal["tokenformer", "transformer"], bool]] = {
    "tokenformer": ("tokenformer", True),
    "tokenformer_transformer": ("transformer", True),
    "tokenformer_vision": ("tokenformer", False),
    "tokenformer_transformer_vision": ("transformer", False),
}
"""The family of each `model_type`, and whether it is a language model."""
LEARNING_RATES: dict[str, float] = {"tokens": 3e-3, "lora": 1e-3, "full": 1e-4, "sparse": 3e-3}
LONGEST = 512
"""Tokens per sequence by default, if the model and the data have as many."""
DATA, KEEP = "data", "keep"
"""Folders in --out with the prepared texts."""


def adapt_model(
    model: str,
    data: str | None = None,
    out: Path | None = None,
    method: Method = "tokens",
    tokens: int = 32,
    share: float | None = None,
    layers: list[str] = [],  # noqa: B006
    blocks: list[int] = [],  # noqa: B006
    norm: Literal["shared", "own"] = "shared",
    rank: int = 8,
    alpha: float | None = None,
    rslora: bool = False,
    keep: str | None = None,
    steps: int = 500,
    batch_size: int = 16,
    micro_batch_size: int | None = None,
    length: int | None = None,
    learning_rate: float | None = None,
    weight_decay: float = 0.0,
    warmup_steps: int | None = None,
    validate_every: int | None = None,
    validation_sequences: int = 64,
    checkpoint_every: int | None = None,
    order: Literal["random", "epochs"] = "epochs",
    seed: int = 0,
    precision: Literal["fp32", "bf16", "fp16"] = "fp32",
    parallel: Literal["auto", "ddp", "fsdp"] = "auto",
    on_spike: Literal["stop", "skip", "rollback"] = "stop",
    override: bool = False,
    json: bool = False,
) -> None:
    """Fine-tune a trained model on new data: by added tokens, LoRA, all or only free parameters.

    Run the same command again to resume after an interruption. It ends with a table of the losses
    before and after.

    Args:
        model: A model folder, a run folder or a hub name.
        data: What to learn (required): a folder made by `tokenformer prepare`, whatever that
            takes, or jsonl with prompt and completion, or with messages of a chat, of which only
            completions are learned. For an image classifier, images.
        out: The run folder (required). The result is in its folder adapter, or model for the
            methods full and sparse.
        method: tokens adds tokens to the layers and freezes the rest; lora adds low-rank updates;
            full trains all parameters; sparse trains the existing tokens that the new data uses
            and --keep does not.
        tokens: Tokens per layer: to add or, with --method sparse, existing ones to train.
        share: With --method sparse, the share of the tokens of each layer to train.
        layers: Which layers: any of ffn, q, k, v, o. By default ffn; with --method lora all.
        blocks: Which blocks, counted from 0; by default all.
        norm: With --method tokens, whether new tokens share the norm of the old ones. Those with
            their own norm cannot be merged.
        rank: With --method lora, the rank of the updates.
        alpha: With --method lora, the scale of the updates times the rank; by default 2 x rank.
        rslora: With --method lora, divide alpha by the root of the rank.
        keep: Data like that the model was trained on, on which to measure forgetting at every
            validation; in the same forms as --data.
        steps: Training steps.
        batch_size: Sequences, examples or images per step over all processes.
        micro_batch_size: Of these, how many are processed at once by each process.
        length: Tokens per sequence, and the most per example; by default at most 512.
        learning_rate: Peak learning rate; the default depends on the method.
        weight_decay: Weight decay of what trains.
        warmup_steps: Steps over which the learning rate rises; by default a tenth of them.
        validate_every: Steps between validations; by default a tenth of them.
        validation_sequences: Sequences, examples or images per validation.
        checkpoint_every: Steps between checkpoints; by default as validate_every.
        order: Each sequence, example or image once per epoch, or random ones.
        seed: Seed of new weights and of the data order.
        precision: fp32, or mixed precision.
        parallel: Under torchrun, replicate the model (ddp, the default) or shard it (fsdp).
        on_spike: What to do at a loss spike or a loss that is not finite.
        override: Resume with changed options, such as more steps.
        json: Print the result as JSON.
    """
    if data is None:
        raise InputError("--data is missing; name the text, examples or images to learn")
    if out is None:
        raise InputError("--out is missing; name a folder for the run")
    start, family, is_text = find_base(model)
    check_method(method, model, family)
    for option, value in (("data", data), ("keep", keep)):
        check_data(option, value)
    tokens_per_sequence = length or recorded_length(out) or longest(start)
    every = validate_every or max(1, steps // 10)
    try:
        adapter = AdapterOptions(
            method=method,
            tokens=tokens,
            share=share,
            layers=layers or None,
            blocks=blocks or None,
            norm=norm,
            rank=rank,
            alpha=alpha,
            rslora=rslora,
            keep=None if keep is None else place_of(keep, out / KEEP, is_text),
        )
        where = place_of(data, out / DATA, is_text)
        recipe = Recipe(
            ModelOptions(family=family, start_from=start),
            DataOptions(
                corpus=where if is_text else None,
                images=None if is_text else where,
                length=tokens_per_sequence,
                order=order,
            ),
            OptimizerOptions(
                learning_rate=LEARNING_RATES[method] if learning_rate is None else learning_rate,
                weight_decay=weight_decay,
            ),
            ScheduleOptions(warmup_steps=steps // 10 if warmup_steps is None else warmup_steps),
            RunOptions(
                steps=steps,
                batch_size=batch_size,
                micro_batch_size=micro_batch_size,
                seed=seed,
                precision=precision,
                parallel=parallel,
                validate_every=every,
                validation_sequences=validation_sequences,
                checkpoint_every=checkpoint_every or every,
                on_spike=on_spike,
                log_to=[],
            ),
            adapter=adapter,
        )
    except ValueError as error:
        raise InputError(f"--{one_line(error)}") from None
    job = AdaptJob(model, data, keep, out, recipe, override, fits_length=length is None)
    print_result(*job.run(on_stderr=json), as_json=json)


def find_base(model: str) -> tuple[str, Literal["tokenformer", "transformer"], bool]:
    """Return the absolute folder or hub name of a model, its family, and whether it is a language
    model."""
    start = resolve_model(model)
    if is_local(start):
        start = str(Path(start).resolve())
        kind = read_config(Path(start)).get("model_type")
    else:
        from tokenformer.models.loading import load_config

        kind = load_config(start).model_type
    if kind not in FAMILIES:
        raise InputError(
            f"{model} is a {kind} model; adapt trains TokenFormers and Transformers of this "
            "package: use peft directly, or see `tokenformer convert`"
        )
    return start, *FAMILIES[kind]


def check_method(method: str, model: str, family: str) -> None:
    if method in ("tokens", "sparse") and family != "tokenformer":
        raise InputError(
            f"--method {method} trains parameter tokens, and {model} is a Transformer; use lora or "
            "full"
        )


def check_data(option: str, value: str | None) -> None:
    """Raise for a path that does not exist; other names may be those of datasets."""
    if value is not None and is_local(value) and not exists(expand_user(value)):
        raise InputError(f"--{option}: {missing_message(value)}")


def place_of(data: str, prepared: Path, is_text: bool) -> str:
    """Return where the run reads its data: images and prepared text where they are, other text in
    the run folder."""
    path = expand_user(data)
    in_place = not is_text or is_prepared(path)
    if not in_place:
        return str(prepared.resolve())
    return str(path.resolve()) if exists(path) else data


def recorded_length(out: Path) -> int | None:
    """Return the length of the run in a folder, if it holds one."""
    from tokenformer.train.run_record import Record

    values = Record(out).values
    return None if values is None else values["data"]["length"]


def longest(start: str) -> int:
    """Return the default length: the model's context, if it is shorter than LONGEST."""
    if not is_local(start):
        return LONGEST
    context = read_config(Path(start)).get("max_position_embeddings")
    return min(LONGEST, context) if isinstance(context, int) and context > 0 else LONGEST
