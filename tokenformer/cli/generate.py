"""`tokenformer generate`: sample text from a language or vision-language model, streamed."""

import re
import sys
from collections.abc import Callable
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

from tokenformer.cli.model import (
    adapter_folders,
    check_bits,
    check_image_text_options,
    load_image_text,
    load_model,
    takes_images_with_text,
)
from tokenformer.cli.terminal import json_text, printable
from tokenformer.errors import DataError, InputError
from tokenformer.paths import exists, expand_user, missing_message

LEAST_TEMPERATURE = 1e-3
"""Logits divided by less than this overflow."""


def generate(
    model: str,
    prompt: str | None = None,
    prompts: Path | None = None,
    image: Path | None = None,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float | None = None,
    greedy: bool = False,
    stop: str | None = None,
    seed: int = 0,
    adapter: tuple[str, ...] = (),
    bits: int | None = None,
    no_verify: bool = False,
    json: bool = False,
) -> None:
    """Sample text from a language model, or about an image from a vision-language model, streamed.

    Args:
        model: A model folder, a run folder or a hub name of any causal language model or of a
            vision-language model.
        prompt: The text to continue; - reads it from standard input.
        prompts: A text file with one prompt per line; each is continued independently.
        image: An image that the text is about. <image> marks its place in the prompt, which is by
            default the front; the prompt may be left out.
        max_new_tokens: Maximum number of tokens to generate. Beyond the model's context, a sliding
            window is used.
        temperature: Sampling temperature; 0 is greedy decoding.
        top_k: Sample from the k most likely tokens only.
        top_p: Sample from the most likely tokens whose probabilities sum to p.
        repetition_penalty: Values above 1 make tokens that already appeared less likely.
        greedy: Always take the most likely token.
        stop: Stop before this text appears.
        seed: Seed for sampling.
        adapter: An adapter to use, a folder or NAME=DIR; several, or the option again, are active
            together.
        bits: 8 or 4 quantizes the weights of a TokenFormer, to a quarter or less than a
            fifth of the memory.
        no_verify: Skip verifying the weights (checksums.json, NaN, inf).
        json: Print a JSON list with each prompt and the text added.
    """
    check(max_new_tokens, temperature, top_k, top_p, seed)
    check_bits(bits)
    if repetition_penalty is not None and not repetition_penalty > 0:
        raise InputError(f"--repetition_penalty {repetition_penalty} must be above 0")
    if stop == "":
        raise InputError("--stop must be a text of at least one character")
    texts = [*([] if prompt is None else [read_prompt(prompt)]), *read_prompts(prompts)]
    if not texts and image is not None:
        texts = [""]
    if not texts:
        raise InputError("the prompt is missing; give --prompt TEXT or --prompts FILE")
    adapters = adapter_folders(adapter)
    if image is not None and (url := re.match(r"(https?|ftp|data):", str(image))):
        raise InputError(
            f"--image {url[0]}...: URLs are not fetched; save the image and name its file"
        )
    if image is not None and not exists(expand_user(image)):
        raise InputError(f"--image: {missing_message(image)}")
    if image is not None or takes_images_with_text(model):
        check_image_text_options(bits=bits, adapter=adapters)
        loaded, processor = load_image_text(model, verify=not no_verify)
        tokenizer = processor.tokenizer
        if image is None and any(processor.image_token in text for text in texts):
            raise InputError(f"the prompt has {processor.image_token}; name the image with --image")
    else:
        loaded, tokenizer = load_model(model, bits, verify=not no_verify, adapters=adapters)

    import torch

    sampling: dict[str, Any] = {"do_sample": False}
    if not greedy and temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k or 0}
        sampling |= {} if top_p is None else {"top_p": top_p}
    if repetition_penalty is not None:
        sampling["repetition_penalty"] = repetition_penalty
    # All prompts are encoded first, so that a bad one fails before any text is generated.
    inputs: dict[str, Any] = {}
    if image is None:
        encoded = [(text, encode(loaded, tokenizer, text)) for text in texts]
        warn(loaded, [ids.shape[1] for _, ids in encoded], max_new_tokens)
    else:
        encoded, inputs = encode_image(loaded, processor, texts, image)
        longest = max(ids.shape[1] for _, ids in encoded)
        max_new_tokens = fit_context(loaded, longest, max_new_tokens)
    on_text = (lambda text: None) if json else show
    samples = []
    for index, (text, ids) in enumerate(encoded):
        torch.manual_seed(seed)
        on_text(("\n\n" if index else "") + text)
        added = continue_prompt(
            loaded, tokenizer, ids, max_new_tokens, sampling | inputs, stop, on_text
        )
        samples.append({"prompt": text, "added": added})
    sys.stdout.write(json_text(samples, sys.stdout.encoding or "utf-8") + "\n" if json else "\n")


def read_prompt(prompt: str) -> str:
    try:
        if prompt == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        prompt.encode("utf-8")  # invalid bytes on the command line become surrogates
    except UnicodeDecodeError:
        raise InputError("--prompt -: the standard input is not UTF-8 text") from None
    except UnicodeEncodeError:
        raise InputError("--prompt is not UTF-8 text") from None
    return prompt


