"""A seed for every named thing, so that what is drawn for one does not depend on the others."""

import hashlib


def named_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "big")
