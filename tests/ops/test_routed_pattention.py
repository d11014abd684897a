"""Routed pattention: the sorted products against dense scores with a mask, and both against dense
pattention."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support.backends import assert_close, random_inputs
from tests.support.theta import expected_weights
from tokenformer.ops import THETAS, pattention, routed_pattention
from tokenformer.ops.backends import derivatives, grouped, score_norm, streamed
from tokenformer.ops.backends.native import few_rows
from tokenformer.ops.backends.native import routed as native_routed
from tokenformer.ops.backends.native.library import library

CASES = [("l2_gelu", "all"), *((theta, "chosen") for theta in THETAS)]
cases = pytest.mark.parametrize(("theta", "norm"), CASES)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of rows and chunks of tokens smaller than the inputs below."""
    monkeypatch.setattr(derivatives, "CACHE_BYTES", 0)
    monkeypatch.setattr(streamed, "FEWEST_TOKENS", 4)
    monkeypatch.setattr(streamed, "CHUNK_BYTES", 0)


def random_groups(*leading: int, count: int, k: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*leading, count, generator=generator).argsort(-1)[..., :k]


def output_and_gradients(
    backend: str, inputs: list[Tensor], groups: Tensor, **options: object
) -> list[Tensor]:
    """Return the output and the gradients of the inputs, and of gates and scale if given."""
    out = routed_pattention(*inputs, groups, backend=backend, **options)
    extra = [options.get(name) for name in ("gates", "scale_tokens")]
    extra += options.get("added") or []
    wanted = [*inputs, *(tensor for tensor in extra if isinstance(tensor, Tensor))]
    grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    # k = 0 leaves nothing that depends on the gates.
    found = torch.autograd.grad(out, wanted, grad, allow_unused=True, materialize_grads=True)
    return [out, *found]


