"""Stands for `flash_attn/cute/interface.py` of the package flash-attn-4: its call, with what it does written out.

Names and defaults of the arguments are those of version 4.0.0b36, and it refuses what that refuses.
"""

import torch


CALLS = []


def flash_attn_varlen_func(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    gather_kv_indices=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    block_sparse_tensors=None,
    aux_tensors=None,
    aux_scalars=None,
    return_lse=False,
    scheduler_metadata=None,
    seqlen_k_per_split=None,
    disable_scheduler_metadata=False,
    gather_bwd_recompute_p=False,
    gather_bwd_token_chunk=None,
):
    """Output `(total_q, nheads, hdim_v)`, computed in fp32, and log-sum-exp `(nheads, total_q)`."""
    CALLS.append({name: value for name, value in locals().items() if name not in ("q", "k", "v")})
    CALLS[-1]["shapes"] = [tuple(x.shape) for x in (q, k, v)]
    assert q.dtype == k.dtype == v.dtype and v.dtype in (torch.float16, torch.bfloat16)
    assert k.shape[0] == v.shape[0] and k.shape[1] == v.shape[1] and q.shape[1] % k.shape[1] == 0
    for boundaries in (cu_seqlens_q, cu_seqlens_k):
        assert boundaries.dtype == torch.int32 and boundaries.stride(0) == 1
    assert type(max_seqlen_q) is type(max_seqlen_k) is int
    group = q.shape[1] // k.shape[1]
    query, key, value = (x.float().transpose(0, 1) for x in (q, k, v))
    key, value = (x.repeat_interleave(group, 0) for x in (key, value))
    # of each token its segment, and what there is in it behind the token
    rows, columns = (torch.arange(x.shape[0], device=cu_seqlens_q.device) for x in (q, k))
    row_of, column_of = (
        torch.searchsorted(boundaries, x, right=True, out_int32=True)
        for boundaries, x in ((cu_seqlens_q, rows), (cu_seqlens_k, columns))
    )
    behind_row, behind_column = cu_seqlens_q[row_of] - rows, cu_seqlens_k[column_of] - columns
    distance = behind_column[None, :] - behind_row[:, None]  # the last query stands at the last key
    seen = row_of[:, None] == column_of[None, :]
    left, right = window_size[0], 0 if causal else window_size[1]
    if left is not None:
        seen &= distance <= left
    if right is not None:
        seen &= -distance <= right
    scores = (query @ key.transpose(1, 2) * softmax_scale).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(0, 1).to(q.dtype), scores.logsumexp(-1)
