"""A batch: packed sequences in a `TensorDict`, one table of its fields, and the operations on sequences.

A packed batch of N sequences with T tokens in total has ``cu_seqlens [N + 1]`` (int64, starts at 0, ends at T), *token*
fields ``[T, …]``, *sequence* fields ``[N, …]`` and *meta* fields that belong to the batch as a whole. Images and sounds are
not in the batch: the token field ``media`` has their numbers, see `tandem.api.media`. `TensorDict` is only the container: do
not use its own ``cat``, ``stack``, ``split`` and indexing, which ignore sequences. Every function here returns a new batch.

A *stage* is a method that a training step calls. It declares the fields of the batch and the state that it reads and writes.
The graph of a run is traced from its step with these declarations alone, without running the stages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tandem.api.failures import BatchError
from tandem.api.lazy_torch import TensorDict, torch

Kind = Literal["token", "sequence", "weight", "meta"]


@dataclass(frozen=True)
class Field:
    """Declaration of a field: one entry per token, sequence or batch (``kind``), its dtype, and its value in padding.

    A field of kind ``weight`` has one entry per token or per sequence; its length shows which.
    """

    kind: Kind
    dtype: Literal["int64", "float32", "bool"] | None = None
    """Name of the torch dtype; None keeps the dtype of the values."""

    padding: float = 0
    meaning: str = ""


FIELDS: dict[str, Field] = {
    "input_ids": Field("token", "int64", 0, "tokens, media placeholders expanded"),
    "media": Field(
        "token", "int64", 0, "number of the medium whose placeholder the token is; 0: text; absent without media"
    ),
    "loss_mask": Field("token", "bool", False, "True: the policy produced the token and is trained on it"),
    "rollout_logprobs": Field("token", "float32", 0, "log-probability by the inference engine"),
    "proximal_logprobs": Field("token", "float32", 0, "log-probability by the trainer, just before this update"),
    "reference_logprobs": Field("token", "float32", 0, "log-probability by the frozen reference"),
    "versions": Field("token", "int64", -1, "weight version that produced the token"),
    "token_rewards": Field("token", "float32", 0, "part of the reward that is earned after the token"),
    "teacher_logprobs": Field("token", "float32", 0, "log-probability by the frozen teacher"),
    "step_end": Field("token", "bool", False, "True: the last token of a step that was judged"),
    "step_right": Field("token", "bool", False, "True at a `step_end`: the step was judged right"),
    "entropy": Field("token", "float32", 0, "entropy of the proximal policy"),
    "values": Field("token", "float32", 0, "the critic's value of the state before the token"),
    "advantages": Field("token", "float32", 0, ""),
    "returns": Field("token", "float32", 0, ""),
    "expired": Field(
        "token", "bool", False, "True: older than η versions when consumed; not in the loss, in its denominators"
    ),
    "prepared": Field("token", "float32", 0, "values that the policy loss computed from the whole batch before the update"),
    "dropped": Field("token", "bool", False, "True: weight 0, because expired or masked by shaping; still in denominators"),
    "correction": Field("token", "float32", 0, "behaviour correction weight"),
    "loss_weights": Field("weight", "float32", 0, "weight of each loss in the global sum"),
    "reward": Field("sequence", "float32", 0, "reward of the sample"),
    "sample_length": Field("sequence", "int64", 0, "number of trained tokens in all trajectories of the sample"),
    "shaped_reward": Field("sequence", "float32", 0, "reward of the sample after shaping"),
    "accuracy": Field("sequence", "float32", 0, "accuracy of the sample; NaN if unknown"),
    "temperature": Field("sequence", "float32", 1, "temperature by which the logits were divided"),
    "group_id": Field("sequence", "int64", -1, "number of the prompt's group"),
    "sample_id": Field("sequence", "int64", -1, "number of the sample, unique in the batch"),
    "unit_id": Field("sequence", "int64", -1, "number that sequences share if they must be in one micro-batch"),
    "stop_reason": Field("sequence", "int64", 0, "`StopReason`"),
    "in_statistics": Field("sequence", "bool", False, "True: the sample counts in the statistics of its group"),
    "in_loss": Field("sequence", "bool", False, "True: the sample is trained on and counts in N"),
    "greedy": Field("sequence", "bool", False, "True: part of a greedy sample, a baseline; absent without such samples"),
    "replayed": Field("sequence", "bool", False, "True: part of a group of an earlier batch; absent without such groups"),
    "chosen": Field("sequence", "bool", False, "True: the better side of a pair, or a desirable completion"),
    "safe": Field("sequence", "bool", False, "True: the completion was judged safe"),
    "margin": Field("sequence", "float32", 0, "difference by which the better side should score higher"),
    "baseline": Field("sequence", "float32", 0, "reference point z of the KTO loss, the same for the whole batch"),
    "bootstrap_value": Field("sequence", "float32", 0, "the critic's value of the state after the last token"),
}

FORWARD = ("input_ids", "loss_mask", "temperature")
"""Fields that a forward pass reads."""

BEFORE_UPDATE = ("proximal_logprobs", "reference_logprobs", "entropy")
"""Fields that the passes before an update add."""

GROUPED = ("group_id", "sample_id", "in_statistics")
"""Fields that statistics over the samples of a group read."""


def field_of(name: str) -> Field:
    """Returns the declaration of a field. Every name ``rewards/<name>`` is a field with one value per sequence.

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
    """Adds a field to the table, for a user's own stage.

    Raises:
        BatchError: the name is declared already, with another declaration.
    """
    if FIELDS.setdefault(name, field) != field:
        raise BatchError(f"field {name!r} is declared already, as {FIELDS[name]}")


