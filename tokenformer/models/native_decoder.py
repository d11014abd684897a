"""Batch-1 decoding in native code: one new token through all blocks of a language model in a call.

At batch 1 the Python between the layers takes nearly as long as reading their weights. So on a CPU
`generate` runs all blocks in one native call, unless something in them needs Python: hooks,
adapters, masks, learned scales. Those cases, and all other shapes, run the blocks in eager mode;
the native path is tested against it.
"""

import ctypes
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers.utils import output_capturing

from tokenformer.layers import LayerNorm, Pattention
from tokenformer.layers.int4 import Int4Pattention
from tokenformer.layers.int8 import Int8Pattention
from tokenformer.layers.norm import RMSNorm
from tokenformer.layers.positions import Rotation
from tokenformer.layers.quantized import QuantizedPattention
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
from tokenformer.ops.backends.native.library import Block, Norm, Shape, Tokens, function

if TYPE_CHECKING:
    from tokenformer.models.language import LanguageModel

ATTENTION_PROJECTIONS = ("q", "k", "v", "o")
QUANTIZED_NAMES = ("key_tokens", "value_tokens", "key_scales", "value_scales")
PARAMETER_NAMES: dict[type[nn.Module], tuple[str, ...]] = {
    Pattention: ("key_tokens", "value_tokens"),
    Int8Pattention: QUANTIZED_NAMES,
    Int4Pattention: QUANTIZED_NAMES,
}
"""The parameters of the layers that have a native implementation."""
BACKENDS = ("auto", "native")
"""Layers that ask for another backend run in eager mode."""
layer_options = attrgetter(
    "theta", "approximate", "eps", "backend", "scale_tokens", "active_tokens"
)


def decode_token(
    model: "LanguageModel", hidden: Tensor, rotation: Rotation | None, mask: Any, cache: Any
) -> Tensor | None:
    """Run the blocks of `model` on one token, hidden [1, 1, d] -> [1, 1, d], and append its keys
    and values to the cache. Return None, with nothing changed, where native code cannot."""
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
    if decoder.blocks is None or decoder.is_hooked():
        return None
    return decoder(hidden, rotation, layers)


