"""One request of `tokenformer serve` while its text is generated."""

import asyncio
import logging
from collections.abc import Callable
from json import dumps
from typing import Any

import torch
from torch import Tensor
from transformers.cli.serving.utils import (
    DirectStreamer,
    _GenerationCancelled,
    _StreamError,
    response_events_to_chunks,
)
from transformers.generation import LogitsProcessorList

from tokenformer.data.text_stream import TextStream

logger = logging.getLogger("uvicorn.error")

SHUTTING_DOWN = "the server is shutting down"

BATCHED = {
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "top_h",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "sequence_bias",
    "suppress_tokens",
    "begin_suppress_tokens",
    "renormalize_logits",
    "remove_invalid_values",
    "min_length",
    "min_new_tokens",
    "max_length",
    "max_new_tokens",
    "num_beams",
    "num_return_sequences",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "transformers_version",
    "_from_model_config",
}
"""Settings that `Sampler` supports. A generation_config.json with others runs in `generate`."""
EXTRA = {"stop", "seed", "adapter"}
"""Settings of a request that are not transformers'."""


class TokenStreamer(DirectStreamer):
    """Decodes the tokens of a request and puts the text on a queue of the event loop."""

    def __init__(
        self,
        text: TextStream,
        eos_ids: set[int],
        queue: "asyncio.Queue[Any]",
        parser: Any,
        on_end: "Callable[[TokenStreamer], None]",
    ) -> None:
        super().__init__(text.tokenizer, asyncio.get_running_loop(), queue, parser)
        self.text = text
        self.eos_ids = eos_ids
        self.on_end = on_end
        self.prompt_seen = False

    def cancel(self) -> None:
        super().cancel()
        self.on_end(self)

    def check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise _GenerationCancelled

    def put(self, value: Tensor) -> None:
        """Called by `model.generate`, with the prompt first."""
        if self.prompt_seen:
            self.add(int(value.item()))
        else:
            self.check_cancelled()
        self.prompt_seen = True

    def add(self, token: int) -> None:
        """Add a token; raise `_GenerationCancelled` at a stop sequence or if cancelled."""
        self.check_cancelled()
        self.emit(self.text.add(token))
        if self.text.stopped:
            raise _GenerationCancelled
        # End-of-text tokens are not counted, so that only a full count means "length".
        self.total_tokens += token not in self.eos_ids

    def end(self) -> None:
        self.emit(self.text.end())
        self.on_end(self)
        super().end()

    def fail(self, message: str) -> None:
        self.on_end(self)
        self._enqueue(_StreamError(dumps(message)[1:-1]))  # inserted into JSON unescaped

    def emit(self, text: str) -> None:
        if self._parser is not None:  # a chat model whose responses have parts
            for part in response_events_to_chunks(self._parser.feed(text)):
                self._enqueue(part)
        elif text:
            self._enqueue(text)


class Sampler:
    """Picks the tokens of one sequence from logits, the same ones as `model.generate` does after
    `torch.manual_seed`."""

    def __init__(self, model: Any, ids: Tensor, config: Any, seed: int | None) -> None:
        settings, _ = model._prepare_generation_config(config)
        model._prepare_special_tokens(settings, True, device=model.device, batch_size=1)
        if settings.min_new_tokens is not None:
            settings.min_length = ids.shape[1] + settings.min_new_tokens
        self.processors: LogitsProcessorList = model._get_logits_processor(
            settings,
            input_ids_seq_length=ids.shape[1],
            encoder_input_ids=ids,
            device=model.device,
            model_kwargs={},
        )
        self.ids = ids.to(model.device)
        self.is_greedy = not settings.do_sample
        self.generator = torch.Generator(model.device)
        self.generator.manual_seed(torch.seed() if seed is None else seed)

    @property
    def is_plain(self) -> bool:
        """Whether every token is the most likely one."""
        return self.is_greedy and not self.processors

    def pick(self, logits: Tensor) -> int:
        """Return the next token, from its logits [1, vocab_size]."""
        if self.is_plain:
            return int(logits.argmax())
        scores = self.processors(self.ids, logits)
        if self.is_greedy:
            token = scores.argmax(-1)
        else:
            token = torch.multinomial(scores.softmax(-1), 1, generator=self.generator)[:, 0]
        self.ids = torch.cat([self.ids, token[:, None]], dim=1)
        return int(token)


class Generation:
    """A request: its prompt ids [1, T], the pixels of its images, settings and streamer."""

    def __init__(
        self, ids: Tensor, config: Any, streamer: TokenStreamer, pixels: Tensor | None = None
    ) -> None:
        self.ids = ids
        self.images = {} if pixels is None else {"pixel_values": pixels}
        """Inputs of the model besides the ids."""
        self.config = config
        self.streamer = streamer
        self.adapter: str | None = getattr(config, "adapter", None)
        self.sampler: Sampler | None = None
        self.token = -1
        """The last token."""
        self.remaining: int = config.max_new_tokens
        self.is_batched = config.to_diff_dict().keys() <= BATCHED | EXTRA
        """Whether `Sampler` supports its settings."""

    def start(self, model: Any) -> None:
        self.sampler = Sampler(model, self.ids, self.config, self.config.seed)

    def take(self, logits: Tensor, best: int | None = None) -> bool:
        """Take the next token, `best` or from its logits [1, vocab_size]; return whether it is the
        last."""
        assert self.sampler is not None
        self.token = self.sampler.pick(logits) if best is None else best
        self.streamer.add(self.token)
        self.remaining -= 1
        return self.remaining == 0 or self.token in self.streamer.eos_ids

    def run_alone(self, model: Any) -> None:
        """Generate the whole text with `model.generate`."""
        seed = self.config.seed
        # Seeded in the inference thread: until now it may have sampled for other requests.
        torch.manual_seed(torch.seed() if seed is None else seed)
        model.generate(
            self.ids,
            **self.images,
            attention_mask=torch.ones_like(self.ids),
            generation_config=self.config,
            streamer=self.streamer,
        )

    def stop(self, error: Exception, shutting_down: bool) -> None:
        """End a text for which an exception was raised."""
        if not isinstance(error, _GenerationCancelled):
            logger.error("a request failed", exc_info=error)
            self.streamer.fail(str(error))
            return
        if shutting_down:
            self.streamer.fail(SHUTTING_DOWN)
        self.streamer.end()
