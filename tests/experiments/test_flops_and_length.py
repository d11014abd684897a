"""FLOPs against text length: formulas, counter, and the verdict on hand-made times."""

import pytest

from experiments.__main__ import main
from experiments.exhibit import SCALES
from experiments.flops_and_length import (
    LENGTHS,
    SIZES,
    count_errors,
    jobs,
    published_flops,
    published_ratio,
    report,
    time_ratios,
    verdict_of,
)
from experiments.flops_and_length.measurement import TIMED, CountedFlops, forward_flops, pair_of
from experiments.job import Results

COUNTING, TIMING = jobs(SCALES["laptop"])


@pytest.fixture
def results(tmp_path):
    """A counter that agrees, and a Transformer whose time grows from 1 to 5 of ours."""
    found = Results(tmp_path / "results.jsonl")
    counted = {
        family: [
            {"forward": flops, "training": 3 * flops}
            for length in COUNTING.lengths
            for flops in [sum(forward_flops(model, length).values())]
        ]
        for family, model in pair_of(COUNTING.model).items()
    }
    found.add(COUNTING, {"counted": counted})
    times = [[[2.0, 2.0 * n], [1.0, 1.0 * n], [1.0, 9.0]] for n in range(1, 6)]
    found.add(TIMING, {"times": times})
    return found


def test_the_pairs_have_equal_parameters_and_other_widths():
    for model in (COUNTING.model, TIMED):
        ours, theirs = pair_of(model).values()
        assert ours.parameters == pytest.approx(theirs.parameters, rel=2e-3)
        assert theirs.config().hidden_size >= 2 * ours.config().hidden_size


def test_the_published_sizes():
    assert published_ratio("124m", LENGTHS[-1]) == 1, "one width"
    assert published_ratio("354m", 65536) == pytest.approx(1.65, abs=0.005), "as in the guide"
    assert published_ratio("354m", 65536, causal=True) == pytest.approx(1.53, abs=0.005)
    long = 10**9  # only token-token attention is left
    for size, width in zip(SIZES, (768, 1408, 2112, 2944), strict=True):
        assert published_ratio(size, long) == pytest.approx(width / 768, rel=1e-3)
        flops = published_flops("transformer", size, long)
        assert flops == pytest.approx(3 * 4 * 12 * width * long**2, rel=1e-3)


def test_the_counter_agrees(tmp_path):
    job = CountedFlops().reduced()
    found = Results(tmp_path / "results.jsonl")
    found.add(job, job.run(None))
    errors = count_errors(job, found)
    assert len(errors) == 8
    assert max(errors) < 0.01
    counted = found[job]["counted"]["tokenformer"]
    assert counted[1]["forward"] > 2 * counted[0]["forward"], "attention is quadratic"


def test_verdict(results):
    ratios = time_ratios(TIMING, results)
    assert ratios[TIMING.lengths[1]] == [2, 2, 9]
    errors = count_errors(COUNTING, results)
    assert max(errors) == 0
    assert verdict_of(errors, ratios) == "holds"
    assert verdict_of([0.1], ratios) == "does not hold"
    flat = {length: [1.2] for length in TIMING.lengths}
    assert verdict_of(errors, flat) == "not at this scale"
    found = report(SCALES["laptop"], results)
    assert "exactly" in found.argument
    assert "1.00 times as long as that of the TokenFormer at 512 tokens and 5.00" in found.argument


@pytest.mark.slow
def test_smoke(tmp_path):
    main(["run", "flops_and_length", "--scale", "smoke", "--out", str(tmp_path)])
    assert "## FLOPs and text length" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "images" / "flops-and-length.png").stat().st_size > 10_000
