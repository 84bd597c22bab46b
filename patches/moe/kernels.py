"""Triton kernels of grouped products; their launchers are in `gemm.py`.

Both add up in fp32 in a fixed order, take offsets into tensors as 64-bit numbers, and read nothing that is not theirs
to read: what lies beyond the rows of an expert may be NaN.
"""

import triton
import triton.language as tl


@triton.jit
def _low_rank(acc, xa, b, start, rank, stride_br, in_n, BLOCK_R: tl.constexpr):
    """Adds the product of `BLOCK_R` columns of xa, (BLOCK_M, 1) pointers, and rows of b, (1, BLOCK_N) pointers."""
    r = start + tl.arange(0, BLOCK_R)
    in_r = r < rank
    left = tl.load(xa + r[None, :], mask=in_r[None, :], other=0.0)
    right = tl.load(b + r[:, None].to(tl.int64) * stride_br, mask=in_r[:, None] & in_n[None, :], other=0.0)
    return tl.dot(left, right, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["num_rows", "num_experts"])  # another batch does not compile again
def grouped_mm_kernel(
    x,  # (num_x, in_features)
    x_desc,  # the same as a tensor descriptor with blocks (BLOCK_M, BLOCK_K), or None
    weight,  # (num_experts, in_features, out_features)
    weight_desc,  # the same, (1, BLOCK_K, BLOCK_N), or transposed, (1, BLOCK_N, BLOCK_K), or None
    out,  # (num_rows, out_features)
    tiles,  # (num_tiles, 3) int32: expert, first row, end row
    offsets,  # (num_experts,) int32
    rows,  # (num_rows,) integer, or None: the row of x of each row
    bias,  # (num_experts, out_features), or None
    xa,  # (num_rows, rank), or None
    b,  # (num_experts, rank, out_features), or None
    scale,  # float
    num_rows,
    in_features,
    out_features,
    num_experts,
    rank,
    stride_x,
    stride_we,
    stride_wk,
    stride_wn,
    stride_out,
    stride_bias,
    stride_xa,
    stride_be,
    stride_br,
    stride_bn,
    EXPERTS: tl.constexpr,  # num_experts, rounded up to a power of two
    RANK: tl.constexpr,  # rank, rounded up to a multiple of BLOCK_R
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,  # row tiles whose neighbours in time share columns of the weight
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    TRANSPOSED: tl.constexpr,  # of weight_desc
    FLATTEN: tl.constexpr,
):
    """out[i] = bias[e] + scale * xa[i] @ b[e] + x[rows[i]] @ weight[e] for the rows i of each expert e, else 0."""
    program = tl.program_id(0)
    expert_ids = tl.arange(0, EXPERTS)
    known = expert_ids < num_experts
    ends = tl.load(offsets + expert_ids, mask=known, other=0)
    starts = tl.load(offsets + expert_ids - 1, mask=known & (expert_ids > 0), other=0)
    # the tiles that are left over come last in the table: no program visits them
    num_tiles = tl.sum((ends - starts + (BLOCK_M - 1)) // BLOCK_M)
    num_blocks_n = tl.cdiv(out_features, BLOCK_N)
    num_blocks_k = tl.cdiv(in_features, BLOCK_K)
    tl.assume(num_blocks_k > 0)  # else a flattened loop has a second version, for none
    per_group = GROUP * num_blocks_n
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    for block in tl.range(program, num_tiles * num_blocks_n, tl.num_programs(0), flatten=FLATTEN):
        first_tile = block // per_group * GROUP
        height = tl.minimum(num_tiles - first_tile, GROUP)
        tile = first_tile + block % per_group % height
        start_n = block % per_group // height * BLOCK_N
        expert_id = tl.load(tiles + 3 * tile)
        first = tl.load(tiles + 3 * tile + 1)
        end = tl.load(tiles + 3 * tile + 2)
        expert = expert_id.to(tl.int64)
        # rows past the end repeat the last one: cheaper than a mask in the loop, and never stored
        row = tl.minimum(first + offs_m, end - 1).to(tl.int64)
        col = start_n + offs_n
        in_n = col < out_features

        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        if x_desc is None:
            if rows is None:
                source = row
            else:
                source = tl.load(rows + row).to(tl.int64)
            x_ptrs = x + source[:, None] * stride_x + offs_k[None, :]
        if weight_desc is None:
            w_ptrs = weight + expert * stride_we + tl.cast(start_n, tl.int64) * stride_wn
            w_ptrs = w_ptrs + offs_k[:, None] * stride_wk + offs_n[None, :] * stride_wn
        for block_k in range(num_blocks_k):
            start_k = block_k * BLOCK_K
            if x_desc is not None:
                left = x_desc.load([first, start_k])
            elif EVEN_K:
                left = tl.load(x_ptrs)
            else:
                left = tl.load(x_ptrs, mask=(offs_k < in_features - start_k)[None, :], other=0.0)
            if weight_desc is not None:
                if TRANSPOSED:
                    right = weight_desc.load([expert_id, start_n, start_k]).reshape(BLOCK_N, BLOCK_K).T
                else:
                    right = weight_desc.load([expert_id, start_k, start_n]).reshape(BLOCK_K, BLOCK_N)
            elif EVEN_K and EVEN_N:
                right = tl.load(w_ptrs)
            elif EVEN_K:
                right = tl.load(w_ptrs, mask=in_n[None, :], other=0.0)
            else:
                in_k = offs_k < in_features - start_k
                right = tl.load(w_ptrs, mask=in_k[:, None] & in_n[None, :], other=0.0)
            acc = tl.dot(left, right, acc, input_precision="ieee")
            if x_desc is None:
                x_ptrs += BLOCK_K
            if weight_desc is None:
                w_ptrs += tl.cast(BLOCK_K, tl.int64) * stride_wk

        # not before the loop: flattened, one whose accumulator does not start at zero is not pipelined
        if xa is not None:
            acc = acc * (1.0 / scale)  # and back below: the product needs no second accumulator in registers
            xa_ptrs = xa + row[:, None] * stride_xa
            b_ptrs = b + expert * stride_be + col[None, :].to(tl.int64) * stride_bn
            if RANK == BLOCK_R:
                acc = _low_rank(acc, xa_ptrs, b_ptrs, 0, rank, stride_br, in_n, BLOCK_R)
            else:  # not unrolled, which would load all of them at once into registers
                for start_r in tl.range(0, RANK, BLOCK_R, num_stages=1):
                    acc = _low_rank(acc, xa_ptrs, b_ptrs, start_r, rank, stride_br, in_n, BLOCK_R)
            acc = acc * scale
        if bias is not None:
            acc = acc + tl.load(bias + expert * stride_bias + col, mask=in_n, other=0.0).to(tl.float32)[None, :]
        out_ptrs = out + row[:, None] * stride_out + col[None, :]
        stored = (first + offs_m < end)[:, None] & in_n[None, :]
        tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=stored)

    # rows of no expert of this process
    past = tl.load(offsets + num_experts - 1)
    for start_m in range(past + program * BLOCK_M, num_rows, tl.num_programs(0) * BLOCK_M):
        rest = (start_m + offs_m).to(tl.int64)
        for start_n in range(0, out_features, BLOCK_N):
            col = start_n + offs_n
            stored = (rest < num_rows)[:, None] & (col < out_features)[None, :]
            zeros = tl.zeros((BLOCK_M, BLOCK_N), dtype=out.dtype.element_ty)
            tl.store(out + rest[:, None] * stride_out + col[None, :], zeros, mask=stored)


