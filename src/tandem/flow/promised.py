"""A batch whose fields are computed elsewhere: the step passes it on, and reads nothing of it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
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

    def __getitem__(self, name: str) -> torch.Tensor:
        """Reads one field, and keeps nothing of it."""
        found = next((tensor for tensor in map(self.fetch, self.fields[name]) if tensor is not None), None)
        if found is None:
            raise KeyError(name)
        return found

    def batch(self) -> TensorDict:
        """All fields that there are. Waits for them."""
        found = {}
        for name, references in self.fields.items():
            tensor = next((tensor for tensor in map(self.fetch, references) if tensor is not None), None)
            found |= {} if tensor is None else {name: tensor}
        return TensorDict(found, batch_size=[])

    def read_by(self, declared: Declaration) -> Iterator[tuple[str, Any]]:
        """The fields that a stage may read, each with its references in order."""
        asked = (*declared.reads, *declared.may_read, BOUNDS)
        for name, references in self.fields.items():
            if name in asked or f"{name.split('/')[0]}/" in asked:
                yield from ((name, one) for one in references)

    def with_output(self, declared: Declaration, added: Mapping[str, Any]) -> "Promised":
        """The batch as a pass leaves it, which adds these references."""
        older = {name: self.fields.get(name, ()) if name in declared.may_add else () for name in added}
        return Promised({**self.fields, **{name: (one, *older[name]) for name, one in added.items()}}, self.fetch)


def added_by(declared: Declaration) -> tuple[str, ...]:
    """The fields that a pass gives back: those that it adds, and those that it may add."""
    return tuple(dict.fromkeys((*declared.adds, *declared.may_add))) if declared.kind == "pass" else ()