@settings(max_examples=150, deadline=None)
@given(
    leading=st.lists(st.integers(0, 5), max_size=2),
    d_in=st.integers(1, 6),
    n=st.integers(1, 20),
    d_out=st.integers(1, 5),
    group_size=st.integers(1, 22),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**16),
    case=st.sampled_from(CASES),
    approximate=st.sampled_from(["none", "tanh"]),
    scale=st.none() | st.floats(0.5, 100.0),
    eps=st.sampled_from([0.0, 1e-2]),
    gated=st.booleans(),
    more=st.integers(0, 3),
)
def test_sorted_products_equal_the_masked_reference(
    leading, d_in, n, d_out, group_size, share, seed, case, approximate, scale, eps, gated, more
):
    count = -(-n // group_size)
    groups = random_groups(*leading, count=count, k=round(share * count), seed=seed)
    shapes = (*leading, d_in), (n, d_in), (n, d_out), groups.shape, (more, d_in), (more, d_out)
    *inputs, gates, more_keys, more_values = random_inputs(*shapes, seed=seed)
    theta, norm = case
    # A row almost orthogonal to the keys of its groups loses digits in any backend.
    scores = (inputs[0] @ torch.cat([inputs[1], more_keys]).T).detach().abs()
    assume(not scores.numel() or scores.min() > 1e-2)
    options = {
        "group_size": group_size,
        "theta": theta,
        "norm": norm,
        "approximate": approximate,
        "scale_tokens": scale,
        "eps": eps,
        **({"gates": gates} if gated else {}),
        **({"added": [more_keys, more_values]} if more else {}),
    }
    wanted = output_and_gradients("reference", inputs, groups, **options)
    assert_close(output_and_gradients("grouped", inputs, groups, **options), wanted, 1e-9)


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(theta, norm, dtype):
    """40 rows of 16 channels: in fp32 and bf16 the norm over all tokens is that of the Gram
    matrix."""
    groups = random_groups(40, count=7, k=3)
    *inputs, gates = random_inputs((40, 16), (50, 16), (50, 8), (40, 3), dtype=dtype)
    options = {"group_size": 8, "theta": theta, "norm": norm}
    exact = [tensor.detach().double().requires_grad_() for tensor in (*inputs, gates)]
    truth = output_and_gradients("reference", exact[:3], groups, gates=exact[3], **options)
    found = output_and_gradients("grouped", inputs, groups, gates=gates, **options)
    plain = output_and_gradients("reference", inputs, groups, gates=gates, **options)
    for one, other, true in zip(found, plain, truth, strict=True):
        assert one.dtype == dtype
        errors = [(tensor.double() - true).norm() for tensor in (one, other)]
        rounding = torch.finfo(dtype).eps * true.norm()
        assert errors[0] <= 2 * errors[1] + 4 * rounding, "no worse than the plain formula"


@pytest.mark.parametrize("backend", ["reference", "grouped"])
@cases
@pytest.mark.parametrize("tokens", [48, 50])
def test_all_groups_are_dense_pattention(backend, theta, norm, tokens):
    inputs = random_inputs((10, 6), (tokens, 6), (tokens, 5))
    groups = random_groups(10, count=-(-tokens // 8), k=-(-tokens // 8))
    options = {"theta": theta, "scale_tokens": 11.0, "eps": 1e-3}
    wanted = pattention(*inputs, backend="reference", **options)
    wanted = [wanted, *torch.autograd.grad(wanted.square().sum(), inputs)]
    out = routed_pattention(*inputs, groups, group_size=8, norm=norm, backend=backend, **options)
    assert_close([out, *torch.autograd.grad(out.square().sum(), inputs)], wanted, 1e-11)


@pytest.mark.parametrize("backend", ["reference", "grouped"])
@cases
def test_follows_the_formula(backend, theta, norm):
    """One row and numpy: the weights of all tokens, or of a layer that has only the chosen ones."""
    x, keys, values = (tensor.detach() for tensor in random_inputs((1, 6), (20, 6), (20, 4)))
    chosen = [4, 5, 6, 7, 16, 17, 18, 19]
    scores = (x @ keys.T).numpy()
    if norm == "all":
        weights = expected_weights(theta, scores, 20.0)[:, chosen]
    else:
        weights = expected_weights(theta, scores[:, chosen], 20.0)
    found = routed_pattention(
        x,
        keys,
        values,
        torch.tensor([[4, 1]]),
        group_size=4,
        theta=theta,
        norm=norm,
        backend=backend,
    )
    torch.testing.assert_close(found, torch.tensor(weights) @ values[chosen])


@pytest.mark.parametrize("backend", ["reference", "grouped"])
@cases
def test_no_groups_and_no_rows(backend, theta, norm):
    for rows, k in ((5, 0), (0, 2), (0, 0)):
        inputs = random_inputs((rows, 6), (20, 6), (20, 4))
        groups = random_groups(rows, count=5, k=k)
        found = output_and_gradients(backend, inputs, groups, group_size=4, theta=theta, norm=norm)
        assert found[0].shape == (rows, 4)
        assert all((tensor == 0).all() for tensor in found)


@cases
def test_zero_rows_have_finite_gradients(theta, norm):
    inputs = random_inputs((12, 6), (30, 6), (30, 5), dtype=torch.float32)
    with torch.no_grad():
        inputs[0][3] = 0
        inputs[1][10:] = 0
    groups = random_groups(12, count=8, k=3)
    options = {"group_size": 4, "theta": theta, "norm": norm}
    found = output_and_gradients("grouped", inputs, groups, **options)
    assert all(tensor.isfinite().all() for tensor in found)
    assert_close(found, output_and_gradients("reference", inputs, groups, **options), 3e-6)


@cases
def test_a_learned_scale(theta, norm):
    inputs = random_inputs((10, 6), (30, 6), (30, 5))
    groups = random_groups(10, count=8, k=3)
    scale = torch.tensor([11.0], dtype=torch.float64, requires_grad=True)
    options = {"group_size": 4, "theta": theta, "norm": norm, "scale_tokens": scale, "eps": 1e-3}
    assert_close(
        output_and_gradients("grouped", inputs, groups, **options),
        output_and_gradients("reference", inputs, groups, **options),
        1e-11,
    )


def test_skipped_keys_get_the_gradient_of_the_norm():
    inputs = random_inputs((10, 6), (30, 6), (30, 5))
    groups = torch.zeros(10, 1, dtype=torch.int64)
    for norm, moves in (("all", True), ("chosen", False)):
        found = output_and_gradients("grouped", inputs, groups, group_size=5, norm=norm)
        assert (found[2][5:] != 0).all() == moves
        assert (found[3][5:] == 0).all(), "values outside of the groups have no part"


@pytest.mark.parametrize("rows", [5, 40])
@pytest.mark.parametrize("with_root", [False, True])
def test_norms_of_scores(rows, with_root, monkeypatch):
    """By the Gram matrix, also in float64, and by the scores."""
    monkeypatch.setattr(score_norm, "uses_gram", lambda x: x.shape[0] >= x.shape[1])
    x, keys = random_inputs((rows, 16), (50, 16))
    norms = score_norm.score_norms(x, keys)
    plain = (x @ keys.T).norm(dim=1, keepdim=True)
    share = torch.linspace(-1, 1, rows, dtype=torch.float64)[:, None]
    assert_close(
        [norms, *torch.autograd.grad(norms, (x, keys), share)],
        [plain, *torch.autograd.grad(plain, (x, keys), share)],
        1e-11,
    )
    if with_root:
        root = streamed.gram_root(keys.detach())
        norms = score_norm.score_norms(x, keys, root)
        assert_close(
            [norms, torch.autograd.grad(norms, x, share)[0]],
            [plain, torch.autograd.grad((x @ keys.T).norm(dim=1, keepdim=True), x, share)[0]],
            1e-11,
        )


def test_norms_without_a_factor():
    """Fewer keys than channels have a singular Gram matrix, and so have keys that are alike."""
    for tokens, spread in ((8, 1.0), (30, 1e-7), (30, 0.0)):
        x, keys = random_inputs((40, 16), (tokens, 16), dtype=torch.float32)
        keys = (keys[:1] + spread * keys).detach()
        wanted = (x @ keys.T).norm(dim=1, keepdim=True)
        root = score_norm.exact_gram_root(keys)
        assert torch.equal(root, root.triu())
        for norms in (score_norm.score_norms(x, keys), score_norm.score_norms(x, keys, root)):
            assert_close([norms], [wanted], 1e-6)


@cases
def test_autocast_and_checkpointing(theta, norm):
    inputs = random_inputs((20, 6), (30, 6), (30, 5), dtype=torch.float32)
    groups = random_groups(20, count=8, k=3)

    def grads(backend: str) -> list[Tensor]:
        def layer(*tensors: Tensor) -> Tensor:
            return routed_pattention(
                *tensors, groups, group_size=4, theta=theta, norm=norm, backend=backend
            )

        with torch.autocast("cpu", torch.bfloat16):
            out = checkpoint(layer, *inputs, use_reentrant=False)
            assert out.dtype == torch.bfloat16
        return list(torch.autograd.grad(out.float().sum(), inputs))

    assert_close(grads("grouped"), grads("reference"), 0.05)


@cases
def test_without_gradients(theta, norm):
    inputs = random_inputs((20, 6), (30, 6), (30, 5), dtype=torch.float32)
    groups = random_groups(20, count=8, k=3)
    options = {"group_size": 4, "theta": theta, "norm": norm}
    wanted = routed_pattention(*inputs, groups, **options)
    root = streamed.gram_root(inputs[1].detach()) if norm == "all" else None
    with torch.no_grad():
        out = routed_pattention(*inputs, groups, gram_root=root, **options)
    assert not out.requires_grad
    torch.testing.assert_close(out, wanted)
    half = [tensor.detach().bfloat16() for tensor in inputs]
    torch.testing.assert_close(
        routed_pattention(*half, groups, **options).float(), wanted, rtol=0.1, atol=0.1
    )


def test_a_row_visits_only_its_groups():
    x, keys, values = (t.detach() for t in random_inputs((4, 6), (40, 6), (40, 5)))
    keys[8:] = float("nan")
    groups = torch.tensor([[0], [1], [0], [1]])
    out = routed_pattention(x, keys, values, groups, group_size=4, norm="chosen", backend="grouped")
    assert out.isfinite().all()


def test_it_is_one_product_per_group(monkeypatch):
    groups = torch.tensor([[2, 0], [2, 5], [0, 2]])
    visits = list(grouped.Routes(groups, tokens=22, group_size=4))
    assert [(v.tokens.start, v.tokens.stop) for v in visits] == [(0, 4), (8, 12), (20, 22)]
    assert [v.rows.tolist() for v in visits] == [[0, 2], [0, 1, 2], [1]]


@pytest.mark.parametrize("backend", ["reference", "grouped"])
@cases
@pytest.mark.parametrize("per_sample", [False, True])
def test_added_tokens_are_a_group_that_every_row_chooses(backend, theta, norm, per_sample):
    """Against one operator over all tokens, in which the added ones fill a group of their own."""
    own = (3,) if per_sample else ()
    shapes = (3, 2, 6), (20, 6), (20, 4), (3, 2, 2), (*own, 4, 6), (*own, 4, 4)
    x, keys, values, gates, *added = random_inputs(*shapes)
    groups = random_groups(3, 2, count=5, k=2)
    options = {"group_size": 4, "norm": norm, "theta": theta, "scale_tokens": 9.0, "eps": 1e-3}
    found = routed_pattention(
        x, keys, values, groups, gates=gates, added=tuple(added), backend=backend, **options
    )
    more_groups = torch.cat([groups, torch.full_like(groups[..., :1], 5)], -1)
    more_gates = torch.cat([gates, torch.ones_like(gates[..., :1])], -1)
    wanted = torch.stack(
        [
            routed_pattention(
                x[n],
                torch.cat([keys, added[0][n] if per_sample else added[0]]),
                torch.cat([values, added[1][n] if per_sample else added[1]]),
                more_groups[n],
                gates=more_gates[n],
                backend="reference",
                **options,
            )
            for n in range(3)
        ]
    )
    inputs = x, keys, values, gates, *added
    assert_close(
        [found, *torch.autograd.grad(found.square().sum(), inputs)],
        [wanted, *torch.autograd.grad(wanted.square().sum(), inputs)],
        1e-11,
    )


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [3, 40])
def test_added_tokens_without_gradients(theta, norm, dtype, rows):
    """Native code attends to the groups of a few rows, and sorted products to those of many."""
    shapes = (rows, 16), (50, 16), (50, 24), (rows, 3), (5, 16), (5, 24)
    x, keys, values, gates, *added = (t.detach() for t in random_inputs(*shapes, dtype=dtype))
    groups = random_groups(rows, count=7, k=3)
    options = {"group_size": 8, "theta": theta, "norm": norm, "gates": gates}
    found = routed_pattention(x, keys, values, groups, added=tuple(added), **options)
    wide = [tensor.double() for tensor in (x, keys, values)]
    options |= {"added": tuple(part.double() for part in added), "gates": gates.double()}
    wanted = routed_pattention(*wide, groups, backend="reference", **options)
    assert found.dtype == dtype
    rounding = 3e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        found.double(), wanted, rtol=0, atol=rounding * wanted.abs().max().item()
    )


def test_zero_rows_with_added_tokens_have_finite_gradients():
    shapes = (12, 6), (30, 6), (30, 5), (4, 6), (4, 5)
    x, keys, values, *added = random_inputs(*shapes, dtype=torch.float32)
    with torch.no_grad():
        x[3] = 0
        keys[:] = 0
        added[0][2:] = 0
    groups = random_groups(12, count=8, k=3)
    for theta, norm in CASES:
        options = {"group_size": 4, "theta": theta, "norm": norm, "added": added}
        found = output_and_gradients("grouped", [x, keys, values], groups, **options)
        assert all(tensor.isfinite().all() for tensor in found)
        plain = output_and_gradients("reference", [x, keys, values], groups, **options)
        assert_close(found, plain, 3e-6)


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 3])
def test_native_code_for_few_rows(theta, norm, dtype, threads, monkeypatch):
    assert library() is not None, "there is a compiler where the tests run"
    monkeypatch.setattr(few_rows, "threads_for", lambda size: threads)
    native: list[None] = []
    run = native_routed.run
    monkeypatch.setattr(native_routed, "run", lambda *given: native.append(None) or run(*given))
    for rows, d_in, n, d_out, size, k in [
        (1, 16, 50, 24, 8, 3),
        (5, 33, 40, 7, 3, 14),
        (16, 9, 20, 1, 30, 1),
    ]:
        shapes = (rows, d_in), (n, d_in), (n, d_out)
        inputs = [tensor.detach() for tensor in random_inputs(*shapes, dtype=dtype)]
        groups = random_groups(rows, count=-(-n // size), k=k)
        options = {"group_size": size, "theta": theta, "norm": norm, "eps": 1e-3}
        calls = len(native)
        found = routed_pattention(*inputs, groups, **options)
        wide = (tensor.double() for tensor in inputs)
        wanted = routed_pattention(*wide, groups, backend="reference", **options)
        assert len(native) == calls + 1
        assert found.dtype == dtype
        scale = wanted.abs().max()
        rounding = 2e-6 if dtype == torch.float32 else 8e-3
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=rounding * scale)


def test_native_code_checks_the_groups():
    x, keys, values = (torch.randn(shape) for shape in ((2, 4), (9, 4), (9, 3)))
    for group in (3, -1):
        with pytest.raises(IndexError, match=f"must be from 0 to 2, got .*{group}"):
            routed_pattention(x, keys, values, torch.full((2, 1), group), group_size=4)


def test_native_code_reads_only_the_chosen_groups():
    x, keys, values = torch.randn(2, 16), torch.randn(40, 16), torch.randn(40, 8)
    keys[8:], values[8:] = float("nan"), float("nan")
    out = routed_pattention(x, keys, values, torch.tensor([[0], [1]]), group_size=4, norm="chosen")
    assert out.isfinite().all()


@pytest.mark.slow
@cases
def test_compiles_whole_with_gradients(theta, norm):
    torch._dynamo.reset()
    inputs = random_inputs((10, 6), (30, 6), (30, 5))
    gates, *added = random_inputs((10, 3), (2, 6), (2, 5))
    scale = torch.tensor(11.0, dtype=torch.float64, requires_grad=True)

    def layer(x: Tensor, keys: Tensor, values: Tensor, gates: Tensor) -> Tensor:
        groups = (x @ keys[:8].T).topk(3).indices
        options = {"theta": theta, "norm": norm, "scale_tokens": scale, "gates": gates}
        options["added"] = tuple(added)
        return 2 * routed_pattention(x, keys, values, groups, group_size=4, **options)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    wanted = [*inputs, gates, *added, scale]
    found, expected = (
        torch.autograd.grad(function(*inputs, gates).square().sum(), wanted)
        for function in (compiled, layer)
    )
    assert_close(list(found), list(expected), 1e-12)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("norm", ["all", "chosen"])
def test_registered_operators_keep_their_promises(gated, more, norm):
    x, keys, values = random_inputs((5, 4), (9, 4), (9, 3), dtype=torch.float32)
    groups = random_groups(5, count=3, k=2)
    gates = random_inputs((5, 2), dtype=torch.float32)[0] if gated else None
    norms = (x @ keys.T).detach().norm(dim=1, keepdim=True).requires_grad_()
    known = norms if norm == "all" else None
    added = random_inputs((5, 2), dtype=torch.float32)[0] if more else None
    scale = torch.tensor(9.0, requires_grad=True)
    arguments = (x, keys, values, groups, gates, added, known, scale, 4, "l2_gelu", "none", 1e-3)
    torch.library.opcheck(torch.ops.tokenformer.routed_pattention.default, arguments)
    torch.library.opcheck(torch.ops.tokenformer.score_norms.default, (x, keys))


@pytest.mark.parametrize("theta", ["gelu_l2", "l1_gelu", "softmax"])
def test_refuses_a_norm_that_needs_all_scores(theta):
    inputs = random_inputs((5, 4), (9, 4), (9, 3))
    groups = random_groups(5, count=3, k=2)
    with pytest.raises(ValueError, match=f"theta='{theta}' would need the scores of all tokens"):
        routed_pattention(*inputs, groups, group_size=4, theta=theta)


@pytest.mark.parametrize(
    ("groups", "options", "message"),
    [
        (torch.zeros(5, 4, dtype=torch.int64), {}, "k at most 3"),
        (torch.zeros(4, 2, dtype=torch.int64), {}, "must be .5, 'k'."),
        (torch.zeros(5, 2), {}, "dtype int64"),
        (torch.full((5, 1), 3), {}, "must be from 0 to 2, got 3"),
        (torch.full((5, 1), -1), {}, "must be from 0 to 2, got -1"),
        (torch.zeros(5, 2, dtype=torch.int64), {"group_size": 0}, "group_size=0"),
        (torch.zeros(5, 2, dtype=torch.int64), {"norm": "some"}, "norm='some' is unknown"),
        (torch.zeros(5, 2, dtype=torch.int64), {"theta": "relu"}, "theta='relu' is unknown"),
        (torch.zeros(5, 2, dtype=torch.int64), {"backend": "fast"}, "backend='fast' is unknown"),
        (torch.zeros(5, 2, dtype=torch.int64), {"gates": torch.ones(5, 1)}, "shape of groups"),
    ],
)
def test_errors_name_the_argument(groups, options, message):
    inputs = random_inputs((5, 4), (9, 4), (9, 3))
    with pytest.raises((ValueError, TypeError, IndexError), match=message):
        routed_pattention(*inputs, groups, **{"group_size": 4, **options})
