"""Pattention as the MLP: what is replaced and what is not, and why the published layer is dead."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from experiments.__main__ import main
from experiments.exhibit import SCALES
from experiments.job import Results
from experiments.language import LanguageRun
from experiments.pattention_mlp import (
    EXHIBIT,
    LAW,
    MLP,
    NO_LAYER,
    PAIR_ZERO,
    SAME_RATE,
    TOKENFORMER,
    TRANSFORMER,
    arms,
    plan,
    report,
)
from experiments.pattention_mlp.feed_forward import FeedForwardRun, TokenPair, output_variation
from experiments.pattention_mlp.untrained_keys import UntrainedKeys
from experiments.workspace import Workspace
from tests.support.plans import missing_in_rounds
from tokenformer.layers import Pattention

LAPTOP = SCALES["laptop"]
BASE = LanguageRun(TRANSFORMER, (900,), rate=4e-3, rate_law="none").reduced()


def made_up_results(folder: Path) -> Results:
    results = Results(folder / "results.jsonl")
    ends = {"pattention": 2.62, "pair_zero": 2.85, "none": 2.86}
    for missing in missing_in_rounds(partial(plan, LAPTOP), results):
        for job in missing:
            if isinstance(job, UntrainedKeys):
                results.add(job, {"bytes_per_weight": 0.5})
                continue
            base = job.base if isinstance(job, FeedForwardRun) else job
            bits = ends.get(getattr(job, "ffn", ""), 2.6) + 10 * abs(base.rate - 4e-3)
            if base.rate_law == "tokens":
                bits += 10 * (abs(base.rate - 8e-3) - abs(base.rate - 4e-3))
            row = {"loss": bits, "bits_per_byte": bits, "parameters": 1, "ffn_variation": 0.5}
            results.add(job, row)
    return results


def test_with_the_mlp_it_is_a_language_run(workspace):
    ours = FeedForwardRun(BASE).run(workspace)
    theirs = BASE.run(workspace)
    for name in ("loss", "curve", "parameters", "flops", "tokens"):
        assert ours[name] == theirs[name], name


@pytest.mark.parametrize("ffn", ["pattention", "pair_zero", "pair_random", "pair_l2_gelu"])
def test_other_layers_have_as_many_parameters_and_flops(ffn, workspace):
    job = FeedForwardRun(replace(BASE, steps=(1,)), ffn)
    result = job.run(workspace)
    assert result["parameters"] == pytest.approx(TRANSFORMER.parameters, rel=0.005)
    assert job.flops == pytest.approx(FeedForwardRun(job.base).flops, rel=0.005)
    assert TOKENFORMER.parameters == TRANSFORMER.parameters


def test_only_the_feed_forward_layers_differ(workspace):
    states = [
        FeedForwardRun(BASE, ffn).loop(workspace).task.model.state_dict()
        for ffn in ("mlp", "pattention")
    ]
    shared = states[0].keys() & states[1].keys()
    assert {name for name in states[0] if name not in shared} == {
        f"model.layers.{n}.ffn.{part}.weight" for n in range(3) for part in ("up", "down")
    }
    assert all(torch.equal(states[0][name], states[1][name]) for name in shared)
    values = states[1]["model.layers.0.ffn.value_tokens"]
    assert values.std().item() == pytest.approx(256**-0.5, rel=0.05), "as the model initializes"


def test_rate_laws(workspace):
    def factors(ffn: str, law: str) -> dict[str, float]:
        loop = FeedForwardRun(replace(BASE, rate_law=law), ffn).loop(workspace)
        groups = loop.optimizer.param_groups
        by_id = {id(p): group["rate_factor"] for group in groups for p in group["params"]}
        return {name: by_id[id(p)] for name, p in loop.task.model.named_parameters()}

    first = "model.layers.0"
    ours = factors("pattention", "tokens")
    assert ours[f"{first}.ffn.value_tokens"] == pytest.approx(32 / 256)
    assert ours[f"{first}.ffn.key_tokens"] == pytest.approx((32 / 256) ** 0.5)
    assert ours[f"{first}.attention.q.weight"] == 1
    mlp = factors("mlp_law", "none")
    assert mlp[f"{first}.ffn.down.weight"] == ours[f"{first}.ffn.value_tokens"]
    assert mlp[f"{first}.ffn.up.weight"] == ours[f"{first}.ffn.key_tokens"]
    assert factors("pattention", "none")[f"{first}.ffn.value_tokens"] == 1


def trained_pair(theta: str, *, zero: bool) -> tuple[TokenPair, torch.Tensor]:
    """A layer after a few steps towards random targets, and its outputs."""
    torch.manual_seed(0)
    pair = TokenPair(16, 32, theta)
    if zero:
        pair.zero_values()
    x, target = torch.randn(2, 64, 16).unbind()
    optimizer = torch.optim.AdamW(pair.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        (pair(x) - target).square().mean().backward()
        optimizer.step()
    return pair, pair(x).detach()


def test_the_published_layer_gets_no_gradient_and_is_constant():
    pair, outputs = trained_pair("softmax", zero=True)
    dead = (pair.up.key_tokens, pair.up.value_tokens, pair.down.key_tokens)
    assert all(parameter.grad.count_nonzero() == 0 for parameter in dead)
    assert pair.up.value_tokens.count_nonzero() == 0
    assert pair.down.value_tokens.count_nonzero() > 0, "a constant vector remains"
    assert (outputs == outputs[0]).all()


def test_with_random_values_and_the_papers_theta_it_trains():
    pair, outputs = trained_pair("l2_gelu", zero=False)
    assert all(parameter.grad.count_nonzero() > 0 for parameter in pair.parameters())
    assert outputs.std(dim=0).min() > 1e-3


def test_a_pair_is_the_formula_of_the_pull_request():
    torch.manual_seed(0)
    pair, x = TokenPair(8, 16, "softmax"), torch.randn(5, 8)
    hidden = torch.softmax(x @ pair.up.key_tokens.T / 8**0.5, -1) @ pair.up.value_tokens
    scores = hidden.relu() ** 2 @ pair.down.key_tokens.T / 16**0.5
    expected = torch.softmax(scores, -1) @ pair.down.value_tokens
    torch.testing.assert_close(pair(x), expected)
    assert pair.up.num_tokens == round(8 * 16 / 24)


def test_how_much_of_the_output_depends_on_the_input(workspace):
    dead = FeedForwardRun(BASE, "pair_zero").loop(workspace)
    live = FeedForwardRun(BASE, "pattention").loop(workspace)
    assert output_variation(dead) == 0
    assert 0.1 < output_variation(live) <= 1
    for layer in live.task.model.model.layers:
        assert isinstance(layer.ffn, Pattention)


def test_arms_that_follow_the_rate_of_another(tmp_path):
    results = made_up_results(tmp_path)
    found = arms(LAPTOP, results)
    assert [run.base.seed for run in found[SAME_RATE].runs] == [0, 1, 2]
    assert {run.rate for run in found[SAME_RATE].runs} == {found[MLP].runs[0].rate} == {4e-3}
    assert found[LAW].runs[0].rate == 8e-3
    assert [run.rate for run in found[NO_LAYER].runs] == [found[PAIR_ZERO].runs[0].rate]
    assert found[SAME_RATE].runs[0].base.rate_law == "none"


def test_report_of_made_up_results(tmp_path):
    findings = report(LAPTOP, made_up_results(tmp_path))
    assert "ends at 2.620 bits per byte against 2.600 of the MLP" in findings.argument
    assert "+0.020 where the pull request has +0.147" in findings.argument
    assert "2.850, no layer at all at 2.860" in findings.argument
    findings.plots[0].draw(tmp_path / "plot.png")


def test_untrained_keys_explain_the_size_of_the_published_model(tmp_path):
    """Of numbers with standard deviation 0.02 in steps of 1/127, about 2.5 steps: their entropy is
    3.4 bits, and zlib comes within 20 % of it."""
    assert 3.4 / 8 < UntrainedKeys().run(Workspace(tmp_path))["bytes_per_weight"] < 1.2 * 3.4 / 8


@pytest.mark.slow
def test_smoke(tmp_path):
    main(["run", "pattention_mlp", "--scale", "smoke", "--out", str(tmp_path)])
    assert f"## {EXHIBIT.title}" in (tmp_path / "report.md").read_text()
