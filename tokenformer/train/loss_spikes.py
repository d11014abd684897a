"""Losses and gradients that went wrong: not finite, or far above what came before."""

import math
from collections import deque
from statistics import mean


class SpikeDetector:
    """Compares each loss with the mean of the last ones; the first few are only watched.

    A loss that is nearly zero, as of a classifier, is easily ten times as large in the next batch;
    so a spike is also above `least`, such as half of what guessing costs.
    """

    def __init__(self, factor: float, least: float = 0.0, window: int = 20) -> None:
        self.factor, self.least = factor, least
        self.recent: deque[float] = deque(maxlen=window)

    def problem(self, loss: float, gradient_norm: float) -> str | None:
        """What is wrong with a step, or None; only healthy losses are remembered."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(gradient_norm):
            return f"the norm of the gradient is {gradient_norm}"
        full = len(self.recent) == self.recent.maxlen
        if full and loss > max(self.least, self.factor * mean(self.recent)):
            usual = mean(self.recent)
            return f"the loss is {loss:.3f}, more than {self.factor:g} times the usual {usual:.3f}"
        self.recent.append(loss)
        return None
