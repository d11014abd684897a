"""Rendering and tokenizing of prompts and decoding of their images, in threads outside of the event
loop."""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from tokenformer.models.image_text_processing import IMAGE_TOKEN, TokenformerProcessor
from tokenformer.serve.chat_template import ChatTemplate
from tokenformer.serve.image_messages import ImageReader, MessageImage, split_images
from tokenformer.serve.limits import Limits
from tokenformer.serve.prompt import PromptError

T = TypeVar("T")


class PromptEncoder:
    """Renders and tokenizes prompts, in one thread each: a slow chat template does not delay
    completions, and only one prompt at a time uses the memory of the tokenizer and of images.
    `processor` is that of a vision-language model."""

    def __init__(
        self,
        tokenizer: Any,
        context: int,
        limits: Limits,
        processor: TokenformerProcessor | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.context = context
        self.longest = longest_token(tokenizer)
        self.images: ImageReader | None = None
        if processor is not None:
            limit = limits.max_images, limits.max_image_pixels
            self.images = ImageReader(processor, context, *limit)
        self.tokenizing = ThreadPoolExecutor(1, "tokenize")
        self.rendering = ThreadPoolExecutor(1, "render")
        self.template: ChatTemplate | None = None
        self.closed = False
        if (source := chat_template(tokenizer, processor)) is not None:
            self.template = ChatTemplate(
                source,
                tokenizer.special_tokens_map,
                limits.template_timeout,
                max_characters=4 * limits.max_body,
            )
            self.rendering.submit(self.template.start)

    async def encode(self, text: str) -> dict[str, torch.Tensor]:
        """Return the token ids [1, T] of a text, as an input of the model."""
        if self.images is not None and IMAGE_TOKEN in text:
            raise PromptError(
                f"the prompt has {IMAGE_TOKEN}, the place of an image; send images to "
                "/v1/chat/completions"
            )
        self.check_length(text)
        return {"input_ids": await self.run(self.tokenize, text, True)}

    async def encode_chat(self, messages: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Return the token ids of a chat and the pixels of its images."""
        if self.template is None:
            raise PromptError("this model has no chat template; use /v1/completions")
        messages, images = split_images(messages)
        if self.images is not None:
            self.images.check(images)
        elif images:
            raise PromptError(f"{images[0].name} is an image, and this model takes text only")
        else:
            messages = join_parts(messages)
        loop = asyncio.get_running_loop()
        text = await loop.run_in_executor(self.rendering, self.render, messages)
        self.check_length(text)
        return await self.run(self.tokenize_chat, text, images)

    def check_length(self, text: str) -> None:
        """Refuse a text whose length alone shows that it exceeds the context."""
        min_tokens = 0 if self.longest is None else len(text.encode()) // self.longest
        if min_tokens >= self.context:
            raise PromptError(
                f"the prompt has at least {min_tokens} tokens, the model's context {self.context}, "
                "response included"
            )

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in the tokenizing thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.tokenizing, function, *arguments)

    def render(self, messages: list[dict[str, Any]]) -> str:
        self.check_open()
        assert self.template is not None
        return self.template.render(messages)

    def tokenize_chat(self, text: str, images: list[MessageImage]) -> dict[str, torch.Tensor]:
        self.check_open()
        if self.images is None:
            return {"input_ids": self.tokenize(text, False)}
        text, pixels = self.images.insert(text, images)
        inputs = {"input_ids": self.tokenize(text, False)}
        return inputs if pixels is None else inputs | {"pixel_values": pixels}

    def tokenize(self, text: str, add_special_tokens: bool) -> torch.Tensor:
        self.check_open()
        encoded = self.tokenizer(
            text,
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_tensors="pt",
        )
        ids: torch.Tensor = encoded["input_ids"]
        return ids

    def check_open(self) -> None:
        if self.closed:
            raise RuntimeError("the server is shutting down")

    def close(self) -> None:
        """Drop waiting prompts and kill a chat template that is rendering."""
        self.closed = True
        if self.template is not None:
            self.template.kill()
            self.rendering.submit(self.template.reap)

    def wait(self) -> None:
        """After `close`, block until both threads are done."""
        self.tokenizing.shutdown()
        self.rendering.shutdown()


def join_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with their parts of text joined: the chat templates of language models take
    no lists."""
    return [
        {**message, "content": " ".join(part["text"] for part in message["content"])}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]


def chat_template(tokenizer: Any, processor: TokenformerProcessor | None) -> str | None:
    """Return the template for chats without tools, if the processor or the tokenizer has one."""
    if processor is not None:
        found: str | dict[str, str] | None = processor.chat_template
        return found.get("default") if isinstance(found, dict) else found
    try:
        template: str = tokenizer.get_chat_template()
    except ValueError:  # none, or several of which none is the default
        return None
    return template


def longest_token(tokenizer: Any) -> int | None:
    """Return the maximum number of bytes that one token can encode; None without a known bound.

    Only byte-level BPE of a fast tokenizer has one. In others a normalizer can remove text, a run
    of unknown characters can become one token, and whitespace none.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer in Python, such as ByT5Tokenizer
        return None
    description = json.loads(backend.to_str())
    model, vocabulary = description["model"], tokenizer.get_vocab()
    added = description["added_tokens"]
    whole = (
        model["type"] == "BPE"
        and description["normalizer"] is None
        and keeps_bytes(description["pre_tokenizer"])
        and set(ByteLevel.alphabet()) <= vocabulary.keys()
        and not any(token["lstrip"] or token["rstrip"] for token in added)
    )
    # A symbol of the byte alphabet has at least as many UTF-8 bytes as the byte it encodes.
    return max(len(token.encode()) for token in vocabulary) if whole else None


def keeps_bytes(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Return whether the pre-tokenizer only splits the text and keeps every byte."""
    if pre_tokenizer is None:
        return False
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    kinds = [step["type"] for step in steps]
    removes = any(step.get("behavior") == "Removed" for step in steps)
    return "ByteLevel" in kinds and {*kinds} <= {"ByteLevel", "Split", "Digits"} and not removes
