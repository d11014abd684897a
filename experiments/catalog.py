"""All exhibits, in the order of the report."""

from importlib import import_module

from experiments.exhibit import Exhibit

PAPER = (
    "progressive_scaling",
    "preserved_distribution",
    "incremental_scaling",
    "flops_and_length",
    "zero_shot",
    "image_classification",
    "theta_ablation",
    "norm_ablation",
    "gradients",
    "parameter_table",
)
"""Folders with a table or figure of the paper."""
BEYOND = ("tokens_or_width", "nanogpt", "pattention_mlp")
"""Folders with questions that users ask and the paper does not answer."""
STUDIES = (
    "growth",
    "vision_growth",
    "conversion",
    "adapters",
    "interpretability",
    "sparse_tokens",
    "vision_language",
)
"""Folders with studies of results pages of their own; `make reproduce` leaves them out."""
NAMES = (*PAPER, *BEYOND, *STUDIES)


def load_exhibit(name: str) -> Exhibit:
    exhibit: Exhibit = import_module(f"experiments.{name}").EXHIBIT
    return exhibit
