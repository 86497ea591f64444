"""The HTTP client: whatever a server does, the caller gets an answer or one of three failures, in time."""

import asyncio
import contextlib
import json
import socket
import threading
import time

import pytest

from tandem.api.failures import DataFailure, EngineDied, ServerFailed
from tandem.config.errors import ConfigError
from tandem.protocol.client import HttpClient, stream_events


@contextlib.contextmanager
def server(respond):
    """A server that reads one request a connection and does ``respond(connection, request)``; gives its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    requests = []

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection):
        with connection, contextlib.suppress(OSError):
            request = b""
            while b"\r\n\r\n" not in request:
                request += connection.recv(65536)
            requests.append(request)
            respond(connection, request)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def saying(body, status="200 OK", headers=""):
    whole = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{headers}\r\n".encode() + body
    return lambda connection, request: connection.sendall(whole)


@contextlib.contextmanager
def client_of(respond, **options):
    with server(respond) as (url, requests):
        client = HttpClient(url, **options)
        client.requests = requests
        try:
            yield client
        finally:
            client.close()


def test_json_goes_there_and_comes_back():
    with client_of(saying(b'{"a": [1, null]}'), token="t", admin_token="a") as client:
        assert client.call("/x", {"b": 2}, deadline_s=5) == {"a": [1, None]}
        assert client.call("/x", deadline_s=5, admin=True) == {"a": [1, None]}
        assert asyncio.run(client.post("/x", {}, deadline_s=5)) == client.call("/x", deadline_s=5)
        assert client.call_text("/x", deadline_s=5) == '{"a": [1, null]}'

    post, get, *_ = client.requests
    assert post.startswith(b"POST /x HTTP/1.1") and b"Bearer t\r\n" in post
    assert get.startswith(b"GET /x HTTP/1.1") and b"Bearer a\r\n" in get


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": [2, -0.25, 1e-7, null, true]}',
        "[NaN, Infinity, -Infinity, 1e999]",
        r'"half a character: \ud800, a whole one: \ud83d\ude00 😀"',
        str(2**63 + 1),
        "[" * 500 + "]" * 500,
    ],
    ids=["equal keys", "no numbers", "surrogates", "64 bits", "depth"],
)
def test_answers_are_read_as_python_reads_them(text):
    with client_of(saying(text.encode())) as client:
        found = client.call("/x", deadline_s=5)
    assert (repr(found), type(found)) == (repr(json.loads(text)), type(json.loads(text)))


def test_an_empty_answer_is_none():
    with client_of(saying(b"")) as client:
        assert client.call("/x", deadline_s=5) is None


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_request_at_fault_is_a_data_failure(status):
    body = b'{"error": {"message": "n is bad", "code": "x"}}'
    with client_of(saying(body, f"{status} no")) as client, pytest.raises(DataFailure, match="n is bad") as failure:
        client.call("/x", {}, deadline_s=5)
    assert failure.value.reason == "refused_by_server"


@pytest.mark.parametrize("body", [b'{"detail": "why"}', b'{"message": "why"}', b'{"error": "why"}', b"why", b'["why"]'])
def test_the_servers_own_words_are_quoted(body):
    with client_of(saying(body, "400 no")) as client, pytest.raises(DataFailure, match="why"):
        client.call("/x", {}, deadline_s=5)


@pytest.mark.parametrize("status", [301, 401, 403, 404, 409, 429, 500, 503])
def test_other_statuses_are_the_servers_failure(status):
    answer = saying(b"busy", f"{status} no", "Location: http://127.0.0.1:1/\r\n")
    with client_of(answer) as client, pytest.raises(ServerFailed, match="busy") as failure:
        client.call("/x", {}, deadline_s=5)
    assert (failure.value.status, failure.value.url) == (status, f"{client.base_url}/x")
    assert len(client.requests) == 1  # no redirect is followed, nothing is repeated


def cut(connection, request):
    connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"a":')


def endless(connection, request):
    connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        connection.sendall(b"10000\r\n" + b"1" * 65536 + b"\r\n")


def half(connection, request):
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n1")
    time.sleep(60)


WRONG = {
    "cut": (cut, "Payload"),
    "no JSON": (saying(b'{"a": '), "not JSON"),
    "deep JSON": (saying(b"[" * 100_000), "not JSON"),
    "no HTTP": (lambda connection, request: connection.sendall(b"\x16\x03\x01 what\r\n\r\n"), "http"),
    "nothing": (lambda connection, request: None, "Disconnected"),
    "endless": (endless, "more than 1000000 bytes"),
    "slow": (lambda connection, request: time.sleep(60), "no answer within 0.3 s"),
    "half": (half, "no answer within 0.3 s"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_answer_is_the_servers_failure(kind):
    respond, words = WRONG[kind]
    began = time.monotonic()
    with client_of(respond, max_body_bytes=1_000_000) as client, pytest.raises(ServerFailed, match=words):
        client.call("/x", {}, deadline_s=0.3 if kind in ("slow", "half") else 60)
    assert time.monotonic() - began < 30


def test_a_refused_connection_is_the_servers_failure():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    client = HttpClient(f"http://127.0.0.1:{port}")
    with pytest.raises(ServerFailed) as failure:
        client.call("/x", deadline_s=5)
    assert failure.value.status is None
    client.close()


def test_cancelling_drops_the_connection():
    closed = threading.Event()

    def wait(connection, request):
        connection.settimeout(60)
        if connection.recv(1) == b"":
            closed.set()

    async def leave(client):
        task = asyncio.ensure_future(client.post("/x", {}, deadline_s=20))
        while not client.requests:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with client_of(wait) as client:
        asyncio.run(leave(client))
        assert closed.wait(30)


def test_closing_fails_what_is_under_way_and_what_comes_later():
    with client_of(lambda connection, request: time.sleep(60)) as client:
        failures = []

        def ask():
            try:
                client.call("/x", {}, deadline_s=60)
            except EngineDied as error:
                failures.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        while not client.requests:
            time.sleep(0.005)
        client.close()
        client.close()
        thread.join(30)
        assert len(failures) == 1
        with pytest.raises(EngineDied, match="was closed"):
            client.call("/x", deadline_s=5)


def test_the_thread_ends_with_the_last_client():
    def threads():
        return [thread for thread in threading.enumerate() if thread.name == "http-client"]

    with client_of(saying(b"1")) as one:
        one.call("/x", deadline_s=5)
        with client_of(saying(b"2")) as two:
            two.call("/x", deadline_s=5)
            assert len(threads()) == 1
        assert one.call("/x", deadline_s=5) == 1
    assert threads() == []


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:80", "ftp://a", "http://", "http://user:secret@a", "http://a?b=1", "http://a#b"]
)
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        HttpClient(url)


async def events(url, deadline_s=60):
    return [event async for event in stream_events(f"{url}/x", {}, token=None, deadline_s=deadline_s)]


def test_events_are_read_to_their_end():
    body = b': hello\n\ndata: {"a": 1}\n\ndata:{"a": 2}\r\n\r\ndata: [DONE]\n\n'
    with server(saying(body)) as (url, _):
        assert asyncio.run(events(url)) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("respond", "words"),
    [
        (saying(b'data: {"a": 1}\n\n'), r"without \[DONE\]"),
        (saying(b"data: {\n\n"), "not JSON"),
        (saying(b'data: {"error": {"message": "gone"}}\n\n'), "gone"),
        (saying(b"busy", "503 no"), "busy"),
        (cut, "Payload"),
        (lambda connection, request: time.sleep(60), "within 0.5 s"),
    ],
    ids=["no end", "no JSON", "an error", "503", "cut", "slow"],
)
def test_events_that_break_off_are_the_servers_failure(respond, words):
    with server(respond) as (url, _), pytest.raises(ServerFailed, match=words):
        asyncio.run(events(url, 0.5 if "within" in words else 60))
