"""The table of parameters and FLOPs: the paper's formulas, and what is found about its figures."""

import pytest

from experiments.__main__ import main
from experiments.exhibit import SCALES
from experiments.job import Results
from experiments.parameter_table import (
    BuiltParameters,
    misprints,
    notes,
    report,
    text_models,
    token_token_notes,
    wrong_formulas,
    wrong_sizes,
)
from experiments.parameter_table.formulas import differences
from experiments.parameter_table.published_sizes import (
    PRINTED,
    PrintedSize,
    best_ffn_tokens,
    models,
    parameters,
)
from tokenformer import TransformerConfig


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    found = Results(tmp_path_factory.mktemp("table") / "results.jsonl")
    found.add(BuiltParameters(), BuiltParameters().run(None))
    return found


def test_only_the_de_embed_row_is_wrong_by_the_length():
    found = wrong_formulas()
    assert {(d.operation, d.column) for d in found} == {("de-embed", "FLOPs")}
    assert len(found) == len(text_models()) == 12
    for difference in found:
        length = text_models()[difference.model].max_position_embeddings
        assert difference.ours == length * difference.paper


def test_the_comparison_sees_another_model():
    gated = TransformerConfig(hidden_size=64, num_attention_heads=4, mlp="swiglu")
    found = {d.operation for d in differences("gated", gated, 128)}
    assert {"feed-forward", "total"} <= found
    assert "attention: QKV project" not in found


@pytest.mark.parametrize(
    ("printed", "unit"), [("150M", 1e7), ("109M", 1e6), ("900M", 1e8), ("1.4B", 1e8), ("86M", 1e6)]
)
def test_the_precision_of_a_printed_size(printed, unit):
    size = PrintedSize("x", printed, 1, 1, 1, 1, 1)
    assert size.unit == pytest.approx(unit)
    assert size.rounds_to_printed(round(size.printed_parameters + 0.4 * unit))
    assert not size.rounds_to_printed(round(size.printed_parameters + 0.6 * unit))


def test_the_printed_sizes_that_differ():
    found = {size.preset: parameters(size.config()) for size in wrong_sizes()}
    assert set(found) == {"757m", "1.4b", "1.5b", "base", "large-match", "large"}
    known = {"base": 114.8e6, "757m": 753.8e6, "1.4b": 1.31e9}
    for preset, count in known.items():
        assert found[preset] == pytest.approx(count, rel=1e-3)


def test_the_typo_is_found():
    (found,) = misprints()
    assert (found.preset, found.ffn_tokens) == ("large-match", 768)
    assert best_ffn_tokens(found) == 3072
    for size in PRINTED:
        if size != found:
            assert size.ffn_tokens == 4 * size.attention_tokens


def test_notes_and_findings(results):
    text = "\n".join(notes())
    for figure in ("114.8M", "753.8M", "1,309.7M", "191M", "lacks the factor T"):
        assert figure in text
    assert len(token_token_notes()) == 1, "3.6 is not 3.69; 6.8 and 10.1 are right"
    assert text.count("exactly as many parameters") == 2
    built = results[BuiltParameters()]["parameters"]
    assert built == {name: parameters(config) for name, config in models().items()}
    assert built["TokenFormer 150M"] == 151_881_216, "the authors' training log"
    assert report(SCALES["paper"], results).verdict == "holds"


def test_a_model_that_is_built_otherwise_is_seen(results, tmp_path):
    changed = Results(tmp_path / "results.jsonl")
    counts = results[BuiltParameters()]["parameters"] | {"TokenFormer 124M": 5}
    changed.add(BuiltParameters(), {"parameters": counts})
    found = report(SCALES["laptop"], changed)
    assert found.verdict == "does not hold"
    assert "**5**" in found.tables[1].markdown()


@pytest.mark.slow
def test_smoke(tmp_path):
    main(["run", "parameter_table", "--scale", "smoke", "--out", str(tmp_path)])
    assert "## Parameters and FLOPs" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "images" / "parameter-table.png").exists()
