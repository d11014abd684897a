import pytest

from tokenformer.train.options import ScheduleOptions
from tokenformer.train.schedule import SCHEDULES, rate_factor


def course(kind: str, **options: float) -> list[float]:
    schedule = ScheduleOptions(kind=kind, warmup_steps=5, **options)
    return [rate_factor(step, 55, schedule) for step in range(1, 56)]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_course_warms_up_to_the_peak_and_never_climbs_again(kind):
    factors = course(kind)
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[4:] == sorted(factors[4:], reverse=True)


def test_where_they_end():
    assert course("cosine", floor=0.1)[-1] == pytest.approx(0.1)
    assert course("cosine", floor=0.0)[29] == pytest.approx(0.5)  # half-way
    assert set(course("constant")[4:]) == {1.0}


def test_stable_then_a_straight_line_down():
    factors = course("wsd", decay=0.2, floor=0.0)
    assert factors[4:45] == pytest.approx([1.0] * 41)
    assert factors[49] == pytest.approx(0.5)
    assert factors[-1] == pytest.approx(0)


def test_without_warm_up_or_decay():
    assert rate_factor(1, 10, ScheduleOptions(kind="constant", warmup_steps=0)) == 1
    assert rate_factor(10, 10, ScheduleOptions(kind="wsd", warmup_steps=0, decay=0.0)) == 1


@pytest.mark.parametrize(("name", "value"), [("warmup_steps", -1), ("floor", 5.0), ("decay", -0.1)])
def test_options_refuse_nonsense(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        ScheduleOptions(**{name: value})
