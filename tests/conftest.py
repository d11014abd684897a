"""Fixtures for all tests: small models of both families, seeds, real data, a timeout."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

# Read when torch is imported, here and in the processes that tests start. Small tensors gain
# nothing from threads, and test workers that compete for cores are ten times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).parent.parent
FAMILIES = ("tokenformer", "transformer")
# Under nohup, or in the background of a shell, SIGINT is ignored, here and in every child process.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST, LONGEST_SLOW = 1800, 5400  # seconds that a test may take on a busy machine


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """Interrupt a test that hangs with an alarm, so that it fails."""
    if threading.current_thread() is not threading.main_thread():
        return (yield)
    seconds = LONGEST_SLOW if item.get_closest_marker("slow") else LONGEST

    def give_up(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{item.nodeid} has taken {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def seed() -> int:
    import torch

    torch.manual_seed(0)
    return 0


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_config() -> Callable[..., Any]:
    """make_config(family, **options): two layers, width 32, odd token counts."""
    import tokenformer

    def make(family: str, **options: Any) -> Any:
        shape: dict[str, Any] = {
            "vocab_size": 61,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
        }
        if family == "transformer":
            return tokenformer.TransformerConfig(**{**shape, "intermediate_size": 40, **options})
        tokens = {"qkv_tokens": 24, "output_tokens": 20, "ffn_tokens": 44}
        return tokenformer.TokenformerConfig(**{**shape, **tokens, **options})

    return make


@pytest.fixture
def make_model(make_config: Callable[..., Any], seed: int) -> Callable[..., Any]:
    """make_model(family, **options): in float64 and eval mode, with weights large enough that every
    part of the network affects the logits, unlike the published initialization of a tiny model."""
    import torch

    import tokenformer

    def make(family: str, **options: Any) -> Any:
        classes = {
            "tokenformer": tokenformer.TokenformerForCausalLM,
            "transformer": tokenformer.TransformerForCausalLM,
        }
        model = classes[family](make_config(family, **options)).double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.5)
        return model

    return make


@pytest.fixture(scope="session")
def real_data() -> Callable[[str], Path]:
    """real_data("text/enwik8.gz"): a file in TOKENFORMER_DATA; the test is skipped without it."""
    folder = Path(os.environ.get("TOKENFORMER_DATA", ROOT.parent / "shared" / "data"))

    def find(name: str) -> Path:
        if not (folder / name).exists():
            pytest.skip(f"TOKENFORMER_DATA has no {name}")
        return folder / name

    return find