def num_sequences(batch: TensorDict) -> int:
    """Returns N, the number of sequences."""
    return len(batch["cu_seqlens"]) - 1


def lengths(batch: TensorDict) -> torch.Tensor:
    """Returns the number of tokens of each sequence, ``[N]`` int64."""
    ends: torch.Tensor = batch["cu_seqlens"]
    return ends.diff()


def sequence_index(batch: TensorDict) -> torch.Tensor:
    """Returns the index of each token's sequence, ``[T]`` int64."""
    return torch.repeat_interleave(lengths(batch), output_size=_num_tokens(batch))


def _num_tokens(batch: TensorDict) -> int:
    """Returns T, the number of tokens, without waiting for a GPU if the batch has ``input_ids``."""
    return len(batch["input_ids"]) if "input_ids" in batch.keys() else int(batch["cu_seqlens"][-1])


def per_token(batch: TensorDict, values: torch.Tensor) -> torch.Tensor:
    """Repeats the value of each sequence, ``[N, …]``, for each of its tokens: returns ``[T, …]``."""
    return values[sequence_index(batch)]


def sum_by_sequence(batch: TensorDict, values: torch.Tensor) -> torch.Tensor:
    """Sums the values of the tokens, ``[T]``, over each sequence: returns ``[N]``."""
    return values.new_zeros(num_sequences(batch)).index_add(0, sequence_index(batch), values)


def trained_tokens(batch: TensorDict) -> torch.Tensor:
    """Returns ``loss_mask [T]`` without the first token of each sequence, which is not predicted."""
    mask: torch.Tensor = batch["loss_mask"]
    starts = batch["cu_seqlens"][:-1]
    first = mask.new_zeros(len(mask) + 1).index_fill(0, starts, True)  # T + 1: an empty sequence may start at T
    return mask & ~first[:-1]


def _kind(name: str, value: Any, batch_sizes: tuple[int, int]) -> Kind:
    """Returns the kind of a field; a ``weight`` becomes ``token`` or ``sequence``. ``batch_sizes``: (T, N)."""
    kind = field_of(name).kind
    if kind != "weight":
        return kind
    return "token" if len(value) == batch_sizes[0] else "sequence"


