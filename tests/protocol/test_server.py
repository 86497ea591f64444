"""The HTTP server leaves no open connection behind when it ends."""

import asyncio
import contextlib
import socket

import pytest

from tandem.protocol.access import Access, ServerLimits
from tandem.protocol.server import Application, Server


class Silent(Application):
    """Has no routes, and nothing to wait for."""

    limits, routes = ServerLimits(), ()

    def busy(self):
        return False

    def drain(self):
        pass


async def ends_after(turns):
    """The server ends so many turns of the loop after clients came; what asyncio then has to complain about."""
    complaints = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(repr(context.get("exception"))))
    async with Server(Silent(), Access.of("127.0.0.1", token=None, admin_token=None)).listening("127.0.0.1", 0) as port:
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
        for _ in range(turns):
            await asyncio.sleep(0)
    for client in clients:
        with client, contextlib.suppress(ConnectionResetError):  # of one that nobody had accepted yet
            client.settimeout(5)
            assert client.recv(1) == b"", "the server closes each connection"
    return complaints


@pytest.mark.parametrize("turns", range(6))
def test_a_connection_that_comes_as_the_server_ends_is_closed(turns):
    assert asyncio.run(ends_after(turns), debug=True) == []
