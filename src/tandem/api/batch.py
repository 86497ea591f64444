"""A batch: packed sequences in a `TensorDict`, one table of its fields, and the operations on sequences.

A packed batch of N sequences with T tokens in all has ``cu_seqlens [N + 1]`` (int64, starts at 0, ends at T), *token*
fields ``[T, …]``, *sequence* fields ``[N, …]`` and *meta* fields that belong to the batch as a whole. Images and sounds are
not in it: its token field ``media`` has their numbers, see `tandem.api.media`. `TensorDict` is only the container: its own
``cat``, ``stack``, ``split`` and indexing do not know sequences. Every function returns a new batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tandem.api.failures import BatchError
from tandem.api.lazy_torch import TensorDict, torch

Kind = Literal["token", "sequence", "weight", "meta"]


@dataclass(frozen=True)
class Field:
    """One field: what it has an entry for, its dtype, and what padding holds.

    Kind ``weight`` is per token or per sequence, told by its length.
    """

    kind: Kind
    dtype: Literal["int64", "float32", "bool"] | None = None
    """Name of the torch dtype; None keeps the dtype of the values."""

    padding: float = 0
    meaning: str = ""


FIELDS: dict[str, Field] = {
    "input_ids": Field("token", "int64", 0, "tokens, media placeholders expanded"),
    "media": Field("token", "int64", 0, "number of the medium whose placeholder it is, 0 for text; absent for text alone"),
    "loss_mask": Field("token", "bool", False, "the policy produced the token and is trained on it"),
    "rollout_logprobs": Field("token", "float32", 0, "by the inference engine"),
    "proximal_logprobs": Field("token", "float32", 0, "by the trainer, just before this update"),
    "reference_logprobs": Field("token", "float32", 0, "by the frozen reference"),
    "versions": Field("token", "int64", -1, "weight version that produced the token"),
    "token_rewards": Field("token", "float32", 0, "earned after the token"),
    "teacher_logprobs": Field("token", "float32", 0, "by the frozen teacher"),
    "step_end": Field("token", "bool", False, "last token of a step that was judged"),
    "step_right": Field("token", "bool", False, "there: the step was judged right"),
    "entropy": Field("token", "float32", 0, "of the proximal policy"),
    "values": Field("token", "float32", 0, "before the token"),
    "advantages": Field("token", "float32", 0, ""),
    "returns": Field("token", "float32", 0, ""),
    "expired": Field("token", "bool", False, "older than η at consumption; out of the loss, still in denominators"),
    "prepared": Field("token", "float32", 0, "what the policy loss made of the whole batch before the update"),
    "dropped": Field("token", "bool", False, "weight 0: expired, or masked by shaping; still in denominators"),
    "correction": Field("token", "float32", 0, "behaviour correction weight"),
    "loss_weights": Field("weight", "float32", 0, "weight of each loss in the global sum"),
    "reward": Field("sequence", "float32", 0, "of the sample"),
    "sample_length": Field("sequence", "int64", 0, "trained tokens of the sample, all trajectories together"),
    "shaped_reward": Field("sequence", "float32", 0, "of the sample, after shaping"),
    "accuracy": Field("sequence", "float32", 0, "of the sample; NaN where unknown"),
    "temperature": Field("sequence", "float32", 1, "logits were divided by it"),
    "group_id": Field("sequence", "int64", -1, "the prompt's group"),
    "sample_id": Field("sequence", "int64", -1, "the sample; unique in the batch"),
    "unit_id": Field("sequence", "int64", -1, "sequences that must stay in one micro-batch"),
    "stop_reason": Field("sequence", "int64", 0, "`StopReason`"),
    "in_statistics": Field("sequence", "bool", False, "enters group statistics"),
    "in_loss": Field("sequence", "bool", False, "counts in N and is trained on"),
    "greedy": Field("sequence", "bool", False, "of the group's greedy sample, a baseline; absent where there is none"),
    "replayed": Field("sequence", "bool", False, "of a group of an earlier batch; absent where there is none"),
    "chosen": Field("sequence", "bool", False, "the better side of a pair, or a completion judged desirable"),
    "safe": Field("sequence", "bool", False, "the completion was judged safe"),
    "margin": Field("sequence", "float32", 0, "by which a reward model should score the better side higher"),
    "baseline": Field("sequence", "float32", 0, "KTO's z, the same for the whole batch"),
    "bootstrap_value": Field("sequence", "float32", 0, "value after the last token"),
}


def field_of(name: str) -> Field:
    """The declaration of a field; ``rewards/<name>`` is a sequence field.

    Raises:
        BatchError: the name is not in the table.
    """
    if name in FIELDS:
        return FIELDS[name]
    if name.startswith("rewards/"):
        return FIELDS["reward"]
    if name == "cu_seqlens":
        return Field("meta", "int64")
    raise BatchError(f"no field is called {name!r}; declare it with tandem.api.batch.declare(name, Field(...))")


def declare(name: str, field: Field) -> None:
    """Adds a field to the table, for a stage of one's own. Declaring the same field twice is fine, another one is not."""
    if FIELDS.setdefault(name, field) != field:
        raise BatchError(f"field {name!r} is declared already, as {FIELDS[name]}")


