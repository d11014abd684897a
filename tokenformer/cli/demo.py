"""`tokenformer demo`: a small TokenFormer learns to write Python, with nothing to download."""

from pathlib import Path


def demo(out: Path | None = None, steps: int = 300, seed: int = 0) -> None:
    """Train a small byte-level TokenFormer on this machine's Python sources and let it speak.

    Args:
        out: Folder to keep the model, its metrics and a picture of the loss in.
        steps: Training steps; the default takes about a minute on two cores.
        seed: Seed of the weights, the batches and the sample.
    """
