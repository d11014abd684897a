"""Batch-1 decoding in native code: one new token through all blocks of a language model in a call.

At batch 1 the Python between the layers takes nearly as long as reading their weights. So on a CPU
`generate` runs all blocks in one native call, unless something in them needs Python: hooks,
adapters, masks, learned scales. Then, and for every other shape, the blocks themselves run; the
native path is tested against them.
"""

import ctypes
from collections.abc import Sequence
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers.utils import output_capturing

from tokenformer.layers import LayerNorm, Pattention
from tokenformer.layers.int8 import Int8Pattention
from tokenformer.layers.norm import RMSNorm
from tokenformer.layers.positions import Rotation
from tokenformer.models.backbone import NamedAttention, ParallelLayer, SequentialLayer
from tokenformer.models.kv_cache import PreallocatedLayer
from tokenformer.ops.backends import native
from tokenformer.ops.backends.auto import is_plain
from tokenformer.ops.backends.native.few_rows import (
    theta_struct,
    threads_for,
    token_pointers,
    workspace,
)
from tokenformer.ops.backends.native.library import Block, Norm, Shape, function

PROJECTIONS = ("q", "k", "v", "o")
MEMORY: dict[type[nn.Module], tuple[str, ...]] = {
    Pattention: ("key_tokens", "value_tokens"),
    Int8Pattention: ("key_tokens", "value_tokens", "key_scales", "value_scales"),
}
"""What is read of the layers that have a native form, by their names."""
BACKENDS = ("auto", "native")
"""Of layers that do not ask for another."""
traits = attrgetter("theta", "approximate", "eps", "backend", "scale_tokens", "active_tokens")


