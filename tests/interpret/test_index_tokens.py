"""The index holds what a direct computation over all inputs gives, and resumes after a kill."""

import multiprocessing
import time

import pyarrow.parquet as pq
import pytest
import torch

import tokenformer
from tests.support.processes import LIMIT, START, wait_until
from tokenformer.data.byte_tokenizer import VOCAB_SIZE, byte_tokenizer
from tokenformer.errors import DataError, InputError
from tokenformer.growth.tokens.token_usage import token_statistics
from tokenformer.interpret import Token, TokenIndex, Vocabulary, index_tokens, score_maps
from tokenformer.interpret import firing as firing_module
from tokenformer.interpret.firing import BINS, LOW, WIDTH
from tokenformer.interpret.index_tokens import IndexRun, fingerprint
from tokenformer.interpret.site_data import CURVE, busiest, text_runs
from tokenformer.interpret.token_index import cut
from tokenformer.interpret.token_name import named_layers
from tokenformer.interpret.vocabulary import REPLACEMENT


@pytest.fixture
def batches(seed):
    return [torch.randint(61, (3, 11)) for _ in range(4)] + [torch.randint(61, (1, 11))]


def all_weights(model, batches, layer):
    """All samples' weights, [S, T, n]."""
    return torch.cat([score_maps(model, batch, [layer])[layer].weights for batch in batches])


@pytest.mark.parametrize("scores", [1 << 22, 500, 50], ids=["whole", "by sample", "by position"])
def test_sums_and_top_contexts(make_model, batches, monkeypatch, scores):
    monkeypatch.setattr(firing_module, "MAX_SCORES", scores)
    model = make_model("tokenformer")
    index = index_tokens(model, batches, contexts=3, threshold=0.3)
    assert (index.summary.positions, index.summary.samples) == (13 * 11, 13)
    for name in ("0.k", "1.ffn"):
        layer, each = index.layers[name], all_weights(model, batches, name)
        weights = each.flatten(0, 1)
        assert torch.equal(layer.fired, (weights >= 0.3).sum(0))
        torch.testing.assert_close(layer.mean_weight, weights.mean(0))
        torch.testing.assert_close(layer.largest.double(), weights.amax(0), atol=1e-5, rtol=0)
        added = weights.abs().sum(0) * named_layers(model)[name].value_tokens.norm(dim=1)
        torch.testing.assert_close(layer.work, (added / added.sum()).detach())
        bins = ((weights - LOW) / WIDTH).floor().clamp(0, BINS - 1)
        for token in (0, 7):
            expected = [(bins[:, token] == n).sum().item() for n in range(BINS)]
            assert layer.histogram[token].tolist() == expected
        best = each.max(1)  # over the positions of each sample
        for token in (0, 7):
            order = best.values[:, token].argsort(descending=True)[:3]
            assert layer.top_samples[token].tolist() == order.tolist()
            assert layer.top_positions[token].tolist() == best.indices[order, token].tolist()
    full = "model.layers.1.ffn"
    expected = token_statistics(model, batches)[full].share
    torch.testing.assert_close(index.layers["1.ffn"].norm_share, expected)


@pytest.mark.parametrize("theta", ["gelu_l2", "softmax"])
def test_other_thetas_and_half_precision(make_model, batches, theta):
    model = make_model("tokenformer", theta=theta).bfloat16()
    index = index_tokens(model, batches)
    for layer in index.layers.values():
        assert layer.norm_share.sum() == pytest.approx(1, abs=1e-4)
        assert layer.work.sum() == pytest.approx(1, abs=1e-6)
        assert layer.histogram.sum(1).unique().tolist() == [13 * 11]


def test_memory_is_bounded(make_model):
    """The stream is endless for a run that keeps what it sees."""
    model = make_model(
        "tokenformer", num_hidden_layers=1, qkv_tokens=2, output_tokens=2, ffn_tokens=3
    )
    generator = torch.Generator().manual_seed(0)
    stream = (torch.randint(61, (2, 4), generator=generator) for _ in range(150))
    work = IndexRun(model, named_layers(model), 0.5, 2)
    sizes = []
    work.add_all(stream, None, lambda done: sizes.append(len(work.samples)))
    assert max(sizes) <= 2 * 64 + 2 * 11, "two contexts of 11 tokens, and what came since the sweep"
    work.sweep()
    assert len(work.samples) <= 2 * 11


