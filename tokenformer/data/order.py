"""Which tokens a sample holds, a pure function of (seed, sample index): no loader state to lose.

    starts = segment_starts(len(tokens), 1024, seed=0, first_sample=0, count=512, mode="epochs")

A run counts the samples it has consumed. The next global batch is the next `count` indices,
whatever the batch size was before; a rank takes its slice of them, a micro-batch a slice of that.
A sample of `length` tokens spans `length` + 1 of the corpus: inputs and their targets.

`random`: independent uniform segments. `epochs`: the corpus cut into windows that share no target,
each served once an epoch, in an order drawn anew each epoch. The order is a permutation computed
place by place, a Feistel network (Luby and Rackoff, 1988) with cycle walking (Black and Rogaway,
2002), so it costs no memory however long the corpus.
"""

import numpy as np
import numpy.typing as npt

from tokenformer.errors import DataError

Starts = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

MODES = ("random", "epochs")
ROUNDS = 8


def segment_starts(
    total_tokens: int, length: int, *, seed: int, first_sample: int, count: int, mode: str
) -> Starts:
    """Where the samples first_sample .. first_sample + count - 1 start. [count]"""
    check_length(total_tokens, length)
    if first_sample < 0 or count < 0:
        raise ValueError(f"{first_sample=} and {count=} must be at least 0")
    if mode == "random":
        return random_starts(total_tokens - length, seed, first_sample, count)
    if mode == "epochs":
        windows = window_count(total_tokens, length)
        return shuffled(windows, seed, first_sample, count) * length
    raise ValueError(f"mode={mode!r} is not known; choose from {', '.join(MODES)}")


def validation_starts(total_tokens: int, length: int, *, count: int | None = None) -> Starts:
    """The fixed windows of a validation: all of them, or `count` spread evenly over the corpus.

    They share no target. A corpus of fewer than `count` windows gives all it has.
    """
    check_length(total_tokens, length)
    windows = window_count(total_tokens, length)
    count = windows if count is None else min(count, windows)
    if count < 1:
        raise ValueError(f"{count=} must be at least 1")
    # Exact where floats would not be: the corpus may have more windows than a float has digits.
    places = [i * (windows - 1) // max(1, count - 1) for i in range(count)]
    return np.array(places, dtype=np.int64) * length


def window_count(total_tokens: int, length: int) -> int:
    """Windows of `length` inputs, each with the target of its last; the remainder is left out."""
    return (total_tokens - 1) // length


def random_starts(choices: int, seed: int, first_sample: int, count: int) -> Starts:
    """Uniform in [0, choices). Philox is a counter-based generator: sample i reads block i."""
    # numpy keeps the raw words of its bit generators the same from version to version.
    blocks = np.random.Philox(key=[seed, 0], counter=[first_sample, 0, 0, 0])
    words = np.asarray(blocks.random_raw(4 * count), dtype=np.uint64)[::4]  # [count]
    unit = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53  # in [0, 1)
    return np.minimum((unit * choices).astype(np.int64), choices - 1)


def shuffled(windows: int, seed: int, first_sample: int, count: int) -> Starts:
    """The windows that the samples hold, epoch after epoch. [count]"""
    parts = [np.empty(0, dtype=np.int64)]
    sample, end = first_sample, first_sample + count
    while sample < end:
        epoch, place = divmod(sample, windows)
        served = min(end - sample, windows - place)
        places = np.arange(place, place + served, dtype=np.uint64)
        parts.append(permute(places, windows, round_keys(seed, epoch)).astype(np.int64))
        sample += served
    return np.concatenate(parts)


def round_keys(seed: int, epoch: int) -> Words:
    blocks = np.random.Philox(key=[seed, 1], counter=[epoch * ROUNDS, 0, 0, 0])
    return np.asarray(blocks.random_raw(4 * ROUNDS), dtype=np.uint64)[::4]


def permute(places: Words, size: int, keys: Words) -> Words:
    """A permutation of range(size), evaluated at `places`."""
    half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half_bits)) - 1)
    places = feistel(places, half_bits, mask, keys)
    # The network permutes the next power of four. Whoever lands beyond `size` walks on along its
    # cycle, which must come back in, since it started inside.
    while (outside := places >= size).any():
        places[outside] = feistel(places[outside], half_bits, mask, keys)
    return places


def feistel(places: Words, half_bits: np.uint64, mask: np.uint64, keys: Words) -> Words:
    left, right = places >> half_bits, places & mask
    for key in keys:
        left, right = right, left ^ (mixed(right ^ key) & mask)
    return (left << half_bits) | right


def mixed(words: Words) -> Words:
    """The finaliser of splitmix64: every bit of the input moves every bit of the output."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def check_length(total_tokens: int, length: int, name: str = "the text") -> None:
    """Raise unless there is at least one sequence of `length` inputs and their targets."""
    if length < 1:
        raise ValueError(f"{length=} must be at least 1")
    if total_tokens <= length:
        raise DataError(
            f"{name} has {total_tokens} tokens; one sequence of length {length} needs "
            f"{length + 1}: use a shorter length or more text"
        )
