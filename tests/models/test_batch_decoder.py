"""Sequences that are decoded together get the tokens that each gets alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tokenformer.models.batch_decoder import BatchDecoder
from tokenformer.models.quantization import quantize_model
from tokenformer.ops.backends.native.library import library

OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_key_value_heads": 2, "positions": "learned"},
    {"residual": "parallel", "positions": "none"},
]
LENGTHS = (5, 25, 3, 17, 29, 1, 8)
PROMPTS = [torch.randint(61, (1, n), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]


def new_tokens(place: int) -> int:
    """Sequences end in another order than they begin."""
    return 12 + 37 * place % 23


def alone(model: Any, ids: Tensor, count: int) -> list[int]:
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, ids.shape[1] :].tolist()


def together(
    decoder: BatchDecoder, rows: int, every: int = 3
) -> tuple[list[list[int]], list[bool]]:
    """Decode all prompts, at most `rows` at a time, of which one may join every few tokens. Return
    their tokens, and for each step whether native code gave the best ones."""
    found: list[list[int]] = [[] for _ in PROMPTS]
    native: list[bool] = []
    running: list[int] = []
    waiting = list(range(len(PROMPTS)))
    for step in range(1000):
        if not (waiting or running):
            return found, native
        if waiting and len(running) < rows and (not running or step % every == 0):
            place = waiting.pop(0)
            found[place].append(int(decoder.add(PROMPTS[place]).argmax()))
            running.append(place)
        logits, best = decoder.step([found[place][-1] for place in running], greedy=True)
        native.append(best is not None)
        assert best is None or torch.equal(best, logits.argmax(-1))
        for row, place in enumerate(running):
            found[place].append(int(logits[row].argmax()))
        for row in reversed(range(len(running))):
            if len(found[running[row]]) == new_tokens(running[row]):
                decoder.remove(row)
                last = running.pop()
                if row < len(running):
                    running[row] = last
    raise AssertionError("the sequences do not end")


def check(model: Any, rows: int, native: bool, **options: Any) -> None:
    expected = [alone(model, ids, new_tokens(place)) for place, ids in enumerate(PROMPTS)]
    decoder = BatchDecoder(model, rows, **options)
    found, steps = together(decoder, rows)
    assert found == expected
    assert set(steps) == {native}
    assert len(decoder) == 0


@pytest.mark.skipif(library() is None, reason="no C++ compiler")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_changing_batch_in_native_code(make_model, options, rows):
    check(make_model("tokenformer", **options).float(), rows, native=True)


@pytest.mark.parametrize("family", ["tokenformer", "transformer"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_changing_batch_in_eager_mode(make_model, family, options):
    check(make_model(family, **options), rows=4, native=False)  # fp64 has no native code


@pytest.mark.skipif(library() is None, reason="no C++ compiler")
def test_quantized_and_half_precision(make_model):
    model = make_model("tokenformer").float()
    quantize_model(model, 8)
    check(model, rows=3, native=True)
    check(make_model("tokenformer").bfloat16(), rows=3, native=True)


def test_more_sequences_than_native_code_takes(make_model):
    model = make_model("tokenformer").float()
    decoder = BatchDecoder(model, 20)
    ids = torch.randint(61, (20, 7), generator=torch.Generator().manual_seed(5))
    tokens = [int(decoder.add(row[None]).argmax()) for row in ids]
    logits, best = decoder.step(tokens, greedy=True)
    assert best is None
    whole = torch.cat([ids, torch.tensor(tokens)[:, None]], dim=1)
    with torch.no_grad():
        assert torch.allclose(logits, model(whole).logits[:, -1], atol=1e-4)


def test_a_prompt_that_fails_leaves_the_others(make_model):
    model = make_model("tokenformer")
    decoder = BatchDecoder(model, 4)
    token = int(decoder.add(PROMPTS[0]).argmax())
    with pytest.raises(IndexError):
        decoder.add(torch.tensor([[61]]))  # above the vocabulary
    assert len(decoder) == 1
    logits, _ = decoder.step([token])
    assert [token, int(logits.argmax())] == alone(model, PROMPTS[0], 2)
    decoder.clear()
    assert len(decoder) == 0
    assert int(decoder.add(PROMPTS[1]).argmax()) == alone(model, PROMPTS[1], 1)[0]
