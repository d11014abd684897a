"""Decoding in native code: one new token of up to 16 sequences through a language model in a call.

In decoding the Python between the layers takes nearly as long as reading their weights. So on a CPU
all blocks run in one native call, unless something in them needs Python: hooks, adapters, learned
scales, masks other than left padding. Those cases, and all other shapes, run the blocks in eager
mode; the native path is tested against it. `decode_token` is for one forward pass of the blocks;
the loop of `generate` keeps a `DecodingSession`, which includes embedding and output head.
"""

import ctypes
from collections.abc import Sequence
from itertools import repeat
from operator import is_
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers.utils import output_capturing

from tokenformer.layers import (
    LayerNorm,
    LearnedPositions,
    Linear,
    ModalityPattention,
    NoPositions,
    Pattention,
    RoutedPattention,
)
from tokenformer.layers.int4 import Int4Pattention
from tokenformer.layers.int8 import Int8Embedding, Int8Linear, Int8Pattention
from tokenformer.layers.norm import RMSNorm
from tokenformer.layers.positions import RotaryPositions, Rotation
from tokenformer.layers.quantized import QuantizedPattention
from tokenformer.layers.quantized_routing import RoutedInt4Pattention, RoutedInt8Pattention
from tokenformer.layers.routed_pattention import GroupRouting, KeySummary
from tokenformer.models.backbone import NamedAttention, ParallelLayer, SequentialLayer
from tokenformer.models.kv_cache import PreallocatedTensor, preallocated_tensors
from tokenformer.ops.backends import native
from tokenformer.ops.backends.auto import is_plain
from tokenformer.ops.backends.native.few_rows import (
    bytes_per_row,
    matrix_pointers,
    scores_per_row,
    theta_struct,
    threads_for,
    token_pointers,
    workspace,
)
from tokenformer.ops.backends.native.library import (
    Block,
    Ends,
    Matrix,
    Norm,
    Shape,
    Step,
    Tokens,
    function,
)

if TYPE_CHECKING:
    from tokenformer.models.language import LanguageModel, LanguageModelForCausalLM

MAX_BATCH = 16
"""With more sequences the matrix products of eager mode are faster."""
ATTENTION_PROJECTIONS = ("q", "k", "v", "o")
QUANTIZED_NAMES = ("key_tokens", "value_tokens", "key_scales", "value_scales")
TOKEN_NAMES: dict[type[nn.Module], tuple[str, ...]] = {
    **dict.fromkeys((Pattention, ModalityPattention, RoutedPattention), QUANTIZED_NAMES[:2]),
    **dict.fromkeys((Int8Pattention, Int4Pattention), QUANTIZED_NAMES),
    **dict.fromkeys((RoutedInt8Pattention, RoutedInt4Pattention), QUANTIZED_NAMES),
}
PARAMETER_NAMES: dict[type[nn.Module], tuple[str, ...]] = {
    **TOKEN_NAMES,
    nn.Embedding: ("weight",),
    LearnedPositions: ("weight",),
    Linear: ("weight", "bias"),
    Int8Embedding: ("weight", "scales"),
    Int8Linear: ("weight", "scales"),
}
"""The parameters of the layers that have a native implementation."""
OPTIONS = (
    "theta",
    "approximate",
    "eps",
    "backend",
    "scale_tokens",
    "_active_tokens",
    "vision_tokens",  # of tokens routed by modality: where the language tokens start
)
ROUTING_OPTIONS = ("training", "group_size", "_active_groups", "norm")
BACKENDS = ("auto", "native")
"""Layers that ask for another backend run in eager mode."""
MIN_POSITIONS = 256
"""Positions in the first table of rotations."""