@triton.jit
def grouped_gram_kernel(
    x,  # (num_x, width_x)
    x_desc,  # the same as a tensor descriptor with blocks (BLOCK_K, BLOCK_M), or None
    y,  # (num_y, width_y)
    y_desc,  # the same, (BLOCK_K, BLOCK_N), or None; both or neither
    out,  # (num_experts, width_x, width_y)
    offsets,  # (num_experts,) int32
    x_rows,  # (num_rows,) integer, or None: the row of x of each row
    y_rows,  # (num_rows,) integer, or None
    scale,  # float
    width_x,
    width_y,
    stride_x,
    stride_y,
    stride_oe,
    stride_om,
    stride_on,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_M: tl.constexpr,
    EVEN_N: tl.constexpr,
):
    """out[e] = scale * sum of outer(x[x_rows[i]], y[y_rows[i]]) over the rows i of expert e."""
    num_blocks_m = tl.cdiv(width_x, BLOCK_M)
    num_blocks_n = tl.cdiv(width_y, BLOCK_N)
    expert = tl.program_id(0) // (num_blocks_m * num_blocks_n)
    block = tl.program_id(0) % (num_blocks_m * num_blocks_n)
    first_m = block // (GROUP * num_blocks_n) * GROUP
    height = tl.minimum(num_blocks_m - first_m, GROUP)
    in_group = block % (GROUP * num_blocks_n)
    start_m = (first_m + in_group % height) * BLOCK_M
    start_n = in_group // height * BLOCK_N
    first = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_n = start_n + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    in_m = (offs_m < width_x) | EVEN_M
    in_n = (offs_n < width_y) | EVEN_N

    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if x_desc is None:
        start = first
    else:
        # descriptors know no mask along the rows: they read the blocks that are full
        start = first + (end - first) // BLOCK_K * BLOCK_K
        for k in range(first, start, BLOCK_K):
            acc = tl.dot(x_desc.load([k, start_m]).T, y_desc.load([k, start_n]), acc, input_precision="ieee")
    for k in range(start, end, BLOCK_K):
        x_row = k + offs_k
        here = x_row < end
        y_row = x_row
        if x_rows is not None:
            x_row = tl.load(x_rows + x_row, mask=here, other=0)
        if y_rows is not None:
            y_row = tl.load(y_rows + y_row, mask=here, other=0)
        # transposed where it is loaded: a transposed block does not go through asynchronous copies on sm_80
        left = tl.load(
            x + offs_m[:, None] + x_row.to(tl.int64)[None, :] * stride_x, mask=in_m[:, None] & here[None, :], other=0.0
        )
        right = tl.load(
            y + y_row.to(tl.int64)[:, None] * stride_y + offs_n[None, :], mask=here[:, None] & in_n[None, :], other=0.0
        )
        acc = tl.dot(left, right, acc, input_precision="ieee")

    acc = acc * scale
    out_ptrs = out + expert.to(tl.int64) * stride_oe
    out_ptrs = out_ptrs + offs_m[:, None].to(tl.int64) * stride_om + offs_n[None, :].to(tl.int64) * stride_on
    tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])
