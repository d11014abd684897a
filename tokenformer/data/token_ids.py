"""Token ids, in memory or on disk. Two bytes an id serve every vocabulary up to 65,536."""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.unsignedinteger[Any]]


class TokenSequence(Protocol):
    """A long row of token ids: an array, or a split of a prepared corpus (`corpus.Split`)."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: slice, /) -> TokenIds: ...


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """The smallest little-endian type that holds every id."""
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")
