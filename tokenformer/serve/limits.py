"""Limits of `tokenformer serve`: hosts, API key, sizes, timeouts and queue length."""

import ipaddress
import re
import socket
from dataclasses import dataclass, field

from tokenformer.errors import TokenformerError

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
ANY = "any"
API_KEY_VARIABLE = "TOKENFORMER_API_KEY"


class LimitError(TokenformerError, ValueError):
    """A limit that is out of range."""


@dataclass(frozen=True)
class HostCheck:
    """The accepted Host headers. The check prevents DNS rebinding: a web page whose domain name
    resolves to this machine sends that name as the Host."""

    names: frozenset[str] = LOOPBACK
    addresses: bool = False
    """Whether any IP address is accepted: only names can be rebound."""

    @classmethod
    def of(cls, bound: str, allowed: tuple[str, ...] = ()) -> "HostCheck":
        """Return the check for a server at `bound`; `allowed` adds names, `any` allows all."""
        names = LOOPBACK | {host_name(name) for name in allowed if name} | {bound.lower()}
        if is_address(bound) and ipaddress.ip_address(bound).is_unspecified:  # every address
            return cls(names | {socket.gethostname().lower()}, addresses=True)
        return cls(names)

    def accepts(self, header: str) -> bool:
        name = host_name(header)
        return name in self.names or ANY in self.names or (self.addresses and is_address(name))


def host_name(header: str) -> str:
    """Return the Host header without its port: `::1` for `[::1]:8000`."""
    name = header.strip().lower()
    if address := re.fullmatch(r"\[([^]]*)\](:\d*)?", name):
        return address[1]
    if name.count(":") > 1:  # an IPv6 address as an option, without brackets
        return name
    return name.partition(":")[0].rstrip(".")


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Limits:
    max_body: int = 2**20
    """Maximum size of a request body in bytes."""
    max_queue: int = 32
    """Maximum number of requests that wait while others are generating."""
    max_batch: int = 16
    """Maximum number of requests that generate together."""
    request_timeout: float = 30.0
    """Seconds for a client to send the headers, and again for the body."""
    template_timeout: float = 10.0
    """Seconds for rendering a chat template."""
    max_images: int = 16
    """Maximum number of images in a request."""
    max_image_pixels: int = 2**25
    """Maximum number of pixels of an image, checked before it is decoded."""
    api_key: str | None = field(default=None, repr=False)
    hosts: HostCheck = HostCheck()

    def __post_init__(self) -> None:
        if self.max_body < 1:
            raise LimitError(f"--max_body {self.max_body} must be at least 1 byte")
        if self.max_queue < 0:
            raise LimitError(f"--max_queue {self.max_queue} must be 0 or more")
        if self.max_images < 0:
            raise LimitError(f"--max_images {self.max_images} must be 0 or more")
        for name in ("max_batch", "max_image_pixels"):
            if getattr(self, name) < 1:
                raise LimitError(f"--{name} {getattr(self, name)} must be at least 1")
        for name in ("request_timeout", "template_timeout"):
            seconds = getattr(self, name)
            if not 0 < seconds <= 86_400:
                raise LimitError(f"--{name} {seconds:g} must be above 0 and at most 86400 seconds")
        key = self.api_key
        if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
            raise LimitError(
                "the API key must be printable ASCII without spaces, and not empty; "
                f"unset {API_KEY_VARIABLE} to serve without a key"
            )
