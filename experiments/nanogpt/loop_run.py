"""The job of the comparison: a model trained with nanoGPT's options.

    LoopRun(LanguageRun(...), nanogpt=True)     # nanoGPT's model instead of the run's own

All models train in one loop, on the batches of the language run.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from experiments.in_memory import InMemoryRun, summarize_rows, train_in_memory
from experiments.job import Result
from experiments.workspace import Workspace

if TYPE_CHECKING:
    from benchmarks.baselines import PlainGPT
    from tokenformer.train.loop import Loop

BETAS = (0.9, 0.99)
INIT_STD = 0.02


class SummedLoss(nn.Module):
    """nanoGPT's model, with the sum of the losses that the loop expects instead of their mean."""

    def __init__(self, model: "PlainGPT") -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids) * ids[:, 1:].numel()


def make_nanogpt(config: Any, length: int, seed: int) -> "PlainGPT":
    """nanoGPT's model with the sizes of a configuration, initialized as nanoGPT does: normal with
    standard deviation 0.02, smaller for the matrices that write to the residual stream."""
    from benchmarks.baselines import PlainGPT

    sizes = (config.vocab_size, config.hidden_size, config.intermediate_size)
    model = PlainGPT(*sizes, config.num_hidden_layers, config.num_attention_heads, length)
    model.config = config  # the loop looks for options of tokens in it
    generator = torch.Generator().manual_seed(seed)
    residual_std = INIT_STD / (2 * config.num_hidden_layers) ** 0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                writes = name.endswith(("out.weight", "down.weight"))
                parameter.normal_(std=residual_std if writes else INIT_STD, generator=generator)
    return model


@dataclass(frozen=True)
class LoopRun(InMemoryRun):
    """A language run in memory with nanoGPT's optimizer."""

    nanogpt: bool = False
    """Whether nanoGPT's model replaces the one of the run, a Transformer of the same sizes."""

    def run(self, workspace: Workspace) -> Result:
        loop = self.loop(workspace)
        rows = train_in_memory(loop)
        nats = [[row["step"], round(row["val_loss"], 5)] for row in rows if "val_loss" in row]
        parameters = sum(p.numel() for p in loop.task.model.parameters())
        return {**summarize_rows(rows), "parameters": parameters, "nats": nats}

    def loop(self, workspace: Workspace) -> "Loop":
        from tokenformer.train.loop import Loop
        from tokenformer.train.stages import plan
        from tokenformer.train.text_workload import TextWorkload

        recipe = self.base.recipe(workspace)
        recipe.optimizer.betas = BETAS
        workload = TextWorkload(recipe)
        task: Any = workload.task(workload.first_model())
        if self.nanogpt:
            task.model = make_nanogpt(task.model.config, self.base.length, self.base.seed)
            task.module = SummedLoss(task.model)
            recipe.optimizer.rates = {}  # one learning rate for all
        return Loop.from_stage(task, plan(recipe)[0])