def _kinds(batch: TensorDict) -> dict[str, Kind]:
    sizes = (int(batch["cu_seqlens"][-1]), num_sequences(batch))
    return {str(name): _kind(str(name), batch[name], sizes) for name in batch.keys() if name != "cu_seqlens"}


def check(batch: TensorDict) -> TensorDict:
    """Checks that every field has the length that its kind demands, and returns the batch.

    Raises:
        BatchError: a length is wrong; the message has the field, its length and the expected one.
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


def with_fields(batch: TensorDict, **fields: torch.Tensor) -> TensorDict:
    """Returns a new batch with fields added or replaced; other tensors are shared."""
    return TensorDict(dict(batch.items()) | fields, batch_size=[])


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
    """Returns the row indices of the chosen sequences, where sequence i owns ``sizes[i]`` consecutive rows."""
    starts = sizes.cumsum(0) - sizes
    chosen = sizes[indices]
    within = torch.arange(int(chosen.sum()), device=sizes.device) - torch.repeat_interleave(
        chosen.cumsum(0) - chosen, chosen
    )
    return torch.repeat_interleave(starts[indices], chosen) + within


def select(batch: TensorDict, indices: torch.Tensor | Sequence[int]) -> TensorDict:
    """Returns a batch of the sequences ``indices``, ``[M]``, in this order and with repeats. ``indices`` may also be a bool
    mask ``[N]`` of the sequences."""
    index = torch.as_tensor(indices, device=batch["cu_seqlens"].device)
    index = index.nonzero().flatten() if index.dtype == torch.bool else index.to(torch.int64)
    if len(index) and (int(index.min()) < 0 or int(index.max()) >= num_sequences(batch)):
        raise BatchError(f"sequence indices must lie in 0…{num_sequences(batch) - 1}, got {index.tolist()[:8]}")
    sizes = lengths(batch)
    rows = {"token": _rows(index, sizes), "sequence": index}
    columns = {n: batch[n][rows[kind]] if kind in rows else batch[n] for n, kind in _kinds(batch).items()}
    sizes = sizes[index]
    columns["cu_seqlens"] = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    return TensorDict(columns, batch_size=[])


def split(batch: TensorDict, sizes: Sequence[int]) -> list[TensorDict]:
    """Splits a batch into consecutive parts; part i has ``sizes[i]`` sequences.

    Raises:
        BatchError: the sizes do not add up to N.
    """
    if sum(sizes) != num_sequences(batch):
        raise BatchError(f"sizes {list(sizes)} add up to {sum(sizes)}, the batch has {num_sequences(batch)} sequences")
    bounds = torch.tensor([0, *sizes]).cumsum(0).tolist()
    return [select(batch, torch.arange(a, b)) for a, b in zip(bounds, bounds[1:], strict=False)]


def concatenate(batches: Iterable[TensorDict]) -> TensorDict:
    """Returns one batch with the sequences of all batches, in order. Meta fields are those of the first batch.

    Raises:
        BatchError: there are no batches, or their fields differ.
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
    """Adds one sequence of padding, so that the batch has ``num_tokens`` tokens; the padding is not trained on.

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
    """Returns one mapping per sequence; the inverse of `pack`. Meta fields are left out."""
    kinds, bounds = _kinds(batch), batch["cu_seqlens"].tolist()
    rows = []
    for i, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        place = {"token": slice(start, end), "sequence": i}
        rows.append({name: batch[name][place[kind]] for name, kind in kinds.items() if kind in place})
    return rows


ROLE_STATES = ("weights", "optimizer", "random")


StageKind = Literal["collect", "score", "check", "pass", "update", "deliver", "keep"]
"""The work of a stage: `collect` makes the batch; `pass` adds fields; `update` trains; `check` only returns metrics;
`deliver` copies weights to another model; `keep` follows a step; `score` runs inside of `collect`."""


def require(batch: TensorDict, field: str, remedy: str) -> None:
    """Raises `BatchError` if the batch lacks a field that the algorithm needs. ``remedy``: the call that adds it."""
    if field not in batch.keys():
        raise BatchError(f"the batch has no {field}, which this algorithm needs; call {remedy} before")


def check_age(batch: TensorDict, version: int, bound: int) -> None:
    """Raises `BatchError` if a token in the loss is more than ``bound`` versions older than ``version``. The rollout marks
    such tokens as expired when it makes a batch, so this is the last guard."""
    if "versions" not in batch.keys():
        return
    trained = trained_tokens(batch) & ~batch["dropped"] & per_token(batch, batch["in_loss"])
    age = version - int(batch["versions"][trained].min()) if bool(trained.any()) else 0
    if age > bound:
        raise BatchError(
            f"a trained token is {age} versions old, and max_head_offpolicyness is {bound}; publish weights after each "
            "ppo_update, or mark older tokens in the field 'expired'"
        )


@dataclass(frozen=True)
class Declaration:
    """The fields and state that a stage reads and writes.

    Example: ``Declaration("compute_advantages", reads=("reward", "group_id"), adds=("advantages",))``
    """

    name: str
    """Name of the method."""

    reads: tuple[str, ...] = ()
    adds: tuple[str, ...] = ()
    reads_state: tuple[str, ...] = ()
    writes_state: tuple[str, ...] = ()
    may_read: tuple[str, ...] = ()
    """Fields that are read if the batch has them, or if the role's configuration needs them. ``rewards/`` stands for every
    field with this prefix."""

    may_add: tuple[str, ...] = ()
    """Fields that are added if the role's configuration needs them."""

    title: str = ""
    """Name of the stage; empty: the method's."""

    time: str = "train"
    """The metric to which the stage's seconds are added, ``time/<time>_s``."""

    @property
    def kind(self) -> StageKind:
        """The work of the stage, derived from the fields and state that it reads and writes."""
        if self.adds or self.may_add:
            return "pass" if self.reads else "collect"
        if "optimizer" in self.writes_state:
            return "update"
        if "weights" in self.writes_state:
            return "deliver"
        return "check" if self.reads else "keep"

    @property
    def computes(self) -> bool:
        """True if the stage needs the models of its role on the device (awake)."""
        return "weights" in (*self.reads_state, *self.writes_state)


