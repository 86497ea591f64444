"""The common part of the commands that serve: address, tokens, and serving until they are told to end."""

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

from tandem.config.errors import ConfigError
from tandem.protocol.access import Access, is_loopback
from tandem.protocol.limits import STRANGERS_GIB
from tandem.protocol.server import Application, Server, check_free
from tandem.protocol.token_files import token_from

if TYPE_CHECKING:
    from tandem.media.bound import StoreBound


def add_address(parser: argparse.ArgumentParser, *, port: int) -> Any:
    """The arguments for address and access, as a group of their own."""
    address = parser.add_argument_group("address and access")
    address.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    address.add_argument("--port", type=int, default=port, help=f"port; 0 takes a free one (default: {port})")
    address.add_argument("--token-file", type=Path, metavar="FILE", help="token of the data routes; made if missing")
    address.add_argument("--allow-host", action="append", default=[], metavar="NAME", help="a further name of this server")
    address.add_argument("--address-file", type=Path, metavar="FILE", help="written once it answers: url, pid, instance")
    return address


def add_media_store(parser: argparse.ArgumentParser) -> None:
    """The argument that bounds the media store, for `media_bound`."""
    parser.add_argument(
        "--media-store-gib",
        type=float,
        metavar="GIB",
        help="keep images and sounds in a store of this server alone, of at most this size; those used last stay "
        f"(default: {STRANGERS_GIB:g} with --host elsewhere than this machine, else the store of all runs, which grows)",
    )


def media_bound(arguments: argparse.Namespace, stack: contextlib.ExitStack, *, reads_media: bool) -> "StoreBound | None":
    """The bound of a media store of this server's own, which goes with ``stack``; None: it is that of all runs.
    ``reads_media``: some model that is served does.

    Raises:
        ConfigError: ``--media-store-gib`` is no size, or nothing would use it; the store cannot be made.
    """
    gib = arguments.media_store_gib
    if gib is not None and not 1 <= gib <= 1e9:
        raise ConfigError(f"--media-store-gib must be at least 1 and at most 1000000000, got {gib}")
    if gib is not None and not reads_media:
        raise ConfigError("--media-store-gib: what is served reads text alone, so there is no store; leave it out")
    if gib is None and not is_loopback(arguments.host):
        gib = STRANGERS_GIB
    if gib is None or not reads_media:
        return None
    from tandem.media.bound import StoreBound, private_store  # noqa: PLC0415 — numpy, which a parser needs not

    stack.enter_context(private_store())
    return StoreBound(int(gib * 2**30))


def check_address(arguments: argparse.Namespace) -> None:
    """Raises `ConfigError` for an address that cannot be, or is taken: before a token is made or a model is loaded."""
    if not 0 <= arguments.port <= 65535:
        raise ConfigError(f"--port must be at least 0 and at most 65535, got {arguments.port}")
    if not arguments.host:
        raise ConfigError("--host is empty: give an address of this machine; 0.0.0.0 is all of them")
    if arguments.address_file is not None and not arguments.address_file.absolute().parent.is_dir():
        raise ConfigError(f"--address-file must be in a folder that exists, got {arguments.address_file}")
    asyncio.run(check_free(arguments.host, arguments.port))


def access_of(
    arguments: argparse.Namespace, stack: contextlib.ExitStack, *, control: bool
) -> tuple[Access, dict[str, Path]]:
    """The rules, and where the tokens are; token files that were made for this process go with it.

    ``control``: the server has control routes, which always need the admin token. Everyone needs the token where the server
    can be reached from other machines, and where a file for it is named.
    """
    files = {"token": arguments.token_file}
    needed = ["token"] if arguments.token_file or not is_loopback(arguments.host) else []
    if control:
        files["admin token"] = arguments.admin_token_file
        needed.insert(0, "admin token")
    if not all(files[name] for name in needed):
        made = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-serve-")))
        files = {name: file or made / name.replace(" ", "_") for name, file in files.items()}
    tokens = {name: token_from(files[name].expanduser()) for name in needed}
    if control and tokens["admin token"] == tokens.get("token"):
        raise ConfigError("the token and the admin token must differ: whoever may ask for text may not change the weights")
    access = Access.of(
        arguments.host, token=tokens.get("token"), admin_token=tokens.get("admin token"), allowed_hosts=arguments.allow_host
    )
    return access, {name: files[name] for name in needed}


class Listening:
    """Serves an application until SIGTERM, Ctrl-C or ``stop``; a second signal does not wait for requests."""

    def __init__(self, application: Application, access: Access, arguments: argparse.Namespace, files: Mapping[str, Path]):
        self._application, self._access, self._arguments, self._files = application, access, arguments, files
        self.stop = asyncio.Event()

    async def until_told(self, what: str, *, more: str = "", facts: Mapping[str, Any] | None = None) -> None:
        """Says where it serves ``what``, and serves. ``more``: words behind the address, in which ``{url}`` is replaced.
        ``facts``: of the server, for `--address-file`."""
        loop, task, arguments = asyncio.get_running_loop(), asyncio.current_task(), self._arguments
        assert task is not None

        def told() -> None:
            if self.stop.is_set():
                task.cancel()
            self.stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, told)
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
                        print(f"ending: requests that run have {wait_s:g} s", file=sys.stderr)
        except asyncio.CancelledError:
            print("ended at once, as told a second time", file=sys.stderr)


def _shown(host: str) -> str:
    """The host in a URL."""
    return f"[{host}]" if ":" in host else host


@contextlib.contextmanager
def _address_file(file: Path | None, facts: Mapping[str, Any]) -> Iterator[None]:
    """Written whole or not at all; gone with the server."""
    if file is None:
        yield
        return
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    beside.write_text(json.dumps(facts) + "\n")
    os.replace(beside, file)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
