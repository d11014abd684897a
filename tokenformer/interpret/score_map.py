"""Score maps: the weight that every Pattention gives each of its tokens, for one input.

    maps = score_maps(model, ids)                    # token ids [B, T], or images [B, C, H, W]
    maps["3.ffn"].weights                            # theta(A), [B, T, n]
    maps["3.ffn"].contributions                      # |weight| * ||value||, [B, T, n]
    maps["3.ffn"].explained(k=16)                    # share of the output that 16 tokens carry
    direct_effects(model, maps, targets)["3.ffn"]    # what each token adds to a logit, [B, T, n]

Of an image, position t is a patch, after the class token if there is one. Maps are computed by the
reference implementation in fp32 or wider, whatever backend the model runs. In a sparse layer the
weights of the tokens that a row skips are zero, and those of the others have the gates of a router.
Within `intervene` a pinned token has the pinned weight; one that is off or scaled keeps its weight,
and its value is changed.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from tokenformer.growth.model_inputs import check_batch
from tokenformer.growth.tokens.token_usage import observe_inputs
from tokenformer.interpret.intervention import with_pins
from tokenformer.interpret.token_name import WRITERS, full_names, named_layers
from tokenformer.layers.norm import LayerNorm, RMSNorm
from tokenformer.layers.pattention import Pattention
from tokenformer.models.vision import VisionModelForImageClassification

FINAL_NORM = "norm"


@dataclass(frozen=True)
class ScoreMap:
    """The tokens of one layer on one input."""

    layer: str
    scores: Tensor  # [B, T, n], as they enter the norm
    weights: Tensor  # [B, T, n]
    values: Tensor  # [n, d_out]; where the dtypes agree the layer's own, not a copy

    @property
    def contributions(self) -> Tensor:
        """The length of what each token adds to the output, |weight| * ||value||, [B, T, n]."""
        return self.weights.abs() * self.values.norm(dim=1)

    @property
    def output(self) -> Tensor:
        """What the tokens add up to, [B, T, d_out]: the layer's output, but for the bias that a
        routed layer may have."""
        return self.weights @ self.values

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest contributions at each position and their tokens, [B, T, k]."""
        largest = self.contributions.topk(min(k, len(self.values)), dim=-1)
        return largest.values, largest.indices

    def share(self, k: int) -> Tensor:
        """Return the share of the k largest in the sum of all contributions, [B, T]."""
        total = self.contributions.sum(-1)
        return torch.where(total > 0, self.top(k)[0].sum(-1) / total, 0.0)

    def explained(self, k: int) -> Tensor:
        """Return 1 - ||y - y_k||^2 / ||y||^2, [B, T], where y is the output and y_k what the k
        tokens with the largest contributions add to it. 1 if they carry all of it; negative if the
        others cancel what they add."""
        kept = torch.zeros_like(self.weights)
        chosen = self.top(k)[1]
        kept.scatter_(-1, chosen, self.weights.gather(-1, chosen))
        whole = self.output
        missed = (whole - kept @ self.values).square().sum(-1)
        length = whole.square().sum(-1)
        return torch.where(length > 0, 1 - missed / length, 0.0)


class ScoreMaps(Mapping[str, ScoreMap]):
    """The score maps of a model on one input, by layer: `maps["3.ffn"]`."""

    def __init__(
        self,
        inputs: Tensor,
        maps: dict[str, ScoreMap],
        final: Tensor,
        grid: tuple[int, int] | None = None,
    ) -> None:
        self.inputs = inputs
        self.maps = maps
        self.final = final
        """The input of the final norm, [B, T, d]."""
        self.grid = grid
        """Rows and columns of the patches of an image, the last positions; None for text."""

    def __getitem__(self, layer: str) -> ScoreMap:
        return self.maps[layer]

    def __iter__(self) -> Iterator[str]:
        return iter(self.maps)

    def __len__(self) -> int:
        return len(self.maps)


