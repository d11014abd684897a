"""Records which forward passes of a language model run in native code."""

from typing import Any

import pytest
from torch import Tensor

from tokenformer.models import language, native_decoder
from tokenformer.models.decoding_loop import Decoding
from tokenformer.models.language import LanguageModel


def record_native_decoding(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that gets one entry per forward pass: whether native code ran its blocks."""
    native: list[bool] = []
    is_decoding = LanguageModel._is_decoding

    def checked(*arguments: Any) -> bool:
        found = is_decoding(*arguments)
        if not found:
            native.append(False)
        return found

    def decoded(*arguments: Any) -> Tensor | None:
        found = native_decoder.decode_token(*arguments)
        native.append(found is not None)
        return found

    run_native = Decoding.run_native

    def looped(*arguments: Any) -> Any:
        found = run_native(*arguments)
        if found is not None:  # otherwise a forward pass follows
            native.append(True)
        return found

    monkeypatch.setattr(Decoding, "run_native", looped)
    monkeypatch.setattr(LanguageModel, "_is_decoding", checked)
    monkeypatch.setattr(language, "decode_token", decoded)
    return native
