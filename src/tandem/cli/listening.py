"""The common part of the commands that serve: the address, tokens, and serving until a signal ends it."""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.api.shared_files import write_atomically
from tandem.config.errors import ConfigError
from tandem.protocol.access import STRANGERS_GIB, Access, is_loopback, token_from
from tandem.protocol.server import Application, Server, check_free

if TYPE_CHECKING:
    from tandem.media.bound import StoreBound


def add_address(parser: argparse.ArgumentParser, *, port: int) -> Any:
    """Adds the arguments for address and access in their own group, which is returned."""
    address = parser.add_argument_group("address and access")
    address.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    address.add_argument("--port", type=int, default=port, help=f"port; 0 takes a free one (default: {port})")
    address.add_argument(
        "--token-file", type=Path, metavar="FILE", help="file with the token of the data routes; made if missing"
    )
    address.add_argument("--allow-host", action="append", default=[], metavar="NAME", help="another name of this server")
    address.add_argument(
        "--address-file", type=Path, metavar="FILE", help="file written when the server is ready: url, pid, instance"
    )
    return address


def add_media_store(parser: argparse.ArgumentParser) -> None:
    """Adds the argument that limits the size of the media store; `media_bound` reads it."""
    parser.add_argument(
        "--media-store-gib",
        type=float,
        metavar="GIB",
        help="keep images and sounds in a private store of at most this size; the least recently used are removed "
        f"(default: {STRANGERS_GIB:g} if other machines reach --host, otherwise the store of all runs, without limit)",
    )


def media_bound(arguments: argparse.Namespace, stack: contextlib.ExitStack, *, reads_media: bool) -> "StoreBound | None":
    """Opens a private media store of limited size, which ``stack`` removes. Returns its bound, or `None` if the server uses
    the store of all runs. ``reads_media``: a served model reads images or sounds.

    Raises:
        ConfigError: ``--media-store-gib`` is out of range, no model would use the store, or it cannot be created.
    """
    gib = arguments.media_store_gib
    if gib is not None and not 1 <= gib <= 1e9:
        raise ConfigError(f"--media-store-gib must be at least 1 and at most 1000000000, got {gib}")
    if gib is not None and not reads_media:
        raise ConfigError("--media-store-gib: the served models read only text, so there is no store; leave it out")
    if gib is None and not is_loopback(arguments.host):
        gib = STRANGERS_GIB
    if gib is None or not reads_media:
        return None
    from tandem.media.bound import StoreBound, private_store  # noqa: PLC0415 — imports numpy, which a parser does not need

    stack.enter_context(private_store())
    return StoreBound(int(gib * 2**30))


def check_address(arguments: argparse.Namespace) -> None:
    """Raises `ConfigError` if the address is invalid or in use. Called before a token is created or a model is loaded."""
    if not 0 <= arguments.port <= 65535:
        raise ConfigError(f"--port must be at least 0 and at most 65535, got {arguments.port}")
    if not arguments.host:
        raise ConfigError("--host is empty: give an address of this machine; 0.0.0.0 stands for all its addresses")
    if arguments.address_file is not None and not arguments.address_file.absolute().parent.is_dir():
        raise ConfigError(f"--address-file must be in a folder that exists, got {arguments.address_file}")
    asyncio.run(check_free(arguments.host, arguments.port))


def access_of(
    arguments: argparse.Namespace, stack: contextlib.ExitStack, *, control: bool
) -> tuple[Access, dict[str, Path]]:
    """Returns the access rules, and the token files by name. Token files that it creates are removed with ``stack``.

    ``control``: the server has control routes, which always need the admin token. The other routes need the token if the
    server can be reached from other machines, or if `--token-file` is set.
    """
    files = {"token": arguments.token_file}
    needed = ["token"] if arguments.token_file or not is_loopback(arguments.host) else []
    if control:
        files["admin token"] = arguments.admin_token_file
        needed.insert(0, "admin token")
    if not all(files[name] for name in needed):
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-serve-")))
        files = {name: file or temporary / name.replace(" ", "_") for name, file in files.items()}
    tokens = {name: token_from(files[name].expanduser()) for name in needed}
    if control and tokens["admin token"] == tokens.get("token"):
        raise ConfigError("the token and the admin token must differ: a client that may generate may not change the weights")
    access = Access.of(
        arguments.host, token=tokens.get("token"), admin_token=tokens.get("admin token"), allowed_hosts=arguments.allow_host
    )
    return access, {name: files[name] for name in needed}


class Listening:
    """Serves an application until SIGTERM, Ctrl-C or ``stop``. A second signal ends it without waiting for requests."""

    def __init__(self, application: Application, access: Access, arguments: argparse.Namespace, files: Mapping[str, Path]):
        self._application, self._access, self._arguments, self._files = application, access, arguments, files
        self.stop = asyncio.Event()

    async def until_stopped(self, what: str, *, more: str = "", facts: Mapping[str, Any] | None = None) -> None:
        """Prints that ``what`` is served and at which address, and serves until it is stopped.

        Args:
            what: the name of the served model or application.
            more: text to print behind the address; ``{url}`` in it is replaced.
            facts: further entries for `--address-file`.
        """
        loop, task, arguments = asyncio.get_running_loop(), asyncio.current_task(), self._arguments
        assert task is not None

        def on_signal() -> None:
            if self.stop.is_set():
                task.cancel()
            self.stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        try:
            async with Server(self._application, self._access).listening(arguments.host, arguments.port) as port:
                url = f"http://{_shown(arguments.host)}:{port}"
                with _address_file(arguments.address_file, {"url": url, "pid": os.getpid(), **(facts or {})}):
                    print(f"serving {what} at {url}{more.format(url=url)}", flush=True)
                    for name, file in self._files.items():
                        print(f"{name}: {file}", flush=True)
                    await self.stop.wait()
                    if self._application.busy():
                        wait_s = self._application.limits.shutdown_s
                        print(f"ending: running requests have {wait_s:g} s", file=sys.stderr)
        except asyncio.CancelledError:
            print("ended at once, because of a second signal", file=sys.stderr)


def _shown(host: str) -> str:
    """Returns the host as written in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


@contextlib.contextmanager
def _address_file(file: Path | None, facts: Mapping[str, Any]) -> Iterator[None]:
    """Writes ``facts`` as JSON into the file atomically, and removes the file when the block ends."""
    if file is None:
        yield
        return
    write_atomically(file, json.dumps(facts) + "\n")
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
