"""What a training run can be told. Plain data: no torch here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainOptions:
    steps: int = 2000
    """Optimizer steps."""
    batch_size: int = 2
    """Sequences per step."""
    length: int = 256
    """Tokens per sequence."""
    learning_rate: float = 1.5e-3
    """Peak rate, reached after the warm-up and brought down by a cosine."""
    warmup_steps: int = 50
    final_rate: float = 0.1
    """Where the cosine ends, as a fraction of the peak."""
    weight_decay: float = 0.1
    """On matrices (tokens and embeddings); never on norms."""
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 1.0
    validate_every: int = 200
    validation_batches: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "length", "validate_every", "validation_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate={self.learning_rate} must be above 0")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps={self.warmup_steps} must be at least 0")
        if not 0 <= self.final_rate <= 1:
            raise ValueError(f"final_rate={self.final_rate} must be between 0 and 1")
