from dataclasses import replace

import pytest
import torch

from tokenformer.train.comparison import Comparison
from tokenformer.train.comparison_plot import Curve, draw_comparison, spread
from tokenformer.train.loop import train
from tokenformer.train.options import GrowthOptions, OptimizerOptions

SIZES = {"qkv_tokens": 30, "output_tokens": 40, "ffn_tokens": 88}


@pytest.fixture
def comparison() -> Comparison:
    text = torch.randint(61, (2000,), generator=torch.Generator().manual_seed(0)).numpy()
    return Comparison(text[:1600], text[1600:], 16, 2, OptimizerOptions(1e-3))


def test_a_grown_run_goes_on_where_the_smaller_one_stood(comparison, make_model):
    loop = comparison.start(make_model("tokenformer"), 5, measurements=2, schedule="constant")
    young = train(loop, lambda row: None)
    assert [row["step"] for row in young if "val_loss" in row] == [3, 5]

    grown, growth = comparison.grow(loop, 4, GrowthOptions(sizes=SIZES), measurements=2)
    assert growth.step == 5
    assert growth.loss_after == pytest.approx(growth.loss_before, abs=1e-12)
    assert growth.loss_before == young[-1]["val_loss"]
    assert grown.progress == loop.progress
    assert grown.progress.samples == 10
    key = grown.task.model.model.layers[0].ffn.key_tokens
    before = loop.task.model.model.layers[0].ffn.key_tokens
    moment = grown.optimizer.state[key]["exp_avg"]
    assert torch.equal(moment[: len(before)], loop.optimizer.state[before]["exp_avg"])
    assert not moment[len(before) :].any()

    old = train(grown, lambda row: None)
    assert [row["step"] for row in old] == [6, 7, 8, 9]
    assert old[0]["lr"] > old[-1]["lr"]
    assert key[len(before) :].any(), "new keys learn"
    cost = (
        comparison.step_flops(loop.task.model.config),
        comparison.step_flops(grown.task.model.config),
    )
    assert old[-1]["flops"] == 5 * cost[0] + 4 * cost[1]
    assert loop.progress.step == 5, "the smaller run is left alone"


def test_the_rate_falls_over_the_same_share_with_and_without_growth(comparison, make_model):
    comparison = replace(comparison, warmup_steps=4)

    def falling(rows: list[dict[str, float]]) -> int:
        return sum(row["lr"] < max(r["lr"] for r in rows) for row in rows[4:])

    loop = comparison.start(make_model("tokenformer"), 40)
    assert falling(train(loop, lambda row: None)) == pytest.approx(12, abs=1)

    small = comparison.start(make_model("tokenformer"), 12, schedule="constant")
    rows = train(small, lambda row: None)
    # To the same sizes, so that all steps cost the same.
    grown, _ = comparison.grow(small, 28, GrowthOptions(sizes={"ffn_tokens": 97}))
    rows += train(grown, lambda row: None)
    assert falling(rows) == pytest.approx(12, abs=1)


def test_a_picture_of_runs_even_of_a_single_point(tmp_path):
    def rows(*losses: float) -> list[dict[str, float]]:
        return [
            {"step": n, "flops": n * 1e12, "loss": 1.0, "val_bpb": bits}
            for n, bits in enumerate(losses, start=1)
        ]

    curves = [
        Curve("growing", "0.1M to 0.3M", [*rows(5, 4, 3), {"step": 4, "flops": 4e12}], grown_at=2),
        Curve("from scratch", "0.3M", rows(3)),
    ]
    assert curves[0].points == [(1.0, 5), (2.0, 4), (3.0, 3)]
    draw_comparison(curves, tmp_path / "a.png", title="t", subtitle="s", growth="here")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_labels_are_moved_apart_in_their_order():
    assert spread([3.0, 1.0, 2.0], gap=0.5) == [3.0, 1.0, 2.0]
    moved = spread([2.0, 2.1, 5.0], gap=1.0)
    assert moved == pytest.approx([1.7, 2.7, 4.7])
    assert spread([1.0], gap=1.0) == [1.0]
