"""What a recipe would train: model, steps, compute and memory of every stage.

    config = first_config(recipe)
    for stage in estimate_stages(recipe, config):
        stage.parameters, stage.flops, stage.state_bytes

Models are built on the meta device and a corpus is only opened, so this takes seconds for every
size. Data may be missing; then its vocabulary or image size is that of the recipe, or a default.
"""

from dataclasses import dataclass

from tokenformer.data.byte_tokenizer import VOCAB_SIZE
from tokenformer.models.accounting import (
    FLOAT_BYTES,
    count_parameters,
    image_text_training_flops,
    image_training_flops,
    state_bytes,
    training_flops,
)
from tokenformer.models.block_configuration import BlockConfig
from tokenformer.models.configuration import LanguageConfig, VisionConfig
from tokenformer.models.image_text_configuration import TokenformerImageTextConfig
from tokenformer.models.loading import load_config
from tokenformer.models.model_classes import build_on_meta
from tokenformer.paths import exists, expand_user, is_local
from tokenformer.train.image_text_workload import fresh_config, trained_config
from tokenformer.train.image_workload import IMAGE_FAMILIES, ImageWorkload
from tokenformer.train.model_growth import stage_configs
from tokenformer.train.optimizer import check_rates
from tokenformer.train.options import Recipe, RunOptions
from tokenformer.train.parallel.distribute import check_tokens
from tokenformer.train.parallel.mesh import check_batch_size, count_data_ranks
from tokenformer.train.recipe_inputs import absent_data, new_config, text_splits
from tokenformer.train.stages import Stage, plan
from tokenformer.train.text_workload import TEXT_FAMILIES, check_vocabulary

SHARDED = ("qkv", "output", "ffn")
"""The parts whose tokens tensor parallelism shards."""


@dataclass(frozen=True)
class StageEstimate:
    stage: Stage
    parameters: int
    tokens: int
    """Tokens of text, images, or samples of images with text."""
    flops: int
    """Forward and backward, as in metrics.jsonl."""
    state_bytes: int
    """Weights, gradients, AdamW's moments and EMA of one process."""


def first_config(recipe: Recipe) -> BlockConfig:
    """Return the configuration of the first stage. Images are opened only if the recipe leaves
    their size to them; else the number of classes is the preset's."""
    options, data = recipe.model, recipe.data
    if data.image_text is not None:
        return image_text_config(recipe)
    families = TEXT_FAMILIES if data.images is None else IMAGE_FAMILIES
    config_class = families[options.family]
    present = absent_data(recipe) is None
    corpus = text_splits(recipe)[0] if present and data.images is None else None
    if options.start_from is not None:
        config = load_config(options.start_from)
        if type(config) is not config_class:
            raise ValueError(
                f"model.start_from={options.start_from} is a {config.model_type} model, not a "
                f"{config_class.model_type}"
            )
    elif data.images is None:
        sizes = {"max_position_embeddings": data.length}
        if corpus is not None:
            sizes["vocab_size"] = corpus.vocab_size
        elif options.preset is None:
            sizes["vocab_size"] = VOCAB_SIZE  # of bytes, the default of `tokenformer prepare`
        config = new_config(options, config_class, **sizes)
    elif present and options.preset is None:
        config = ImageWorkload(recipe).first_model().config
    else:
        config = new_config(options, config_class)
    if corpus is not None:
        check_vocabulary(corpus, config)
    found: BlockConfig = config
    return found


def image_text_config(recipe: Recipe) -> TokenformerImageTextConfig:
    start = recipe.model.start_from
    if start is None and is_absent_tokenizer(recipe):  # then the preset's vocabulary
        config = new_config(recipe.model, TokenformerImageTextConfig)
    elif start is None:
        config = fresh_config(recipe)
    else:
        config = trained_config(start)
    return config


def is_absent_tokenizer(recipe: Recipe) -> bool:
    """Whether both the data and the tokenizer of a recipe are not there yet."""
    name = recipe.data.tokenizer
    is_file = is_local(name) or name.endswith(".json")
    return absent_data(recipe) is not None and is_file and not exists(expand_user(name))


def estimate_stages(
    recipe: Recipe, config: BlockConfig, processes: int | None = None
) -> list[StageEstimate]:
    """Return what each stage costs if `config` is that of the first. By default there are as many
    processes as tensor parallelism needs."""
    stages = plan(recipe)
    return [
        estimate_stage(recipe, stage, found, processes)
        for stage, found in zip(stages, stage_configs(config, stages), strict=True)
    ]


def estimate_stage(
    recipe: Recipe, stage: Stage, config: BlockConfig, processes: int | None
) -> StageEstimate:
    run = stage.run
    ranks = count_data_ranks(processes or run.tensor_parallel, run.tensor_parallel)
    check_batch_size(run.batch_size, ranks)
    model = build_on_meta(config)
    check_rates(model, stage.optimizer)
    if run.tensor_parallel > 1:
        check_tokens(model, run.tensor_parallel, ranks)
    samples = run.steps * run.batch_size
    if isinstance(config, TokenformerImageTextConfig):
        length, flops = 1, image_text_training_flops(config, recipe.data.length)
    elif isinstance(config, LanguageConfig):
        length = recipe.data.length
        flops = training_flops(config, length)
    else:
        assert isinstance(config, VisionConfig)
        length, flops = 1, image_training_flops(config)
    return StageEstimate(
        stage,
        model.num_parameters(),
        samples * length,
        samples * sum(flops.values()),
        process_state_bytes(config, run, ranks),
    )


def process_state_bytes(config: BlockConfig, run: RunOptions, ranks: int) -> int:
    """Return the bytes of weights, gradients, moments and EMA that one process keeps. Weights are
    fp32 in mixed precision too; FSDP shards all of them, tensor parallelism those of the tokens."""
    assert isinstance(config, LanguageConfig | VisionConfig)
    counts = count_parameters(config)
    parameters = sum(counts.values())
    each = sum(state_bytes(config).values()) / parameters
    if run.ema is not None:
        each += FLOAT_BYTES
    tokens = sum(counts[part] for part in SHARDED)
    kept = parameters - tokens + tokens / run.tensor_parallel
    shards = ranks if run.parallel == "fsdp" or run.tensor_parallel > 1 else 1
    return round(each * kept / shards)
