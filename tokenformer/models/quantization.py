"""Int8 and 4-bit weights, by one option of `from_pretrained`:

    model = TokenformerForCausalLM.from_pretrained(folder, quantization_config=TokenQuantization())
    model.save_pretrained(smaller)          # loads in int8 without the option

Parameter tokens, embeddings and the output head are quantized; norms and positions are not.
Embeddings and head have int8 weights also if the tokens have 4 bits.
"""

from typing import Any

from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from tokenformer.layers import Linear, Pattention, RoutedPattention, ThresholdedPattention
from tokenformer.layers.int4 import Int4Pattention
from tokenformer.layers.int8 import Int8Embedding, Int8Linear, Int8Pattention
from tokenformer.layers.modality_pattention import ModalityPattention
from tokenformer.layers.quantized import QuantizedPattention
from tokenformer.layers.quantized_routing import RoutedInt4Pattention, RoutedInt8Pattention
from tokenformer.layers.sharded import ShardedPattention
from tokenformer.models.configuration import QUANTIZATION_METHOD as METHOD

LAYERS: dict[tuple[type[nn.Module], int], type[QuantizedPattention]] = {
    (Pattention, 4): Int4Pattention,
    (Pattention, 8): Int8Pattention,
    (RoutedPattention, 4): RoutedInt4Pattention,
    (RoutedPattention, 8): RoutedInt8Pattention,
}
"""The quantized form of a layer, for each number of bits."""
BITS = (4, 8)


@register_quantization_config(METHOD)
class TokenQuantization(QuantizationConfigMixin):
    """Quantized weights: pass it to `from_pretrained` as `quantization_config`.

    Args:
        bits: 8 for int8 weights with a scale per token, or 4 for parameter tokens in groups of 32
            with a scale, 4.5 bits per weight.
    """

    def __init__(self, bits: int = 8, **_: Any) -> None:
        check_bits(bits)
        self.quant_method = METHOD
        self.bits = bits


@register_quantizer(METHOD)
class TokenQuantizer(HfQuantizer):
    """Builds and loads quantized models for transformers."""

    def _process_model_before_weight_loading(self, model: Any, **options: Any) -> None:
        placed = options.get("device_map")
        if isinstance(placed, dict) and len(set(placed.values())) > 1:
            raise ValueError(
                "a quantized model runs on one device; leave out device_map, or name one"
            )
        if self.pre_quantized:
            self.quantize(model)  # on the meta device: the weights come from the file
        elif not any(isinstance(module, Pattention) for module in model.modules()):
            raise ValueError(f"{type(model).__name__} has no tokens to quantize")

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> Any:
        if not self.pre_quantized:
            self.quantize(model)
        return model

    def quantize(self, model: Any) -> None:
        quantize_model(model, self.quantization_config.bits)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def check_bits(bits: Any) -> None:
    if bits not in BITS:
        raise ValueError(f"bits={bits} is not supported; only 4 and 8 are")


def quantize_model(model: PreTrainedModel, bits: int = 8) -> None:
    """Quantize a model in place, layer by layer, so that the peak memory is little more than the
    model."""
    check_bits(bits)
    if any(isinstance(module, ShardedPattention) for module in model.modules()):
        raise ValueError("tokens sharded over processes cannot be quantized")
    if any(isinstance(module, ThresholdedPattention) for module in model.modules()):
        raise ValueError("tokens with thresholds (config.thresholds) cannot be quantized")
    if any(isinstance(module, ModalityPattention) for module in model.modules()):
        raise ValueError("tokens routed by modality cannot be quantized")
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if type(module) in (Pattention, RoutedPattention):
                setattr(parent, name, LAYERS[type(module), bits](module))
            elif type(module) is Linear and module.bias is None:
                setattr(parent, name, Int8Linear(module))
            elif type(module) is nn.Embedding:
                setattr(parent, name, Int8Embedding(module, module.weight.dtype))
    tie_scales(model)


def tie_scales(model: Any) -> None:
    """Tie the int8 weights and scales of an output head that is tied to the embedding."""
    for target, source in list(model.all_tied_weights_keys.items()):
        names = [key.removesuffix(".weight") for key in (target, source)]
        head, embedding = (model.get_submodule(name) for name in names)
        if isinstance(head, Int8Linear) and isinstance(embedding, Int8Embedding):
            head.share(embedding)
            scales = {f"{names[0]}.scales": f"{names[1]}.scales"}
            model.all_tied_weights_keys |= scales
            model._tied_weights_keys = {**model._tied_weights_keys, **scales}
