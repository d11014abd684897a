"""A Transformer whose feed-forward layers are replaced, and the job that trains it.

    FeedForwardRun(LanguageRun(Model("transformer", None)), ffn="pattention")

Everything but the feed-forward layers is as in the language run: attention, initial weights,
batches, schedule. The layers have as many parameters as the MLP, within half a percent.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import tokenformer
from experiments.in_memory import InMemoryRun, summarize_rows, train_in_memory
from experiments.job import Result
from experiments.workspace import Workspace

if TYPE_CHECKING:
    from tokenformer.train.loop import Loop


class TokenPair(nn.Module):
    """The feed-forward layer of the pull request: a squared-ReLU MLP with each of its two matrices
    replaced by attention over tokens.

    Its theta is a plain softmax over scores divided by sqrt(d), whose weights sum to 1. With the
    paper's theta the division has no effect.
    """

    def __init__(self, width: int, hidden: int, theta: str) -> None:
        super().__init__()
        tokens = pair_tokens(width, hidden)
        scale = 1.0 if theta == "softmax" else None
        self.up = tokenformer.Pattention(width, hidden, tokens, theta=theta, scale_tokens=scale)
        self.down = tokenformer.Pattention(hidden, width, tokens, theta=theta, scale_tokens=scale)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x * self.up.in_features**-0.5).relu().square()
        return self.down(hidden * self.down.in_features**-0.5)

    @torch.no_grad()
    def zero_values(self) -> None:
        for layer in (self.up, self.down):
            layer.value_tokens.zero_()


class NoFeedForward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


def pair_tokens(width: int, hidden: int) -> int:
    """Tokens of a layer with as many parameters as a matrix between these widths."""
    return round(width * hidden / (width + hidden))


def make_feed_forward(name: str, width: int, hidden: int) -> nn.Module:
    if name == "pattention":
        return tokenformer.Pattention(width, width, hidden)
    if name == "none":
        return NoFeedForward()
    return TokenPair(width, hidden, "l2_gelu" if name == "pair_l2_gelu" else "softmax")


@dataclass(frozen=True)
class FeedForwardRun(InMemoryRun):
    ffn: str = "mlp"
    """mlp; mlp_law, the MLP under the rate law, as if hidden units were tokens; pattention;
    pair_zero, as in the pull request; pair_random, the same with random initial values;
    pair_l2_gelu, with the paper's theta too; none"""

    @property
    def flops(self) -> float:
        """Every weight multiplies every token once in the forward pass, twice in the backward."""
        config = self.base.model.config()
        width, hidden = config.hidden_size, config.intermediate_size
        mlp = 2 * width * hidden
        own = 0 if self.ffn == "none" else mlp
        if self.ffn.startswith("pair"):
            own = 2 * pair_tokens(width, hidden) * (width + hidden)
        tokens = sum(self.base.steps) * self.base.batch * self.base.length
        return self.base.flops + 6 * tokens * config.num_hidden_layers * (own - mlp)

    def run(self, workspace: Workspace) -> Result:
        loop = self.loop(workspace)
        rows = train_in_memory(loop)
        return {
            **summarize_rows(rows),
            "flops": self.flops,
            "parameters": sum(p.numel() for p in loop.task.model.parameters()),
            "ffn_variation": float(f"{output_variation(loop):.3g}"),
        }

    def loop(self, workspace: Workspace) -> "Loop":
        from tokenformer.train.loop import Loop
        from tokenformer.train.stages import plan
        from tokenformer.train.text_workload import TextWorkload

        recipe = self.base.recipe(workspace)
        workload = TextWorkload(recipe)
        model: Any = workload.first_model()
        width, hidden = model.config.hidden_size, model.config.intermediate_size
        if self.ffn == "mlp_law":
            ratio = recipe.optimizer.reference_tokens / hidden
            recipe.optimizer.rates |= {"*.ffn.up.*": math.sqrt(ratio), "*.ffn.down.*": ratio}
        elif self.ffn != "mlp":
            for layer in model.model.layers:
                with torch.device("meta"):  # the loop makes the weights, from the seed
                    layer.ffn = make_feed_forward(self.ffn, width, hidden)
        loop = Loop.from_stage(workload.task(model), plan(recipe)[0])
        if self.ffn == "pair_zero":
            for layer in model.model.layers:
                layer.ffn.zero_values()
        return loop


@torch.no_grad()
def output_variation(loop: "Loop") -> float:
    """Return how much the outputs of the feed-forward layers depend on their input: the share of
    their mean square that is variance over positions, mean over the layers. A constant output
    gives 0."""
    outputs: list[Tensor] = []
    model: Any = loop.task.model
    hooks = [
        layer.ffn.register_forward_hook(lambda *call: outputs.append(call[-1].flatten(0, -2)))
        for layer in model.model.layers
    ]
    loop.module(loop.held_out[0])
    for hook in hooks:
        hook.remove()
    shares = []
    for rows in outputs:  # [B * T, d]
        rows = rows.double()
        square = rows.square().mean()
        shares.append((rows.var(dim=0, correction=0).mean() / square).item() if square else 0.0)
    return sum(shares) / len(shares)
