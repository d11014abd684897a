import pytest

from tokenformer.train.options import DataOptions, OptimizerOptions, RunOptions


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        (RunOptions, "steps", 0),
        (RunOptions, "batch_size", 0),
        (RunOptions, "micro_batch_size", 0),
        (RunOptions, "seed", -1),
        (RunOptions, "validate_every", -1),
        (RunOptions, "spike_factor", 1.0),
        (DataOptions, "length", -1),
        (OptimizerOptions, "learning_rate", -0.1),
        (OptimizerOptions, "clip_norm", 0.0),
    ],
)
def test_options_refuse_nonsense(options, name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        options(**{name: value})
