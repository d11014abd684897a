import math

from tokenformer.train.loss_spikes import SpikeDetector


def test_what_is_not_finite_is_a_problem_at_once():
    watch = SpikeDetector(factor=3)
    assert watch.problem(math.nan, 1.0) == "the loss is nan"
    assert watch.problem(math.inf, 1.0) == "the loss is inf"
    assert watch.problem(1.0, math.inf) == "the norm of the gradient is inf"


def test_a_spike_is_measured_against_the_last_losses():
    watch = SpikeDetector(factor=3, window=4)
    assert [watch.problem(loss, 1.0) for loss in (90.0, 1.0, 1.0, 1.0)] == [None] * 4
    assert watch.problem(60.0, 1.0) is None  # 93 / 4 is the usual
    for _ in range(4):
        assert watch.problem(1.0, 1.0) is None
    assert watch.problem(2.9, 1.0) is None
    assert watch.problem(9.0, 1.0) == "the loss is 9.000, more than 3 times the usual 1.475"
    assert watch.problem(1.0, 1.0) is None  # the spike was not remembered


def test_small_losses_may_differ_by_more_than_the_factor():
    """As those of a classifier that is nearly always right: these were seen."""
    watch = SpikeDetector(factor=3, min_loss=math.log(10) / 2, window=4)
    for loss in (0.003, 0.012, 0.002, 0.005, 0.037, 0.319, 0.004, 0.003, 0.002, 1.1):
        assert watch.problem(loss, 1.0) is None
    for _ in range(4):
        assert watch.problem(0.01, 1.0) is None
    assert watch.problem(1.2, 1.0) == "the loss is 1.200, more than 3 times the usual 0.010"
