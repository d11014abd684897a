"""Registers token adapters with peft.

`peft.utils.register_peft_method` is made for methods inside peft: it takes only names that are
members of the enum `PeftType`, and an enum cannot be subclassed. So this module adds one member;
everything else goes through peft's own function.
"""

from typing import Any

from peft.utils import register_peft_method
from peft.utils.peft_types import PeftType

NAME = "token_adapter"
PREFIX = f"{NAME}_"
"""Prefix of the names of adapter parameters; peft uses it to tell them from those of the base."""


def add_peft_type(name: str) -> PeftType:
    """Return the member of the enum with this name, added if it is missing."""
    if name in PeftType.__members__:
        return PeftType[name]
    member = str.__new__(PeftType, name)
    member._name_ = member._value_ = name
    type.__setattr__(PeftType, name, member)
    PeftType._member_names_.append(name)
    PeftType._member_map_[name] = member
    PeftType._value2member_map_[name] = member
    return member


TOKEN_ADAPTER = add_peft_type(NAME.upper())


def register(config_class: Any, model_class: Any) -> None:
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    if TOKEN_ADAPTER not in PEFT_TYPE_TO_TUNER_MAPPING:
        register_peft_method(
            name=NAME, config_cls=config_class, model_cls=model_class, prefix=PREFIX
        )
