"""The study of sparse tokens: equal FLOPs, PEER, upcycled and sparsified models, the report."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from experiments.__main__ import main
from experiments.exhibit import SCALES
from experiments.job import Results
from experiments.language import Growth, LanguageRun, Model
from experiments.sparse_tokens import plan, report
from experiments.sparse_tokens.arms import (
    ACTIVE,
    CONTINUED,
    DENSE,
    EQUAL,
    MODELS,
    PEER_4,
    PEER_16,
    SPARSE_4,
    SPARSE_16,
    SPARSE_64,
    UPCYCLED,
    dense,
    growth_arms,
    model_arms,
    sparse,
    sparsified,
    train,
)
from experiments.sparse_tokens.figures import active_tokens, total_tokens
from experiments.sparse_tokens.peer import Peer, PeerRun, PeerSize
from experiments.sparse_tokens.sparsity_run import SparsityRun
from tests.support.plans import missing_in_rounds

LAPTOP = SCALES["laptop"]
TINY = LanguageRun(Model(tokens=8, width=32, ffn_tokens=32), (4,)).reduced()


def made_up_results(path: Path, gain: Callable[[int], float] = lambda factor: 0.1) -> Results:
    """All runs of the plan; `gain` is that of a sparse model by its tokens over the active ones."""
    results = Results(path / "results.jsonl")
    for missing in missing_in_rounds(partial(plan, LAPTOP), results):
        for job in missing:
            results.add(job, made_up_row(job, gain))
    return results


def made_up_row(job: Any, gain: Callable[[int], float]) -> dict[str, Any]:
    if isinstance(job, SparsityRun):
        bits = 2.5 + (1 - job.active) * (0.1 if job.distill_steps else 0.4)
        bits += 0.1 * (job.method == "prune") + 10 * abs(job.rate - 1e-3)
        return {"bits_per_byte": bits, "error": 0.3, "oracle_error": 0.2, "seconds": 1.0}
    base = job.base if isinstance(job, PeerRun) else job
    bits = 2.6 + 0.01 * base.seed + abs(base.rate - 8e-3 / (1 + bool(base.start)))
    routed = isinstance(job, LanguageRun) and job.models[-1].active_groups is not None
    if routed:
        model = job.models[-1]
        bits -= gain(total_tokens(model) // active_tokens(model))
    load = {"dead_groups": 0.0, "peak_load": 1.2} if routed else {}
    row = {"bits_per_byte": bits, "loss": bits, "start_bits_per_byte": 2.6, "parameters": 1000}
    return {**row, **load, "seconds": 1.0}


def test_the_compared_models_have_the_flops_that_are_claimed():
    flops = {name: train(model, 8e-3).flops for name, model in MODELS.items()}
    assert flops[SPARSE_16] == pytest.approx(flops[EQUAL], rel=1e-3)
    assert flops[PEER_16] == pytest.approx(flops[EQUAL], rel=5e-3)
    assert flops[PEER_4] == pytest.approx(flops[SPARSE_4], rel=5e-3)
    assert flops[DENSE] < flops[SPARSE_4] < flops[EQUAL]
    for name, factor in {SPARSE_4: 4, SPARSE_16: 16, SPARSE_64: 64}.items():
        assert total_tokens(MODELS[name]) == factor * ACTIVE
        assert active_tokens(MODELS[name]) == ACTIVE
    assert total_tokens(MODELS[PEER_16]) == total_tokens(MODELS[SPARSE_16])


def test_peer_is_its_formula():
    """All experts scored in full, the best of every head weighed by a softmax."""
    torch.manual_seed(0)
    size = PeerSize(experts=25, heads=2, top=4, half=3)
    layer, x = Peer(6, size).double(), torch.randn(7, 6, dtype=torch.float64)
    u, v = layer.down.weight, layer.up.weight.T
    left, right = (keys.weight for keys in layer.sub_keys)
    expected = []
    for row in x:
        out = torch.zeros_like(row)
        for query in F.rms_norm((layer.query.weight @ row).view(2, 2, 3), (3,)):
            scores = ((left @ query[0])[:, None] + (right @ query[1])[None]).flatten()
            best = scores.topk(4)
            gates = 4 * best.values.softmax(0)
            chosen = best.indices
            out = out + (gates * F.gelu(u[chosen] @ row)) @ v[chosen]
        expected.append(out)
    torch.testing.assert_close(layer(x), torch.stack(expected))


def test_peer_learns_and_its_values_start_like_those_of_tokens(workspace):
    size = PeerSize(experts=64, heads=2, top=4, half=4)
    job = PeerRun(TINY, size)
    loop = job.loop(workspace)
    layer = loop.task.model.model.layers[0].ffn
    assert layer.up.weight.std().item() == pytest.approx(8**-0.5, rel=0.1)
    groups = loop.optimizer.param_groups
    factors = {id(p): group["rate_factor"] for group in groups for p in group["params"]}
    assert factors[id(layer.up.weight)] == 32 / 8
    assert factors[id(layer.down.weight)] == (32 / 8) ** 0.5
    assert factors[id(layer.query.weight)] == 0.25
    result = job.run(workspace)
    assert result["bits_per_byte"] < result["start_bits_per_byte"]
    assert result["parameters"] == sum(p.numel() for p in loop.task.model.parameters())


def test_a_run_starts_from_an_upcycled_model(workspace):
    """Upcycling hardly changes the loss; the result is the model that the growth names."""
    source = replace(TINY, corpus="python")
    to = replace(source.model, ffn_tokens=128, active_groups=4, group_size=8, theta_norm="chosen")
    later = LanguageRun(source.model, (2,), (Growth(to, method="upcycle"),), source).reduced()
    later = replace(later, start=source, corpus="python")
    before = source.run(workspace)
    result = later.run(workspace)
    assert result["start_bits_per_byte"] == pytest.approx(before["bits_per_byte"], abs=2e-3)
    assert result["parameters"] == to.parameters
    assert result["peak_load"] >= 1
    assert later.flops == 2 * later.batch * to.training_flops(later.length)


def test_models_made_sparse(workspace):
    """With all groups the routed model is the dense one; with fewer, each method differs, and
    distillation changes the result."""
    whole = TINY.run(workspace)["bits_per_byte"]
    full = SparsityRun(TINY, "routing", 1.0, 8, fit_batches=4)
    assert full.run(workspace)["bits_per_byte"] == pytest.approx(whole, abs=1e-3)
    found = {}
    for method in ("routing", "threshold", "prune"):
        job = replace(full, method=method, active=0.25)
        result = job.run(workspace)
        assert ("error" in result) == (method != "prune")
        found[method] = result["bits_per_byte"]
    distilled = replace(full, active=0.25, distill_steps=3, rate=1e-2).run(workspace)
    assert len({whole, distilled["bits_per_byte"], *found.values()}) == 5
    assert not list((workspace.folder / "work").iterdir())


def test_arms_that_train_further_start_from_the_seeds_of_the_dense_model(tmp_path):
    results = made_up_results(tmp_path)
    found = growth_arms(LAPTOP, results)
    dense_runs = model_arms(LAPTOP, results)[DENSE].runs
    for name in (CONTINUED, UPCYCLED):
        assert [run.start for run in found[name].runs] == dense_runs
        assert [run.rate for run in found[name].runs] == [4e-3] * 3
    assert found[UPCYCLED].runs[0].models == [sparse(4 * ACTIVE)]
    assert found[CONTINUED].runs[0].models == [dense(ACTIVE)]
    for by_share in sparsified(LAPTOP, results)[1].values():
        for share, runs in by_share.items():
            assert [(run.seed, run.start.seed) for run in runs] == [(n, n) for n in range(3)]
            assert {run.active for run in runs} == {share}


def test_report_of_made_up_results(tmp_path):
    gains = {1: -0.1, 4: 0.06, 16: 0.12, 64: 0.11}
    results = made_up_results(tmp_path, lambda factor: gains[factor])
    findings = report(LAPTOP, results)
    assert "sparse 4n 2.550 ± 0.010 (-0.060)" in findings.argument
    assert "reaches the target" in findings.argument
    assert "the returns end at sparse 16n" in findings.argument
    assert "below it in every seed" in findings.argument
    assert "at shares of 0.125, 0.25, 0.5, 0.75" in findings.argument
    assert findings.headline == "sparse 4n -0.060 bits per byte against dense n"
    for plot in findings.plots:
        plot.draw(tmp_path / plot.name)
    flat = made_up_results(tmp_path / "flat", lambda factor: 0.0)
    argument = report(LAPTOP, flat).argument
    assert "misses the target" in argument
    assert "the returns end at dense, n = 64" in argument
    assert "below it not in every seed" in argument


@pytest.mark.slow
def test_smoke(tmp_path):
    main(["run", "sparse_tokens", "--scale", "smoke", "--out", str(tmp_path)])
    text = (tmp_path / "report.md").read_text()
    assert "**Growth without inference cost.**" in text
    assert (tmp_path / "images" / "sparsify.png").exists()
