"""The decode kernel's reference: reads and writes the same addresses, and computes in float64."""

import ctypes

import torch
from torch.nn.functional import scaled_dot_product_attention


def attend(queries, keys, values, table, addresses, longest, window, scale, softcap):
    """Does the same as `paged_kernel.attend`, with the same arguments."""
    for i, head, own in _heads(keys, table):
        for new, first in zip((keys, values), addresses.tolist(), strict=True):
            memory(first, own, head, keys)[own[3] - 1] = new[i, head]
    assert int((table[3] + table[7]).max()) <= longest
    return exact(queries, keys, values, table, addresses, longest, window, scale, softcap).to(queries.dtype)


def written(queries, keys, values, table, addresses, *_):
    """True if the new tokens are in the cache."""
    return all(
        torch.equal(memory(first, own, head, keys)[own[3] - 1], new[i, head])
        for i, head, own in _heads(keys, table)
        for new, first in zip((keys, values), addresses.tolist(), strict=True)
    )


def exact(queries, keys, values, table, addresses, longest, window, scale, softcap):
    """In float64, of what is in the cache: ``[B, heads, D]``."""
    out = torch.empty(queries.shape, dtype=torch.float64)
    for q, k, v, place in visible(queries, keys, table, addresses, window, out):
        scores = q.double() @ k.double().T * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        place.copy_(scores.softmax(-1) @ v.double())
    return out


def flash(queries, keys, values, table, addresses, longest, window, scale, softcap):
    """torch's flash attention in bfloat16, which knows no soft-caps."""
    out = torch.empty(queries.shape, dtype=torch.bfloat16)
    for q, k, v, place in visible(queries, keys, table, addresses, window, out):
        given = (x.bfloat16()[None, None] for x in (q, k, v))  # the query heads of a key head are rows
        place.copy_(scaled_dot_product_attention(*given, scale=scale)[0, 0])
    return out


def visible(queries, keys, table, addresses, window, out):
    """Queries, the keys and values that they see, and the place of the result, for each row and key head."""
    for i, head, own in _heads(keys, table):
        prompt = table.T[i, :4].tolist()
        k, v = (
            torch.cat([memory(first, part, head, keys) for part in (prompt, own) if part[3]]) for first in addresses.tolist()
        )
        first = 0 if window is None else max(0, len(k) - window)
        yield _of(queries, i, head, keys), k[first:], v[first:], _of(out, i, head, keys)


def memory(addresses, part, head, like):
    """The tokens of a head of a row, ``[n, D]``, where they are."""
    dim, size = like.shape[-1], like.dtype.itemsize
    slab, place, step, tokens = part
    raw = (ctypes.c_char * (tokens * dim * size)).from_address(addresses[slab] + (place + head * step) * dim * size)
    return torch.frombuffer(raw, dtype=like.dtype).view(tokens, dim)


def _of(tensor, row, head, keys):
    return tensor[row].unflatten(0, (keys.shape[1], -1))[head]


def _heads(keys, table):
    for i, line in enumerate(table.T.tolist()):
        for head in range(keys.shape[1]):
            yield i, head, line[4:]
