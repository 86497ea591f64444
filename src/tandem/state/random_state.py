"""The random generators of a process that anybody may draw from: Python's, NumPy's, torch's."""

import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from tandem.api.team import Team


class RandomStates:
    """The random states of all ranks. If a run goes on with more ranks, each new rank takes the state of rank 0."""

    def __init__(self, device: str, team: Team):
        """``device``: of this process; a GPU has a generator of its own."""
        self._device, self._team = device, team

    def state_dict(self) -> dict[str, Any]:
        """Collective."""
        return {"ranks": self._team.gather(self._here())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rank = self._team.rank
        mine = state["ranks"][rank if rank < len(state["ranks"]) else 0]
        version, words, gauss = mine["python"]
        random.setstate((version, tuple(words), gauss))
        inner = {"key": numpy.array(mine["numpy"]["key"], dtype=numpy.uint32), "pos": mine["numpy"]["pos"]}
        known = numpy.random.get_state(legacy=False)
        numpy.random.set_state(
            {**known, "state": inner, "has_gauss": mine["numpy"]["has_gauss"], "gauss": mine["numpy"]["gauss"]}
        )
        torch.set_rng_state(mine["torch"].clone())
        if self._device.startswith("cuda") and mine["cuda"] is not None:
            torch.cuda.set_rng_state(mine["cuda"].clone(), self._device)

    def _here(self) -> dict[str, Any]:
        version, words, gauss = random.getstate()
        numbers: Any = numpy.random.get_state(legacy=False)
        cuda = torch.cuda.get_rng_state(self._device) if self._device.startswith("cuda") else None
        return {
            "python": [version, list(words), gauss],
            "numpy": {
                "key": numbers["state"]["key"].tolist(),
                "pos": int(numbers["state"]["pos"]),
                "has_gauss": int(numbers["has_gauss"]),
                "gauss": float(numbers["gauss"]),
            },
            "torch": torch.get_rng_state(),
            "cuda": cuda,
        }
