"""Tensor parallelism over parameter tokens: each process of a mesh has a slice of every layer's.

    spread_tokens(model, mesh["tp"])                 # a model in memory, or on the meta device

    TokenformerForCausalLM.from_pretrained(folder, tp_plan="auto")        # under torchrun

All else of the model is the same on every process, and so are the inputs, the outputs and the
gradients of what is not spread. The second way is transformers' own, by the plan in the
configuration; there the embedding and the output head are split along the vocabulary too.
"""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from tokenformer.layers.pattention import Pattention
from tokenformer.layers.sharded import ShardedPattention
from tokenformer.ops.sharded import SumGradient

TOKENS = ("key_tokens", "value_tokens")


class TokenParallel(ParallelStyle):
    """How a Pattention layer is spread, for torch's `parallelize_module` and, by the methods
    without an underscore, for transformers' plans."""

    def __init__(self, *, sum_gradient: bool = True) -> None:
        super().__init__()
        self.sum_gradient = sum_gradient

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in TOKENS:
            self.shard_param(module, name, device_mesh)
        return self.install_forward(module, device_mesh)

    def validate_param(self, module: nn.Module, param: str, mesh: Any, **_: Any) -> None:
        """Any number of tokens can be spread."""

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Of a tensor that every process has whole, or on the meta device, nothing is sent."""
        if type(module) is not Pattention:  # such as one whose tokens are in int8
            raise TypeError(f"only Pattention can be spread over processes, not {module}")
        if param in TOKENS:  # a learned scale is everyone's
            whole = module.get_parameter(param)
            part = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
            spread = nn.Parameter(part, requires_grad=whole.requires_grad)
            module.register_parameter(param, spread)

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        module.__class__ = ShardedPattention
        module.sum_gradient = self.sum_gradient  # type: ignore[assignment]
        return module


class SummedInput(ParallelStyle):
    """For a module all of whose use of its input is by layers without `sum_gradient`: the gradient
    is summed once for all of them."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        module.register_forward_pre_hook(
            lambda _, args: (SumGradient.apply(args[0], group), *args[1:])
        )
        return module


def spread_tokens(model: Any, mesh: DeviceMesh) -> None:
    """Spread the tokens of every Pattention layer of `model`, a TokenFormer, over a mesh of one
    dimension, in place."""
    shares_input = TokenParallel(sum_gradient=False)
    plan: dict[str, ParallelStyle] = {
        "layers.*.attention": SummedInput(),
        **{f"layers.*.attention.{name}": shares_input for name in "qkv"},
        "layers.*.attention.o": TokenParallel(),
        "layers.*.ffn": TokenParallel(),
    }
    parallelize_module(model.base_model, mesh, plan)
