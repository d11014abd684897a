"""The options of a training run, by section of a recipe. Does not import torch."""

from dataclasses import dataclass, field
from typing import Any, Literal

from tokenformer.data.augmentation_options import AugmentationOptions

ADAPTED_LAYERS = ("ffn", "q", "k", "v", "o")
"""The layers of a block that can be adapted."""
PARTS = ("vision", "new", "language")
"""The parts of the tokens of a vision-language model."""


@dataclass
class ModelOptions:
    """The model to train."""

    family: Literal["tokenformer", "transformer"] = "tokenformer"
    """A TokenFormer, or the Transformer baseline."""
    preset: str | None = None
    """A published size; `options` override it."""
    start_from: str | None = None
    """A model folder or run folder to train further, instead of fresh weights. A trained model
    needs a lower learning rate than a fresh one."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of TokenformerConfig or TransformerConfig; for images, of TokenformerVisionConfig or
    TransformerVisionConfig; for images with text, of TokenformerImageTextConfig. The data sets the
    vocabulary size or the number of classes."""


@dataclass
class DataOptions:
    """The data to train on."""

    corpus: str | None = None
    """A folder made by `tokenformer prepare`."""
    length: int = 256
    """Tokens per sequence."""
    order: Literal["random", "epochs"] = "random"
    """Random segments, or every segment once per epoch, in a new order each epoch."""
    images: str | None = None
    """Instead of a corpus: a folder of images by class (train/CLASS/..., val/CLASS/...), of IDX or
    CIFAR files, a Hugging Face dataset, or digits (no download needed)."""
    image_text: str | None = None
    """Instead of a corpus: images with captions or conversations, as a folder of parquet files, of
    JSON lines or of images with text files, or a Hugging Face dataset. `length` is then the most
    tokens of text in a sample."""
    tokenizer: str = "bytes"
    """Tokenizer of a fresh vision-language model: bytes, a tokenizer.json, a tokenizer folder or a
    hub name. A trained model has its own."""
    held_out_share: float = 0.1
    """Share of the images to hold out if the data has no validation split."""
    on_corrupt: Literal["refuse", "skip"] = "refuse"
    """What to do at an image that cannot be decoded: stop with an error, or use the next one."""
    crop_share: float = 1.0
    """Share of an image's side that the center crop keeps in evaluation; 0.875 for ImageNet. At 1
    the whole image is resized."""
    workers: int = 0
    """Threads that decode and augment images; 0 does it in the training thread."""

    def __post_init__(self) -> None:
        require(self, 1, "length")
        require(self, 0, "workers")
        if not 0 < self.crop_share <= 1:
            raise ValueError(f"crop_share={self.crop_share} must be above 0 and at most 1")


@dataclass
class OptimizerOptions:
    """AdamW. Weight decay applies to matrices (tokens and embeddings), not to norms."""

    learning_rate: float = 6e-4
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moments."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""
    clip_norm: float | None = 1.0
    """Maximum gradient norm; null for no clipping."""
    rates: dict[str, float] = field(default_factory=dict)
    """Factors on the learning rate of parameters by name pattern: {"*.key_tokens": 0.5}. 0 freezes
    them, without weight decay. The last matching pattern applies."""
    part_rates: dict[str, float] = field(default_factory=dict)
    """Factors on the learning rate of the tokens of a vision-language model by part, vision, new or
    language: {"vision": 0, "language": 0} trains only new tokens; 0 freezes."""
    rate_law: Literal["none", "tokens"] = "none"
    """`tokens` adapts the learning rate to the number of tokens n of each layer: values learn at
    reference_tokens / n, keys at the root of that, routers at a quarter of the rate. A rate tuned
    on a small model then fits a large one, and a growing model keeps its step size. It does not
    affect a Transformer."""
    reference_tokens: int = 32
    """Number of tokens at which `rate_law: tokens` leaves the learning rate as it is."""

    def __post_init__(self) -> None:
        require(self, 1, "reference_tokens")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate={self.learning_rate} must be above 0")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm={self.clip_norm} must be above 0, or null")
        if any(rate < 0 for rate in self.rates.values()):
            raise ValueError(f"rates={self.rates} must not be negative; 0 freezes")
        for part, rate in self.part_rates.items():
            if part not in PARTS or rate < 0:
                raise ValueError(
                    f"part_rates={self.part_rates} must have factors of at least 0 for "
                    f"{', '.join(PARTS)}"
                )


