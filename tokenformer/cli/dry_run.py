"""`tokenformer train --dry_run`: print what a recipe would train, without training it."""

import os
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from tokenformer.cli.inspect import in_bytes, new_table, quantity
from tokenformer.cli.recipes import header_line
from tokenformer.errors import InputError, one_line
from tokenformer.paths import closest_path, expand_user, is_local
from tokenformer.train.recipe_inputs import absent_data, text_splits

if TYPE_CHECKING:
    from rich.table import Table

    from tokenformer.models.block_configuration import BlockConfig
    from tokenformer.train.options import Recipe
    from tokenformer.train.run_estimate import StageEstimate
    from tokenformer.train.stages import Stage


def show_run(file: Path, recipe: "Recipe", notes: tuple[str, ...], folder: Path, step: int) -> None:
    """Print the stages of a checked recipe. `step` is that of the run in `folder`, 0 if new."""
    from rich.console import Console

    from tokenformer.train.run_estimate import estimate_stages, first_config

    # Both are set by torchrun; without RANK a run has one process.
    processes = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else None
    try:
        config = first_config(recipe)
        stages = estimate_stages(recipe, config, processes)
    except (ValueError, OSError) as error:
        raise InputError(one_line(error)) from None
    # As in training, only the first process prints. No markup: paths may contain brackets.
    first = os.environ.get("RANK", "0") == "0"
    console = Console(highlight=False, markup=False, quiet=not first)
    for line in (*notes, *data_lines(file, recipe, config), *model_lines(recipe, config, stages)):
        console.print(line, soft_wrap=True)
    console.print()
    console.print(stage_table(stages, unit(recipe)))
    console.print()
    for line in (*rate_lines(stages), memory_line(recipe, processes)):
        console.print(line, soft_wrap=True)
    last = stages[-1].stage.last_step
    state = f"would be trained in {folder}"
    if step:
        state = f"{folder} is at step {step:,}, {max(0, last - step):,} steps are left"
    console.print(f"Dry run: {state}; nothing was written", soft_wrap=True)


def unit(recipe: "Recipe") -> str:
    """Return what a run counts its data in."""
    if recipe.data.image_text is not None:
        return "samples"
    return "tokens" if recipe.data.images is None else "images"


def data_lines(file: Path, recipe: "Recipe", config: "BlockConfig") -> Iterator[str]:
    """Yield what is known about the data: its size, or how to make it."""
    missing = absent_data(recipe)
    if missing is not None:
        yield missing_line(file, recipe, missing)
    elif unit(recipe) == "tokens":
        corpus, train, _ = text_splits(recipe)
        yield f"{corpus.folder}: {len(train):,} tokens to train on"
    if recipe.model.start_from is None:
        yield from assumed_lines(recipe, config, is_missing=missing is not None)


def missing_line(file: Path, recipe: "Recipe", missing: str) -> str:
    how = header_line(file, "Data")
    if missing not in how:  # another folder was given on the command line
        if unit(recipe) == "tokens":
            how = "make it with `tokenformer prepare`"
        else:
            how = "add it" if is_local(missing) else "a run looks for it on the Hugging Face hub"
    near = closest_path(expand_user(missing))
    return f"{missing} is not there yet: {how}" + (f"; or did you mean {near}?" if near else "")


def assumed_lines(recipe: "Recipe", config: "BlockConfig", is_missing: bool) -> Iterator[str]:
    """Yield what the figures assume about data that was not opened."""
    from tokenformer.models.configuration import LanguageConfig, VisionConfig

    model = recipe.model
    if isinstance(config, VisionConfig) and (is_missing or model.preset is not None):
        side, size = config.image_size, ""
        if model.preset is None:
            size = f"images of {side} x {side}, {config.num_channels} channels and "
        yield f"Counted with {size}{config.num_labels:,} classes; the data may have others"
    elif isinstance(config, LanguageConfig) and is_missing and "vocab_size" not in model.options:
        yield f"Counted with a vocabulary of {config.vocab_size:,}; the corpus may have another"


def model_lines(
    recipe: "Recipe", config: "BlockConfig", stages: "list[StageEstimate]"
) -> Iterator[str]:
    shape = f"{config.num_hidden_layers} layers, width {config.hidden_size}"
    yield f"{recipe.model.family}: {shape}, {config.num_attention_heads} heads"
    length = f"{recipe.data.length:,} tokens"
    kind = {"images": "images", "samples": f"an image and {length} of text"}.get(
        unit(recipe), f"sequences of {length}"
    )
    sizes = [f"{size:,}" for size, _ in groupby(part.stage.run.batch_size for part in stages)]
    yield f"Batches of {', then '.join(sizes)} {kind}, {recipe.run.precision}"


def stage_table(stages: "list[StageEstimate]", unit: str) -> "Table":
    table = new_table(["stage", "parameters", "steps", unit, "FLOPs", "memory"])

    def add(name: str, parameters: str, parts: "list[StageEstimate]", memory: str) -> None:
        steps = sum(part.stage.run.steps for part in parts)
        amount, flops = sum(part.tokens for part in parts), sum(part.flops for part in parts)
        table.add_row(name, parameters, f"{steps:,}", quantity(amount), f"{flops:.2e}", memory)

    for number, part in enumerate(stages, 1):
        add(str(number), f"{part.parameters:,}", [part], in_bytes(part.state_bytes))
    if len(stages) > 1:
        table.add_section()
        add("total", "", stages, "")
    return table


def rate_lines(stages: "list[StageEstimate]") -> list[str]:
    """Return the learning rates, one line for all stages if they share them."""
    lines = [rate_text(part.stage) for part in stages]
    if len(set(lines)) == 1:
        return [f"Learning rate: {lines[0]}"]
    return [f"Learning rate of stage {number}: {line}" for number, line in enumerate(lines, 1)]


def rate_text(stage: "Stage") -> str:
    schedule, optimizer = stage.schedule, stage.optimizer
    last = f"{schedule.floor * optimizer.learning_rate:g}"
    kinds = {
        "cosine": f"cosine to {last}",
        "constant": "constant",
        "wsd": f"constant, then linear to {last} over the last {schedule.decay:.0%}",
    }
    law = " with rate_law tokens" if optimizer.rate_law == "tokens" else ""
    warmup = f"{schedule.warmup_steps:,} warm-up steps" if schedule.warmup_steps else "no warm-up"
    return f"{optimizer.learning_rate:g}{law}; {warmup}, then {kinds[schedule.kind]}"


def memory_line(recipe: "Recipe", processes: int | None) -> str:
    run = recipe.run
    where = "on each process"
    if processes is None and run.parallel == "fsdp":
        where = "in all, which fsdp shards over the processes of torchrun"
    if (processes or run.tensor_parallel) > 1:
        where = f"on each of {processes or run.tensor_parallel} processes"
    parts = "weights, gradients, AdamW" + (", EMA" if run.ema is not None else "")
    return f"Memory: {parts} in fp32, without activations, {where}"
