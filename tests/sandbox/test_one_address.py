"""A program that may reach one address reaches it, and nothing else, in each back end."""

import asyncio
import contextlib
import http.server
import json
import os
import socket
import threading
import time

import pytest

from tandem.api.sandbox import Limits, Program
from tandem.config.errors import ConfigError
from tandem.sandbox.choose import choose_sandbox
from tests.sandbox.machine import Machine, descendants, lives


class Answers(http.server.BaseHTTPRequestHandler):
    """Says what was sent to it."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"you said " + body)

    def log_message(self, *_):
        return


@pytest.fixture(scope="module")
def address():
    """Of a server on this machine that answers."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.request_queue_size = 128
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server.server_address
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module", params=["bubblewrap", "landlock"])
def walls(request):
    """Each back end with walls, with one worker."""
    try:
        made = choose_sandbox(request.param, size=1)
    except ConfigError as error:
        pytest.skip(f"{request.param} does not work here: {str(error).splitlines()[1]}")
    yield made
    made.close()


def run(sandbox, program, address, **limits):
    return asyncio.run(sandbox.run(program, Limits(**{"wall_s": 30, "cpu_s": 30} | limits, address=address)))


WAYS = {
    "urllib": """
import urllib.request
print(urllib.request.urlopen(url, b"hello").read().decode())
""",
    "asyncio": """
import asyncio
async def main():
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"POST / HTTP/1.0\\r\\nContent-Length: 5\\r\\n\\r\\nhello")
    print((await reader.read()).decode().splitlines()[-1])
asyncio.run(main())
""",
    "a socket that waits for nothing, watched before it is connected": """
import select, socket
plug = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
watch = select.epoll()
watch.register(plug, select.EPOLLOUT)
assert plug.connect_ex((host, port)) == 0 and watch.poll(10)
plug.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
assert plug.getpeername() == (host, port)
plug.send(b"POST / HTTP/1.0\\r\\nContent-Length: 5\\r\\n\\r\\nhello")
plug.setblocking(True)
print(b"".join(iter(lambda: plug.recv(99), b"")).decode().splitlines()[-1])
""",
    "many threads": """
import urllib.request
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(16) as pool:
    said = set(pool.map(lambda _: urllib.request.urlopen(url, b"hello").read().decode(), range(48)))
print(*said)
""",
}


@pytest.mark.parametrize("way", WAYS)
def test_the_address_answers(walls, address, way):
    facts = f"host, port = {address!r}\nurl = 'http://%s:%d/' % (host, port)\n"
    outcome = run(walls, Program(source=facts + WAYS[way]), address)
    assert (outcome.status, outcome.stdout) == ("ok", b"you said hello\n"), outcome.stderr.decode()


def test_a_command_reaches_it_too_and_finds_its_variables(walls, address):
    read = "import os, urllib.request as u; print(u.urlopen(os.environ['URL'], b'1').read())"
    program = Program(argv=("sh", "-c", f'python3 -c "{read}"'), environment={"URL": "http://{}:{}".format(*address)})
    outcome = run(walls, program, address)
    assert (outcome.status, outcome.stdout) == ("ok", b"b'you said 1'\n"), outcome.stderr.decode()


ATTEMPTS = """
import ctypes, json, os, socket, struct, sys, threading
facts = json.loads(sys.stdin.readline())
host, port = facts["address"]
libc = ctypes.CDLL(None, use_errno=True)

def attempt(name, connect):
    try:
        connect()
    except (OSError, AttributeError):
        return
    print("ESCAPED", name)

def packed(host, port):
    return struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(host) + bytes(8)

def changed_meanwhile():
    good, bad = packed(host, port), packed(host, facts["port"])
    place = ctypes.create_string_buffer(good, 16)
    running = True
    def flip():
        while running:
            place[:16] = bad
            place[:16] = good
    thread = threading.Thread(target=flip)
    thread.start()
    try:
        for _ in range(60):
            plug = socket.socket()
            libc.connect(plug.fileno(), place, 16)
            if plug.getpeername() != (host, port):
                return
            plug.close()
    finally:
        running = False
        thread.join()
    raise OSError

def options(level, option, value):
    plug = socket.socket()
    plug.setsockopt(level, option, value)

def by_message():
    plug = socket.socket()
    plug.sendto(b"x", 0x20000000, (host, facts["port"]))

def disconnect():
    plug = socket.socket()
    nothing = ctypes.create_string_buffer(16)
    if libc.connect(plug.fileno(), nothing, 16) < 0:
        raise OSError
    plug.connect((host, facts["port"]))

def pair():
    one, other = socket.socketpair()
    other.close()
    if libc.connect(one.fileno(), packed(host, facts["port"]), 16) < 0:
        raise OSError

TCP, IP = socket.IPPROTO_TCP, socket.IPPROTO_IP
for other in (facts["port"], 22, 53, 80, 1):
    attempt(f"port {other}", lambda: socket.create_connection((host, other), 2))
for other in ("127.0.0.2", facts["own"], "8.8.8.8", "0.0.0.0", "127.0.0.255"):
    attempt(f"address {other}", lambda: socket.create_connection((other, port), 2))
attempt("IPv6", lambda: socket.socket(socket.AF_INET6))
attempt("IPv6 by name", lambda: socket.create_connection(("::1", port), 2))
attempt("UDP", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
attempt("a name", lambda: socket.getaddrinfo("example.org", 80))
attempt("a unix socket", lambda: socket.socket(socket.AF_UNIX).connect(facts["unix"]))
attempt("an abstract socket", lambda: socket.socket(socket.AF_UNIX).connect(facts["abstract"]))
attempt("datagrams", lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
attempt("a raw socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 6))
attempt("netlink", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
attempt("vsock", lambda: socket.socket(socket.AF_VSOCK))
attempt("another protocol of streams", lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262))
attempt("listening", lambda: socket.create_server(("127.0.0.1", 0)))
attempt("listening without an address", lambda: socket.socket().listen())
attempt("a message that connects", by_message)
attempt("an address that changes meanwhile", changed_meanwhile)
attempt("connecting anew", disconnect)
attempt("a pair of sockets", pair)
attempt("a route of its own", lambda: options(IP, 4, bytes([131, 7, 4, 8, 8, 8, 8])))
attempt("another interface", lambda: options(socket.SOL_SOCKET, 25, b"eth0"))
attempt("another protocol above", lambda: options(TCP, 31, b"tls"))
attempt("a mark", lambda: options(socket.SOL_SOCKET, 36, struct.pack("=I", 1)))
attempt("names of interfaces", lambda: socket.if_nameindex())
import fcntl
attempt("addresses of interfaces", lambda: fcntl.ioctl(socket.socket(), 0x8915, struct.pack("256s", b"eth0")))
print("tried")
"""


