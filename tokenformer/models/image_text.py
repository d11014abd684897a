"""Vision-language models: text with images in it, to text.

    model, report = tokenformer.join_modalities(vision, language, new_tokens=64, mode="routed")
    logits = model(input_ids, pixel_values=pixel_values).logits

`pixel_values` [N, C, H, W] are the images of the batch in the order of its text, where each is
marked by placeholders, ids `config.image_token_id`. `TokenformerProcessor` makes both.

In a joint model (modes `routed` and `shared`) patches are embedded as by the vision model, with its
learned positions, and pass through the layers of the language model, whose Pattentions hold the
tokens of both models. Attention and positions are described in `image_places`. A call without
images is one of the language model: the same code, cache and native decoder.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import LogitsProcessorList
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    BaseModelOutputWithPooling,
    CausalLMOutputWithPast,
)
from transformers.models.auto.modeling_auto import AutoModel, AutoModelForImageTextToText
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from tokenformer.layers import ModalityPattention, ModalityRows, PatchEmbedding
from tokenformer.layers.positions import Rotation
from tokenformer.models.backbone import make_norm, tokenformer_projections
from tokenformer.models.configuration import TokenformerVisionConfig
from tokenformer.models.image_places import ImagePlaces
from tokenformer.models.image_text_configuration import TokenformerImageTextConfig
from tokenformer.models.language import (
    LanguageModel,
    LanguageModelForCausalLM,
    make_position_ids,
)
from tokenformer.models.vision import TokenformerVisionModel

IGNORED = -100
"""A label without a loss."""


def routed_projections(config: TokenformerImageTextConfig, layer: int) -> list[nn.Module]:
    d, kv = config.hidden_size, config.key_value_size

    def tokens(name: str, out_features: int) -> ModalityPattention:
        vision, new, language = config.parts(name, layer)
        return ModalityPattention(
            d,
            out_features,
            vision_tokens=vision,
            new_tokens=new,
            language_tokens=language,
            theta=config.theta,
            vision_scale_tokens=config.vision_scale(name, layer),
            scale_tokens=config.scale(name, layer),
            approximate=config.approximate,
            eps=config.theta_eps,
        )

    return [tokens("q", d), tokens("k", kv), tokens("v", kv), tokens("o", d), tokens("ffn", d)]


def image_text_projections(config: TokenformerImageTextConfig, layer: int) -> list[nn.Module]:
    build = routed_projections if config.mode == "routed" else tokenformer_projections
    return build(config, layer)


class JoinedImages(nn.Module):
    """Images whose patches pass through the layers of the language model: the patch embedding and
    final norm of the vision model."""

    def __init__(self, config: TokenformerImageTextConfig) -> None:
        super().__init__()
        vision: TokenformerVisionConfig = config.vision_config
        self.class_tokens, self.patch_size = vision.class_tokens, vision.patch_size
        self.embed = PatchEmbedding(
            vision.image_size,
            vision.patch_size,
            vision.num_channels,
            vision.hidden_size,
            class_token=bool(vision.class_tokens),
        )
        self.norm = make_norm(vision, vision.final_norm_parameters)

    def forward(self, pixel_values: Tensor) -> Tensor:
        embedded: Tensor = self.embed(pixel_values)  # [N, P, d]
        return embedded

    def position_ids(self, places: ImagePlaces, position_ids: Tensor) -> Tensor:
        return places.shared_positions(position_ids)

    def rotation(self, places: ImagePlaces, rotation: Rotation | None) -> Rotation | None:
        return None if rotation is None else places.normalized(rotation)

    def attention_mask(self, places: ImagePlaces, cache: Cache | None, **inputs: Any) -> Any:
        length = places.mask.shape[1]
        cached = cache.get_seq_length() if cache is not None else 0
        total = cached + length
        if cache is not None:  # of a static cache, all that is allocated
            total = max(total, cache.get_mask_sizes(length, 0)[0])
        or_mask, and_mask = places.mask_functions(int(cached), int(total))
        return create_causal_mask(
            past_key_values=cache,
            or_mask_function=or_mask,
            and_mask_function=and_mask,
            **inputs,
        )

    def finish(self, places: ImagePlaces, hidden: Tensor, normed: Tensor) -> Tensor:
        """Apply the vision model's final norm to image positions: `hidden` is the output of the
        last layer, `normed` the same after the language model's norm."""
        features: Tensor = self.norm(hidden[places.mask])
        return normed.masked_scatter(places.mask[..., None], features)


