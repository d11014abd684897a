"""The behaviors of byte-level models whose controlling tokens are looked for.

    choose = BEHAVIORS["enwik8"]["second ] of ]]"]
    behavior = Behavior.predicting(ids, choose)

Each takes the bytes at every position and the bytes to predict from there, [S, T], and returns
which predictions belong to the behavior.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Choose = Callable[["Tensor", "Tensor"], "Tensor"]


def second_bracket(now: "Tensor", following: "Tensor") -> "Tensor":
    """The second bracket of the end of a link, [[like this]]."""
    return (now == ord("]")) & (following == ord("]"))


def first_bracket(now: "Tensor", following: "Tensor") -> "Tensor":
    """The bracket that ends a link or its target."""
    return (now != ord("]")) & (following == ord("]"))


def closing_tag(now: "Tensor", following: "Tensor") -> "Tensor":
    """The name in </name> and its bracket; the name is that of the tag which was opened."""
    starts = (now == ord("/")) & (before(now) == ord("<"))
    return spans(starts, now != ord(">"))


def capital(now: "Tensor", following: "Tensor") -> "Tensor":
    """A capital letter after a full stop and a space."""
    return (before(now) == ord(".")) & (now == ord(" ")) & among(following, "A", "Z")


def closing_bracket(now: "Tensor", following: "Tensor") -> "Tensor":
    """A bracket that closes a call, a list or a dict."""
    return (following == ord(")")) | (following == ord("]")) | (following == ord("}"))


def indentation(now: "Tensor", following: "Tensor") -> "Tensor":
    """The spaces at the start of a line, after a line that ends with a colon."""
    starts = (now == ord("\n")) & (before(now) == ord(":"))
    return spans(starts, now == ord(" ")) & (following == ord(" "))


def colon(now: "Tensor", following: "Tensor") -> "Tensor":
    """The colon that ends a line."""
    ends = following == ord(":")
    ends[:, :-1] &= following[:, 1:] == ord("\n")
    ends[:, -1] = False
    return ends


def before(ids: "Tensor") -> "Tensor":
    """The byte before every position; 0 at the start."""
    shifted = ids.roll(1, dims=1)
    shifted[:, 0] = 0
    return shifted


def among(ids: "Tensor", first: str, last: str) -> "Tensor":
    return (ids >= ord(first)) & (ids <= ord(last))


def spans(starts: "Tensor", goes_on: "Tensor") -> "Tensor":
    """Return the positions from each start on for as long as `goes_on` holds after it."""
    found = starts.clone()
    for t in range(1, starts.shape[1]):
        found[:, t] |= found[:, t - 1] & goes_on[:, t]
    return found


BEHAVIORS: dict[str, dict[str, Choose]] = {
    "enwik8": {
        "second bracket of ]]": second_bracket,
        "first bracket of ]]": first_bracket,
        "names in closing tags": closing_tag,
        "capital after a full stop": capital,
    },
    "python": {
        "closing brackets": closing_bracket,
        "indentation after a colon": indentation,
        "colon at the end of a line": colon,
    },
}
"""By corpus and name."""
