"""The image classifiers: TokenFormer and the Vision Transformer baseline, in the same code.

The blocks are those of the language models, without mask and rotation. The classifiers follow the
conventions of Hugging Face (`from_pretrained`, Trainer, `pipeline("image-classification")`) and
timm (`forward_features`, `forward_head`, `num_classes`).

    config = TokenformerVisionConfig.from_preset("base")
    model = TokenformerForImageClassification(config)
    logits = model(pixel_values).logits         # [B, 3, 224, 224] -> [B, 1000]
"""

from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput, ImageClassifierOutput
from transformers.models.auto.modeling_auto import AutoModel, AutoModelForImageClassification
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from tokenformer.layers import PatchEmbedding
from tokenformer.models.backbone import (
    BlockPreTrainedModel,
    Projections,
    make_layer,
    make_norm,
    tokenformer_projections,
    transformer_projections,
)
from tokenformer.models.configuration import (
    TokenformerVisionConfig,
    TransformerVisionConfig,
    VisionConfig,
)


class VisionPreTrainedModel(BlockPreTrainedModel):
    main_input_name = "pixel_values"
    input_modalities: ClassVar = ("image",)
    _input_embed_layer = "embed_patches"  # what `get_input_embeddings` returns


class VisionModel(VisionPreTrainedModel):
    """Patch embedding, blocks and final norm, without a head."""

    projections: Projections
    """Builds the projections, the only difference between TokenFormer and Transformer."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__(config)
        self.embed_patches = PatchEmbedding(
            config.image_size,
            config.patch_size,
            config.num_channels,
            config.hidden_size,
            class_token=bool(config.class_tokens),
        )
        self.layers = nn.ModuleList(
            [
                make_layer(
                    config,
                    self.projections,
                    index,
                    is_causal=False,
                    drop_path=config.drop_path(index),
                )
                for index in range(config.num_hidden_layers)
            ]
        )
        self.norm = make_norm(config, config.final_norm_parameters)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(self, pixel_values: Tensor, **options: Any) -> BaseModelOutput:
        hidden = self.embed_patches(pixel_values)  # [B, T, d]
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, **options)
        return BaseModelOutput(last_hidden_state=self.norm(hidden))


class VisionModelForImageClassification(VisionPreTrainedModel):
    """A vision model with a linear classifier."""

    backbone: ClassVar[type[VisionModel]]

    def __init__(self, config: VisionConfig) -> None:
        super().__init__(config)
        self.model = self.backbone(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @property
    def num_classes(self) -> int:
        return self.classifier.out_features

    def forward_features(self, pixel_values: Tensor) -> Tensor:
        """Return all tokens after the final norm, [B, T, d]; a class token comes first."""
        features: Tensor = self.model(pixel_values).last_hidden_state
        return features

    def forward_head(self, features: Tensor) -> Tensor:
        """Return logits [B, num_classes] for the output of `forward_features`."""
        pooled = features[:, 0] if self.config.pooling == "class" else features.mean(1)  # [B, d]
        logits: Tensor = self.classifier(pooled)
        return logits

    @can_return_tuple
    def forward(
        self, pixel_values: Tensor, labels: Tensor | None = None, **options: Any
    ) -> ImageClassifierOutput:
        """`labels` are classes [B], or values or several classes per image [B, num_classes],
        according to `config.problem_type`; see `classification_loss`."""
        outputs = self.model(pixel_values, **options)
        logits = self.forward_head(outputs.last_hidden_state)
        loss = (
            None if labels is None else self.classification_loss(logits.float(), labels, **options)
        )
        return ImageClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def classification_loss(
        self,
        logits: Tensor,
        labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
        **options: Any,
    ) -> Tensor:
        """The loss of `config.problem_type`, as in transformers' ViT: cross-entropy, binary
        cross-entropy or squared error. If None, it is inferred from the first labels and stored:
        regression with one label, otherwise single-label for integers and multi-label for floats.
        Single-label problems also accept probabilities over the classes, as from mixup.

        `num_items_in_batch` counts the labels of all batches of an optimizer step (Trainer gives
        it when it accumulates gradients); the loss is then this batch's share of their mean.
        """
        kind = self.config.problem_type
        if kind == "single_label_classification" and labels.is_floating_point():
            loss = F.cross_entropy(logits, labels)
        else:
            loss = self.loss_function(
                labels, logits, self.config, num_items_in_batch=num_items_in_batch, **options
            )
            if self.config.problem_type == "single_label_classification":
                return loss  # already divided by the number of items
        if num_items_in_batch is None:
            return loss
        return loss * labels.numel() / num_items_in_batch


class TokenformerVisionModel(VisionModel):
    config: TokenformerVisionConfig
    projections = staticmethod(tokenformer_projections)


class TokenformerForImageClassification(VisionModelForImageClassification):
    """A Vision Transformer with Pattention projections and a linear classifier."""

    config: TokenformerVisionConfig
    backbone = TokenformerVisionModel


class TransformerVisionModel(VisionModel):
    config: TransformerVisionConfig
    projections = staticmethod(transformer_projections)


class TransformerForImageClassification(VisionModelForImageClassification):
    """The Vision Transformer baseline with a linear classifier."""

    config: TransformerVisionConfig
    backbone = TransformerVisionModel


for _config, _backbone, _classifier in (
    (TokenformerVisionConfig, TokenformerVisionModel, TokenformerForImageClassification),
    (TransformerVisionConfig, TransformerVisionModel, TransformerForImageClassification),
):
    AutoModel.register(_config, _backbone, exist_ok=True)
    AutoModelForImageClassification.register(_config, _classifier, exist_ok=True)