@torch.no_grad()
def score_maps(
    model: PreTrainedModel, inputs: Tensor, layers: Iterable[str] | None = None
) -> ScoreMaps:
    """Return the score maps of all layers, or of those named: layers (3.ffn), blocks (3) or
    projections (ffn)."""
    wanted, names, maps = named_layers(model, layers), full_names(model), dict[str, ScoreMap]()
    check_batch(model, inputs)
    final: list[Tensor] = []

    def record(name: str, layer: Pattention, x: Tensor) -> None:
        scores, _, weights = layer.token_weights(x)
        values = layer.value_tokens.detach().to(weights.dtype)
        weights, values = with_pins(layer, weights, values)
        maps[name] = ScoreMap(name, scores, weights, values)

    observers = {
        names[name]: lambda x, name=name, layer=layer: record(name, layer, x)
        for name, layer in wanted.items()
    }
    norm = next(n for n, module in model.named_modules() if module is final_norm(model))
    observe_inputs(model, [inputs], {**observers, norm: final.append})
    ordered = {name: maps[name] for name in wanted}
    return ScoreMaps(inputs, ordered, final[0], patch_rows_and_columns(model, inputs))


def patch_rows_and_columns(model: PreTrainedModel, inputs: Tensor) -> tuple[int, int] | None:
    if inputs.ndim != 4:
        return None
    size = model.config.patch_size
    return inputs.shape[2] // size, inputs.shape[3] // size


def final_norm(model: PreTrainedModel) -> LayerNorm:
    norm: LayerNorm = model.base_model.get_submodule(FINAL_NORM)
    return norm


@torch.no_grad()
def direct_effects(model: PreTrainedModel, maps: ScoreMaps, targets: Tensor) -> dict[str, Tensor]:
    """Return what each token of the output projections and feed-forward layers adds to a logit.

    The final norm is linear once its statistics are known, so a logit is a sum over everything that
    was written to the residual stream: the embedding, the tokens of all layers, and biases. This is
    the token's own term, without what later layers make of it.

    Args:
        model: a language model or an image classifier with its head.
        maps: the score maps of an input.
        targets: the id of the logit at every position, [B, T]; of images, their class, [B].

    Returns:
        [B, T, n] by layer.
    """
    readout = readouts(model, maps.final, targets)  # [B, T, d]
    return {
        name: each.weights * (readout.to(each.values.dtype) @ each.values.T)
        for name, each in maps.items()
        if name.split(".")[1] in WRITERS
    }


def readouts(model: PreTrainedModel, final: Tensor, targets: Tensor) -> Tensor:
    """Return the direction in the residual stream that each target's logit reads, [B, T, d]: the
    logit is its dot product with the input of the final norm, plus a constant."""
    wide = torch.promote_types(final.dtype, torch.float32)
    final = final.to(wide)
    norm = final_norm(model)
    rows = lens_rows(model).to(wide)[targets]  # [B, T, d], or [B, d] of images
    if not isinstance(model, VisionModelForImageClassification):
        if targets.shape != final.shape[:2]:
            raise ValueError(f"targets are {[*targets.shape]}; give one id per position")
    elif model.config.pooling == "class":
        rows = F.pad(rows[:, None], (0, 0, 0, final.shape[1] - 1))  # the class token is read
    else:
        rows = rows[:, None].expand(final.shape) / final.shape[1]
    if isinstance(norm, RMSNorm):
        return rows * (final.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    variance = final.var(-1, keepdim=True, unbiased=False)
    return rows * (variance + norm.eps).rsqrt()


def lens_rows(model: PreTrainedModel) -> Tensor:
    """Return the row of every logit's weights, [logits, d], with the final norm's weight and its
    centering folded in: the logit lens of a value is its product with these."""
    norm, head = final_norm(model), output_head(model)
    rows = head.weight.detach()
    if norm.weight is not None:
        rows = rows * norm.weight.detach()
    return rows if isinstance(norm, RMSNorm) else rows - rows.mean(-1, keepdim=True)


def output_head(model: PreTrainedModel) -> torch.nn.Linear:
    """Return the linear layer that makes the logits."""
    if isinstance(model, VisionModelForImageClassification):
        return model.classifier
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} has no logits; load the model with its head")
    found: torch.nn.Linear = head
    return found
