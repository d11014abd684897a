"""A PEER layer in place of the feed-forward layers, and the job that trains it.

    PeerRun(LanguageRun(Model(ffn_tokens=128)), PeerSize(experts=1024, heads=4, top=24))

PEER (arXiv 2407.04153) retrieves one-neuron experts by product keys. A head splits its query q into
halves and scores them against two sets of sqrt(N) sub-keys; an expert's score is the sum of one
score of each set. The k experts with the largest scores add

    sum_i softmax(scores)_i gelu(u_i x) v_i

Everything but the feed-forward layers is as in the language run: attention, initial weights,
batches, schedule. All experts are evaluated and those that no head retrieved are masked, which at
these sizes is faster than gathering them; FLOPs are counted as if only retrieved ones were.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.in_memory import InMemoryRun, summarize_rows, train_in_memory
from experiments.job import Result
from experiments.workspace import Workspace

if TYPE_CHECKING:
    from tokenformer.train.loop import Loop


@dataclass(frozen=True)
class PeerSize:
    experts: int
    """A square number."""
    heads: int
    top: int
    """Experts that each head retrieves."""
    half: int = 8
    """Channels of half a query."""

    @property
    def side(self) -> int:
        return math.isqrt(self.experts)

    @property
    def active(self) -> int:
        return self.heads * self.top

    def active_weights(self, width: int) -> int:
        """Weights that multiply an input row: queries, sub-keys and the retrieved experts."""
        queries = width * self.heads * 2 * self.half
        retrieval = self.heads * 2 * self.side * self.half
        return queries + retrieval + 2 * width * self.active


class Peer(nn.Module):
    """The gates of a head sum to `top`, so that values have the size and the learning rate of the
    values of as many parameter tokens; in the paper they sum to 1. Queries have an RMS norm instead
    of a batch norm."""

    def __init__(self, width: int, size: PeerSize) -> None:
        super().__init__()
        self.size = size
        self.query = nn.Linear(width, size.heads * 2 * size.half, bias=False)
        self.sub_keys = nn.ModuleList(nn.Linear(size.half, size.side, bias=False) for _ in range(2))
        self.down = nn.Linear(width, size.experts, bias=False)
        self.up = nn.Linear(size.experts, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.gates(x) * F.gelu(self.down(x)))

    def gates(self, x: Tensor) -> Tensor:
        """Return the factor of every expert [..., N]; 0 for those that no head retrieved."""
        size = self.size
        queries = self.query(x).unflatten(-1, (size.heads, 2, size.half))  # [..., h, 2, half]
        queries = F.rms_norm(queries, (size.half,))
        scores, experts = self.retrieve(queries)  # [..., h, k]
        shares = scores.softmax(-1) * size.top
        by_expert = x.new_zeros(*x.shape[:-1], size.experts)
        return by_expert.scatter_add(-1, experts.flatten(-2), shares.flatten(-2))

    def retrieve(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores and indices of the best experts of every head. They are among the pairs
        of the best sub-keys of each half."""
        few = min(self.size.top, self.size.side)
        left, right = (
            keys(queries[..., part, :]).topk(few) for part, keys in enumerate(self.sub_keys)
        )
        pairs = left.values[..., :, None] + right.values[..., None, :]  # [..., h, few, few]
        names = left.indices[..., :, None] * self.size.side + right.indices[..., None, :]
        best = pairs.flatten(-2).topk(self.size.top)
        return best.values, names.flatten(-2).gather(-1, best.indices)

    @torch.no_grad()
    def rescale_values(self) -> None:
        """Give the values the standard deviation of as many parameter tokens as are active; a
        linear layer has that of all experts."""
        self.up.weight.mul_(math.sqrt(self.size.experts / self.size.active))


@dataclass(frozen=True)
class PeerRun(InMemoryRun):
    size: PeerSize = PeerSize(1024, 4, 24)
    retrieval_rate: float = 0.25
    """Factor on the learning rate of queries and sub-keys; by default that of routers."""

    @property
    def flops(self) -> float:
        model = self.base.model
        config = model.config()
        own = self.size.active_weights(model.width)
        replaced = 2 * model.width * config.ffn_tokens
        rows = sum(self.base.steps) * self.base.batch * self.base.length
        return self.base.flops + 6 * rows * model.layers * (own - replaced)

    def run(self, workspace: Workspace) -> Result:
        loop = self.loop(workspace)
        rows = train_in_memory(loop)
        return {
            **summarize_rows(rows),
            "flops": self.flops,
            "parameters": sum(p.numel() for p in loop.task.model.parameters()),
        }

    def loop(self, workspace: Workspace) -> "Loop":
        from tokenformer.train.loop import Loop
        from tokenformer.train.stages import plan
        from tokenformer.train.text_workload import TextWorkload

        recipe = self.base.recipe(workspace)
        workload = TextWorkload(recipe)
        model = workload.first_model()
        for layer in model.model.layers:
            with torch.device("meta"):  # the loop makes the weights, from the seed
                layer.ffn = Peer(model.config.hidden_size, self.size)
        ratio = recipe.optimizer.reference_tokens / self.size.active
        recipe.optimizer.rates |= {
            "*.ffn.up.*": ratio,
            "*.ffn.down.*": math.sqrt(ratio),
            "*.ffn.query.*": self.retrieval_rate,
            "*.ffn.sub_keys.*": self.retrieval_rate,
        }
        loop = Loop.from_stage(workload.task(model), plan(recipe)[0])
        for layer in model.model.layers:
            layer.ffn.rescale_values()
        return loop
