"""Detection of steps that went wrong: a loss or gradient that is not finite, or a loss spike."""

import math
from collections import deque
from statistics import mean


class SpikeDetector:
    """Compares each loss with the mean of the last `window` ones.

    Nothing is a spike before the window is full, or at a loss of at most `min_loss`: a classifier's
    loss is close to zero and can be ten times larger in the next batch.
    """

    def __init__(self, factor: float, min_loss: float = 0.0, window: int = 20) -> None:
        self.factor, self.min_loss = factor, min_loss
        self.recent: deque[float] = deque(maxlen=window)

    def problem(self, loss: float, gradient_norm: float) -> str | None:
        """Return what is wrong with a step, or None. Only healthy losses enter the window."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(gradient_norm):
            return f"the norm of the gradient is {gradient_norm}"
        if len(self.recent) == self.recent.maxlen:
            usual = mean(self.recent)
            if loss > max(self.min_loss, self.factor * usual):
                return (
                    f"the loss is {loss:.3f}, more than {self.factor:g} times the usual {usual:.3f}"
                )
        self.recent.append(loss)
        return None