def test_values_promote_what_raises_their_logits(make_model, batches):
    model = make_model("tokenformer")
    with torch.no_grad():
        model.model.layers[1].ffn.value_tokens[5] = 3.0 * model.lm_head.weight[17]
    index = index_tokens(model, batches, words=4)
    layer = index.layers["1.ffn"]
    norm, head = model.model.norm, model.lm_head.weight.detach()
    value = model.model.layers[1].ffn.value_tokens[5].detach()
    logits = head @ ((value - value.mean()) * norm.weight.detach())
    assert layer.promoted[5].tolist() == logits.topk(4).indices.tolist()
    assert layer.suppressed[5].tolist() == logits.topk(4, largest=False).indices.tolist()
    torch.testing.assert_close(
        layer.promoted_by[5].double(), logits.topk(4).values, rtol=1e-5, atol=0
    )
    assert index.layers["1.v"].promoted.shape == (24, 0), "v does not write to the residual stream"


def test_neighbors_ages_and_dead_tokens(make_model, batches):
    model, _ = tokenformer.grow(make_model("tokenformer"), ffn_tokens=50)
    q = model.model.layers[0].attention.q
    with torch.no_grad():
        q.key_tokens[3] = 2 * q.key_tokens[20]
    index = index_tokens(model, batches, neighbors=2)
    assert index.layers["0.q"].like_key[3, 0] == 20
    assert index.layers["0.q"].like_key_by[20, 0] == pytest.approx(1)
    ffn = index.layers["1.ffn"]
    assert ffn.ages.tolist() == [0] * 44 + [1] * 6
    assert ffn.dead[44:].all(), "keys of zero never fire"
    assert ffn.work[44:].sum() == 0
    assert (ffn.selectivity[44:] == 0).all()
    assert ((ffn.selectivity[:44] > 0) & (ffn.selectivity[:44] < 1)).all()


def test_contexts_show_the_text(make_model):
    model = make_model("tokenformer", vocab_size=VOCAB_SIZE)
    text = "one € two, three — four. " * 3
    ids = torch.tensor([list(text.encode())[:60]])
    index = index_tokens(model, [ids])
    vocabulary = Vocabulary(byte_tokenizer())
    layer = index.layers["0.ffn"]
    for number in range(44):
        (found,) = index.contexts(Token("0.ffn", number), vocabulary, before=99, after=99)
        assert found.before + found.fired + found.after == vocabulary.decode(ids[0].tolist())
        start = len(found.before.encode())
        assert start <= layer.top_positions[number, 0] < start + len(found.fired.encode())
        assert found.weight == layer.top_weights[number, 0]


def test_the_work_of_the_busiest_tokens_is_not_rounded_to_whole_tokens(make_model, batches):
    layer = index_tokens(make_model("tokenformer", qkv_tokens=16), batches).layers["0.q"]
    work = layer.work.sort(descending=True).values
    found = busiest(layer, [0, 0.1, 0.5, 0.99, 1])
    expected = [0, work[0] + 0.6 * work[1], work[:8].sum(), 1 - 0.16 * work[-1], 1]
    assert found == pytest.approx([float(each) for each in expected])
    steps = torch.tensor(busiest(layer, CURVE)).diff()
    assert (steps > 0).all(), "33 points over 16 tokens are no staircase"


@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_positions_before_the_patches(make_classifier, pooling):
    index = index_tokens(make_classifier(pooling=pooling), [torch.randn(2, 1, 12, 12).double()])
    assert index.summary.class_tokens == (pooling == "class")


def test_images_are_kept_small_with_their_grid(make_classifier):
    model = make_classifier(image_size=96, patch_size=16)
    images = torch.randn(3, 1, 96, 96).double()
    index = index_tokens(model, [images])
    assert index.summary.grid == (6, 6)
    assert index.summary.labels == tuple(f"LABEL_{n}" for n in range(5))
    assert index.samples.shape == (3, 1, 64, 64)
    assert index.samples.dtype == torch.uint8
    assert index.samples.flatten(1).amax(1).tolist() == [255] * 3
    best = score_maps(model, images)["1.ffn"].weights.amax(1)[:, 2]
    assert index.layers["1.ffn"].top_samples[2, 0] == best.argmax()


def test_saved_and_loaded(make_model, batches, tmp_path):
    model = make_model("tokenformer")
    index = index_tokens(model, batches, out=tmp_path / "index")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index"]
    loaded = TokenIndex.load(tmp_path / "index")
    assert loaded.summary == index.summary
    for name, layer in index.layers.items():
        for field, tensor in layer.tensors().items():
            assert torch.equal(getattr(loaded.layers[name], field), tensor), (name, field)
    assert torch.equal(loaded.samples, index.samples)
    table = pq.read_table(tmp_path / "index" / "tokens.parquet").to_pydict()
    assert len(table["token"]) == 2 * (3 * 24 + 20 + 44)
    row = table["token"].index("1.ffn.7")
    assert table["frequency"][row] == index.layers["1.ffn"].frequency[7]
    assert (table["block"][row], table["projection"][row], table["number"][row]) == (1, "ffn", 7)
    assert len(table["contexts"][row]) == 8
    assert table["promoted"][row] == [str(n) for n in index.layers["1.ffn"].promoted[7].tolist()]
    with pytest.raises(InputError, match="already exists"):
        index_tokens(model, batches, out=tmp_path / "index")
    (tmp_path / "index" / "index.safetensors").write_bytes(b"torn")
    with pytest.raises(DataError, match="cannot be read"):
        TokenIndex.load(tmp_path / "index")
    with pytest.raises(DataError, match="is not an index"):
        TokenIndex.load(tmp_path)


