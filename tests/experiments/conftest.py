"""The small corpus of the training tests serves experiments too."""

from tests.train.conftest import corpus

__all__ = ["corpus"]