def num_sequences(batch: TensorDict) -> int:
    """N."""
    return len(batch["cu_seqlens"]) - 1


def lengths(batch: TensorDict) -> torch.Tensor:
    """Tokens of each sequence, ``[N]`` int64."""
    ends: torch.Tensor = batch["cu_seqlens"]
    return ends.diff()


def sequence_index(batch: TensorDict) -> torch.Tensor:
    """For each token the sequence it belongs to, ``[T]`` int64."""
    return torch.repeat_interleave(lengths(batch), output_size=_num_tokens(batch))


def _num_tokens(batch: TensorDict) -> int:
    """T; of a batch with tokens no GPU is asked for it."""
    return len(batch["input_ids"]) if "input_ids" in batch.keys() else int(batch["cu_seqlens"][-1])


def per_token(batch: TensorDict, values: torch.Tensor) -> torch.Tensor:
    """Spreads ``[N, …]`` over the tokens, ``[T, …]``."""
    return values[sequence_index(batch)]


def sum_by_sequence(batch: TensorDict, values: torch.Tensor) -> torch.Tensor:
    """Sums ``[T]`` over each sequence, ``[N]``."""
    return values.new_zeros(num_sequences(batch)).index_add(0, sequence_index(batch), values)


def _kind(name: str, value: Any, batch_sizes: tuple[int, int]) -> Kind:
    """``batch_sizes``: (T, N)."""
    kind = field_of(name).kind
    if kind != "weight":
        return kind
    return "token" if len(value) == batch_sizes[0] else "sequence"


def _kinds(batch: TensorDict) -> dict[str, Kind]:
    sizes = (int(batch["cu_seqlens"][-1]), num_sequences(batch))
    return {str(name): _kind(str(name), batch[name], sizes) for name in batch.keys() if name != "cu_seqlens"}


def check(batch: TensorDict) -> TensorDict:
    """Returns the batch if every field has the length that its kind demands.

    Raises:
        BatchError: names the field, its length and the one expected.
    """
    cu_seqlens = batch["cu_seqlens"]
    if len(cu_seqlens) < 1 or cu_seqlens[0] != 0 or (cu_seqlens.diff() < 0).any():
        raise BatchError(f"cu_seqlens must start at 0 and never fall, got {cu_seqlens.tolist()[:8]}")
    total, count = int(cu_seqlens[-1]), num_sequences(batch)
    for name, kind in _kinds(batch).items():
        value = batch[name]
        expected = {"token": total, "sequence": count}.get(kind)
        if expected is not None and len(value) != expected:
            raise BatchError(f"{kind} field {name!r} must have length {expected}, got {len(value)}")
    return batch


def pack(trajectories: Sequence[Mapping[str, Any]]) -> TensorDict:
    """Packs sequences end to end.

    Each mapping holds token fields ``[S, …]`` (at least ``input_ids``) and sequence fields as scalars (or ``[…]``); all
    mappings have the same fields.

    Raises:
        BatchError: no sequences, different fields, or token fields of different length; names the sequence.
    """
    if not trajectories:
        raise BatchError("nothing to pack: the list of sequences is empty")
    names = list(trajectories[0])
    for i, trajectory in enumerate(trajectories):
        if set(trajectory) != set(names):
            raise BatchError(f"sequence {i} has other fields than sequence 0: {sorted(set(trajectory) ^ set(names))}")
        size = len(trajectory["input_ids"])
        for name in names:
            if field_of(name).kind == "token" and len(trajectory[name]) != size:
                raise BatchError(f"sequence {i}: {name} has {len(trajectory[name])} entries, input_ids has {size}")
    columns: dict[str, torch.Tensor] = {}
    for name in names:
        field, values = field_of(name), [trajectory[name] for trajectory in trajectories]
        dtype = None if field.dtype is None else getattr(torch, field.dtype)
        join = torch.cat if field.kind == "token" else torch.stack
        columns[name] = join([torch.as_tensor(value, dtype=dtype) for value in values])
    sizes = torch.tensor([len(trajectory["input_ids"]) for trajectory in trajectories])
    columns["cu_seqlens"] = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    return check(TensorDict(columns, batch_size=[]))


