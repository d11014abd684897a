"""`tokenformer inspect`: what a model costs, before it is built."""

from pathlib import Path


def inspect(model: str, plot: Path | None = None, json: bool = False) -> None:
    """Parameters, training FLOPs and memory of a preset or model folder, beside its Transformer twin.

    Args:
        model: A preset (124m, 354m, ...) or a folder with a config.json.
        plot: Draw FLOPs against sequence length for the four growth sizes into this file.
        json: Print JSON instead of tables.
    """
    print(model, plot, json)
