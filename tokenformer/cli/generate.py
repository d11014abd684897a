"""`tokenformer generate`: a language model continues prompts, streamed."""

import sys
from collections.abc import Callable
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

from tokenformer.cli.model import check_bits, load_model
from tokenformer.cli.terminal import json_text, printable
from tokenformer.errors import InputError
from tokenformer.paths import exists, expand_user, missing_message

LEAST_TEMPERATURE = 1e-3
"""Less divides logits by so little that they overflow."""


def generate(
    model: str,
    prompt: str | None = None,
    prompts: Path | None = None,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float | None = None,
    greedy: bool = False,
    stop: str | None = None,
    seed: int = 0,
    bits: int | None = None,
    no_verify: bool = False,
    json: bool = False,
) -> None:
    """Continue one or more prompts with a language model; the text is streamed.

    Args:
        model: A model folder, a run folder or a hub name of any causal language model.
        prompt: The text to continue; - reads it from the standard input.
        prompts: A file with a prompt on each line; each is continued by itself.
        max_new_tokens: The most tokens to add. Beyond the model's context, the window slides.
        temperature: Below 1 nearer to the likeliest, above 1 further from it; 0 is greedy.
        top_k: Choose among the k likeliest tokens only.
        top_p: Choose among the likeliest tokens that make up this share of the probability.
        repetition_penalty: Above 1, what was said becomes less likely: against going in circles.
        greedy: Always take the likeliest token.
        stop: End before this text appears.
        seed: Seed of the choices.
        bits: 8 rounds a TokenFormer's numbers to int8 as it is loaded: a quarter of the memory.
        no_verify: Do not check the weights against checksums.json, nor for NaN and inf.
        json: Print one JSON document: a list of prompts and what was added.
    """
    check(max_new_tokens, temperature, top_k, top_p, seed)
    check_bits(bits)
    if repetition_penalty is not None and not repetition_penalty > 0:
        raise InputError(f"--repetition_penalty {repetition_penalty} must be above 0")
    if stop == "":
        raise InputError("--stop must be a text of at least one character")
    texts = [*([] if prompt is None else [read_prompt(prompt)]), *read_prompts(prompts)]
    if not texts:
        raise InputError("the prompt is missing; give --prompt TEXT or --prompts FILE")
    loaded, tokenizer = load_model(model, bits, verify=not no_verify)

    import torch

    chosen: dict[str, Any] = {"do_sample": False}
    if not greedy and temperature > 0:
        chosen = {"do_sample": True, "temperature": temperature, "top_k": top_k or 0}
        chosen |= {} if top_p is None else {"top_p": top_p}
    if repetition_penalty is not None:
        chosen["repetition_penalty"] = repetition_penalty
    asked = [(text, encode(loaded, tokenizer, text)) for text in texts]  # refused before any answer
    warn(loaded, [ids.shape[1] for _, ids in asked], max_new_tokens)
    told = (lambda piece: None) if json else show
    samples = []
    for place, (text, ids) in enumerate(asked):
        torch.manual_seed(seed)
        told(("\n\n" if place else "") + text)
        added = go_on(loaded, tokenizer, ids, max_new_tokens, chosen, stop, told)
        samples.append({"prompt": text, "added": added})
    sys.stdout.write(json_text(samples, sys.stdout.encoding or "utf-8") + "\n" if json else "\n")


def read_prompt(prompt: str) -> str:
    try:
        if prompt == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        prompt.encode("utf-8")  # bytes of a command line that are no text come as surrogates
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
    """The prompt as ids [1, T]; of an empty one, the beginning of a text."""
    from tokenformer.serve.prompt import begin

    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]
    return begin(ids, tokenizer).to(model.device)


def warn(model: Any, lengths: list[int], new: int) -> None:
    """Say once that the context is too short for a prompt, or for it and the tokens to add."""
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


class Enough(Exception):  # noqa: N818  # nothing is wrong
    """The stop text was reached: raised to leave transformers' `generate`."""


class TokenStreamer:
    """The streamer of `model.generate`: in every window first the prompt, then each new token."""

    def __init__(self, stream: Any, told: Callable[[str], None]) -> None:
        self.stream = stream
        self.told = told
        self.prompted = False
        self.pieces: list[str] = []

    def put(self, value: Any) -> None:
        if self.prompted:
            self.say(self.stream.add(int(value.item())))
            if self.stream.stopped:
                raise Enough
        self.prompted = True

    def end(self) -> None:
        """The window is full, or the text at its end."""
        self.prompted = False

    def say(self, piece: str) -> None:
        self.pieces.append(piece)
        self.told(piece)


def go_on(
    model: Any,
    tokenizer: Any,
    ids: Any,
    tokens: int,
    chosen: dict[str, Any],
    stop: str | None,
    told: Callable[[str], None],
) -> str:
    """What the model adds; each piece of it is told as soon as it is certain."""
    from tokenformer.data.text_stream import TextStream
    from tokenformer.serve.prompt import context_length
    from tokenformer.serve.sliding_window import generate_sliding, prefix_of

    speaker = TokenStreamer(TextStream(tokenizer, stop=() if stop is None else (stop,)), told)
    padding = tokenizer.pad_token_id
    with suppress(Enough):
        generate_sliding(
            model,
            ids,
            max_new_tokens=tokens,
            context=context_length(model.config),
            prefix=prefix_of(tokenizer).to(ids.device),
            tokenizer=tokenizer,
            num_beams=1,  # a stream cannot take tokens back
            streamer=speaker,
            pad_token_id=tokenizer.eos_token_id if padding is None else padding,
            **chosen,
        )
    speaker.say(speaker.stream.end())
    return "".join(speaker.pieces)


def show(text: str) -> None:
    sys.stdout.write(printable(text, sys.stdout.encoding or "utf-8"))
    sys.stdout.flush()