def _rows(indices: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Positions of the rows of the chosen sequences, when sequence i owns ``sizes[i]`` rows in a row."""
    starts = sizes.cumsum(0) - sizes
    chosen = sizes[indices]
    within = torch.arange(int(chosen.sum()), device=sizes.device) - torch.repeat_interleave(
        chosen.cumsum(0) - chosen, chosen
    )
    return torch.repeat_interleave(starts[indices], chosen) + within


def select(batch: TensorDict, indices: torch.Tensor | Sequence[int]) -> TensorDict:
    """The sequences with these indices ``[M]``, in this order; an index may come twice. A boolean ``[N]`` works too."""
    index = torch.as_tensor(indices, device=batch["cu_seqlens"].device)
    index = index.nonzero().flatten() if index.dtype == torch.bool else index.to(torch.int64)
    if len(index) and (int(index.min()) < 0 or int(index.max()) >= num_sequences(batch)):
        raise BatchError(f"sequence indices must lie in 0…{num_sequences(batch) - 1}, got {index.tolist()[:8]}")
    tokens = _rows(index, lengths(batch))
    columns = {}
    for name, kind in _kinds(batch).items():
        if kind == "token":
            columns[name] = batch[name][tokens]
        elif kind == "sequence":
            columns[name] = batch[name][index]
        else:
            columns[name] = batch[name]
    sizes = lengths(batch)[index]
    columns["cu_seqlens"] = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    return TensorDict(columns, batch_size=[])


def split(batch: TensorDict, sizes: Sequence[int]) -> list[TensorDict]:
    """Consecutive parts of ``sizes`` sequences each.

    Raises:
        BatchError: the sizes do not add up to N.
    """
    if sum(sizes) != num_sequences(batch):
        raise BatchError(f"sizes {list(sizes)} add up to {sum(sizes)}, the batch has {num_sequences(batch)} sequences")
    bounds = torch.tensor([0, *sizes]).cumsum(0).tolist()
    return [select(batch, torch.arange(a, b)) for a, b in zip(bounds, bounds[1:], strict=False)]


def concatenate(batches: Iterable[TensorDict]) -> TensorDict:
    """The sequences of all batches, in order.

    Raises:
        BatchError: no batches, or different fields.
    """
    batches = list(batches)
    if not batches:
        raise BatchError("nothing to concatenate")
    names = {str(name) for name in batches[0].keys()}
    for batch in batches:
        if set(batch.keys()) != names:
            raise BatchError(f"batches have different fields: {sorted(set(batch.keys()) ^ names)}")
    columns = {}
    for name in names - {"cu_seqlens"}:
        values = [batch[name] for batch in batches]
        columns[name] = values[0] if field_of(name).kind == "meta" else torch.cat(values)
    sizes = torch.cat([lengths(batch) for batch in batches])
    columns["cu_seqlens"] = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    return check(TensorDict(columns, batch_size=[]))


def pad(batch: TensorDict, num_tokens: int) -> TensorDict:
    """Adds one sequence of padding, so that the batch has ``num_tokens`` tokens; nothing in it is trained.

    Raises:
        BatchError: the batch has more tokens already.
    """
    missing = num_tokens - int(batch["cu_seqlens"][-1])
    if missing < 0:
        raise BatchError(f"the batch has {int(batch['cu_seqlens'][-1])} tokens, more than {num_tokens}")
    if missing == 0:
        return batch.clone(recurse=False)
    rows = {"token": missing, "sequence": 1}
    columns = {}
    for name, kind in _kinds(batch).items():
        value = batch[name]
        if kind == "meta":
            columns[name] = value
            continue
        filler = value.new_full((rows[kind], *value.shape[1:]), field_of(name).padding)
        columns[name] = torch.cat([value, filler])
    columns["cu_seqlens"] = torch.cat([batch["cu_seqlens"], batch["cu_seqlens"].new_tensor([num_tokens])])
    return TensorDict(columns, batch_size=[])


def unpack(batch: TensorDict) -> list[dict[str, torch.Tensor]]:
    """The inverse of `pack`: one mapping a sequence."""
    kinds, bounds = _kinds(batch), batch["cu_seqlens"].tolist()
    rows = []
    for i, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        row = {}
        for name, kind in kinds.items():
            if kind == "token":
                row[name] = batch[name][start:end]
            elif kind == "sequence":
                row[name] = batch[name][i]
        rows.append(row)
    return rows
