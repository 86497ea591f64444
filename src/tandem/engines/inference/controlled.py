"""Engines that hand control calls on: to a thread, to a process, to a server, or to many servers."""

from abc import abstractmethod
from typing import Any

from tandem.api.engines import InferenceEngine, InferencePart


class Controlled(InferenceEngine):
    """An engine whose control calls all go one way, each under the name that it has in `InferenceEngine`."""

    @abstractmethod
    def control(self, name: str, *arguments: Any) -> dict[str, float]:
        """Lets whoever computes do it; returns the figures of the call, if it has any."""

    def discard_weights(self) -> None:
        self.control("discard_weights")

    def pause(self) -> None:
        self.control("pause")

    def resume(self) -> None:
        self.control("resume")

    def flush(self) -> None:
        self.control("flush")

    def sleep(self, parts: tuple[InferencePart, ...]) -> None:
        self.control("sleep", parts)

    def wake(self, parts: tuple[InferencePart, ...]) -> None:
        self.control("wake", parts)

    def statistics(self) -> dict[str, float]:
        return self.control("statistics")