@dataclass
class ScheduleOptions:
    """The learning rate schedule: a linear warm-up, then `kind`."""

    kind: Literal["cosine", "constant", "wsd"] = "cosine"
    """cosine decays to the floor; wsd (warm-up, stable, decay) is constant, then falls linearly to
    the floor over the last `decay` of the steps after the warm-up."""
    warmup_steps: int = 100
    """Steps of the warm-up."""
    floor: float = 0.1
    """Final learning rate, as a fraction of the peak."""
    decay: float = 0.2
    """Share of the steps after the warm-up over which `wsd` decays."""

    def __post_init__(self) -> None:
        require(self, 0, "warmup_steps")
        for name in ("floor", "decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be between 0 and 1")


@dataclass
class RunOptions:
    """Steps, batch size, precision, parallelism, validation, checkpoints and logging."""

    steps: int = 1000
    """Training steps; a run with `stages` takes theirs."""
    batch_size: int = 32
    """Global batch size: sequences or images per step over all processes."""
    micro_batch_size: int | None = None
    """Sequences or images per process in one forward pass; gradients are accumulated over the rest.
    By default its whole share of the batch."""
    ema: float | None = None
    """Decay of an exponential moving average of the weights, such as 0.999. The averaged weights
    are validated and exported. None by default."""
    seed: int = 0
    """Seed for weights, data order and augmentation."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """fp32, or mixed precision with fp32 weights."""
    compile: bool = False
    """Compile the model with torch.compile."""
    threads: int | Literal["auto"] | None = None
    """CPU threads: a number, `auto` to measure which number is fastest before the first step, or
    torch's default. A resumed run keeps the number that `auto` found."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    """Under torchrun: replicate the model (ddp, the default) or shard it (fsdp)."""
    tensor_parallel: int = 1
    """Under torchrun: number of processes that share the parameter tokens of every layer. They
    process the same samples; groups of them split the batch with fsdp."""
    nested: list[float] | None = None
    """Nested dropout: each step trains a random one of these shares of the tokens, such as
    [0.25, 0.5, 1.0], so that a prefix of the tokens is a working smaller model."""
    validate_every: int = 100
    """Steps between validations; 0 for none, needed if the data has no validation split."""
    validation_sequences: int = 64
    """Sequences or images per validation."""
    checkpoint_every: int = 200
    """Steps between checkpoints."""
    keep_last: int = 2
    """Checkpoints to keep, besides the best one."""
    on_spike: Literal["stop", "skip", "rollback"] = "stop"
    """What to do at a loss or gradient that is not finite, or at a loss spike."""
    spike_factor: float = 3.0
    """A loss above this many times the recent mean is a spike."""
    log_to: list[str] | str = field(default_factory=lambda: ["tensorboard"])
    """Loggers besides metrics.jsonl: tensorboard, wandb, trackio, or [] for none. They must be
    installed."""

    def __post_init__(self) -> None:
        if isinstance(self.log_to, str):
            self.log_to = [name.strip() for name in self.log_to.split(",")]
        require(self, 1, "steps", "batch_size", "validation_sequences")
        require(self, 1, "checkpoint_every", "keep_last")
        require(self, 0, "seed", "validate_every")
        require(self, 1, "tensor_parallel")
        if isinstance(self.threads, int):
            require(self, 1, "threads")
        if self.tensor_parallel > 1:
            self._check_tensor_parallel()
        if self.micro_batch_size is not None:
            require(self, 1, "micro_batch_size")
        if self.nested is not None and not all(0 < share <= 1 for share in self.nested):
            raise ValueError(f"nested={self.nested} must be shares above 0 and at most 1")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"ema={self.ema} must be between 0 and 1, or null")
        if not self.spike_factor > 1:
            raise ValueError(f"spike_factor={self.spike_factor} must be above 1")

    def _check_tensor_parallel(self) -> None:
        # DDP does not support DTensors, torch's GradScaler no mix of DTensors and plain tensors.
        for name, refused, others in (
            ("parallel", "ddp", "auto or fsdp"),
            ("precision", "fp16", "fp32 or bf16"),
        ):
            if getattr(self, name) == refused:
                raise ValueError(
                    f"{name}={refused} cannot be combined with "
                    f"tensor_parallel={self.tensor_parallel}; choose {others}"
                )