def own_address():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plug, contextlib.suppress(OSError):
        plug.connect(("192.0.2.1", 9))
        return plug.getsockname()[0]
    return "127.0.0.3"


def test_everything_else_is_refused(walls, address, tmp_path):
    machine = Machine(tmp_path)
    others = []
    for host, family in (("127.0.0.2", socket.AF_INET), (own_address(), socket.AF_INET), ("::1", socket.AF_INET6)):
        with contextlib.suppress(OSError):  # a machine without IPv6
            others.append(socket.create_server((host, address[1]), family=family))
            threading.Thread(target=machine.listen, args=(others[-1],), daemon=True).start()
    facts = json.loads(machine.facts) | {"address": address, "own": own_address()}
    outcome = run(walls, Program(source=ATTEMPTS, stdin=json.dumps(facts).encode() + b"\n"), address)
    machine.close()
    for other in others:
        other.close()
    assert (outcome.status, outcome.stdout) == ("ok", b"tried\n"), (outcome.stdout.decode(), outcome.stderr.decode())
    assert machine.heard == []


def test_without_an_address_no_socket_can_be_made_also_beside_a_program_that_has_one(walls, address):
    async def both():
        hold = walls.run(Program(source="import socket, time\ns = socket.socket()\ntime.sleep(1)"), Limits(address=address))
        return await asyncio.gather(hold, walls.run(Program(source="import socket\nsocket.socket()")))

    held, other = asyncio.run(both())
    assert held.status == "ok" and b"PermissionError" in other.stderr


def test_an_address_where_nobody_listens_refuses(walls):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        nobody = gone.getsockname()
    outcome = run(walls, Program(source=f"import socket\nsocket.create_connection({nobody!r}, 5)"), nobody)
    assert b"ConnectionRefusedError" in outcome.stderr


FLOOD = """
import socket, threading
def ask():
    while True:
        try:
            socket.socket()
        except OSError:
            pass
for _ in range(8):
    threading.Thread(target=ask, daemon=True).start()
ask()
"""


ONE = "import urllib.request as u\nu.urlopen('http://{}:{}', b'')\nprint('served')"


def test_a_program_that_asks_without_end_is_killed_in_time_and_others_are_served(walls, address):
    async def work():
        flood = asyncio.create_task(walls.run(Program(source=FLOOD), Limits(wall_s=60, cpu_s=60, address=address)))
        await asyncio.sleep(0.5)
        served = await walls.run(Program(source=ONE.format(*address)), Limits(wall_s=40, address=address))
        beside = not flood.done()
        flood.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await flood
        return served, beside, await walls.run(Program(source=FLOOD), Limits(wall_s=1, cpu_s=30, address=address))

    served, beside, flood = asyncio.run(work())
    assert served.status == "ok" and served.stdout == b"served\n" and beside
    assert flood.status == "timeout" and flood.seconds < 20


def test_a_program_that_dies_or_is_cancelled_while_it_asks_leaves_nothing(walls, address):
    asyncio.run(walls.run(Program(source="")))
    workers = {below for pid in walls.pids for below in descendants(pid)}
    before = len(os.listdir("/proc/self/fd"))

    async def work():
        dying = Program(source=FLOOD.replace("\nask()", "\nimport os, time\ntime.sleep(.2)\nos.kill(os.getpid(), 9)"))
        first = await walls.run(dying, Limits(address=address))
        cancelled = asyncio.create_task(walls.run(Program(source=FLOOD), Limits(address=address)))
        await asyncio.sleep(0.5)
        cancelled.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await cancelled
        space = await walls.open({"a": b"1"}, Limits(address=address))
        await space.exec(Program(source="import socket\nsocket.socket()"))
        await space.close()
        return first

    assert asyncio.run(work()).status == "signal"
    until = time.monotonic() + 30
    while len(os.listdir("/proc/self/fd")) != before and time.monotonic() < until:
        time.sleep(0.05)  # the server of this test ends its own side of the last connections
    assert len(os.listdir("/proc/self/fd")) == before
    while (left := {pid for each in walls.pids for pid in descendants(each)} - workers) and time.monotonic() < until:
        time.sleep(0.05)
    assert not [pid for pid in left if lives(pid)]


@pytest.mark.parametrize("wrong", [("10.0.0.1", 80), ("localhost", 80), ("127.0.0.1", 0), ("::1", 80)])
def test_an_address_is_one_of_this_machine(wrong):
    with pytest.raises(ConfigError, match="must be an address such as"):
        Limits(address=wrong)


def test_a_variable_has_a_name():
    with pytest.raises(ConfigError, match="a name and a text"):
        Program(source="", environment={"A=B": "1"})
