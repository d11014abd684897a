"""The Triton kernels of `triton.py`; importing this module imports triton.

Rows are x and the gradient of the output, tokens are keys and values; all are contiguous. A tile of
scores, or of the gradient of the weights, is computed on chip, used and dropped:

    row_sums   one number per row and tile of tokens: its part of the row's norm or its gradient
    mixtures   sums of a matrix's rows, weighted by tiles of theta(A) or dL/dA, or their transposes
"""

import math

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Constants of the GELUs. They must be the right factor of a product: on the left they make the
# interpreter treat the product as a constant.
HALF_ROOT = tl.constexpr(math.sqrt(0.5))
BELL = tl.constexpr(1 / math.sqrt(2 * math.pi))
LINEAR = tl.constexpr(2 * math.sqrt(2 / math.pi))
CUBIC = tl.constexpr(LINEAR.value * 0.044715)


@triton.jit
def row_sums(
    x, keys, grad, values, factors, tops, sums, rows, tokens, d_in, d_out,
    THETA: tl.constexpr, TANH: tl.constexpr, BACKWARD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """sums [tiles, R]: the part of each tile in a row's norm, or if BACKWARD in dL / d log f.

    `tops` has the largest scores of softmax: of each tile [tiles, R], found here together with the
    sums; if BACKWARD of each row [R].
    """
    r = block(tl.program_id(0), BLOCK_ROWS)
    t = block(tl.program_id(1), BLOCK_TOKENS)
    offset = tl.program_id(1).to(tl.int64) * rows + r
    scores = inner_products(x, keys, r, t, rows, tokens, d_in, INNER)  # [BLOCK_ROWS, BLOCK_TOKENS]
    if BACKWARD:
        if THETA == "softmax":
            scores -= row_numbers(tops, r, t, rows, tokens, True)
        factor = row_numbers(factors, r, t, rows, tokens, True)
        dweights = inner_products(grad, values, r, t, rows, tokens, d_out, INNER)
        if (THETA == "l2_gelu") or (THETA == "l1_gelu"):
            normed = factor * scores
            terms = dweights * gelu_slope(normed, TANH) * normed
        else:
            terms = dweights * weights_of(scores, factor, THETA, TANH)
        # Scores beyond the edge are zero, but softmax gives them weights, possibly infinite.
        found = tl.sum(tl.where(t[None, :] < tokens, terms, 0.0), 1)
    elif THETA == "l2_gelu":
        found = tl.sum(scores * scores, 1)
    elif THETA == "l1_gelu":
        found = tl.sum(tl.abs(scores), 1)
    elif THETA == "gelu_l2":
        weights = gelu(scores, TANH)
        found = tl.sum(weights * weights, 1)
    else:
        scores = tl.where(t[None, :] < tokens, scores, float("-inf"))
        top = tl.max(scores, 1)
        found = tl.sum(tl.exp(scores - top[:, None]), 1)
        tl.store(tops + offset, top, mask=r < rows)
    tl.store(sums + offset, found, mask=r < rows)


@triton.jit
def mixtures(
    left, right, dleft, dright, mixed, factors, tops, shrinks, out,
    count, others, d_in, d_out, channels, out_stride, out_channel_stride,
    THETA: tl.constexpr, TANH: tl.constexpr, BACKWARD: tl.constexpr, BY_ROWS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_OTHERS: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr,
):  # fmt: skip
    """out [count, channels] = T mixed, where T [count, others] is theta(A), or dL/dA if BACKWARD.

    If BY_ROWS, left is x, right the keys, dleft the gradient of the output and dright the values;
    otherwise they are swapped and T is the transpose. This covers the output and the gradients of
    rows, keys and values. One program computes one tile of `out`.
    """
    i = block(tl.program_id(0), BLOCK)
    c = block(tl.program_id(1), OUTER)
    total = tl.zeros((BLOCK, OUTER), tl.float32)
    for start in range(0, others, BLOCK_OTHERS):
        j = start + block(0, BLOCK_OTHERS)
        tile = inner_products(left, right, i, j, count, others, d_in, INNER)
        factor = row_numbers(factors, i, j, count, others, BY_ROWS)
        if THETA == "softmax":
            tile -= row_numbers(tops, i, j, count, others, BY_ROWS)
        if BACKWARD:
            dtile = inner_products(dleft, dright, i, j, count, others, d_out, INNER)
            shrink = row_numbers(shrinks, i, j, count, others, BY_ROWS)
            tile = dscores_of(tile, dtile, factor, shrink, THETA, TANH)
        else:
            tile = weights_of(tile, factor, THETA, TANH)
        tile = tl.where((i[:, None] < count) & (j[None, :] < others), tile, 0.0)
        inside = (j[:, None] < others) & (c[None, :] < channels)
        some = tl.load(mixed + j[:, None] * channels + c[None, :], mask=inside, other=0.0)
        total = add_product(total, tile.to(some.dtype), some)
    inside = (i[:, None] < count) & (c[None, :] < channels)
    offset = out + i[:, None] * out_stride + c[None, :] * out_channel_stride
    tl.store(offset, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def block(index, SIZE: tl.constexpr):
    """The indices of a block, in 64 bits: rows times channels may overflow 32 bits."""
    return (index * SIZE + tl.arange(0, SIZE)).to(tl.int64)


@triton.jit
def inner_products(left, right, i, j, count, others, width, INNER: tl.constexpr):
    """A tile of left right^T, zero beyond the edges."""
    total = tl.zeros((i.shape[0], j.shape[0]), tl.float32)
    for start in range(0, width, INNER):
        c = start + tl.arange(0, INNER)
        some = (i[:, None] < count) & (c[None, :] < width)
        other = (c[:, None] < width) & (j[None, :] < others)
        a = tl.load(left + i[:, None] * width + c[None, :], mask=some, other=0.0)
        b = tl.load(right + c[:, None] + j[None, :] * width, mask=other, other=0.0)
        total = add_product(total, a, b)
    return total


@triton.jit
def add_product(total, a, b):
    """total + a b, in fp32 and never in TF32."""
    if INTERPRETED:  # the interpreter would multiply the bits of bf16 as integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def row_numbers(numbers, i, j, count, others, BY_ROWS: tl.constexpr):
    """Load one number per row, shaped to broadcast over a tile."""
    if BY_ROWS:
        found = tl.load(numbers + i, mask=i < count, other=0.0)[:, None]
    else:
        found = tl.load(numbers + j, mask=j < others, other=0.0)[None, :]
    return found


@triton.jit
def weights_of(scores, factor, THETA: tl.constexpr, TANH: tl.constexpr):
    """theta(A); scores of softmax are relative to the largest of the row."""
    if THETA == "softmax":
        weights = factor * tl.exp(scores)
    elif THETA == "gelu_l2":
        weights = factor * gelu(scores, TANH)
    else:
        weights = gelu(factor * scores, TANH)
    return weights


@triton.jit
def dscores_of(scores, dweights, factor, shrink, THETA: tl.constexpr, TANH: tl.constexpr):
    """dL/dA; `shrink` is c in `triton.py`, the gradient through the norm."""
    if THETA == "softmax":
        dscores = factor * tl.exp(scores) * (dweights - shrink)
    elif THETA == "gelu_l2":
        dscores = gelu_slope(scores, TANH) * (factor * dweights - shrink * gelu(scores, TANH))
    else:
        dscores = factor * gelu_slope(factor * scores, TANH) * dweights
        if THETA == "l2_gelu":
            dscores -= shrink * scores
        else:
            dscores -= shrink * tl.where(scores > 0, 1.0, tl.where(scores < 0, -1.0, 0.0))
    return dscores


@triton.jit
def gelu(x, TANH: tl.constexpr):
    return x * share(x, TANH)


@triton.jit
def gelu_slope(x, TANH: tl.constexpr):
    part = share(x, TANH)
    if TANH:
        found = part + x * part * (1 - part) * (3 * x * x * CUBIC + LINEAR)
    else:
        found = part + x * BELL * tl.exp(-0.5 * x * x)
    return found


@triton.jit
def share(x, TANH: tl.constexpr):
    """gelu(x) / x. In the approximation (1 + tanh u) / 2 is the sigmoid of 2 u."""
    if TANH:
        part = 1 / (1 + tl.exp(-x * (x * x * CUBIC + LINEAR)))
    else:
        part = 0.5 * (1 + tl.erf(x * HALF_ROOT))
    return part
