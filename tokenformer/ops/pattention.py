"""Token-parameter attention: input rows attend to learnable key-value parameter tokens.

    pattention(x, K, V) = theta(x K^T) V        (the paper's equation 4)

`reference` below is that equation and nothing else; every other backend is tested against it. The
modified softmax theta, and what it does to zero rows, is in `theta.py`.
"""

import torch
from torch import Tensor

from tokenformer.ops.backends import FAST_BACKENDS, Backend
from tokenformer.ops.backends.auto import choose
from tokenformer.ops.theta import THETAS, ThetaOptions


def reference(x: Tensor, keys: Tensor, values: Tensor, options: ThetaOptions) -> Tensor:
    scores = x @ keys.T  # [..., n]
    weights = options.weights(scores)  # [..., n]
    return weights.to(scores.dtype) @ values  # [..., d_out]


BACKENDS: dict[str, Backend] = {"reference": reference, **FAST_BACKENDS}


def pattention(
    x: Tensor,
    key_tokens: Tensor,
    value_tokens: Tensor,
    *,
    scale_tokens: float | Tensor | None = None,
    theta: str = "l2_gelu",
    approximate: str = "none",
    eps: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Attend from every row of `x` to the parameter tokens.

    Args:
        x: input rows `[..., d_in]`, any leading dimensions, none included.
        key_tokens: `[n, d_in]`.
        value_tokens: `[n, d_out]`.
        scale_tokens: the positive number s in the scale, by default the token count n. It is an
            argument because growth keeps it: a layer grown from n tokens still has s = n. Pass a
            tensor of one element where the scale is learned or changes during training.
        theta: `l2_gelu` (the paper's), `gelu_l2`, `l1_gelu` or `softmax`.
        approximate: which GELU, as in torch: `none` (exact, as released) or `tanh` (the paper's
            own figures).
        eps: added to the norm; 0 as released, 1e-5 in the paper's own figures. Softmax ignores it:
            its sum is never zero.
        backend: `auto` or the name of one implementation; see `tokenformer.ops.BACKENDS`.

    Returns:
        `[..., d_out]`, in the dtype of the inputs.
    """
    check_inputs(x, key_tokens, value_tokens)
    check_names(theta, approximate, backend)
    if scale_tokens is None:
        scale_tokens = float(key_tokens.shape[0])
    else:
        check_scale(scale_tokens)
    if isinstance(scale_tokens, Tensor):
        scale_tokens = scale_tokens.reshape(())  # its dimensions must not become the output's
    if backend == "auto":
        backend = choose(x, key_tokens, value_tokens, scale_tokens)
    options = ThetaOptions(theta, scale_tokens, approximate, eps)
    return BACKENDS[backend](x, key_tokens, value_tokens, options)


def check_names(theta: str, approximate: str, backend: str = "auto") -> None:
    if theta not in THETAS:
        raise ValueError(f"theta={theta!r} is unknown; choose one of {', '.join(THETAS)}")
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate={approximate!r} is unknown; choose none or tanh")
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; choose auto, {', '.join(BACKENDS)}")


def check_scale(scale_tokens: float | Tensor) -> None:
    if isinstance(scale_tokens, Tensor):
        # The value is not checked: reading it would make the host wait for the device.
        if scale_tokens.numel() != 1:
            raise ValueError(
                f"scale_tokens must be one number, got a tensor {tuple(scale_tokens.shape)}"
            )
    elif not 0 < scale_tokens < float("inf"):  # torch.compile cannot trace math.isfinite
        raise ValueError(f"scale_tokens={scale_tokens} must be a positive finite number")


def check_inputs(x: Tensor, key_tokens: Tensor, value_tokens: Tensor) -> None:
    problem = None
    if key_tokens.ndim != 2 or value_tokens.ndim != 2:
        problem = "key_tokens must be [n, d_in] and value_tokens [n, d_out]"
    elif key_tokens.shape[0] != value_tokens.shape[0]:
        problem = "key_tokens and value_tokens differ in their number of tokens"
    elif key_tokens.shape[0] == 0:
        problem = "pattention needs at least one parameter token"
    elif x.ndim == 0 or x.shape[-1] != key_tokens.shape[1]:
        problem = "the last dimension of x must be d_in of key_tokens"
    if problem:
        raise ValueError(
            f"{problem}; got x {tuple(x.shape)}, key_tokens {tuple(key_tokens.shape)}, "
            f"value_tokens {tuple(value_tokens.shape)}"
        )
    if not x.is_floating_point():
        raise TypeError(f"x must be floating point, got {x.dtype}")
    # Under autocast the matmuls cast mixed dtypes themselves.
    same = x.dtype == key_tokens.dtype == value_tokens.dtype
    if not same and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(
            f"x is {x.dtype}, key_tokens {key_tokens.dtype}, value_tokens {value_tokens.dtype}; "
            "convert them to one dtype or use torch.autocast"
        )
