"""The check of the computed FLOPs: torch's counter, and the time of a forward pass."""

import time
from dataclasses import dataclass, replace
from typing import Any

from experiments.job import Job, Result
from experiments.language import Model
from experiments.workspace import Workspace

COUNTED = Model(tokens=384)
TIMED = Model(width=64, heads=2, tokens=768)
"""Its Transformer is four times as wide, about as in the paper's largest pair."""


def pair_of(model: Model) -> dict[str, Model]:
    """Return a TokenFormer and the Transformer of equal parameters, which is wider."""
    return {"tokenformer": model, "transformer": replace(model, family="transformer")}


def forward_flops(model: Model, length: int) -> dict[str, int]:
    from tokenformer.models.accounting import forward_flops

    return forward_flops(model.config(), length)


def build(model: Model, length: int) -> Any:
    import torch

    from tokenformer.models.model_classes import MODEL_CLASSES

    torch.manual_seed(0)
    config = model.config()
    config.max_position_embeddings = length
    return MODEL_CLASSES[type(config)](config).eval()


@dataclass(frozen=True)
class CountedFlops(Job):
    """FLOPs of forward and backward by torch's counter, for both families."""

    model: Model = COUNTED
    lengths: tuple[int, ...] = (128, 384)

    def reduced(self) -> "CountedFlops":
        return replace(self, lengths=(16, 32))

    def run(self, workspace: Workspace) -> Result:
        start = time.perf_counter()
        counted = {
            family: [count(model, length) for length in self.lengths]
            for family, model in pair_of(self.model).items()
        }
        return {"counted": counted, "seconds": round(time.perf_counter() - start, 1)}


def count(model: Model, length: int) -> dict[str, int]:
    """Return the FLOPs of one sequence, forward and forward plus backward."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from tokenformer.layers.pattention import Pattention

    built = build(model, length)
    # The counter does not see inside fused kernels.
    built.config._attn_implementation = "eager"
    for layer in built.modules():
        if isinstance(layer, Pattention):
            layer.backend = "reference"
    ids = torch.zeros(1, length, dtype=torch.long)
    with FlopCounterMode(display=False) as forward:
        logits = built(input_ids=ids, use_cache=False).logits
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    counted = forward.get_total_flops()
    return {"forward": counted, "training": counted + backward.get_total_flops()}


@dataclass(frozen=True)
class ForwardTimes(Job):
    """CPU seconds of a forward pass of both families over text length, measured in turns."""

    model: Model = TIMED
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    repeats: int = 3

    @property
    def flops(self) -> float:
        models = pair_of(self.model).values()
        passes = [sum(forward_flops(m, length).values()) for m in models for length in self.lengths]
        return float(self.repeats * sum(passes))

    def reduced(self) -> "ForwardTimes":
        return replace(self, model=replace(TIMED, tokens=256), lengths=(32, 64))

    def run(self, workspace: Workspace) -> Result:
        import torch

        start = time.perf_counter()
        models = [build(model, max(self.lengths)) for model in pair_of(self.model).values()]
        times: list[list[list[float]]] = []
        with torch.no_grad():
            for model in models:
                seconds(model, torch.zeros(1, min(self.lengths), dtype=torch.long))  # warm up
            for length in self.lengths:
                ids = torch.zeros(1, length, dtype=torch.long)
                rounds = [[seconds(model, ids) for model in models] for _ in range(self.repeats)]
                times.append(rounds)
        return {"times": times, "seconds": round(time.perf_counter() - start, 1)}


def seconds(model: Any, ids: Any) -> float:
    """Return the CPU time of a forward pass, which other programs on the machine hardly change."""
    start = time.process_time()
    model(input_ids=ids, use_cache=False)
    return time.process_time() - start
