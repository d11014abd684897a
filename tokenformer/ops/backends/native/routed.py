"""Routed pattention of a few rows on a CPU, without gradients: reads only the chosen groups."""

from torch import Tensor

from tokenformer.ops.backends.native import few_rows
from tokenformer.ops.backends.native.library import Routing, Tokens
from tokenformer.ops.theta import ThetaOptions


def routing(
    group_size: int,
    active_groups: int,
    *,
    router: Tensor,
    router_scales: Tensor | None = None,
    bias: Tensor,
    root: Tensor | None,
    root_rows: int,
    is_gated: bool,
    shift: Tensor | None,
) -> Routing | None:
    """Return pointers for native code that routes by itself; None if it cannot.

    Args:
        router: rows [groups, d_in] whose products with a normalized row are the scores of the
            groups; in int8 with scales [groups].
        bias: [groups], added to the scores.
        root: `pack_upper` of a matrix [root_rows, d_in] whose product with a row has the norm of
            the scores of all tokens; None for the norm of the chosen ones.
        is_gated: whether twice the sigmoid of a group's score is a factor of its weights.
        shift: [d_out], added to the output; or None.
    """
    found = Routing(size=group_size, active=active_groups, is_gated=is_gated)
    matrices = {
        "router": (router, router_scales),
        "bias": (bias, None),
        "root": (root, None),
        "shift": (shift, None),
    }
    for name, (matrix, scales) in matrices.items():
        if matrix is not None:
            pointers = few_rows.matrix_pointers(matrix, scales)
            if pointers is None:
                return None
            setattr(found, name, pointers)
    found.root.n, found.root.width = root_rows, router.shape[1]
    return found


def run(
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    groups: Tensor,
    gates: Tensor | None,
    norms: Tensor | None,
    options: ThetaOptions,
    group_size: int,
) -> Tensor:
    """Rows x [R, d_in] with groups [R, k], their gates and norms [R, 1] -> [R, d_out]."""
    chosen, order = groups.sort(dim=1)
    count = -(-keys.shape[0] // group_size)
    if chosen.numel() and not 0 <= int(chosen[:, 0].min()) <= int(chosen[:, -1].max()) < count:
        raise IndexError(
            f"groups must be from 0 to {count - 1}, got {int(chosen.min())} to {int(chosen.max())}"
        )
    theta, scale, approximate, eps = options
    tokens: Tokens = few_rows.token_pointers(keys, values, scale)
    gates = None if gates is None else gates.float().gather(1, order)
    norms = None if norms is None else norms.float().contiguous()
    tokens.routing = Routing(
        size=group_size,
        active=chosen.shape[1],
        groups=chosen.data_ptr(),
        gates=None if gates is None else gates.data_ptr(),
        norms=None if norms is None else norms.data_ptr(),
    )
    return few_rows.pattention(
        x, tokens, keys.dtype, few_rows.theta_struct(theta, approximate, eps)
    )
