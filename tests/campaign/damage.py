"""Ways to damage a file, by name; each takes the file and a random generator."""

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

Damage = Callable[[Path, random.Random], None]


def truncate(file: Path, chance: random.Random) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: chance.randrange(1, len(data))])


def flip(file: Path, chance: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def append(file: Path, chance: random.Random) -> None:
    file.write_bytes(file.read_bytes() + chance.randbytes(chance.randint(1, 64)))


def empty(file: Path, chance: random.Random) -> None:
    file.write_bytes(b"")


def delete(file: Path, chance: random.Random) -> None:
    file.unlink()


def zero(file: Path, chance: random.Random) -> None:
    """Write a block of NUL bytes into the middle, as a power cut may leave it."""
    data = bytearray(file.read_bytes())
    begin = chance.randrange(len(data))
    data[begin : begin + 512] = bytes(len(data[begin : begin + 512]))
    data[begin // 2] = 0
    file.write_bytes(data)


def scramble(file: Path, chance: random.Random) -> None:
    """Replace the content with as many random bytes."""
    file.write_bytes(chance.randbytes(file.stat().st_size))


def make_folder(file: Path, chance: random.Random) -> None:
    file.unlink()
    file.mkdir()


def dangle(file: Path, chance: random.Random) -> None:
    """Replace the file with a dangling symbolic link."""
    file.unlink()
    file.symlink_to("nowhere")


def link_to_sibling(file: Path, chance: random.Random) -> None:
    """Replace the file with a symbolic link to another one in the folder."""
    other = chance.choice([p for p in sorted(file.parent.iterdir()) if p != file and p.is_file()])
    file.unlink()
    file.symlink_to(other.name)


def swap(file: Path, chance: random.Random) -> None:
    """Swap the file with another one in the folder."""
    other = chance.choice([p for p in sorted(file.parent.iterdir()) if p != file and p.is_file()])
    data = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(data)


def wrong_json(file: Path, chance: random.Random) -> None:
    """Write valid JSON of the wrong structure."""
    file.write_text(chance.choice(["{}", "[]", "null", "3", '"text"', '{"files": 3}', "[[[]]]"]))


ANY: dict[str, Damage] = {
    "truncated": truncate,
    "bit flipped": flip,
    "bytes appended": append,
    "empty": empty,
    "deleted": delete,
    "zeros inside": zero,
    "random bytes": scramble,
    "a folder": make_folder,
    "a dangling link": dangle,
    "a link to a sibling": link_to_sibling,
    "swapped with a sibling": swap,
}
JSON_ONLY: dict[str, Damage] = {"other JSON": wrong_json}


def relist(checkpoint: Path) -> None:
    """Make the manifest of a checkpoint match its files again, as an attacker would."""
    manifest = checkpoint / "manifest.json"
    document = json.loads(manifest.read_text())
    for name in document["files"]:
        data = (checkpoint / name).read_bytes()
        document["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest.write_text(json.dumps(document))


def wrong_state(checkpoint: Path, chance: random.Random) -> None:
    """Remove a field of state.json or change its type, and update the hash."""
    file = checkpoint / "state.json"
    document: Any = json.loads(file.read_text())
    place = chance.choice([document, document["state"], document["state"]["progress"]])
    key = chance.choice(sorted(place))
    if chance.random() < 0.5:
        del place[key]
    else:
        place[key] = chance.choice([None, "text", [[1]], {"a": 1}])
    file.write_text(json.dumps(document))
    relist(checkpoint)


def wrong_document(checkpoint: Path, chance: random.Random) -> None:
    """Replace state.json with other JSON, and update the hash."""
    wrong_json(checkpoint / "state.json", chance)
    relist(checkpoint)


def wrong_header(checkpoint: Path, chance: random.Random) -> None:
    """Rename a tensor in the header of a tensor file, and update the hash."""
    file = chance.choice(sorted(checkpoint.glob("*.safetensors")))
    data = file.read_bytes()
    file.write_bytes(data.replace(b"embed_tokens", b"embed_tokenz"))
    relist(checkpoint)


def foreign_shard(checkpoint: Path, chance: random.Random) -> None:
    """Add a tensor file that the manifest does not list."""
    file = chance.choice(sorted(checkpoint.glob("*.safetensors")))
    shutil.copy(file, checkpoint / "shard-00009-model-00001-of-00001.safetensors")


def become_file(checkpoint: Path, chance: random.Random) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.write_bytes(b"a file")


def become_empty(checkpoint: Path, chance: random.Random) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


WHOLE: dict[str, Damage] = {
    "state of another shape, hash matching": wrong_state,
    "other JSON as state, hash matching": wrong_document,
    "tensor renamed, hash matching": wrong_header,
    "a foreign tensor file": foreign_shard,
    "the folder is a file": become_file,
    "the folder is empty": become_empty,
}
"""Damage to a checkpoint folder as a whole."""
