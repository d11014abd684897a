"""Tensor parallelism over parameter tokens: each rank of a mesh holds a shard of every layer.

    shard_tokens(model, mesh["tp"])                  # a model in memory, or on the meta device

    TokenformerForCausalLM.from_pretrained(folder, tp_plan="auto")        # under torchrun

All other parameters are replicated, as are inputs, outputs and the gradients of replicated
parameters. The second form uses the plan in the configuration; there transformers also shards the
embedding and the output head along the vocabulary.
"""

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

from tokenformer.layers.pattention import Pattention
from tokenformer.layers.sharded import ShardedPattention
from tokenformer.ops.sharded import SumGradient

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = ("key_tokens", "value_tokens")


class TokenParallel(ParallelStyle):
    """Shards a Pattention layer, for torch's `parallelize_module` (`_apply`) and for the plans of
    transformers (the other methods)."""

    def __init__(self, *, sum_gradient: bool = True) -> None:
        super().__init__()
        self.sum_gradient = sum_gradient

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in TOKENS:
            self.shard_param(module, name, device_mesh)
        return self.install_forward(module, device_mesh)

    def validate_param(self, module: nn.Module, param: str, mesh: Any, **_: Any) -> None:
        """Accept any number of tokens."""

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Keep this rank's shard of a full tensor, without communication."""
        if type(module) is not Pattention:  # for example Int8Pattention
            raise TypeError(f"only Pattention can be sharded, not {module}")
        if param in TOKENS:  # a learned scale is replicated
            whole = module.get_parameter(param)
            part = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
            shard = nn.Parameter(part, requires_grad=whole.requires_grad)
            module.register_parameter(param, shard)

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        module.__class__ = ShardedPattention
        module.sum_gradient = self.sum_gradient  # type: ignore[assignment]
        return module


class SummedInput(ParallelStyle):
    """Sums the gradient of a module's input once for all layers that read it with
    `sum_gradient=False`."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        module.register_forward_pre_hook(
            lambda _, args: (SumGradient.apply(args[0], group), *args[1:])
        )
        return module


def shard_tokens(model: "PreTrainedModel", mesh: DeviceMesh) -> None:
    """Shard the tokens of every Pattention layer of a TokenFormer over a one-dimensional mesh, in
    place."""
    shares_input = TokenParallel(sum_gradient=False)
    plan: dict[str, ParallelStyle] = {
        "layers.*.attention": SummedInput(),
        **{f"layers.*.attention.{name}": shares_input for name in "qkv"},
        "layers.*.attention.o": TokenParallel(),
        "layers.*.ffn": TokenParallel(),
    }
    parallelize_module(model.base_model, mesh, plan)


ALL_PARALLEL_STYLES.register("tokens", TokenParallel())  # used in the plan of `TokenConfig`
