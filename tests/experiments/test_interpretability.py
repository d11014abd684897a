"""The study of interpretability: its behaviors, its rule for control, and all of it in small."""

from pathlib import Path

import pytest
import torch

from experiments.__main__ import main
from experiments.exhibit import SCALES
from experiments.interpretability import control, model_of, plan
from experiments.interpretability.behaviors import BEHAVIORS
from experiments.interpretability.figures import code, control_table, is_controlled
from experiments.interpretability.measurement import Control, concentration, pattern_ends
from experiments.job import Results, with_needs


def ids_of(text: str) -> torch.Tensor:
    return torch.tensor([[*text.encode()]])


@pytest.mark.parametrize(
    ("corpus", "behavior", "text", "chosen"),
    [
        ("enwik8", "second bracket of ]]", "a [[b]] [c] d", "]"),
        ("enwik8", "first bracket of ]]", "a [[b]] [c] d", "]]"),
        ("enwik8", "names in closing tags", "<b>x</b> 1/2 </id> <c>", "b>id>"),
        ("enwik8", "capital after a full stop", "An A. B c. d. E.F", "BE"),
        ("python", "closing brackets", "f(a[0], {1: 2})", "]})"),
        ("python", "indentation after a colon", "if a:\n    b = c\n  d\nx:\n e", "     "),
        ("python", "colon at the end of a line", "a: int\nif b:\n  c[:]\nelse:", ":"),
    ],
)
def test_a_behavior_is_its_predictions(corpus, behavior, text, chosen):
    ids = ids_of(text)
    now, following = ids[:, :-1], ids[:, 1:]
    found = BEHAVIORS[corpus][behavior](now, following)
    assert found.shape == following.shape
    assert bytes(following[found].tolist()).decode() == chosen
    assert torch.equal(ids, ids_of(text)), "the text is not changed"


def test_a_pattern_ends_where_its_bytes_do():
    text = "abab cab\nb"
    found = pattern_ends(ids_of(text), b"ab")[0].nonzero().flatten().tolist()
    assert found == [1, 3, 7]
    assert pattern_ends(ids_of("b"), b"ab").sum() == 0


def test_work_of_the_busiest_tokens():
    work = torch.tensor([1.0, 5.0, 2.0, 2.0] + 16 * [0.625])
    assert concentration(work).tolist() == pytest.approx([0.25, 0.25, 0.35, 0.53125])


def measured(loss: float, elsewhere: float) -> dict:
    return {"loss": loss, "accuracy": 0.5, "elsewhere": elsewhere}


@pytest.mark.parametrize(
    ("reached", "rise", "elsewhere", "busiest", "expected"),
    [
        (True, 1.0, 0.1, 0.2, True),
        (False, 1.0, 0.1, 0.2, False),  # 100 tokens were not enough
        (True, 0.4, 0.0, 0.0, False),  # not on held-out text
        (True, 1.0, 0.3, 0.2, False),  # everything suffers
        (True, 1.0, 0.1, 0.6, False),  # so do other tokens
    ],
)
def test_what_counts_as_control(reached, rise, elsewhere, busiest, expected):
    row = {
        "predictions": [10, 20],
        "tokens": ["0.o.1", "1.ffn.2"],
        "reached": reached,
        "before": measured(0.5, 2.0),
        "after": measured(0.5 + rise, 2.0 + elsewhere),
        "busiest": measured(0.5 + busiest, 2.0),
        "random": [measured(0.5, 2.0)] * 3,
    }
    assert is_controlled(row, 1.0) is expected
    header, line = control_table("text", {("it", 1.0): [row, {"predictions": [0, 0]}]}).rows
    cells = dict(zip(header, line, strict=True))
    assert cells["rise without them"] == f"{rise:+.2f}"
    assert cells["controlled"] == f"{int(expected)} of 1"
    assert cells["tokens"] == ("2" if reached else "2 (missed)")


def test_a_cell_shows_any_text():
    assert code("a|b\n", "[", "* <c>") == (
        "<code>a&#124;b↵<mark>&#91;</mark>&#42;\N{NO-BREAK SPACE}&lt;c&gt;</code>"
    )


def test_models_are_shared_and_seeds_differ():
    laptop = SCALES["laptop"]
    jobs = with_needs(plan(laptop, Results(Path("/nonexistent"))))
    searches = [job for job in jobs if isinstance(job, Control)]
    assert {job.start.corpus for job in searches} == set(BEHAVIORS)
    first, *others = control("python", "closing brackets", 1.0, laptop)
    assert first.start == model_of("python")
    assert [job.start.seed for job in others] == [1, 2]
    trained = [job for job in jobs if type(job).__name__ == "LanguageRun"]
    assert len(trained) == 1 + 2 * 3 + 3 * 3


@pytest.mark.slow
def test_smoke(tmp_path):
    main(["run", "interpretability", "--scale", "smoke", "--out", str(tmp_path)])
    text = (tmp_path / "report.md").read_text()
    assert "What the tokens do" in text
    for name in ("token-sparsity", "token-control", "old-and-new-tokens"):
        assert (tmp_path / "images" / f"{name}.png").exists()