def index_folder(model, out, pause, done_batches):
    """Index 40 batches; the numbers of those that were done here go to `done_batches`."""
    torch.manual_seed(3)
    batches = [torch.randint(61, (2, 9)) for _ in range(40)]

    def slowly(done):
        done_batches.append(done)
        time.sleep(pause)

    index_tokens(model, batches, out=out, save_every=0, on_batch=slowly)


def index_slowly(model_folder, out):
    model = tokenformer.TokenformerForCausalLM.from_pretrained(model_folder)
    index_folder(model, out, 0.5, [])


def test_a_killed_index_resumes_with_the_same_result(make_model, tmp_path):
    make_model("tokenformer").float().save_pretrained(tmp_path / "model")
    model = tokenformer.TokenformerForCausalLM.from_pretrained(tmp_path / "model")
    whole, resumed = [], []
    index_folder(model, tmp_path / "whole", 0, whole)
    assert whole == list(range(1, 41))
    progress = tmp_path / ".killed.progress" / "progress.safetensors"
    arguments = str(tmp_path / "model"), str(tmp_path / "killed")
    process = multiprocessing.get_context(START).Process(target=index_slowly, args=arguments)
    process.start()
    try:
        assert wait_until(progress.exists)
    finally:
        process.kill()
        process.join(LIMIT)
    assert not (tmp_path / "killed").exists()
    index_folder(model, tmp_path / "killed", 0, resumed)
    assert resumed == whole[-len(resumed) :]
    assert 0 < len(resumed) < 40
    for name in ("index.safetensors", "index.json", "tokens.parquet"):
        ours, theirs = (tmp_path / folder / name for folder in ("killed", "whole"))
        assert ours.read_bytes() == theirs.read_bytes(), name
    assert not progress.parent.exists()


class StoppedError(Exception):
    """Ends an index that is being made, as an interrupt would."""


def test_progress_of_other_inputs_or_another_model_is_refused(make_model, batches, tmp_path):
    model, options = make_model("tokenformer"), {"out": tmp_path / "index", "save_every": 0}

    def stop(done):
        if done == 2:
            raise StoppedError

    with pytest.raises(StoppedError):
        index_tokens(model, batches, on_batch=stop, **options)
    with pytest.raises(InputError, match="the batches differ"):
        index_tokens(model, [batch.flip(0) for batch in batches], **options)
    with pytest.raises(InputError, match=r"progress of another threshold=0\.5"):
        index_tokens(model, batches, threshold=0.1, **options)
    before = fingerprint(model)
    with torch.no_grad():
        model.model.layers[0].attention.q.key_tokens[0, 0] += 1
    assert fingerprint(model) != before
    with pytest.raises(InputError, match="progress of another model"):
        index_tokens(model, batches, **options)


def test_bad_inputs(make_model):
    model = make_model("tokenformer")
    with pytest.raises(ValueError, match="batches is empty"):
        index_tokens(model, [])
    shapes = [torch.zeros(1, 4).long(), torch.zeros(1, 5).long()]
    with pytest.raises(ValueError, match=r"samples of \[5\], those before \[4\]"):
        index_tokens(model, shapes)
    with pytest.raises(ValueError, match="contexts=0"):
        index_tokens(model, shapes, contexts=0)
    with pytest.raises(ValueError, match="has no logits"):
        index_tokens(model.model, shapes)
    with pytest.raises(ValueError, match="must be token ids"):
        index_tokens(model, [torch.zeros(1, 1, 4, 4)])


def test_a_context_has_no_half_characters():
    """Wherever the window around a position cuts the bytes of a character."""
    text = "naïve — 東京 and € in [[São]]" * 3
    ids = list(text.encode())
    vocabulary = Vocabulary(byte_tokenizer())
    for start, end in ((s, s + 30) for s in range(40)):
        window = ids[start:end]
        for position in range(len(window)):
            before, fired, after = cut(window, position, vocabulary)
            assert not before.startswith(REPLACEMENT)
            assert not after.endswith(REPLACEMENT)
            runs = text_runs(window, [0] * len(window), position, vocabulary)
            assert "".join(part for part, _ in runs) == before + fired + after
            assert [part for part, level in runs if level >= 10] == [fired]
            if REPLACEMENT not in fired:  # the position itself may be in a half character
                assert before + fired + after in text
