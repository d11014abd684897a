"""`tokenformer generate`: a model goes on with a prompt, as it thinks."""

import sys
from collections.abc import Callable
from contextlib import suppress
from json import dumps
from pathlib import Path
from typing import Any

from tokenformer.cli.errors import InputError
from tokenformer.cli.model import check_bits, load_model
from tokenformer.cli.terminal import printable


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
    json: bool = False,
) -> None:
    """Let a model go on with one or more prompts; its text appears as it is made.

    Args:
        model: A folder or hub name of a causal language model, ours or any other.
        prompt: The text to go on with; - reads it from the standard input.
        prompts: A file with a prompt on each line, each gone on with by itself.
        max_new_tokens: The most tokens to add; the model's context may end it sooner.
        temperature: Below 1 nearer to the likeliest, above 1 further from it.
        top_k: Choose among the k likeliest tokens only.
        top_p: Choose among the likeliest tokens that make up this share of the probability.
        repetition_penalty: Above 1, what was said becomes less likely: against going in circles.
        greedy: Always take the likeliest token.
        stop: End before this text appears.
        seed: Seed of the choices.
        bits: 8 rounds a TokenFormer's numbers to int8 as it is loaded: a quarter of the memory.
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
        raise InputError("nothing to go on with; give --prompt TEXT or --prompts FILE")

    import torch

    loaded, tokenizer = load_model(model, bits)
    chosen: dict[str, Any] = {"do_sample": False}
    if not greedy:
        chosen = {"do_sample": True, "temperature": temperature, "top_k": top_k or 0}
        chosen |= {} if top_p is None else {"top_p": top_p}
    if repetition_penalty is not None:
        chosen["repetition_penalty"] = repetition_penalty
    asked = [(text, encode(loaded, tokenizer, text)) for text in texts]  # refused before any answer
    told = (lambda piece: None) if json else show
    samples = []
    for place, (text, ids) in enumerate(asked):
        torch.manual_seed(seed)
        told(("\n\n" if place else "") + text)
        added = go_on(loaded, tokenizer, ids, max_new_tokens, chosen, stop, told)
        samples.append({"prompt": text, "added": added})
    sys.stdout.write(dumps(samples, indent=2, ensure_ascii=False) + "\n" if json else "\n")


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
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
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
    if not temperature > 0:
        raise InputError(f"--temperature {temperature} must be above 0; --greedy for the likeliest")
    if top_k is not None and top_k < 1:
        raise InputError(f"--top_k {top_k} must be at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise InputError(f"--top_p {top_p} must be above 0 and at most 1")
    if not 0 <= seed < 2**63:
        raise InputError(f"--seed {seed} must be a whole number from 0")


def encode(model: Any, tokenizer: Any, text: str) -> Any:
    """The prompt as ids [1, T] that the model's context has room for."""
    from tokenformer.converse.prompt import PromptError, begin, context_length, room

    try:
        ids = begin(tokenizer(text, return_tensors="pt")["input_ids"], tokenizer)
        room(ids, context_length(model.config))
    except PromptError as error:
        raise InputError(str(error)) from None
    return ids.to(model.device)


class Enough(Exception):  # noqa: N818  # nothing is wrong
    """The stop text was reached: raised to leave transformers' `generate`."""


class Speaker:
    """What `generate` hands its tokens to: first the prompt, then each new one."""

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
        self.say(self.stream.end())

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
    from tokenformer.converse.prompt import context_length, room
    from tokenformer.data.text_stream import TextStream

    context = context_length(model.config)
    left = room(ids, context)
    speaker = Speaker(TextStream(tokenizer, stop=() if stop is None else (stop,)), told)
    padding = tokenizer.pad_token_id
    with suppress(Enough):
        model.generate(
            ids,
            attention_mask=ids.new_ones(ids.shape),
            max_new_tokens=tokens if left is None else min(tokens, left),
            num_beams=1,  # a stream has no second thoughts
            streamer=speaker,
            pad_token_id=tokenizer.eos_token_id if padding is None else padding,
            **chosen,
        )
    if left is not None and len(speaker.stream.ids) == left < tokens:
        sys.stderr.write(f"\ntokenformer generate: the model's context of {context} is full\n")
    return "".join(speaker.pieces)


def show(text: str) -> None:
    sys.stdout.write(printable(text, sys.stdout.encoding or "utf-8"))
    sys.stdout.flush()