class NativeDecoder:
    """The weights of a model as pointers for the native code, and what they were taken from.

    It stays valid until a module, parameter or option of the model is replaced (`is_current`).
    """

    blocks: Any = None
    """None if the model needs Python between its layers."""

    def __init__(self, model: "LanguageModel") -> None:
        # Nothing here may refer to the model itself: it would never be freed.
        self.module_dicts: list[dict[str, Any]] = []
        self.hooks = [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
        self.members: list[tuple[dict[str, Any], str, Any]] = []
        self.addresses: list[tuple[Tensor, int]] = []
        self.classes: list[tuple[nn.Module, type[nn.Module]]] = []
        self.projections: list[tuple[Any, Any]] = []
        self.attention = model.config._attn_implementation
        self.track(model, model._modules, "layers")
        self.track(model.layers, model.layers._modules, *model.layers._modules)
        blocks: list[Any] = [self.block(layer, index) for index, layer in enumerate(model.layers)]
        layer_classes = {type(layer) for layer in model.layers}
        thetas = {options[:3] for _, options in self.projections}
        tokens = [(layer.key_tokens, layer.value_tokens) for layer, _ in self.projections]
        dtypes = {tensor.dtype for pair in tokens for tensor in pair}
        uniform = len(layer_classes) == len(thetas) == len(dtypes) == 1
        if None in blocks or not uniform or self.attention != "sdpa":
            return
        self.theta, self.dtype = theta_struct(*thetas.pop()), dtypes.pop()
        self.blocks = (Block * len(blocks))(*blocks)
        first: Block = blocks[0]
        attention: Any = model.layers[0].attention
        self.shape = Shape(
            width=model.config.hidden_size,
            heads=first.q.d_out // attention.head_dim,
            kv_heads=first.k.d_out // attention.head_dim,
            head_dim=attention.head_dim,
            scaling=attention.scaling,
            is_parallel=layer_classes == {ParallelLayer},
        )
        self.most_tokens = max(max(b.q.n + b.k.n + b.v.n, b.o.n, b.ffn.n) for b in blocks)
        self.threads = threads_for(first.ffn.n * first.ffn.d_in * self.dtype.itemsize)

    def __call__(
        self, hidden: Tensor, rotation: Rotation | None, layers: Sequence[PreallocatedLayer]
    ) -> Tensor | None:
        caches = [(layer.buffers["keys"], layer.buffers["values"]) for layer in layers]
        sizes = {(c.length, c.reserve(1).shape, c.buffer.dtype) for pair in caches for c in pair}
        if len(sizes) != 1:
            return None
        (length, (batch, _, capacity, _), dtype) = sizes.pop()
        if batch != 1 or dtype not in (torch.float32, torch.bfloat16):
            return None
        # Copies: another thread may be decoding with the same model.
        blocks, shape = (type(made).from_buffer_copy(made) for made in (self.blocks, self.shape))
        for block, (keys, values) in zip(blocks, caches, strict=True):
            block.cached_keys = keys.buffer.data_ptr()
            block.cached_values = values.buffer.data_ptr()
        shape.length, shape.capacity = length, capacity
        cos, sin = (None, None) if rotation is None else (part.float() for part in rotation)
        shape.rotary_dim = 0 if cos is None else cos.shape[-1]
        out = hidden.to(torch.float32, copy=True)
        inner, inner_kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        # A row for each thread, then shared memory: queries, keys, values, attention output, block
        # output and attention scores.
        scratch = (self.threads + 1) * shape.width
        scratch += 2 * (inner + inner_kv) + shape.heads * (length + 1)
        outputs = max(inner + 2 * inner_kv, shape.width)
        buffer, work = workspace(self.threads, self.most_tokens, 3, outputs, scratch)
        function("decode", self.dtype)(
            out.data_ptr(),
            ctypes.addressof(blocks),
            len(blocks),
            ctypes.addressof(shape),
            self.theta,
            None if cos is None else cos.data_ptr(),
            None if sin is None else sin.data_ptr(),
            dtype == torch.bfloat16,
            buffer[-scratch:].data_ptr(),
            work,
            self.threads,
        )
        for keys, values in caches:
            keys.length = values.length = length + 1
        return out.to(hidden.dtype)

    def block(self, layer: Any, index: int) -> Block | None:
        """Pointers to a layer's weights; None if it has no native implementation."""
        if self.class_of(layer) not in (SequentialLayer, ParallelLayer):
            return None
        attention = layer.attention
        if self.class_of(attention) is not NamedAttention or attention.layer_idx != index:
            return None
        if self.class_of(layer.drop_path) is not nn.Identity:
            return None
        self.track(layer, layer._modules, *layer._modules)
        self.track(attention, attention._modules, *ATTENTION_PROJECTIONS)
        parts = [
            self.norm(layer.attention_norm),
            self.norm(layer.ffn_norm),
            *(self.tokens(getattr(attention, name)) for name in ATTENTION_PROJECTIONS),
            self.tokens(layer.ffn),
        ]
        return None if None in parts else Block(*parts)

    def norm(self, module: Any) -> Norm | None:
        if self.class_of(module) not in (LayerNorm, RMSNorm):
            return None
        vectors = self.track(module, module._parameters, "weight", "bias")
        if any(vector is not None and vector.dtype != torch.float32 for vector in vectors):
            return None
        pointers = [None if vector is None else vector.data_ptr() for vector in vectors]
        return Norm(*pointers, module.eps, type(module) is RMSNorm)

    def tokens(self, module: Any) -> Tokens | None:
        names = PARAMETER_NAMES.get(self.class_of(module))
        if names is None:
            return None
        self.projections.append((module, layer_options(module)))
        tensors = self.track(module, module._parameters, *names)
        # Some libraries remove parameters and set tensors in their place.
        if not all(isinstance(tensor, Tensor) for tensor in tensors):
            return None
        *_, backend, scale, active = layer_options(module)
        if isinstance(scale, Tensor) or active is not None or backend not in BACKENDS:
            return None
        keys, values, *_ = tensors
        if isinstance(module, QuantizedPattention):
            row = keys.new_empty(1, module.in_features, dtype=torch.float32)
            return module.pointers() if module.supports_native(row) else None
        if not native.supports(keys.new_empty(1, keys.shape[1], dtype=torch.float32), keys, values):
            return None
        return token_pointers(keys, values, scale)

    def class_of(self, module: nn.Module) -> type[nn.Module]:
        """Return the exact class and record it: assigning to `__class__` replaces the forward."""
        self.classes.append((module, type(module)))
        return type(module)

    def track(self, module: nn.Module, owner: dict[str, Any], *names: str) -> list[Any]:
        """Record a module's hooks and the members of `owner` by these names; return the members."""
        self.module_dicts.append(module.__dict__)
        self.hooks += [module._forward_hooks, module._forward_pre_hooks]
        members = [owner.get(name) for name in names]
        self.members += [(owner, name, part) for name, part in zip(names, members, strict=True)]
        self.addresses += [(part, part.data_ptr()) for part in members if isinstance(part, Tensor)]
        return members

    def is_hooked(self) -> bool:
        """Whether a module has a forward hook or an overridden forward. Hooks that transformers
        leaves behind once hidden states were requested count only while it collects them."""
        if any("forward" in module_dict for module_dict in self.module_dicts):
            return True
        hooks = [hook for hooks in self.hooks if hooks for hook in hooks.values()]
        capturing = [hook for hook in hooks if hook.__module__ == output_capturing.__name__]
        is_collecting = bool(capturing and output_capturing._active_collector.get())
        return len(capturing) < len(hooks) or is_collecting

    def is_current(self, model: "LanguageModel") -> bool:
        """Whether all recorded modules, parameters and options are unchanged."""
        return (
            model.config._attn_implementation == self.attention
            and all(owner.get(name) is member for owner, name, member in self.members)
            and all(type(module) is recorded for module, recorded in self.classes)
            and all(tensor.data_ptr() == address for tensor, address in self.addresses)
            and all(layer_options(layer) == options for layer, options in self.projections)
        )


DECODERS: "WeakKeyDictionary[LanguageModel, NativeDecoder]" = WeakKeyDictionary()