def stage(
    title: str = "",
    *,
    reads: tuple[str, ...] = (),
    adds: tuple[str, ...] = (),
    reads_state: tuple[str, ...] = (),
    writes_state: tuple[str, ...] = (),
    may_read: tuple[str, ...] = (),
    may_add: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declares a method as a stage. A stage is called with a batch, ``method(self, batch, …)``, whose fields ``reads`` are
    checked, or without one if it only reads and writes state. Arguments: see `Declaration`.

    Raises:
        BatchError: at a call, if the batch lacks a field; the message names the stage and the batch's fields.
    """
    unknown = set(reads_state + writes_state) - set(ROLE_STATES)
    if unknown:
        raise ValueError(f"role state must be one of {ROLE_STATES}, got {sorted(unknown)}")

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        declaration = Declaration(method.__name__, reads, adds, reads_state, writes_state, may_read, may_add, title)

        @functools.wraps(method)
        def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
            batch = args[0] if args else kwargs.get("batch", {})
            missing = [name for name in reads if name not in batch.keys()]
            if missing:
                raise BatchError(f"{declaration.name} needs the fields {missing}; the batch has {sorted(batch.keys())}")
            return method(self, *args, **kwargs)

        checked.stage = declaration  # type: ignore[attr-defined]
        return checked

    return decorate


update_stage = functools.partial(
    stage, title="update", reads_state=("weights", "optimizer"), writes_state=("weights", "optimizer")
)
"""Declares a method as a stage that takes optimizer steps."""


def stages_of(role: type) -> dict[str, Declaration]:
    """Returns method name → declaration of each stage of a role class."""
    methods = ((name, getattr(role, name)) for name in dir(role))
    return {name: method.stage for name, method in methods if hasattr(method, "stage")}