class ProjectedImages(nn.Module):
    """Images whose features, from a frozen vision encoder and a projector, take the place of
    embeddings, as in LLaVA (arXiv 2304.08485, 2310.03744). To the language model they are text."""

    def __init__(self, config: TokenformerImageTextConfig) -> None:
        super().__init__()
        vision: TokenformerVisionConfig = config.vision_config
        self.class_tokens, self.patch_size = vision.class_tokens, vision.patch_size
        self.encoder = TokenformerVisionModel(vision)
        self.projector = nn.Sequential(
            nn.Linear(vision.hidden_size, config.projector_size),
            nn.GELU(),
            nn.Linear(config.projector_size, config.hidden_size),
        )
        self.train()

    def train(self, mode: bool = True) -> "ProjectedImages":
        """Set the mode of the projector. `from_pretrained` calls this too, after it has loaded
        weights that require gradients."""
        super().train(mode)
        self.encoder.eval().requires_grad_(False)
        return self

    def forward(self, pixel_values: Tensor) -> Tensor:
        projected: Tensor = self.features(pixel_values).pooler_output  # [N, P, d]
        return projected

    def features(self, pixel_values: Tensor, **options: Any) -> BaseModelOutputWithPooling:
        with torch.no_grad():
            outputs = self.encoder(pixel_values, **options | {"return_dict": True})
        return BaseModelOutputWithPooling(
            last_hidden_state=outputs.last_hidden_state,  # [N, P, d_vision]
            pooler_output=self.projector(outputs.last_hidden_state),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def position_ids(self, places: ImagePlaces, position_ids: Tensor) -> Tensor:
        return position_ids

    def rotation(self, places: ImagePlaces, rotation: Rotation | None) -> Rotation | None:
        return rotation

    def attention_mask(self, places: ImagePlaces, cache: Cache | None, **inputs: Any) -> Any:
        return create_causal_mask(past_key_values=cache, **inputs)

    def finish(self, places: ImagePlaces, hidden: Tensor, normed: Tensor) -> Tensor:
        return normed


class TokenformerImageTextModel(LanguageModel):
    """A vision-language model without the output head."""

    config: TokenformerImageTextConfig
    projections = staticmethod(image_text_projections)
    input_modalities: ClassVar = ("image", "text")

    def __init__(self, config: TokenformerImageTextConfig) -> None:
        super().__init__(config)
        self.images = JoinedImages(config) if config.is_joined else ProjectedImages(config)
        self.route = ModalityRows.of if config.mode == "routed" else None
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        pixel_values: Tensor | None = None,
        **options: Any,
    ) -> BaseModelOutputWithPast:
        if pixel_values is None or self._are_cached(input_ids, past_key_values):
            self._check_text(input_ids)
            return self.forward_text(
                input_ids,
                attention_mask,
                position_ids,
                past_key_values,
                inputs_embeds,
                use_cache,
                **options,
            )
        return self.forward_images(
            input_ids,
            pixel_values,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            **options,
        )

    def forward_images(
        self,
        input_ids: Tensor | None,
        pixel_values: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        past_key_values: Cache | None,
        inputs_embeds: Tensor | None,
        use_cache: bool | None,
        **options: Any,
    ) -> BaseModelOutputWithPast:
        is_image = self.image_mask(input_ids, inputs_embeds)  # [B, T]
        places = self.find_images(is_image, pixel_values)
        embeds = inputs_embeds
        if input_ids is not None:
            embeds = self.embed_tokens(input_ids.masked_fill(is_image, 0))  # [B, T, d]
        assert embeds is not None
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            position_ids = make_position_ids(embeds, attention_mask, past_key_values)
        hidden, rotation = self.positions(embeds, self.images.position_ids(places, position_ids))
        rotation = self.images.rotation(places, rotation)
        features = self.images(pixel_values.to(hidden.dtype))
        hidden = hidden.masked_scatter(places.mask[..., None], features)
        mask = self.images.attention_mask(
            places,
            past_key_values,
            config=self.config,
            inputs_embeds=embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
        )
        routing = () if self.route is None else (self.route(places.mask),)
        for layer in self.layers:
            hidden = layer(
                hidden,
                attention_mask=mask,
                rotation=rotation,
                past_key_values=past_key_values,
                routing=routing,
                **options,
            )
        return BaseModelOutputWithPast(
            last_hidden_state=self.images.finish(places, hidden, self.norm(hidden)),
            past_key_values=past_key_values,
        )

    def image_positions(self, height: int, width: int) -> int:
        """Return the number of positions that an image of this size takes in the text."""
        side = self.images.patch_size
        return self.images.class_tokens + (height // side) * (width // side)

    def image_mask(self, input_ids: Tensor | None, inputs_embeds: Tensor | None = None) -> Tensor:
        """Return which positions [B, T] are those of images: by their ids, or by the embedding of
        the placeholder, if it has one."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds, not both and not neither")
        marker = self.config.image_token_id
        if input_ids is not None:
            return input_ids == marker
        assert inputs_embeds is not None
        if marker >= self.config.vocab_size:
            raise ValueError(
                f"the places of images cannot be found in inputs_embeds: their placeholder, id "
                f"{marker}, is not in the vocabulary of {self.config.vocab_size}; give input_ids"
            )
        return torch.eq(inputs_embeds, self.embed_tokens.weight[marker]).all(-1)

    def find_images(self, mask: Tensor, pixel_values: Tensor) -> ImagePlaces:
        if pixel_values.ndim != 4:
            raise ValueError(
                f"pixel_values have shape {tuple(pixel_values.shape)}; it must be [N, C, H, W], "
                "all images of the batch in the order of its text"
            )
        size = self.image_positions(*pixel_values.shape[2:])
        return ImagePlaces.find(mask, len(pixel_values), size)

    @can_return_tuple
    def get_image_features(
        self, pixel_values: Tensor, **options: Any
    ) -> BaseModelOutputWithPooling:
        """Return the features of images [N, C, H, W] after the final norm, [N, P, d]: of a `routed`
        joint model, those of its vision model. `pooler_output` is what text attends to: the same,
        or with a projector, its output."""
        if isinstance(self.images, ProjectedImages):
            return self.images.features(pixel_values.to(self.dtype), **options)
        size = self.image_positions(*pixel_values.shape[2:])
        marker = self.config.image_token_id
        ids = torch.full((len(pixel_values), size), marker, device=pixel_values.device)
        options |= {"use_cache": False, "return_dict": True}
        outputs = self(ids, pixel_values=pixel_values, **options)
        return BaseModelOutputWithPooling(
            last_hidden_state=outputs.last_hidden_state,
            pooler_output=outputs.last_hidden_state,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _are_cached(self, input_ids: Tensor | None, cache: Cache | None) -> bool:
        """Whether these ids only continue a text whose images are in the cache: older versions of
        transformers pass the images again with every token that they generate."""
        if cache is None or input_ids is None or not cache.get_seq_length():
            return False
        return not bool((input_ids == self.config.image_token_id).any())

    def _check_text(self, input_ids: Tensor | None) -> None:
        """Refuse placeholders without images. Those in the vocabulary may have been generated."""
        marker = self.config.image_token_id
        if marker < self.config.vocab_size or input_ids is None or input_ids.shape[1] == 1:
            return
        if bool((input_ids == marker).any()):
            raise ValueError(f"the ids mark images (id {marker}), but there are no pixel_values")


class TextLogitsProcessors(LogitsProcessorList):
    """Logits processors that see the text only: a placeholder may be no id of the vocabulary, which
    a repetition penalty would look up."""

    def __init__(self, processors: LogitsProcessorList, image_token_id: int) -> None:
        super().__init__(processors)
        self.image_token_id = image_token_id

    def __call__(self, input_ids: Tensor, scores: Tensor, **options: Any) -> Tensor:
        if input_ids.shape[1] == 0:  # the prompt was given as embeddings
            return super().__call__(input_ids, scores, **options)
        is_image = input_ids == self.image_token_id
        text = (~is_image).long()
        indices = torch.arange(input_ids.shape[1], device=input_ids.device)
        last = input_ids.gather(1, (text * indices).argmax(1, keepdim=True))  # [B, 1]
        return super().__call__(torch.where(is_image, last, input_ids), scores, **options)


def without_images(labels: Tensor, is_image: Tensor) -> Tensor:
    """Ignore the labels [B, T] of images and of what follows one."""
    follows = torch.zeros_like(is_image)
    follows[:, 1:] = is_image[:, :-1]
    return labels.masked_fill(is_image | follows, IGNORED)


class TokenformerForImageTextToText(LanguageModelForCausalLM):
    """A vision-language TokenFormer: text and images to text."""

    config: TokenformerImageTextConfig
    backbone = TokenformerImageTextModel
    input_modalities: ClassVar = ("image", "text")
    _can_compile_fullgraph = False  # the places of images depend on the ids

    def __init__(self, config: TokenformerImageTextConfig) -> None:
        super().__init__(config)
        self.loss_type = "ForCausalLM"
        if config.image_token_id < config.vocab_size:
            self.generation_config.suppress_tokens = [config.image_token_id]

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        pixel_values: Tensor | None = None,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """`labels` are the input ids (they are shifted here), with -100 where the loss is ignored.
        Images have no labels, and an image position predicts none."""
        if labels is not None and pixel_values is not None:
            labels = without_images(labels, self.model.image_mask(input_ids, inputs_embeds))
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            pixel_values=pixel_values,
            **options,
        )

    def text_labels(self, labels: Tensor, input_ids: Tensor) -> Tensor:
        """Ignore the labels of images, and of the text that follows one immediately: in a joint
        model an image position has seen no text."""
        return without_images(labels, self.model.image_mask(input_ids))

    def get_image_features(self, pixel_values: Tensor, **options: Any) -> Any:
        return self.model.get_image_features(pixel_values, **options)

    @staticmethod
    def create_masks_for_generate(*, attention_mask: Tensor | None, **_: Any) -> Tensor | None:
        """Called by `generate` with a static cache. The mask of a prompt depends on its images, so
        `forward` makes it."""
        return attention_mask

    def _expand_inputs_for_generation(
        self,
        expand_size: int = 1,
        is_encoder_decoder: bool = False,
        input_ids: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """Repeat every sequence with its own images, which may be several or none."""
        pixels = inputs.pop("pixel_values", None)
        if pixels is not None and expand_size > 1:
            size = self.model.image_positions(*pixels.shape[2:])
            embeds = inputs.get("inputs_embeds")
            mask = self.model.image_mask(input_ids if embeds is None else None, embeds)
            counts = mask.sum(1) // size
            rows = pixels.split(counts.tolist())
            pixels = torch.cat([each.repeat(expand_size, 1, 1, 1) for each in rows])
        ids, expanded = super()._expand_inputs_for_generation(
            expand_size=expand_size,
            is_encoder_decoder=is_encoder_decoder,
            input_ids=input_ids,
            **inputs,
        )
        return ids, expanded if pixels is None else expanded | {"pixel_values": pixels}

    def _get_logits_processor(self, *args: Any, **options: Any) -> LogitsProcessorList:
        found: LogitsProcessorList = super()._get_logits_processor(*args, **options)
        return TextLogitsProcessors(found, self.config.image_token_id) if found else found


AutoModel.register(TokenformerImageTextConfig, TokenformerImageTextModel, exist_ok=True)
AutoModelForImageTextToText.register(
    TokenformerImageTextConfig, TokenformerForImageTextToText, exist_ok=True
)
