"""The loss of prompts with completions: only completions count, exactly."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.support.adaptation import save_base, write_rows
from tokenformer import TokenformerForCausalLM
from tokenformer.data.corpus import Corpus
from tokenformer.data.examples import ExampleSplit
from tokenformer.data.preparation import PrepareOptions, prepare
from tokenformer.train.loop import Loop
from tokenformer.train.options import OptimizerOptions, RunOptions, ScheduleOptions
from tokenformer.train.text_workload import make_task

ROWS = [
    {"prompt": "a long prompt: ", "completion": "yes"},
    {"prompt": "p", "completion": " a much longer completion"},
    {"prompt": "", "completion": "x"},
    {"prompt": "prompt", "completion": "four"},
]


@pytest.fixture
def examples(tmp_path: Path) -> ExampleSplit:
    file = write_rows(tmp_path / "rows.jsonl", ROWS)
    prepare(PrepareOptions(str(file), validation=0), tmp_path / "corpus")
    return ExampleSplit(Corpus(tmp_path / "corpus"), "train")


def load(folder: Path) -> TokenformerForCausalLM:
    return TokenformerForCausalLM.from_pretrained(save_base(folder))


def test_the_gradient_is_that_of_the_completions(examples: ExampleSplit, tmp_path: Path) -> None:
    """Against transformers' labels on each example alone, without padding."""
    model = load(tmp_path / "base")
    total, count = torch.zeros(()), 0
    for row in ROWS:
        prompt = list(row["prompt"].encode()) or [256]
        completion = [*row["completion"].encode(), 256]
        ids = torch.tensor([prompt + completion])
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
        total = total + F.cross_entropy(logits, torch.tensor(completion), reduction="sum")
        count += len(completion)
    (total / count).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}

    for micro in (4, 1, 3):
        fresh = load(tmp_path / "base")
        loop = Loop(
            make_task(fresh, examples, None, length=60, order="epochs"),
            OptimizerOptions(clip_norm=None),
            ScheduleOptions(),
            RunOptions(steps=1, batch_size=4, micro_batch_size=micro, validate_every=0),
        )
        loss = loop.accumulate(0)
        assert loss == pytest.approx(total.item() / count, rel=1e-6)
        for name, parameter in fresh.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)


def test_the_held_out_loss_is_a_mean_over_completions(
    examples: ExampleSplit, tmp_path: Path
) -> None:
    losses = []
    for micro in (1, 4):
        loop = Loop(
            make_task(load(tmp_path / "base"), examples, examples, length=60),
            OptimizerOptions(),
            ScheduleOptions(),
            RunOptions(steps=1, batch_size=4, micro_batch_size=micro, validate_every=1),
        )
        losses.append(loop.validate())
        row = loop.held_out_metrics()
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    tokens, text = 4 + 26 + 2 + 5, 3 + 25 + 1 + 4
    assert examples.trained_tokens == tokens
    assert row["val_bpb"] == pytest.approx(losses[1] / 0.6931471805599453 * tokens / text)


def test_a_token_without_a_loss_is_context_all_the_same(
    examples: ExampleSplit, tmp_path: Path
) -> None:
    task = make_task(load(tmp_path / "base"), examples, None, length=60, order="epochs")
    batch = torch.from_numpy(examples.rows([0], 60))
    before = task.module(batch)
    batch[0, 0] = ~ord("b")  # another prompt
    assert task.module(batch) != before
    padded = F.pad(batch, (0, 5), value=~0)
    torch.testing.assert_close(task.module(padded), task.module(batch))
    assert task.count_batch_losses(padded) == 4
