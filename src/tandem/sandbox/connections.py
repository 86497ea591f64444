"""Connections for programs in a sandbox: made here, to the one address that they may reach, and handed inside."""

import asyncio
import contextlib
import socket

PAUSE_S = 0.002
"""Between two connections of one session, so that a program that asks without end does not keep the loop from the others."""
CONNECT_S = 5.0
_WORD = 16


class Connections:
    """Makes a connection for each byte that arrives on the other end of its socket, one after the other, while an event loop
    runs. An answer without a descriptor: the address cannot be reached."""

    def __init__(self, address: tuple[str, int]):
        self._address = address
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self._task = asyncio.get_running_loop().create_task(self._serve())
        self._task.add_done_callback(lambda _: self._ours.close())  # also of one that was cancelled before it began

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # the session has gone
            while await loop.sock_recv(self._ours, _WORD):
                with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
                    connection.setblocking(False)
                    try:
                        async with asyncio.timeout(CONNECT_S):
                            await loop.sock_connect(connection, self._address)
                    except OSError:
                        self._ours.send(b"-")
                    else:
                        socket.send_fds(self._ours, [b"+"], [connection.fileno()])
                await asyncio.sleep(PAUSE_S)

    def close(self) -> None:
        """Makes no more. Twice is fine."""
        self.theirs.close()
        with contextlib.suppress(RuntimeError):  # its loop is closed, and with it the task has ended
            self._task.cancel()
