"""Scores of generated captions against several references each: BLEU and CIDEr-D.

    bleu(candidates, references)        # BLEU-1 to BLEU-4
    cider(candidates, references)

BLEU (Papineni et al., 2002) of the whole corpus, with the closest reference length and without
smoothing. CIDEr-D (Vedantam et al., arXiv 1411.5726) as in the evaluation server of COCO: TF-IDF
vectors of 1- to 4-grams, clipped counts, a Gaussian penalty on the length, times 10. Document
frequencies are those of the references given. Words are lower-cased, without punctuation.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence

LONGEST = 4
"""Words of the longest n-gram."""
SIGMA = 6.0
"""Standard deviation of the length penalty, in words."""

Words = list[str]
Ngrams = Counter[tuple[str, ...]]


def words(text: str) -> Words:
    return re.findall(r"\w+", text.lower())


def ngrams(text: Words, size: int) -> Ngrams:
    return Counter(tuple(text[i : i + size]) for i in range(len(text) - size + 1))


def bleu(candidates: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """Return corpus BLEU-1 to BLEU-4, from 0 to 1."""
    check(candidates, references)
    matched, total = [0] * LONGEST, [0] * LONGEST
    written = expected = 0
    for candidate, several in zip(candidates, references, strict=True):
        own, others = words(candidate), [words(each) for each in several]
        written += len(own)
        expected += min((abs(len(each) - len(own)), len(each)) for each in others)[1]
        for index in range(LONGEST):
            found = ngrams(own, index + 1)
            most: Ngrams = Counter()
            for each in others:
                most |= ngrams(each, index + 1)
            matched[index] += (found & most).total()
            total[index] += found.total()
    if not written:
        return [0.0] * LONGEST
    brevity = math.exp(min(0.0, 1 - expected / written))
    precisions = [hit / max(1, all_) for hit, all_ in zip(matched, total, strict=True)]
    return [
        brevity * math.exp(sum(map(math.log, precisions[:size])) / size)
        if all(precisions[:size])
        else 0.0
        for size in range(1, LONGEST + 1)
    ]


def cider(candidates: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return the mean CIDEr-D, from 0 to 10."""
    check(candidates, references)
    frequency: Ngrams = Counter()
    for several in references:
        found = {gram for each in several for gram in all_ngrams(words(each))}
        frequency.update(found)
    weigh = Weighting(frequency, math.log(len(references)))
    scores = []
    for candidate, several in zip(candidates, references, strict=True):
        own = weigh.vectors(words(candidate))
        similar = [weigh.similarity(own, weigh.vectors(words(each))) for each in several]
        scores.append(10 * sum(similar) / len(similar))
    return sum(scores) / len(scores)


def all_ngrams(text: Words) -> Ngrams:
    found: Ngrams = Counter()
    for size in range(1, LONGEST + 1):
        found += ngrams(text, size)
    return found


class Vectors:
    """TF-IDF weights of the n-grams of a text, one vector for each n."""

    def __init__(self, weights: list[dict[tuple[str, ...], float]], length: int) -> None:
        self.weights, self.length = weights, length
        self.norms = [math.sqrt(sum(w * w for w in vector.values())) for vector in weights]


class Weighting:
    def __init__(self, frequency: Ngrams, log_images: float) -> None:
        self.frequency, self.log_images = frequency, log_images

    def vectors(self, text: Words) -> Vectors:
        weights = [
            {
                gram: count * (self.log_images - math.log(max(1, self.frequency[gram])))
                for gram, count in ngrams(text, size).items()
            }
            for size in range(1, LONGEST + 1)
        ]
        return Vectors(weights, len(text))

    def similarity(self, own: Vectors, other: Vectors) -> float:
        """Return the mean cosine over n, with counts clipped to those of the reference, times the
        length penalty."""
        # COCO's code measures length in bigrams, which differs from words by one in both texts.
        difference = max(0, own.length - 1) - max(0, other.length - 1)
        penalty = math.exp(-(difference**2) / (2 * SIGMA**2))
        total = 0.0
        for a, b, norm_a, norm_b in zip(
            own.weights, other.weights, own.norms, other.norms, strict=True
        ):
            shared = a.keys() & b.keys()
            product = math.fsum(min(a[gram], b[gram]) * b[gram] for gram in shared)
            if norm_a and norm_b:
                total += product / (norm_a * norm_b)
        return penalty * total / LONGEST


def check(candidates: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    if len(candidates) != len(references) or not candidates:
        raise ValueError(
            f"{len(candidates)} captions and the references of {len(references)} images; give as "
            "many, and at least one"
        )
    if not all(references):
        raise ValueError("an image has no reference")
