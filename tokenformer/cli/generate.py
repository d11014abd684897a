"""`tokenformer generate`: a model goes on with a prompt, as it thinks."""

import sys
from json import dumps
from pathlib import Path
from typing import Any

from tokenformer.cli.errors import InputError
from tokenformer.cli.terminal import printable


def generate(
    model: str,
    prompt: str | None = None,
    prompts: Path | None = None,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    greedy: bool = False,
    seed: int = 0,
    json: bool = False,
) -> None:
    """Let a model go on with one or more prompts; its text appears as it is made.

    Args:
        model: A folder or hub name of a causal language model, ours or any other.
        prompt: The text to go on with.
        prompts: A file with a prompt on each line, each gone on with by itself.
        max_new_tokens: The most tokens to add.
        temperature: Below 1 nearer to the likeliest, above 1 further from it.
        top_k: Choose among the k likeliest tokens only.
        top_p: Choose among the likeliest tokens that make up this share of the probability.
        greedy: Always take the likeliest token.
        seed: Seed of the choices.
        json: Print one JSON document: a list of prompts and what was added.
    """
    texts = [*([] if prompt is None else [prompt]), *read_prompts(prompts)]
    if not texts:
        raise InputError("nothing to go on with; give --prompt TEXT or --prompts FILE")
    check(max_new_tokens, temperature, top_k, top_p, seed)

    import torch

    from tokenformer.cli.model import load_model

    loaded, tokenizer = load_model(model)
    chosen: dict[str, Any] = {"do_sample": False}
    if not greedy:
        chosen = {"do_sample": True, "temperature": temperature, "top_k": top_k or 0}
        chosen |= {} if top_p is None else {"top_p": top_p}
    samples = []
    for place, text in enumerate(texts):
        torch.manual_seed(seed)
        if not json:
            sys.stdout.write(("\n\n" if place else "") + shown(text))
        added = go_on(loaded, tokenizer, text, max_new_tokens, chosen, quiet=json)
        samples.append({"prompt": text, "added": added})
    sys.stdout.write(dumps(samples, indent=2, ensure_ascii=False) + "\n" if json else "\n")


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


def go_on(
    model: Any, tokenizer: Any, text: str, tokens: int, chosen: dict[str, Any], quiet: bool
) -> str:
    import torch

    from tokenformer.data.text_stream import TextStream

    ids = tokenizer(text, return_tensors="pt", return_token_type_ids=False).to(model.device)
    if ids["input_ids"].shape[1] == 0:  # an empty prompt: the beginning of a text
        first = tokenizer.bos_token_id
        first = tokenizer.eos_token_id if first is None else first
        if first is None:
            raise InputError("the prompt is empty, and the tokenizer has no beginning of text")
        ids = {"input_ids": torch.tensor([[first]], device=model.device)}
    stream = TextStream(tokenizer)
    pieces: list[str] = []

    def write(piece: str) -> None:
        pieces.append(piece)
        if not quiet:
            sys.stdout.write(shown(piece))
            sys.stdout.flush()

    class Speaker:
        """What `generate` hands its tokens to: first the prompt, then each new one."""

        prompted = False

        def put(self, value: torch.Tensor) -> None:
            if self.prompted:
                write(stream.add(int(value.item())))
            self.prompted = True

        def end(self) -> None:
            write(stream.end())

    model.generate(
        **ids,
        max_new_tokens=tokens,
        streamer=Speaker(),
        pad_token_id=tokenizer.pad_token_id
        if tokenizer.pad_token_id is not None
        else tokenizer.eos_token_id,
        **chosen,
    )
    return "".join(pieces)


def shown(text: str) -> str:
    return printable(text, sys.stdout.encoding or "utf-8")
