"""A causal language model as lm-evaluation-harness asks it: batches by length, kept answers.

lm-eval's own Hugging Face model does the scoring. What is added here is that requests go to it in
batches as large as fit, longest first, each kept as soon as it is answered; and that an answer
longer than the model reads, which lm-eval cannot score, is scored in windows.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokenformer.errors import DataError
from tokenformer.evaluate.answers import Answer, Answers, batch_key, fingerprint
from tokenformer.evaluate.capacity import tokens_at_once
from tokenformer.evaluate.perplexity import windows
from tokenformer.evaluate.quiet import quiet

Ids = list[int]


class Scorer:
    """What `lm_eval.evaluate` takes for a model. `on_requests` hears how many are done, of all."""

    rank, world_size = 0, 1

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        folder: Path,
        *,
        batch_size: int | None = None,
        on_requests: Callable[[int, int], None] = lambda done, of: None,
    ) -> None:
        from lm_eval.models.huggingface import HFLM

        if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
            raise DataError("the model's tokenizer has neither a beginning nor an end of text")
        with quiet():
            self.lm = HFLM(pretrained=model, tokenizer=tokenizer, softmax_dtype=torch.float32)
        self.batch_size = batch_size
        self.on_requests = on_requests
        self.tokens_at_once = tokens_at_once(model)
        self.too_long = 0
        """Requests so far that were longer than the model reads."""
        settings = {"max_length": self.lm.max_length, "prefix": self.lm.prefix_token_id}
        self.answers = Answers(folder / f"{fingerprint(model, **settings)}.jsonl")

    def loglikelihood(self, requests: Sequence[Any]) -> list[Answer]:
        """The log-likelihood of each continuation after its context, and whether it is greedy."""
        pairs = [self.encode(*request.args) for request in requests]
        most = self.lm.max_length
        self.too_long += sum(len(context) + len(answer) > most + 1 for context, answer in pairs)
        found: list[Answer] = [(0.0, False)] * len(requests)
        done = 0
        for places in self.batches(pairs):
            key = batch_key([pairs[place] for place in places])
            answers = self.answers.get(key)
            if answers is None:
                if len(pairs[places[0]][1]) > most:
                    answers = [self.score_in_windows(*pairs[places[0]])]
                else:
                    answers = self.score([requests[place] for place in places])
                self.answers.add(key, answers)
            for place, answer in zip(places, answers, strict=True):
                found[place] = answer
            done += len(places)
            self.on_requests(done, len(requests))
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        return self.ask("loglikelihood_rolling", requests)

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        return self.ask("generate_until", requests)

    def ask(self, kind: str, requests: Sequence[Any]) -> list[Any]:
        """Requests of unknown length, as many at a time as fit at full length."""
        rows = self.batch_size or max(1, self.tokens_at_once // self.lm.max_length)
        self.lm.batch_size_per_gpu = rows
        answers: list[Any] = getattr(self.lm, kind)(requests, disable_tqdm=True)
        self.on_requests(len(requests), len(requests))
        return answers

    def encode(self, context: str, continuation: str) -> tuple[Ids, Ids]:
        """As lm-eval does: both together, then cut where the context ends but for its last spaces;
        without a context, after the beginning of a text."""
        if not context:
            return [self.lm.prefix_token_id], self.lm.tok_encode(
                continuation, add_special_tokens=False
            )
        whole = self.lm.tok_encode(context + continuation)
        cut = len(self.lm.tok_encode(context.rstrip()))
        return whole[:cut], whole[cut:]

    def batches(self, pairs: Sequence[tuple[Ids, Ids]]) -> Iterator[list[int]]:
        """Places of requests, longest first, so that what is together is of about one length; each
        whose answer is longer than the model reads by itself."""
        order = sorted(
            range(len(pairs)),
            key=lambda place: (-len(pairs[place][0] + pairs[place][1]), pairs[place]),
        )
        most = self.lm.max_length
        yield from ([place] for place in order if len(pairs[place][1]) > most)
        order = [place for place in order if len(pairs[place][1]) <= most]
        while order:
            longest = min(sum(map(len, pairs[order[0]])), most)
            rows = self.batch_size or max(1, self.tokens_at_once // longest)
            yield order[:rows]
            order = order[rows:]

    def score(self, batch: Sequence[Any]) -> list[Answer]:
        """All at once, or in halves where the memory of a GPU is too small for that."""
        try:
            self.lm.batch_size_per_gpu = len(batch)
            answers: list[Answer] = self.lm.loglikelihood(batch, disable_tqdm=True)
            return answers
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise
        half = len(batch) // 2
        return self.score(batch[:half]) + self.score(batch[half:])

    @torch.no_grad()
    def score_in_windows(self, context: Ids, answer: Ids) -> Answer:
        """Each token of the answer once, after half a window at least."""
        length = self.lm.max_length
        tokens = np.array([*context[1:], *answer])
        waiting, total, greedy = len(context) - 1, 0.0, True  # the context is not scored
        for ids, fresh in windows(tokens, context[0], length, max(1, length // 2)):
            count = fresh - min(fresh, waiting)
            waiting -= fresh - count
            if count:
                inputs = torch.from_numpy(ids).to(self.lm.device)
                logits = self.lm.model(inputs[None, :-1]).logits[0, -count:].float()
                targets = inputs[-count:, None]
                total += logits.log_softmax(-1).gather(1, targets).double().sum().item()
                greedy &= bool((logits.argmax(-1, keepdim=True) == targets).all())
        return total, greedy
