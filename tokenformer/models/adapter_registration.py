"""Imports our adapters, which register with peft, right after peft has been imported.

An installed peft may be too old for them. Then there are no token adapters, but peft itself, which
transformers imports too, must work.
"""

import importlib
import warnings

try:
    importlib.import_module("tokenformer.adapters")
except (ImportError, AttributeError) as error:
    warnings.warn(f"there are no token adapters: they need peft>=0.21 ({error})", stacklevel=2)
