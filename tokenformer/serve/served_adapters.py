"""The adapters of a running server, and how clients may change them.

`AdapterSet` belongs to the inference thread. The names that requests may use belong to the event
loop: one that is being removed is gone there first, so no request can follow.

Clients name a folder below that of `--allow_adapter_changes`. A path that leads out of it, also
through a symbolic link, is refused like one that does not exist.
"""

import time
from pathlib import Path
from typing import Any

from tokenformer.adapters.adapter_folder import WEIGHTS, AdapterFolder
from tokenformer.adapters.adapter_set import AdapterSet
from tokenformer.errors import AdapterError, TokenformerError
from tokenformer.paths import ADAPTER_CONFIG, check_adapter_name, find_adapter

MAX_ADAPTERS = 1000
"""Maximum number of adapters while clients can load them."""


class AdapterInUseError(AdapterError):
    """An adapter cannot be removed while requests use it."""


class ServedAdapters(AdapterSet):
    def __init__(self, model: Any, root: Path | None = None) -> None:
        super().__init__(model)
        self.root = root
        """The folder, resolved, that clients may load adapters from; None if they may not."""
        self.served: dict[str, int] = {}
        """When each adapter was loaded, by name."""

    def load(self, name: str, adapter: AdapterFolder) -> None:
        super().load(name, adapter)
        self.served[name] = int(time.time())

    def find(self, folder: str) -> Path:
        """Return the adapter folder that a client names, relative to the root."""
        assert self.root is not None
        try:
            found = find_adapter(self.root.joinpath(folder).resolve())
            files = [found / ADAPTER_CONFIG, found / WEIGHTS]
            if all(path.resolve().is_relative_to(self.root) for path in files):
                return found
        except (AdapterError, OSError, ValueError, RuntimeError):
            pass
        raise AdapterError(f"the server has no adapter folder {folder!r} (--allow_adapter_changes)")

    async def add(self, queue: Any, name: str, folder: str) -> None:
        """Load an adapter between two tokens of the running requests."""
        check_adapter_name(name, "name")
        if len(self.served) >= MAX_ADAPTERS:
            raise AdapterError(f"there are {MAX_ADAPTERS} adapters already; remove one")
        found = self.find(folder)

        def attach() -> None:
            AdapterSet.load(self, name, AdapterFolder.read(found))
            if not self.mixes and len({row.adapter for row in queue.batch.rows}) > 1:
                self.remove(name)
                raise AdapterError(f"{name} cannot mix with the adapters in use; try again later")

        try:
            await queue.change(attach)
        except TokenformerError as error:  # without the path on the server
            raise AdapterError(str(error).replace(f"{self.root}/", "")) from None
        self.served[name] = int(time.time())

    async def delete(self, queue: Any, name: str) -> None:
        """Remove an adapter unless requests use it."""
        created = self.served.pop(name)

        def remove() -> None:
            requests = [*queue.batch.rows, *queue.waiting]
            if in_use := sum(request.adapter == name for request in requests):
                raise AdapterInUseError(f"{name} is used by {in_use} requests; try again later")
            self.remove(name)

        try:
            await queue.change(remove)
        except AdapterInUseError:
            self.served[name] = created
            raise
