"""Chooses the server of a request: the server that has computed its prefix, otherwise the server with the least work.

Pure, and not thread-safe. A choice costs one dictionary look-up, or one pass over the servers, whatever the number of
requests.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

MAX_AFFINITIES = 200_000
"""Most groups and chats whose server is remembered; the least recently used is forgotten first."""

PROMPT_TOKENS_PER_TOKEN = 16
"""Number of prompt tokens that cost as much as one generated token: a prompt's tokens are computed side by side."""


def work_of(prompt_tokens: int, max_new_tokens: int) -> int:
    """Estimate of a request's work in generated tokens; at least 1."""
    return 1 + max_new_tokens + prompt_tokens // PROMPT_TOKENS_PER_TOKEN


class _RoutedServer:
    """A server's entry in the router. A server that leaves and joins again gets a new entry."""

    __slots__ = ("live", "name", "pace", "stamp", "work")

    def __init__(self, name: str):
        self.name, self.live = name, True
        self.work = self.stamp = 0
        self.pace = 1.0


class Lease(NamedTuple):
    """A request's share of a server; give it back with `Router.end`."""

    place: _RoutedServer
    work: int

    @property
    def server(self) -> str:
        return self.place.name


class Router:
    """Distributes requests over the healthy servers: `add` a server when it becomes healthy, `remove` it when it fails.

    - *Affinity*: requests with one affinity (samples of a group, turns of a chat) go to one server for as long as it stays.
    - *Least work*: any other request goes to the server with the least work, in estimated tokens times its pace; among
      equals, to the server that was given work longest ago. Groups arrive whole, so no server is ahead of another by more
      than the work of the largest group.
    """

    def __init__(self, max_affinities: int = MAX_AFFINITIES):
        self._places: dict[str, _RoutedServer] = {}
        self.affinities: OrderedDict[str, _RoutedServer] = OrderedDict()
        self._max_affinities = max_affinities
        self._stamps = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def add(self, name: str) -> None:
        """Adds a healthy server; a server that is there already is left alone."""
        if name not in self._places:
            place = self._places[name] = _RoutedServer(name)
            self._touch(place)

    def remove(self, name: str) -> None:
        """Removes a server; unknown names are ignored. Its affinities move with their next request."""
        place = self._places.pop(name, None)
        if place is not None:
            place.live = False

    def choose(self, work: int, affinity: str | None = None, avoid: Collection[str] = ()) -> Lease | None:
        """Reserves a server for a request of ``work`` estimated tokens (`work_of`); None if only servers in ``avoid`` are
        left.

        ``avoid``: servers that have already failed this request.
        """
        place = self.affinities.get(affinity) if affinity is not None else None
        if place is None or not place.live or place.name in avoid:
            place = self._least(avoid)
            if place is None:
                return None
        if affinity is not None:
            self._remember(affinity, place)
        place.work += work
        self._touch(place)
        return Lease(place, work)

    def end(self, lease: Lease) -> None:
        """Takes a finished request's work off its server. Call it once for each lease."""
        place = lease.place
        place.work -= lease.work
        if place.live:
            self._touch(place)

    def set_pace(self, name: str, pace: float) -> None:
        """Sets a server's time per token relative to the other servers; 1 is usual."""
        place = self._places.get(name)
        if place is not None and place.pace != pace:
            place.pace = pace
            self._touch(place)

    def work(self) -> Mapping[str, int]:
        return {name: place.work for name, place in self._places.items()}

    def _remember(self, affinity: str, place: _RoutedServer) -> None:
        self.affinities[affinity] = place
        self.affinities.move_to_end(affinity)
        if len(self.affinities) > self._max_affinities:
            self.affinities.popitem(last=False)

    def _least(self, avoid: Collection[str]) -> _RoutedServer | None:
        places = (place for place in self._places.values() if place.name not in avoid)
        return min(places, key=lambda place: (place.work * place.pace, place.stamp), default=None)

    def _touch(self, place: _RoutedServer) -> None:
        """Puts the server behind all others with equal work."""
        self._stamps += 1
        place.stamp = self._stamps
