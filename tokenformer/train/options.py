"""What a training run can be told: the sections of a recipe. Plain data: no torch here."""

from dataclasses import dataclass, field
from typing import Any, Literal

from tokenformer.data.augmentation_options import AugmentationOptions


@dataclass
class ModelOptions:
    """Which model is trained."""

    family: Literal["tokenformer", "transformer"] = "tokenformer"
    preset: str | None = None
    """A published size; `options` change it."""
    start_from: str | None = None
    """A model folder or run folder to train further, instead of fresh weights. A trained model
    needs a lower learning rate than a fresh one."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of TokenformerConfig or TransformerConfig, of images TokenformerVisionConfig or
    TransformerVisionConfig. The vocabulary is the corpus's, the classes are those of the images."""


@dataclass
class DataOptions:
    """What it is trained on."""

    corpus: str | None = None
    """A folder made by `tokenformer prepare`."""
    length: int = 256
    """Tokens per sequence."""
    order: Literal["random", "epochs"] = "random"
    """Random segments, or every segment once per epoch, shuffled anew each time."""
    images: str | None = None
    """Instead of a corpus: a folder of images by class (train/CLASS/..., val/CLASS/...), of IDX or
    of CIFAR files, a Hugging Face dataset, or digits, which need no download."""
    held_out_share: float = 0.1
    """Share of the images to hold out where they come without such a split."""
    on_corrupt: Literal["refuse", "skip"] = "refuse"
    """At an image that cannot be decoded: stop and name it, or take the next one."""
    crop_share: float = 1.0
    """Share of the side of an image that its centre crop keeps in evaluation; 0.875 for ImageNet.
    At 1 the image is resized whole."""
    workers: int = 0
    """Threads that decode and vary images; 0 for none besides the training itself."""

    def __post_init__(self) -> None:
        require(self, 1, "length")
        require(self, 0, "workers")
        if not 0 < self.crop_share <= 1:
            raise ValueError(f"crop_share={self.crop_share} must be above 0 and at most 1")


