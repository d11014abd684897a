"""The limits of `tokenformer serve`: who may send requests, how large, how slowly, how many."""

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
    """The Host headers that are accepted, against DNS rebinding: a web page whose domain name is
    made to resolve to this machine sends that name as the Host."""

    names: frozenset[str] = LOOPBACK
    addresses: bool = False
    """Whether any IP address is accepted: an address cannot be rebound, only a name can."""

    @classmethod
    def of(cls, bound: str, allowed: tuple[str, ...] = ()) -> "HostCheck":
        """For a server bound to `bound`; `allowed` are further names, or `any` for all."""
        names = LOOPBACK | {host_name(name) for name in allowed if name} | {bound.lower()}
        if is_address(bound) and ipaddress.ip_address(bound).is_unspecified:  # every address
            return cls(names | {socket.gethostname().lower()}, addresses=True)
        return cls(names)

    def accepts(self, header: str) -> bool:
        name = host_name(header)
        return name in self.names or ANY in self.names or (self.addresses and is_address(name))


def host_name(header: str) -> str:
    """The Host header without its port: `[::1]:8000` is `::1`."""
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
    """Bytes of a request body."""
    max_queue: int = 32
    """Requests that wait while another one is answered."""
    request_timeout: float = 30.0
    """Seconds that a client has to send its headers, and then its body."""
    template_timeout: float = 10.0
    """Seconds that a chat template has to render."""
    api_key: str | None = field(default=None, repr=False)
    hosts: HostCheck = HostCheck()

    def __post_init__(self) -> None:
        if self.max_body < 1:
            raise LimitError(f"--max_body {self.max_body} must be at least 1 byte")
        if self.max_queue < 0:
            raise LimitError(f"--max_queue {self.max_queue} must be 0 or more")
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
