"""The label of a server's weights: a name that only one client gives, so that nobody else's weights pass for ours."""

import uuid
from collections.abc import Sequence

from tandem.api.failures import ServerFailed
from tandem.api.weights import WeightVersion


class Labels:
    """Version → label and back. A label names run, model, number and digest, and this client by a random word."""

    def __init__(self, url: str):
        self._url = url
        self._nonce = uuid.uuid4().hex[:8]
        self._numbers: dict[str, int] = {}

    def of(self, version: WeightVersion) -> str:
        """The label of a version, known from now on."""
        label = f"{version.run or 'tandem'}/{version.model}/{version.number}/{version.digest[:12]}/{self._nonce}"
        self._numbers[label] = version.number
        return label

    def adopt(self, label: str, otherwise: int) -> int:
        """Takes another client's label for known, and returns its number; ``otherwise`` where it is no label of Tandem's."""
        number = label.rsplit("/", 3)[1] if label.count("/") >= 4 else ""
        self._numbers[label] = int(number) if number.isdecimal() else otherwise
        return self._numbers[label]

    def numbers(self, labels: Sequence[str]) -> tuple[int, ...]:
        """The version of each token. Raises `ServerFailed` for a label that is not ours."""
        strange = set(labels) - self._numbers.keys()
        if strange:
            raise ServerFailed(
                f"{self._url} says that its weights are {min(strange)!r}, which this run did not give it: it was restarted, "
                "or another run uses it",
                url=self._url,
            )
        return tuple(self._numbers[label] for label in labels)