def read_prompts(path: Path | None) -> list[str]:
    if path is None:
        return []
    if not exists(expand_user(path)):
        raise InputError(f"--prompts: {missing_message(path)}")
    try:
        lines = expand_user(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"--prompts {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"--prompts {path} is not UTF-8 text") from None
    return [line for line in lines if line]


def check(
    max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None, seed: int
) -> None:
    if max_new_tokens < 1:
        raise InputError(f"--max_new_tokens {max_new_tokens} must be at least 1")
    if not (isfinite(temperature) and (temperature == 0 or temperature >= LEAST_TEMPERATURE)):
        raise InputError(
            f"--temperature {temperature} must be 0, which is greedy, or at least "
            f"{LEAST_TEMPERATURE}"
        )
    if top_k is not None and top_k < 1:
        raise InputError(f"--top_k {top_k} must be at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise InputError(f"--top_p {top_p} must be above 0 and at most 1")
    if not 0 <= seed < 2**63:
        raise InputError(f"--seed {seed} must be a whole number from 0")


def encode(model: Any, tokenizer: Any, text: str) -> Any:
    """Return the prompt as ids [1, T]; the start token if it is empty."""
    from tokenformer.serve.prompt import add_start_token

    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]
    return add_start_token(ids, tokenizer).to(model.device)


def encode_image(
    model: Any, processor: Any, texts: list[str], image: Path
) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    """Return each prompt with its ids [1, T], and the pixel values that belong to them."""
    from tokenformer.data.images import decode_file
    from tokenformer.models.image_text_processing import IMAGE_TOKEN
    from tokenformer.models.pixels import to_pillow

    try:
        picture = to_pillow(decode_file(expand_user(image)))
    except DataError as error:
        raise InputError(f"--image: {error}") from None
    encoded, values = [], None
    for text in texts:
        marked = text if IMAGE_TOKEN in text else IMAGE_TOKEN + text
        if marked.count(IMAGE_TOKEN) > 1:
            raise InputError(f"the prompt has {IMAGE_TOKEN} more than once, for one image")
        batch = processor(text=marked, images=[picture], return_tensors="pt").to(model.device)
        encoded.append((text, batch["input_ids"]))
        values = batch["pixel_values"]
    return encoded, {"pixel_values": values}


def fit_context(model: Any, length: int, new: int) -> int:
    """Return how many tokens fit in the context after an image and its prompt: a window would slide
    over the image."""
    context = model.config.max_position_embeddings
    if length >= context:
        raise InputError(
            f"the image and the prompt take {length} positions, the model has {context}; shorten "
            "the prompt"
        )
    if length + new > context:
        line = f"the model's context is {context} positions; at most {context - length} tokens fit"
        sys.stderr.write(f"tokenformer generate: {line} after the image and the prompt\n")
    return min(new, int(context) - length)


def warn(model: Any, lengths: list[int], new: int) -> None:
    """Print one warning if a prompt and the new tokens exceed the model's context."""
    from tokenformer.serve.prompt import context_length
    from tokenformer.serve.sliding_window import KEPT

    context, longest = context_length(model.config), max(lengths)
    if context is None or longest + new <= context:
        return
    line = f"the model's context is {context} tokens; the window slides, so beyond it the model "
    line += f"sees the last {max(int(context * KEPT), context - new)} to {context} tokens"
    if longest >= context:
        line += f"; the prompt has {longest}"
    sys.stderr.write(f"tokenformer generate: {line}\n")


class StopGeneration(Exception):  # noqa: N818  # not an error
    """Raised to leave transformers' `generate` when the stop text is reached."""


class TextStreamer:
    """A streamer for `model.generate`, which puts the prompt of a window first, then each token."""

    def __init__(self, stream: Any, on_text: Callable[[str], None]) -> None:
        self.stream = stream
        self.on_text = on_text
        self.prompt_seen = False
        self.pieces: list[str] = []

    def put(self, value: Any) -> None:
        if self.prompt_seen:
            self.emit(self.stream.add(int(value.item())))
            if self.stream.stopped:
                raise StopGeneration
        self.prompt_seen = True

    def end(self) -> None:
        """Called at the end of a window; the next one starts with its prompt again."""
        self.prompt_seen = False

    def emit(self, text: str) -> None:
        self.pieces.append(text)
        self.on_text(text)


def continue_prompt(
    model: Any,
    tokenizer: Any,
    ids: Any,
    max_new_tokens: int,
    sampling: dict[str, Any],
    stop: str | None,
    on_text: Callable[[str], None],
) -> str:
    """Generate text and return it; `on_text` gets each piece as soon as it is decoded."""
    from tokenformer.data.text_stream import TextStream
    from tokenformer.serve.prompt import context_length
    from tokenformer.serve.sliding_window import bos_prefix, generate_sliding

    streamer = TextStreamer(TextStream(tokenizer, stop=() if stop is None else (stop,)), on_text)
    padding = tokenizer.pad_token_id
    with suppress(StopGeneration):
        generate_sliding(
            model,
            ids,
            max_new_tokens=max_new_tokens,
            context=context_length(model.config),
            prefix=bos_prefix(tokenizer).to(ids.device),
            tokenizer=tokenizer,
            num_beams=1,  # beam search cannot stream
            streamer=streamer,
            pad_token_id=tokenizer.eos_token_id if padding is None else padding,
            **sampling,
        )
    streamer.emit(streamer.stream.end())
    return "".join(streamer.pieces)


def show(text: str) -> None:
    sys.stdout.write(printable(text, sys.stdout.encoding or "utf-8"))
    sys.stdout.flush()