def decode_token(
    model: Any, hidden: Tensor, rotation: Rotation | None, mask: Any, cache: Any
) -> Tensor | None:
    """hidden [1, 1, d] -> [1, 1, d], with its keys and values in the cache; None, and nothing has
    changed, where that cannot be had."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return None
    if hidden.shape[:2] != (1, 1) or mask is not None:
        return None
    layers = getattr(cache, "layers", ())
    if len(layers) != len(model.layers):
        return None
    if not all(type(layer) is PreallocatedLayer and layer.is_initialized for layer in layers):
        return None
    if not is_plain(hidden) or not native.supports(hidden):
        return None
    decoder = DECODERS.get(model)
    if decoder is None or not decoder.is_current(model):
        decoder = DECODERS[model] = NativeDecoder(model)
    if decoder.blocks is None or decoder.is_watched():
        return None
    return decoder(hidden, rotation, layers)


class NativeDecoder:
    """Of a model as it was when this was made."""

    blocks: Any = None
    """None if the model has what only Python can do."""

    def __init__(self, model: Any) -> None:
        # Nothing here leads back to the model, which would never be freed.
        self.states: list[dict[str, Any]] = []
        self.hooks = [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
        self.parts: list[tuple[dict[str, Any], str, Any]] = []
        self.places: list[tuple[Tensor, int]] = []
        self.kinds: list[tuple[nn.Module, type[nn.Module]]] = []
        self.maps: list[tuple[Any, Any]] = []
        self.attention = model.config._attn_implementation
        self.watch(model, model._modules, "layers")
        self.watch(model.layers, model.layers._modules, *model.layers._modules)
        blocks: list[Any] = [self.block(layer, place) for place, layer in enumerate(model.layers)]
        layers = {type(layer) for layer in model.layers}
        rules = {found[:3] for _, found in self.maps}
        memory = [(layer.key_tokens, layer.value_tokens) for layer, _ in self.maps]
        dtypes = {tensor.dtype for pair in memory for tensor in pair}
        alike = len(layers) == len(rules) == len(dtypes) == 1
        if None in blocks or not alike or self.attention != "sdpa":
            return
        self.rule, self.dtype = theta_struct(*rules.pop()), dtypes.pop()
        self.blocks = (Block * len(blocks))(*blocks)
        first, attention = blocks[0], model.layers[0].attention
        self.shape = Shape(
            width=model.config.hidden_size,
            heads=first.q.d_out // attention.head_dim,
            kv_heads=first.k.d_out // attention.head_dim,
            head_dim=attention.head_dim,
            scaling=attention.scaling,
            is_parallel=layers == {ParallelLayer},
        )
        self.most_tokens = max(max(b.q.n + b.k.n + b.v.n, b.o.n, b.ffn.n) for b in blocks)
        self.threads = threads_for(first.ffn.n * first.ffn.d_in * self.dtype.itemsize)

    def __call__(
        self, hidden: Tensor, rotation: Rotation | None, layers: Sequence[Any]
    ) -> Tensor | None:
        buffers = [(layer.buffers["keys"], layer.buffers["values"]) for layer in layers]
        rooms = {(r.length, r.reserve(1).shape, r.buffer.dtype) for pair in buffers for r in pair}
        if len(rooms) != 1:
            return None
        (seen, (batch, _, room, _), dtype) = rooms.pop()
        if batch != 1 or dtype not in (torch.float32, torch.bfloat16):
            return None
        # Copies: another thread may be speaking with the same model.
        blocks, shape = (type(made).from_buffer_copy(made) for made in (self.blocks, self.shape))
        for block, (keys, values) in zip(blocks, buffers, strict=True):
            block.cached_keys, block.cached_values = (
                keys.buffer.data_ptr(),
                values.buffer.data_ptr(),
            )
        shape.seen, shape.room = seen, room
        cos, sin = (None, None) if rotation is None else (part.float() for part in rotation)
        shape.rotary_dim = 0 if cos is None else cos.shape[-1]
        out = hidden.to(torch.float32, copy=True)
        inner, inner_kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        # Rows of each thread, then what they share: queries, keys, values, attended, outputs, and
        # the scores of attention.
        spare = (self.threads + 1) * shape.width + 2 * (inner + inner_kv) + shape.heads * (seen + 1)
        outputs = max(inner + 2 * inner_kv, shape.width)
        held, work = workspace(self.threads, self.most_tokens, 3, outputs, spare)
        function("step", self.dtype)(
            out.data_ptr(),
            ctypes.addressof(blocks),
            len(blocks),
            ctypes.addressof(shape),
            self.rule,
            None if cos is None else cos.data_ptr(),
            None if sin is None else sin.data_ptr(),
            dtype == torch.bfloat16,
            held[-spare:].data_ptr(),
            work,
            self.threads,
        )
        for keys, values in buffers:
            keys.length = values.length = seen + 1
        return out.to(hidden.dtype)

    def block(self, layer: Any, place: int) -> Block | None:
        if self.kind(layer) not in (SequentialLayer, ParallelLayer):
            return None
        attention = layer.attention
        if self.kind(attention) is not NamedAttention or attention.layer_idx != place:
            return None
        if self.kind(layer.drop_path) is not nn.Identity:
            return None
        self.watch(layer, layer._modules, *layer._modules)
        self.watch(attention, attention._modules, *PROJECTIONS)
        made = [
            self.norm(layer.attention_norm),
            self.norm(layer.ffn_norm),
            *(self.map(getattr(attention, name)) for name in PROJECTIONS),
            self.map(layer.ffn),
        ]
        return None if None in made else Block(*made)

    def norm(self, module: Any) -> Norm | None:
        if self.kind(module) not in (LayerNorm, RMSNorm):
            return None
        vectors = self.watch(module, module._parameters, "weight", "bias")
        if any(vector is not None and vector.dtype != torch.float32 for vector in vectors):
            return None
        places = [None if vector is None else vector.data_ptr() for vector in vectors]
        return Norm(*places, module.eps, type(module) is RMSNorm)

    def map(self, module: Any) -> Any:
        names = MEMORY.get(self.kind(module))
        if names is None:
            return None
        self.maps.append((module, traits(module)))
        found = self.watch(module, module._parameters, *names)
        # Other libraries take parameters away and set tensors in their place.
        if not all(isinstance(tensor, Tensor) for tensor in found):
            return None
        *_, backend, scale, active = traits(module)
        if isinstance(scale, Tensor) or active is not None or backend not in BACKENDS:
            return None
        keys, values, *scales = found
        if not native.supports(keys.new_empty(1, keys.shape[1], dtype=torch.float32), keys, values):
            return None
        if any(numbers.dtype != torch.float32 for numbers in scales):
            return None
        return token_pointers(keys, values, scale, *scales)

    def kind(self, module: nn.Module) -> type[nn.Module]:
        """Its very class: a part of its own may have been put into it since."""
        self.kinds.append((module, type(module)))
        return type(module)

    def watch(self, module: nn.Module, has: dict[str, Any], *names: str) -> list[Any]:
        """What is in the way of a module's forward, and what it has by these names."""
        self.states.append(module.__dict__)
        self.hooks += [module._forward_hooks, module._forward_pre_hooks]
        found = [has.get(name) for name in names]
        self.parts += [(has, name, part) for name, part in zip(names, found, strict=True)]
        self.places += [(part, part.data_ptr()) for part in found if isinstance(part, Tensor)]
        return found

    def is_watched(self) -> bool:
        """Whether someone wants to see what a module is given or gives. The hooks of transformers
        itself stay for ever once it was asked for hidden states, and mostly do nothing."""
        if any("forward" in state for state in self.states):
            return True
        hooks = [hook for hooks in self.hooks if hooks for hook in hooks.values()]
        own = [hook for hook in hooks if hook.__module__ == output_capturing.__name__]
        return len(own) < len(hooks) or bool(own and output_capturing._active_collector.get())

    def is_current(self, model: Any) -> bool:
        """Whether the model still is what it was."""
        return (
            model.config._attn_implementation == self.attention
            and all(has.get(name) is part for has, name, part in self.parts)
            and all(type(module) is kind for module, kind in self.kinds)
            and all(tensor.data_ptr() == place for tensor, place in self.places)
            and all(traits(module) == found for module, found in self.maps)
        )


DECODERS: WeakKeyDictionary[Any, NativeDecoder] = WeakKeyDictionary()