@dataclass
class OptimizerOptions:
    """AdamW. Weight decay falls on matrices (tokens and embeddings), never on norms."""

    learning_rate: float = 6e-4
    """The peak rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    """Largest norm of the gradient; null for no clipping."""
    rates: dict[str, float] = field(default_factory=dict)
    """Factor on the rate of the parameters whose name matches a pattern: {"*.key_tokens": 0.5}.
    0 freezes them, decay included. The last pattern that matches counts."""

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate={self.learning_rate} must be above 0")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm={self.clip_norm} must be above 0, or null")
        if any(rate < 0 for rate in self.rates.values()):
            raise ValueError(f"rates={self.rates} must not be negative; 0 freezes")


@dataclass
class ScheduleOptions:
    """How the rate moves: a linear warm-up, then `kind`."""

    kind: Literal["cosine", "constant", "wsd"] = "cosine"
    """A cosine to the floor; constant; or warm-up, stable, decay: constant, then linearly to the
    floor over the last `decay` of the run."""
    warmup_steps: int = 100
    floor: float = 0.1
    """Where the decay ends, as a fraction of the peak."""
    decay: float = 0.2
    """Share of the run that `wsd` decays over."""

    def __post_init__(self) -> None:
        require(self, 0, "warmup_steps")
        for name in ("floor", "decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be between 0 and 1")


@dataclass
class RunOptions:
    """How long, how large, how precise, and what is reported and kept."""

    steps: int = 1000
    batch_size: int = 32
    """Sequences or images per step, over all processes and accumulation: the global batch."""
    micro_batch_size: int | None = None
    """Sequences or images a process holds at once; the rest is accumulated. By default all of its
    share."""
    ema: float | None = None
    """Decay of a moving average of the weights, such as 0.999; the average is what is validated and
    exported. By default there is none."""
    seed: int = 0
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    compile: bool = False
    activation_checkpointing: bool = False
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    """Under torchrun: replicate (ddp, the default) or shard (fsdp)."""
    tensor_parallel: int = 1
    """Under torchrun: so many processes share the parameter tokens of every layer, a slice each,
    and see the same samples; such groups share the batch, by fsdp."""
    nested: list[float] | None = None
    """Train prefixes of the tokens too: each step with one of these shares of them, such as
    [0.25, 0.5, 1.0], so that a prefix is a working smaller model."""
    validate_every: int = 100
    """Steps between validations; 0 for none, also where the data has no split to validate on."""
    validation_sequences: int = 64
    checkpoint_every: int = 200
    keep_last: int = 2
    """Checkpoints kept, besides the best one."""
    on_spike: Literal["stop", "skip", "rollback"] = "stop"
    """What to do at a loss or gradient that is not finite, or a loss far above the recent ones."""
    spike_factor: float = 3.0
    """A loss this many times the recent mean is a spike."""
    log_to: list[str] | str = field(default_factory=lambda: ["tensorboard"])
    """Reporters besides metrics.jsonl: tensorboard, wandb, trackio, or [] for none; each must be
    installed."""

    def __post_init__(self) -> None:
        if isinstance(self.log_to, str):
            self.log_to = [name.strip() for name in self.log_to.split(",")]
        require(self, 1, "steps", "batch_size", "validation_sequences")
        require(self, 1, "checkpoint_every", "keep_last")
        require(self, 0, "seed", "validate_every")
        require(self, 1, "tensor_parallel")
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
        # DDP takes no spread tensors, torch's gradient scaler no mix of spread and other ones.
        for name, refused, others in (
            ("parallel", "ddp", "auto or fsdp"),
            ("precision", "fp16", "fp32 or bf16"),
        ):
            if getattr(self, name) == refused:
                raise ValueError(
                    f"{name}={refused} does not go with tensor_parallel={self.tensor_parallel}; "
                    f"choose {others}"
                )


@dataclass
class GrowthOptions:
    """How a model grows where a stage begins."""

    to: str | None = None
    """A preset of the same width and depth."""
    sizes: dict[str, Any] = field(default_factory=dict)
    """Instead of `to`: qkv_tokens, output_tokens, ffn_tokens; of a Transformer hidden_size, ..."""
    method: str | None = None
    """Of a Transformer: net2net, hypercloning, ...; a TokenFormer grows by tokens."""
    init: Literal["zero", "random", "zero_value", "clone"] = "zero"
    scale: Literal["frozen", "current", "anneal", "learned"] | None = None
    """By default as the init needs."""
    anneal_steps: int = 100
    """Steps over which the scale moves where it is annealed."""
    optimizer_state: Literal["keep", "mean", "reset"] = "keep"
    old_rate: float | None = None
    """Factor on the rate of the tokens that were there before; 0 freezes them."""
    seed: int = 0

    def __post_init__(self) -> None:
        require(self, 1, "anneal_steps")
        require(self, 0, "seed")
        if self.old_rate is not None and self.old_rate < 0:
            raise ValueError(f"old_rate={self.old_rate} must not be negative; 0 freezes")


@dataclass
class StageOptions:
    """A part of a run. What it leaves out is as in the recipe's own sections."""

    steps: int = 1000
    grow: GrowthOptions | None = None
    """How the model grows before it; the first stage cannot."""
    learning_rate: float | None = None
    rates: dict[str, float] | None = None
    schedule: ScheduleOptions | None = None
    """Of this stage alone, over its own steps."""
    batch_size: int | None = None
    micro_batch_size: int | None = None

    def __post_init__(self) -> None:
        require(self, 1, "steps")


@dataclass
class Recipe:
    """A whole training run, as a recipe file writes it."""

    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    run: RunOptions = field(default_factory=RunOptions)
    stages: list[StageOptions] = field(default_factory=list)
    """Parts of the run between which the model grows; `run.steps` is then their sum."""
    augmentation: AugmentationOptions = field(default_factory=AugmentationOptions)


def require(options: Any, least: int, *names: str) -> None:
    for name in names:
        if getattr(options, name) < least:
            raise ValueError(f"{name}={getattr(options, name)} must be at least {least}")