def decode_token(
    model: "LanguageModel", hidden: Tensor, rotation: Rotation | None, mask: Any, cache: Any
) -> Tensor | None:
    """Run the blocks of `model` on one token per sequence, hidden [B, 1, d] -> [B, 1, d], and
    append its keys and values to the cache. `mask` [B, T] is None without padding. Return None,
    with nothing changed, where native code cannot."""
    if torch.is_grad_enabled() or not is_supported(hidden):
        return None
    tensors = preallocated_tensors(cache)
    if tensors is None:
        return None
    starts = first_tokens(mask, hidden.shape[0], tensors[0].length + 1)
    decoder = decoder_of(model)
    if starts is None or decoder is None:
        return None
    session = DecodingSession(decoder, hidden.shape[0], starts)
    if rotation is not None:
        cos, sin = (part.flatten(0, 1).float().contiguous() for part in rotation)  # [B or 1, dim]
        session.rotate(torch.arange(hidden.shape[0], device="cpu") % cos.shape[0], cos, sin)
    session.hidden.copy_(hidden[:, 0])
    return session.hidden[:, None].to(hidden.dtype) if session.advance(tensors) else None


def is_supported(hidden: Tensor) -> bool:
    """Whether native code takes these rows: a few, on a CPU, outside of all transforms."""
    return hidden.shape[0] <= MAX_BATCH and is_plain(hidden) and native.supports(hidden[:1])


def decoder_of(model: Any) -> "NativeDecoder | None":
    """Return the decoder of a language model, with or without head; None if it needs Python."""
    decoder = DECODERS.get(model)
    if decoder is None or not decoder.is_current():
        from tokenformer.models.language import LanguageModel

        made = NativeDecoder if isinstance(model, LanguageModel) else CausalDecoder
        decoder = DECODERS[model] = made(model)
    return None if decoder.blocks is None or decoder.is_hooked() else decoder


def first_tokens(mask: Any, rows: int, length: int) -> Tensor | None:
    """Return the first token of each sequence that a mask [B, length] of left padding leaves in;
    None for other masks."""
    if mask is None:
        return torch.zeros(rows, dtype=torch.long, device="cpu")
    if not isinstance(mask, Tensor) or mask.shape != (rows, length) or not is_plain(mask):
        return None
    kept = mask != 0
    starts = length - kept.sum(1)
    padded = torch.arange(length, device=mask.device) < starts[:, None]
    return starts if torch.equal(kept, ~padded) and bool(kept[:, -1].all()) else None


