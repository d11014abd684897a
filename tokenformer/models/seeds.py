"""Seeds by name, so that the random values of one tensor do not depend on the others."""

import hashlib


def named_seed(seed: int, name: str) -> int:
    """Derive the seed of `name` from a global seed."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "big")
