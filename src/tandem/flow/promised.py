"""A batch whose fields are computed elsewhere: the step passes it on, and reads nothing of it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict

from tandem.api.stage import Declaration

BOUNDS = "cu_seqlens"
"""The field of every batch, which no stage names."""


@dataclass(frozen=True)
class Promised:
    """The references of each field. Several where a call may add a field that another one has added: the newest first."""

    fields: Mapping[str, tuple[Any, ...]]
    fetch: Callable[[Any], torch.Tensor | None]
    """Waits for what a reference is of; None where that call did not add it."""

    def keys(self) -> Iterable[str]:
        """Names of the fields, also of those that may be added."""
        return self.fields.keys()

    def __getitem__(self, name: str) -> torch.Tensor | None:
        """Reads one field, and keeps nothing of it; None where no call added it."""
        return next((tensor for tensor in map(self.fetch, self.fields[name]) if tensor is not None), None)

    def batch(self) -> TensorDict:
        """All fields that there are. Waits for them."""
        found = {name: self[name] for name in self.fields}
        return TensorDict({name: tensor for name, tensor in found.items() if tensor is not None}, batch_size=[])

    def read_by(self, declared: Declaration) -> Iterator[tuple[str, Any]]:
        """The fields that a stage may read, each with its references in order."""
        asked = (*declared.reads, *declared.may_read, BOUNDS)
        for name, references in self.fields.items():
            if name in asked or f"{name.split('/')[0]}/" in asked:
                yield from ((name, one) for one in references)

    def with_output(self, declared: Declaration, added: Mapping[str, Any]) -> "Promised":
        """The batch as a pass leaves it, which adds these references."""
        older = {name: self.fields.get(name, ()) for name in declared.may_add}
        fields = {name: (one, *older.get(name, ())) for name, one in added.items()}
        return replace(self, fields={**self.fields, **fields})


def added_by(declared: Declaration) -> tuple[str, ...]:
    """The fields that a pass gives back: those that it adds, and those that it may add."""
    return tuple(dict.fromkeys((*declared.adds, *declared.may_add))) if declared.kind == "pass" else ()