@dataclass
class GrowthOptions:
    """How a model grows: at the start of a stage, or by `tokenformer grow`."""

    to: str | None = None
    """A preset, which for a TokenFormer must have the same width and depth, or a model folder."""
    sizes: dict[str, Any] = field(default_factory=dict)
    """Instead of `to`: qkv_tokens, output_tokens, ffn_tokens; for a Transformer hidden_size, ..."""
    method: str | None = None
    """For a Transformer: net2net (default), hypercloning, ...; a TokenFormer grows by tokens."""
    init: Literal["zero", "random", "zero_value", "clone", "shrink"] = "zero"
    scale: Literal["frozen", "current", "anneal", "learned"] | None = None
    """The default depends on `init`."""
    anneal_steps: int = 100
    """Steps over which `scale: anneal` moves the scale."""
    optimizer_state: Literal["keep", "mean", "reset"] = "keep"
    old_rate: float | None = None
    """Factor on the learning rate of the old tokens; 0 freezes them."""
    seed: int = 0

    def __post_init__(self) -> None:
        require(self, 1, "anneal_steps")
        require(self, 0, "seed")
        if self.old_rate is not None and self.old_rate < 0:
            raise ValueError(f"old_rate={self.old_rate} must not be negative; 0 freezes")


@dataclass
class StageOptions:
    """A stage of a run. Options left out are those of the recipe's sections."""

    steps: int = 1000
    grow: GrowthOptions | None = None
    """How the model grows at the start of the stage; not for the first stage."""
    learning_rate: float | None = None
    rates: dict[str, float] | None = None
    schedule: ScheduleOptions | None = None
    """The schedule of this stage, over its own steps."""
    batch_size: int | None = None
    micro_batch_size: int | None = None

    def __post_init__(self) -> None:
        require(self, 1, "steps")


@dataclass
class AdapterOptions:
    """What to train of the model in `model.start_from`, and what to watch while it learns. The
    base is frozen unless the method is `full`."""

    method: Literal["tokens", "lora", "full", "sparse"] | None = None
    """tokens adds tokens to the layers (a token adapter), lora adds low-rank updates (peft), full
    trains all parameters, sparse the existing tokens that the new data uses and `keep` does not.
    None trains all parameters without measuring the base."""
    tokens: int = 32
    """Tokens per layer: to add, or for `sparse` existing ones to train."""
    share: float | None = None
    """Instead of `tokens`, for `sparse`: the share of the tokens of each layer to train."""
    layers: list[str] | None = None
    """Which layers: any of ffn, q, k, v, o. By default ffn, for `lora` all."""
    blocks: list[int] | None = None
    """Which blocks, counted from 0; by default all."""
    norm: Literal["shared", "own"] = "shared"
    """For `tokens`: the new tokens share the norm of the old ones, or have one of their own."""
    rank: int = 8
    """For `lora`: the rank of the updates."""
    alpha: float | None = None
    """For `lora`: the scale of the updates times the rank; by default twice the rank."""
    rslora: bool = False
    """For `lora`: divide alpha by the root of the rank instead of the rank."""
    keep: str | None = None
    """A second corpus, or images, whose held-out loss is measured at every validation; for
    `sparse` also the background that tells which tokens are free."""

    def __post_init__(self) -> None:
        require(self, 1, "tokens", "rank")
        if self.share is not None and not 0 < self.share <= 1:
            raise ValueError(f"share={self.share} must be above 0 and at most 1")
        if self.alpha is not None and not self.alpha > 0:
            raise ValueError(f"alpha={self.alpha} must be above 0")
        for layer in self.layers or []:
            if layer not in ADAPTED_LAYERS:
                known = ", ".join(ADAPTED_LAYERS)
                raise ValueError(f"layers: {layer!r} is unknown; choose from {known}")
        for name in ("layers", "blocks"):
            if getattr(self, name) == []:
                raise ValueError(f"{name}=[] leaves nothing to train; leave it out for the default")
        if self.method == "sparse" and self.keep is None:
            raise ValueError(
                "method=sparse needs keep=DATA, data like that the model was trained on, to find "
                "the tokens that it does not use"
            )

    def count_rows(self, tokens: int) -> int:
        """Return how many of the tokens of a layer `sparse` trains."""
        rows = self.tokens if self.share is None else max(1, round(self.share * tokens))
        return min(tokens, rows)

    @property
    def freezes_base(self) -> bool:
        return self.method in ("tokens", "lora", "sparse")

    @property
    def is_saved_apart(self) -> bool:
        """Whether the result is an adapter folder, not a model of its own."""
        return self.method in ("tokens", "lora")


@dataclass
class Recipe:
    """A training run, as written in a recipe file."""

    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    run: RunOptions = field(default_factory=RunOptions)
    stages: list[StageOptions] = field(default_factory=list)
    """Stages of the run, between which the model grows. Their steps replace `run.steps`."""
    augmentation: AugmentationOptions = field(default_factory=AugmentationOptions)
    adapter: AdapterOptions = field(default_factory=AdapterOptions)


def require(options: Any, least: int, *names: str) -> None:
    for name in names:
        if getattr(options, name) < least:
            raise ValueError(f"{name}={getattr(options, name)} must be at least {least}")
