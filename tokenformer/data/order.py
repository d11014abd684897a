"""Sample order as a pure function of (seed, sample index), so there is no data loader state.

    starts = segment_starts(len(tokens), 1024, seed=0, first_sample=0, count=512, mode="epochs")

A run counts the samples it has consumed. The next global batch is the next `count` indices,
whatever the batch size was before; each rank takes its slice, and each micro-batch a slice of that.
A sample of `length` tokens spans `length` + 1 of the corpus: inputs and their targets.

`random`: independent uniform segments. `epochs`: windows that share no target, each used once per
epoch, in a new random order every epoch. The order is a permutation computed index by index, a
Feistel network (Luby and Rackoff, 1988) with cycle walking (Black and Rogaway, 2002), so it needs
no memory for any length of corpus.
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
    """Return the start offsets of samples first_sample .. first_sample + count - 1. [count]"""
    check_length(total_tokens, length)
    if first_sample < 0 or count < 0:
        raise ValueError(f"{first_sample=} and {count=} must be at least 0")
    if mode == "random":
        return random_starts(total_tokens - length, seed, first_sample, count)
    if mode == "epochs":
        windows = window_count(total_tokens, length)
        return shuffled_indices(windows, seed, first_sample, count) * length
    raise ValueError(f"mode={mode!r} is not known; choose from {', '.join(MODES)}")


def validation_starts(total_tokens: int, length: int, *, count: int | None = None) -> Starts:
    """Return the start offsets of the validation windows: all of them, or `count` spread evenly.
    Windows share no target."""
    check_length(total_tokens, length)
    windows = window_count(total_tokens, length)
    count = windows if count is None else min(count, windows)
    if count < 1:
        raise ValueError(f"{count=} must be at least 1")
    # In integers: a corpus may have more windows than a float can count.
    indices = [i * (windows - 1) // max(1, count - 1) for i in range(count)]
    return np.array(indices, dtype=np.int64) * length


def window_count(total_tokens: int, length: int) -> int:
    """Count the windows of `length` inputs and their targets; a shorter remainder is dropped."""
    return (total_tokens - 1) // length


def random_starts(choices: int, seed: int, first_sample: int, count: int) -> Starts:
    """Uniform in [0, choices). Philox is counter-based: sample i uses block i."""
    # numpy guarantees that the raw words of its bit generators stay the same across versions.
    blocks = np.random.Philox(key=[seed, 0], counter=[first_sample, 0, 0, 0])
    words = np.asarray(blocks.random_raw(4 * count), dtype=np.uint64)[::4]  # [count]
    unit = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53  # in [0, 1)
    return np.minimum((unit * choices).astype(np.int64), choices - 1)


def shuffled_indices(size: int, seed: int, first_sample: int, count: int) -> Starts:
    """Return which of `size` windows or images each sample is, epoch after epoch. [count]"""
    parts = [np.empty(0, dtype=np.int64)]
    sample, end = first_sample, first_sample + count
    while sample < end:
        epoch, index = divmod(sample, size)
        used = min(end - sample, size - index)
        indices = np.arange(index, index + used, dtype=np.uint64)
        parts.append(permute(indices, size, round_keys(seed, epoch)).astype(np.int64))
        sample += used
    return np.concatenate(parts)


def round_keys(seed: int, epoch: int) -> Words:
    blocks = np.random.Philox(key=[seed, 1], counter=[epoch * ROUNDS, 0, 0, 0])
    return np.asarray(blocks.random_raw(4 * ROUNDS), dtype=np.uint64)[::4]


def permute(indices: Words, size: int, keys: Words) -> Words:
    """Apply a pseudorandom permutation of range(size) to `indices`."""
    half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half_bits)) - 1)
    indices = feistel(indices, half_bits, mask, keys)
    # Cycle walking: the network permutes the next power of four. An index beyond `size` is permuted
    # again until it is back in range, which must happen because its cycle started in range.
    while (outside := indices >= size).any():
        indices[outside] = feistel(indices[outside], half_bits, mask, keys)
    return indices


def feistel(indices: Words, half_bits: np.uint64, mask: np.uint64, keys: Words) -> Words:
    left, right = indices >> half_bits, indices & mask
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) & mask)
    return (left << half_bits) | right


def mix(words: Words) -> Words:
    """The finalizer of splitmix64, in which every input bit affects every output bit."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def check_length(total_tokens: int, length: int, name: str = "the text") -> None:
    """Raise DataError unless the text has one sequence of `length` inputs and their targets."""
    if length < 1:
        raise ValueError(f"{length=} must be at least 1")
    if total_tokens <= length:
        raise DataError(
            f"{name} has {total_tokens} tokens; one sequence of length {length} needs "
            f"{length + 1}: use a shorter length or more text"
        )
