"""Our flash attention in Triton: the kernels. `engine.attention.triton_attention` launches them.

FlashAttention-2 (Dao 2023, arXiv 2307.08691). Forward gives each program a tile of queries and walks the keys it sees;
the softmax is taken in base 2. Backward has two kernels, so that nothing is added atomically and gradients are the same
from run to run: one gives each program a tile of keys and walks the queries of every head that shares it (dK, dV), the
other a tile of queries and walks the keys (dQ).

Names: M rows of queries and N keys in a tile, D the head size padded to a power of two. Matrices are read through
(batch, head, row) strides; columns are contiguous. `shift` = Sk - Sq aligns the causal mask bottom-right.
"""

import triton
import triton.language as tl


@triton.jit
def _load(base, rows, columns, stride, row_count, width):
    """rows × columns of a matrix; zeros outside."""
    inside = (rows[:, None] < row_count) & (columns[None, :] < width)
    return tl.load(base + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _store(base, values, rows, columns, stride, row_count, width):
    inside = (rows[:, None] < row_count) & (columns[None, :] < width)
    tl.store(base + rows[:, None] * stride + columns[None, :], values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _scores(q, k, rows, columns, key_count, shift, scale, CAUSAL: tl.constexpr):
    """q (M, D) against k (N, D), times scale; -inf where a key is not seen."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    seen = columns[None, :] < key_count
    if CAUSAL:
        seen = seen & (columns[None, :] <= rows[:, None] + shift)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def forward_kernel(
    q_at, k_at, v_at, out_at, lse_at,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
    heads, groups, row_count, key_count, width, scale,
    CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """`scale` is log2(e)/√D; the log-sum-exp (B, H, Sq) is stored in base 2."""
    batch, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    rows, dims, shift = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, D), key_count - row_count
    q = _load(q_at + batch * q_batch + head * q_head, rows, dims, q_row, row_count, width)
    k_at += batch * k_batch + head // groups * k_head
    v_at += batch * v_batch + head // groups * v_head
    maximum = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    summed = tl.zeros([M, D], tl.float32)
    stop = key_count
    if CAUSAL:
        stop = tl.minimum(key_count, (tl.program_id(0) + 1) * M + shift)
    for start in range(0, stop, N):
        columns = start + tl.arange(0, N)
        k = _load(k_at, columns, dims, k_row, key_count, width)
        scores = _scores(q, k, rows, columns, key_count, shift, scale, CAUSAL)
        risen = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - risen[:, None])
        shrink = tl.exp2(maximum - risen)
        total = total * shrink + tl.sum(weights, 1)
        v = _load(v_at, columns, dims, v_row, key_count, width)
        summed = summed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        maximum = risen
    out_at += batch * out_batch + head * out_head
    _store(out_at, summed / total[:, None], rows, dims, out_row, row_count, width)
    lse_at += tl.program_id(1).to(tl.int64) * row_count
    tl.store(lse_at + rows, maximum + tl.log2(total), mask=rows < row_count)


@triton.jit
def _slopes(q, k, v, grad, lse, delta, rows, columns, row_count, key_count, shift, scale, CAUSAL: tl.constexpr):
    """P (M, N) recomputed, and dS = P∘(dO·Vᵀ - delta); both 0 outside."""
    scores = _scores(q, k, rows, columns, key_count, shift, scale, CAUSAL)
    weights = tl.where(rows[:, None] < row_count, tl.exp2(scores - lse[:, None]), 0.0)
    return weights, weights * (tl.dot(grad, tl.trans(v), input_precision="ieee") - delta[:, None])


@triton.jit
def backward_keys_kernel(
    q_at, k_at, v_at, grad_at, lse_at, delta_at, grad_k_at, grad_v_at,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, grad_batch, grad_head, grad_row,
    out_batch, out_head, out_row, heads, groups, row_count, key_count, width, scale, plain_scale,
    CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """dV = Pᵀ·dO and dK = dSᵀ·Q/√D of one tile of keys, summed over the query heads that share them."""
    kv_heads = heads // groups
    batch, kv_head = (tl.program_id(1) // kv_heads).to(tl.int64), tl.program_id(1) % kv_heads
    columns, dims, shift = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, D), key_count - row_count
    k = _load(k_at + batch * k_batch + kv_head * k_head, columns, dims, k_row, key_count, width)
    v = _load(v_at + batch * v_batch + kv_head * v_head, columns, dims, v_row, key_count, width)
    grad_k, grad_v = tl.zeros([N, D], tl.float32), tl.zeros([N, D], tl.float32)
    first = 0
    if CAUSAL:
        first = tl.maximum(0, tl.program_id(0) * N - shift) // M * M
    for member in range(0, groups):
        head = kv_head * groups + member
        statistics = (batch * heads + head) * row_count
        for start in range(first, row_count, M):
            rows = start + tl.arange(0, M)
            q = _load(q_at + batch * q_batch + head * q_head, rows, dims, q_row, row_count, width)
            grad = _load(grad_at + batch * grad_batch + head * grad_head, rows, dims, grad_row, row_count, width)
            lse = tl.load(lse_at + statistics + rows, mask=rows < row_count, other=0.0)
            delta = tl.load(delta_at + statistics + rows, mask=rows < row_count, other=0.0)
            weights, slope = _slopes(
                q, k, v, grad, lse, delta, rows, columns, row_count, key_count, shift, scale, CAUSAL
            )
            grad_v += tl.dot(tl.trans(weights.to(grad.dtype)), grad, input_precision="ieee")
            grad_k += tl.dot(tl.trans(slope.to(q.dtype)), q, input_precision="ieee")
    at = batch * out_batch + kv_head * out_head
    _store(grad_k_at + at, grad_k * plain_scale, columns, dims, out_row, key_count, width)
    _store(grad_v_at + at, grad_v, columns, dims, out_row, key_count, width)


@triton.jit
def backward_queries_kernel(
    q_at, k_at, v_at, grad_at, lse_at, delta_at, grad_q_at,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, grad_batch, grad_head, grad_row,
    out_batch, out_head, out_row, heads, groups, row_count, key_count, width, scale, plain_scale,
    CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """dQ = dS·K/√D of one tile of queries."""
    batch, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    rows, dims, shift = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, D), key_count - row_count
    q = _load(q_at + batch * q_batch + head * q_head, rows, dims, q_row, row_count, width)
    grad = _load(grad_at + batch * grad_batch + head * grad_head, rows, dims, grad_row, row_count, width)
    statistics = tl.program_id(1).to(tl.int64) * row_count
    lse = tl.load(lse_at + statistics + rows, mask=rows < row_count, other=0.0)
    delta = tl.load(delta_at + statistics + rows, mask=rows < row_count, other=0.0)
    k_at += batch * k_batch + head // groups * k_head
    v_at += batch * v_batch + head // groups * v_head
    grad_q = tl.zeros([M, D], tl.float32)
    stop = key_count
    if CAUSAL:
        stop = tl.minimum(key_count, (tl.program_id(0) + 1) * M + shift)
    for start in range(0, stop, N):
        columns = start + tl.arange(0, N)
        k = _load(k_at, columns, dims, k_row, key_count, width)
        v = _load(v_at, columns, dims, v_row, key_count, width)
        _, slope = _slopes(q, k, v, grad, lse, delta, rows, columns, row_count, key_count, shift, scale, CAUSAL)
        grad_q += tl.dot(slope.to(k.dtype), k, input_precision="ieee")
    at = batch * out_batch + head * out_head
    _store(grad_q_at + at, grad_q * plain_scale, rows, dims, out_row, row_count, width)
