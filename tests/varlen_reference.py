"""Attention of sequences of several lengths, one matrix each: what `torch.nn.attention.varlen.varlen_attn` computes, with
the same arguments, for any device and dtype."""

import torch


def varlen_reference(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    """``query [Tq, Hq, D]``, ``key`` and ``value [Tk, Hkv, D]``; the queries of a sequence are the last of its keys."""
    assert enable_gqa or query.shape[1] == key.shape[1]
    outputs = [
        torch.einsum("hqk,khd->qhd", weights, v).to(query.dtype)
        for *_, v, weights in _sequences(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size)
    ]
    return torch.cat(outputs)


def _sequences(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size):
    """Of each sequence: where its queries and keys lie, and in float32 its queries, keys and values with as many heads, and
    the weights ``[heads, queries, keys]``."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    groups = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    left, right = window_size
    bounds = [(slice(*q), slice(*k)) for q, k in zip(_pairs(cu_seq_q), _pairs(cu_seq_k), strict=True)]
    for of_q, of_k in bounds:
        queries, keys = of_q.stop - of_q.start, of_k.stop - of_k.start
        assert queries <= max_q and keys <= max_k
        q, k, v = query[of_q].float(), *(x[of_k].repeat_interleave(groups, 1).float() for x in (key, value))
        at, seen = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
        hidden = torch.zeros(queries, keys, dtype=torch.bool)
        if right >= 0:
            hidden = hidden | (seen > at + right)
        if left >= 0:
            hidden = hidden | (seen < at - left)
        scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(hidden, float("-inf"))
        yield of_q, of_k, q, k, v, scores.softmax(-1)


def _pairs(bounds):
    return zip(bounds.tolist(), bounds.tolist()[1:], strict=False)


def varlen_forward(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False, scale=None, window=None, gqa=False, *_):
    """The operator behind `varlen_attn`: output, log-sum-exps (0 here), state of a generator."""
    settings = {"scale": scale, "window_size": tuple(window or (-1, -1)), "enable_gqa": gqa}
    out = varlen_reference(q, k, v, cu_q, cu_k, max_q, max_k, **settings)
    return out, torch.zeros(q.shape[1], q.shape[0]), torch.zeros(2, dtype=torch.uint64)


def varlen_backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, is_causal, state, scale=None, window=None):
    """Its gradients."""
    wanted = tuple(torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    groups, factor = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5 if scale is None else scale
    for of_q, of_k, q_, k_, v_, weights in _sequences(q, k, v, cu_q, cu_k, max_q, max_k, scale, tuple(window or (-1, -1))):
        g = grad[of_q].float()
        of_weights = torch.einsum("qhd,khd->hqk", g, v_)
        of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * factor
        wanted[0][of_q] = torch.einsum("hqk,khd->qhd", of_scores, k_)
        for found, x in zip(
            wanted[1:], (torch.einsum("hqk,qhd->khd", of_scores, q_), torch.einsum("hqk,qhd->khd", weights, g)), strict=True
        ):
            found[of_k] = x.unflatten(1, (-1, groups)).sum(2)
    return tuple(found.to(q.dtype) for found in wanted)
