"""A proxy between a client and a server that can do to their bytes what networks and broken servers do."""

import asyncio
import contextlib
import threading

CANNED = {
    "503": b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbusy",
    "malformed": b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"output_',
    "not_http": b"\x00\x01\x02 what is this\r\n\r\n",
}
MODES = ("pass", "cut", "silent", "endless", "refuse", "slow", *CANNED)


class Proxy:
    """``with Proxy(port) as proxy: proxy.url``; `set` chooses what happens to all that comes from then on.

    ``cut``: after ``argument`` bytes of the answers of one connection it is closed. ``slow``: answers come ``argument``
    seconds late. ``silent``: nothing comes through any more, in either direction. ``hits`` counts what was done to whom.
    """

    def __init__(self, port):
        self._port = port
        self.mode, self.argument, self.hits = "pass", 0.0, 0
        self._later = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._writers = set()

    def __enter__(self):
        self._thread.start()
        self._run(self._listen(0))
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_):
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    def set(self, mode, argument=0.0, at=None):
        """From now on; with ``at``, from the first request to that path on."""
        assert mode in MODES
        self._later = None
        if at is not None:
            self.set("pass")
            self._later = (f" {at} ".encode(), mode, argument)
            return
        before, self.mode, self.argument, self.hits = self.mode, mode, argument, 0
        if mode == "refuse":
            self._run(self._deaf())
            self.hits = 1
        elif before == "refuse":
            self._run(self._listen(self.port))

    def _run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def _listen(self, port):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _deaf(self):
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _close(self):
        await self._deaf()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader, writer):
        self._writers.add(writer)
        try:
            inner, outer = await asyncio.open_connection("127.0.0.1", self._port)
            self._writers.add(outer)
            await asyncio.gather(self._there(reader, outer, writer), self._back(inner, writer))
        except (OSError, asyncio.IncompleteReadError, _Ended):
            pass
        finally:
            for one in (writer, outer):
                self._writers.discard(one)
                with contextlib.suppress(OSError, RuntimeError):
                    one.transport.abort()

    async def _there(self, reader, outer, writer):
        while data := await reader.read(1 << 16):
            if self._later is not None and self._later[0] in data:
                (_, self.mode, self.argument), self._later = self._later, None
            if self.mode == "refuse":
                self.hits += 1
                await self._deaf()
                raise _Ended
            if self.mode in CANNED:
                self.hits += 1
                writer.write(CANNED[self.mode])
                await writer.drain()
                writer.close()
                raise _Ended
            if self.mode == "endless":
                self.hits += 1
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                while self.mode == "endless":
                    writer.write(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
                    await writer.drain()
                raise _Ended
            if self.mode == "silent":
                self.hits += 1
                continue
            outer.write(data)
            await outer.drain()
        raise _Ended

    async def _back(self, inner, writer):
        passed = 0
        while data := await inner.read(1 << 16):
            if self.mode == "silent":
                self.hits += 1
                continue
            if self.mode == "slow":
                self.hits += 1
                await asyncio.sleep(self.argument)
            if self.mode == "cut":
                data = data[: max(0, int(self.argument) - passed)]
                passed += len(data)
            writer.write(data)
            await writer.drain()
            if self.mode == "cut" and passed >= self.argument:
                self.hits += 1
                raise _Ended
        raise _Ended


class _Ended(Exception):
    """One side is done: so is the connection."""