class NativeDecoder:
    """The weights of a model as pointers for the native code, and what they were taken from.

    It stays valid until a module, parameter or option of the model is replaced (`is_current`).
    """

    blocks: Any = None
    """None if the model needs Python between its layers."""
    ends: Ends | None = None
    """Embedding, final norm and head, of a decoder that has them."""

    def __init__(self, model: "LanguageModel") -> None:
        # Nothing here may refer to the model itself: it would never be freed.
        self.module_dicts: list[dict[str, Any]] = []
        self.hooks = [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
        self.owners: list[dict[str, Any]] = []
        self.names: list[str] = []
        self.members: list[Any] = []
        self.tensors: list[Tensor] = []
        self.addresses: list[int] = []
        self.keys: list[Tensor] = []
        """Of routed layers; `summaries` were made of them."""
        self.versions: list[int] = []
        self.summaries: list[KeySummary] = []
        self.modules: list[nn.Module] = []
        self.classes: list[type[nn.Module]] = []
        self.config = model.config
        self.attention = model.config._attn_implementation
        self.track(model, model.__dict__, "config")
        self.track(model, model._modules, "layers")
        self.track(model.layers, model.layers._modules, *model.layers._modules)
        self.projections: list[Any] = []
        blocks: list[Any] = [self.block(layer, index) for index, layer in enumerate(model.layers)]
        layer_classes = {type(layer) for layer in model.layers}
        thetas = {(layer.theta, layer.approximate, layer.eps) for layer in self.projections}
        tokens = [(layer.key_tokens, layer.value_tokens) for layer in self.projections]
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
        together = [part for b in blocks for part in ((b.q, b.k, b.v), (b.o,), (b.ffn,))]
        self.most_scores = max(sum(map(scores_per_row, part)) for part in together)
        self.most_chosen = max(sum(one.routing.active for one in part) for part in together)
        self.ffn_bytes = bytes_per_row(first.ffn, self.dtype)

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
        self.track(module, module.__dict__, "eps")
        vectors = self.track(module, module._parameters, "weight", "bias")
        dtypes = {vector.dtype for vector in vectors if vector is not None}
        if not dtypes <= {torch.float32} and dtypes != {torch.bfloat16}:
            return None
        pointers = [None if vector is None else vector.data_ptr() for vector in vectors]
        is_half = dtypes == {torch.bfloat16}
        return Norm(*pointers, module.eps, type(module) is RMSNorm, is_half)

    def tokens(self, module: Any) -> Tokens | None:
        if self.class_of(module) not in TOKEN_NAMES:
            return None
        self.projections.append(module)
        self.track(module, module.__dict__, *OPTIONS)
        tensors = self.track(module, module._parameters, *PARAMETER_NAMES[type(module)])
        # Some libraries remove parameters and set tensors in their place.
        if not all(isinstance(tensor, Tensor) for tensor in tensors):
            return None
        scale = module.scale_tokens
        if isinstance(scale, Tensor) or module.active_tokens is not None:
            return None
        if module.backend not in BACKENDS:
            return None
        if isinstance(module, GroupRouting):
            self.track_routing(module)
        if isinstance(module, RoutedPattention):
            return self.routed_tokens(module)
        if isinstance(module, QuantizedPattention):
            row = tensors[0].new_empty(1, module.in_features, dtype=torch.float32)
            return module.pointers() if module.supports_native(row) else None
        keys, values, scale = module.token_set()
        if not native.supports(keys.new_empty(1, keys.shape[1], dtype=torch.float32), keys, values):
            return None
        return token_pointers(keys, values, scale)

    def track_routing(self, module: Any) -> None:
        router = module.router
        self.class_of(router)
        self.track(module, module.__dict__, *ROUTING_OPTIONS)
        self.track(module, module._modules, "router")
        self.track(module, module._parameters, "bias", "gram_root")
        self.track(router, router._parameters, "weight", "scales")
        self.track(router, router._buffers, "bias")

    @torch.no_grad()  # or the summary would be one for training
    def routed_tokens(self, module: RoutedPattention) -> Tokens | None:
        keys = module.key_tokens
        if not module.supports_native(keys.new_empty(1, keys.shape[1], dtype=torch.float32)):
            return None
        self.summaries.append(module.key_summary())
        self.keys.append(keys)
        self.versions.append(keys._version)
        return module.pointers(self.summaries[-1])

    def class_of(self, module: nn.Module) -> type[nn.Module]:
        """Return the exact class and record it: assigning to `__class__` replaces the forward."""
        self.modules.append(module)
        self.classes.append(type(module))
        return type(module)

    def track(self, module: nn.Module, owner: dict[str, Any], *names: str) -> list[Any]:
        """Record a module's hooks and the members of `owner` by these names; return the members."""
        if not any(module.__dict__ is known for known in self.module_dicts[-2:]):
            self.module_dicts.append(module.__dict__)
            self.hooks += [module._forward_hooks, module._forward_pre_hooks]
        members = [owner.get(name) for name in names]
        self.owners += repeat(owner, len(names))
        self.names += names
        self.members += members
        self.tensors += [part for part in members if isinstance(part, Tensor)]
        self.addresses += [part.data_ptr() for part in members if isinstance(part, Tensor)]
        return members

    def is_hooked(self) -> bool:
        """Whether a module has a forward hook or an overridden forward. Hooks that transformers
        leaves behind once hidden states were requested count only while it collects them."""
        if any(map(dict.__contains__, self.module_dicts, repeat("forward"))):
            return True
        if not any(self.hooks):
            return False
        hooks = [hook for hooks in self.hooks for hook in hooks.values()]
        capturing = [hook for hook in hooks if hook.__module__ == output_capturing.__name__]
        is_collecting = bool(capturing and output_capturing._active_collector.get())
        return len(capturing) < len(hooks) or is_collecting

    def is_current(self) -> bool:
        """Whether all recorded modules, parameters and options are unchanged. It runs for every
        token, so the loops are inside of `map`."""
        return (
            self.config._attn_implementation == self.attention
            and all(map(is_, map(dict.get, self.owners, self.names), self.members))
            and all(map(is_, map(type, self.modules), self.classes))
            and list(map(Tensor.data_ptr, self.tensors)) == self.addresses
            and [keys._version for keys in self.keys] == self.versions
        )


class CausalDecoder(NativeDecoder):
    """A decoder with embedding, final norm and output head, from ids to logits."""

    hidden_dtype: torch.dtype
    rotary: RotaryPositions | None = None
    rotations: tuple[Tensor, Tensor] | None = None
    """cos and sin of the first positions, each [positions, rotary_dim]."""

    def __init__(self, causal: "LanguageModelForCausalLM") -> None:
        model = causal.model
        super().__init__(model)
        self.track(causal, causal._modules, "model", "lm_head")
        self.track(model, model._modules, "embed_tokens", "positions", "norm")
        embedding = self.matrix(model.embed_tokens, nn.Embedding, Int8Embedding)
        head = self.matrix(causal.lm_head, Linear, Int8Linear)
        positions = self.positions(model.positions)
        norm = self.norm(model.norm)
        dtype = getattr(model.embed_tokens, "dtype", None) or model.embed_tokens.weight.dtype
        self.hidden_dtype = dtype
        missing = None in (embedding, head, positions, norm)
        if missing or dtype not in (torch.float32, torch.bfloat16):
            self.blocks = None
        else:
            self.ends = Ends(embedding, positions, head, norm)

    def matrix(self, module: Any, *classes: type[nn.Module]) -> Matrix | None:
        """Pointers to the rows of an embedding or of the head."""
        if self.class_of(module) not in classes:
            return None
        self.track(module, module.__dict__, "max_norm", "dtype")
        weight, *others = self.track(module, module._parameters, *PARAMETER_NAMES[type(module)])
        scales = others[0] if isinstance(module, Int8Embedding | Int8Linear) else None
        biased = scales is None and any(other is not None for other in others)
        if biased or getattr(module, "max_norm", None) is not None:
            return None
        if not isinstance(weight, Tensor) or not is_plain(weight):
            return None
        return matrix_pointers(weight, scales)

    def positions(self, module: Any) -> Matrix | None:
        """Pointers to learned positions; no rows for other encodings."""
        if type(module) is LearnedPositions:
            return self.matrix(module, LearnedPositions)
        if self.class_of(module) not in (RotaryPositions, NoPositions):
            return None
        self.track(module, module.__dict__, "dim", "base")
        self.rotary = module if isinstance(module, RotaryPositions) else None
        return Matrix()

    def rotations_up_to(self, position: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin of all positions up to this one, as eager mode computes them."""
        assert self.rotary is not None
        found = self.rotations
        if found is None or found[0].shape[0] <= position:
            count = max(MIN_POSITIONS, 2 * position)
            like = torch.empty(0, dtype=self.hidden_dtype, device="cpu")
            _, made = self.rotary(like, torch.arange(count, device="cpu"))
            cos, sin = (part.float() for part in made)
            found = self.rotations = cos, sin
        return found


class DecodingSession:
    """Decodes token after token with one model and one KV cache.

    `starts` [B] are the first tokens that the sequences attend to. Pointers to the cache are kept
    until a buffer of it is replaced.
    """

    def __init__(self, decoder: NativeDecoder, rows: int, starts: Tensor) -> None:
        self.decoder, self.rows, self.starts = decoder, rows, starts
        # Copies: another thread may be decoding with the same model.
        self.blocks = type(decoder.blocks).from_buffer_copy(decoder.blocks)
        self.shape = Shape.from_buffer_copy(decoder.shape)
        self.hidden = torch.empty(rows, self.shape.width, dtype=torch.float32, device="cpu")
        self.threads = threads_for(decoder.ffn_bytes)
        self.step = Step(rows=rows, hidden=self.hidden.data_ptr())
        if bool(starts.any()):
            self.step.starts = starts.data_ptr()
        self.buffers: list[Tensor] = []
        self.capacity = 0
        self.run = function("decode", decoder.dtype)

    def rotate(self, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Take the rotation of every sequence from row `positions` of cos and sin."""
        self.positions, self.rotation = positions, (cos, sin)  # keeps them alive
        self.step.positions = positions.data_ptr()
        self.step.cos, self.step.sin = cos.data_ptr(), sin.data_ptr()
        self.shape.rotary_dim = cos.shape[-1]

    def advance(self, tensors: Sequence[PreallocatedTensor]) -> bool:
        """Decode a token and append it to the cache, or return False with nothing changed."""
        lengths = {tensor.length for tensor in tensors}
        if len(lengths) != 1:
            return False
        length = lengths.pop()
        kept = len(self.buffers) == len(tensors) and length < self.capacity
        kept = kept and all(t.buffer is b for t, b in zip(tensors, self.buffers, strict=True))
        if not kept and not self.attach(tensors):
            return False
        self.step.length = length
        ends = self.decoder.ends
        done = self.run(
            ctypes.addressof(self.blocks),
            len(self.blocks),
            ctypes.addressof(self.shape),
            None if ends is None else ctypes.addressof(ends),
            ctypes.addressof(self.step),
            self.decoder.theta,
            self.is_half_cache,
            self.scratch,
            self.work,
            self.threads,
        )
        if done:
            for tensor in tensors:
                tensor.length = length + 1
        return bool(done)

    def attach(self, tensors: Sequence[PreallocatedTensor]) -> bool:
        """Point to the buffers of a cache and make space for a token; False if they do not fit."""
        shape, rows = self.shape, self.rows
        sizes = {(tensor.buffer.shape[:2], tensor.buffer.shape[3:]) for tensor in tensors}
        if len(tensors) != 2 * len(self.blocks) or sizes != {
            ((rows, shape.kv_heads), (shape.head_dim,))
        }:
            return False
        buffers = [tensor.reserve(1) for tensor in tensors]
        kinds = {(buffer.shape[2], buffer.dtype, buffer.device.type) for buffer in buffers}
        (capacity, dtype, device), *others = kinds
        if others or device != "cpu" or dtype not in (torch.float32, torch.bfloat16):
            return False
        self.buffers, self.capacity, self.is_half_cache = buffers, capacity, dtype == torch.bfloat16
        for block, keys, values in zip(self.blocks, buffers[::2], buffers[1::2], strict=True):
            block.cached_keys, block.cached_values = keys.data_ptr(), values.data_ptr()
        self.step.capacity = capacity
        inner, inner_kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        # Each thread has normed rows and attention weights; queries, keys, values, attention and
        # block output are shared.
        scratch = self.threads * (rows * shape.width + capacity)
        scratch += rows * (2 * (inner + inner_kv) + shape.width)
        outputs = rows * max(inner + 2 * inner_kv, shape.width)
        scores, chosen = rows * self.decoder.most_scores, rows * self.decoder.most_chosen
        self.buffer, self.work = workspace(self.threads, scores, 3 * rows, outputs, chosen, scratch)
        self.scratch = self.buffer[-scratch:].data_ptr()
        return True


class CausalSession(DecodingSession):
    """Decodes from ids to logits. The sequences are at `positions` [B] when it starts."""

    decoder: CausalDecoder

    def __init__(
        self, decoder: CausalDecoder, starts: Tensor, positions: Tensor, offset: int = 0
    ) -> None:
        super().__init__(decoder, len(starts), starts)
        self.positions, self.last, self.offset = positions, int(positions.max()), offset
        self.step.positions = positions.data_ptr()
        self.shape.is_half = decoder.hidden_dtype == torch.bfloat16
        assert decoder.ends is not None
        self.vocab_size = decoder.ends.head.n
        self.logits: Tensor | None = None

    def decode(self, ids: Tensor, tensors: Any, is_greedy: bool) -> tuple[Tensor, Tensor] | None:
        """Decode the tokens ids [B]; return their logits [B, vocab_size] and, if `is_greedy`, the
        ids of the largest [B]. The logits then are valid until the next call only."""
        decoder, step = self.decoder, self.step
        if decoder.rotary is not None:
            cos, sin = decoder.rotations_up_to(self.last + self.offset)
            if cos is not getattr(self, "rotation", (None,))[0]:
                self.rotate(self.positions, cos, sin)
        if self.logits is None or not is_greedy:
            shape = (self.rows, self.vocab_size)
            self.logits = torch.empty(shape, dtype=torch.float32, device="cpu")
        best = torch.empty(self.rows, dtype=torch.long, device="cpu")
        step.ids, step.offset, step.logits = ids.data_ptr(), self.offset, self.logits.data_ptr()
        step.best = best.data_ptr() if is_greedy else None
        return (self.logits, best) if self.advance(tensors) else None


DECODERS: "WeakKeyDictionary[nn.Module, NativeDecoder]" = WeakKeyDictionary()
