"""Hostile requests to every route of the table: a new route is included by itself. None gets through."""

import http.client
import json
import socket
import time

import pytest

from tandem.protocol.access import Access
from tandem.protocol.bodies import Refusal
from tests.serve.served import ADMIN, TOKEN


@pytest.fixture(scope="module")
def routes(guarded):
    return guarded.server.routes


def right_token(route):
    return ADMIN if route.audience == "control" else TOKEN


def state(guarded):
    """Reads all that a request could have changed if it had got through."""
    identity = guarded.json("GET", "/health")
    statistics = guarded.json("GET", "/control/statistics")
    return identity, statistics["generated_tokens"], statistics["cancelled"]


@pytest.fixture(autouse=True)
def nothing_changed(guarded):
    before = state(guarded)
    yield
    assert state(guarded) == before


def all_routes(guarded, check):
    """Calls ``check(route, body)`` for each route; ``body`` is one that would be looked at."""
    assert len(guarded.server.routes) >= 19
    for route in guarded.server.routes:
        check(route, None if route.body is None else b"{}")


TOKENS = {
    "none": {},
    "wrong": {"Authorization": "Bearer " + "x" * len(TOKEN)},
    "empty": {"Authorization": "Bearer "},
    "no scheme": {"Authorization": TOKEN},
    "other scheme": {"Authorization": f"Basic {TOKEN}"},
    "with more": {"Authorization": f"Bearer {TOKEN} x"},
    "shorter": {"Authorization": f"Bearer {TOKEN[:-1]}"},
    "of another run": {"Authorization": "Bearer the-token-of-another-run"},
    "not ascii": {"Authorization": "Bearer \xff\xfe"},
}


@pytest.mark.parametrize("kind", TOKENS)
def test_without_the_right_token_nothing_is_answered(guarded, kind):
    def check(route, body):
        status, said = guarded.request(route.method, route.path, body, headers=TOKENS[kind])
        assert (status, json.loads(said)["error"]["type"]) == (401, "authentication_error"), route.path

    all_routes(guarded, check)


def test_each_token_opens_its_own_routes_only(guarded):
    def check(route, body):
        other = TOKEN if route.audience == "control" else ADMIN
        assert guarded.request(route.method, route.path, body, token=other)[0] == 401, route.path

    all_routes(guarded, check)


def test_two_tokens_are_none(guarded, routes):
    for route in routes:
        lines = [f"Authorization: Bearer {right_token(route)}"] * 2
        assert raw(guarded, f"{route.method} {route.path} HTTP/1.1", [f"Host: 127.0.0.1:{guarded.port}", *lines])[0] == 401


HOSTS = ("evil.example", "127.0.0.1.evil.example", "evil.example:80", "", "localhost@evil.example", "127.0.0.1:x", "[::1")


@pytest.mark.parametrize("host", HOSTS)
def test_under_another_name_nothing_is_answered(guarded, host):
    def check(route, body):
        status = guarded.request(route.method, route.path, body, token=right_token(route), headers={"Host": host})[0]
        assert status == 403, route.path

    all_routes(guarded, check)


def test_two_names_or_none_are_no_name(guarded, routes):
    for route in routes:
        token = f"Authorization: Bearer {right_token(route)}"
        for hosts in ([], ["Host: localhost", "Host: evil.example"]):
            assert raw(guarded, f"{route.method} {route.path} HTTP/1.0", [*hosts, token])[0] in (400, 403)


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "file://"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
    ids=str,
)
def test_pages_of_other_sites_are_refused(guarded, headers):
    def check(route, body):
        assert guarded.request(route.method, route.path, body, token=right_token(route), headers=headers)[0] == 403, (
            route.path
        )

    all_routes(guarded, check)


def test_other_methods_are_refused(guarded, routes):
    known = {(route.method, route.path) for route in routes}
    for route in routes:
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "BREW"):
            if (method, route.path) not in known:
                status, said = guarded.request(method, route.path, token=TOKEN)
                assert status == 405 or (method == "BREW" and status in (400, 405)), (method, route.path)
                if status == 405 and method != "HEAD":
                    assert json.loads(said).keys() == route.refused(Refusal(405, "")).keys(), (method, route.path)
                assert guarded.request(method, route.path, token=ADMIN)[0] in (401, 400)


def bodies(routes):
    return [route for route in routes if route.body is not None]


def test_a_body_that_is_too_long_is_refused_before_it_is_read(guarded, routes):
    for route in bodies(routes):
        limit = route.max_body_bytes
        status, said = guarded.request(route.method, route.path, b" " * (limit + 1), token=right_token(route))
        assert status == 413 and str(limit) in said.decode(), route.path


def test_a_chunked_body_that_is_too_long_is_refused(guarded, routes):
    for route in bodies(routes):
        connection = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=60)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {right_token(route)}"}
        pieces = (b" " * 1000 for _ in range(route.max_body_bytes // 1000 + 2))
        connection.request(route.method, route.path, pieces, headers, encode_chunked=True)
        assert connection.getresponse().status == 413, route.path
        connection.close()


@pytest.mark.parametrize(
    "body",
    [b"[" * 5000, b"[" * 5000 + b"]" * 5000, b'{"a":' * 200 + b"1" + b"}" * 200, b'{"a":' + b"[" * 33 + b"]" * 33 + b"}"],
    ids=["open", "closed", "objects", "just too deep"],
)
def test_a_deep_body_is_refused(guarded, routes, body):
    for route in bodies(routes):
        status, said = guarded.request(route.method, route.path, body, token=right_token(route))
        assert status == 400, (route.path, said)


NO_REQUESTS = (
    *(b"", b"x", b"null", b"[]", b'"a"', b"1", b"\xff\xfe", b'{"a": NaN}', b"{} {}", b'{"__proto__": 1}'),
    *(b'{"n": ' + b"9" * 5000 + b"}", b'{"\\ud800": 1}', b'{"model": "\\ud800"}', b'{"run": "\\ud800"}'),
)


@pytest.mark.parametrize("body", NO_REQUESTS)
def test_a_body_that_is_no_request_is_refused(guarded, routes, body):
    for route in bodies(routes):
        status, said = guarded.request(route.method, route.path, body, token=right_token(route))
        assert status == 400 and json.loads(said)["error"]["message"], (route.path, said)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "text/json"])
def test_only_json_is_taken(guarded, routes, kind):
    for route in bodies(routes):
        headers = {"Content-Type": kind}
        assert guarded.request(route.method, route.path, b"{}", token=right_token(route), headers=headers)[0] == 415, (
            route.path
        )


def test_a_packed_body_is_refused(guarded, routes):
    for route in bodies(routes):
        headers = {"Content-Encoding": "gzip"}
        assert guarded.request(route.method, route.path, b"{}", token=right_token(route), headers=headers)[0] == 415


def test_a_query_is_refused(guarded):
    def check(route, body):
        assert guarded.request(route.method, route.path + "?a=1", body, token=right_token(route))[0] == 400, route.path

    all_routes(guarded, check)


def test_a_body_where_none_belongs_is_refused(guarded, routes):
    for route in routes:
        if route.body is None:
            assert guarded.request(route.method, route.path, b"{}", token=right_token(route))[0] == 400, route.path


def test_slow_senders_are_cut_off(guarded, routes):
    """All at the same time: of the headers, and of the body."""
    slow = []
    for route in routes:
        head = [f"{route.method} {route.path} HTTP/1.1", f"Host: localhost:{guarded.port}"]
        slow.append((route, opened(guarded, "\r\n".join(head))))
        if route.body is not None:
            head += [bearer(right_token(route)), "Content-Type: application/json", "Content-Length: 9", "", "{"]
            slow.append((route, opened(guarded, "\r\n".join(head))))
    began = time.monotonic()
    for route, connection in slow:
        connection.settimeout(30)
        said = connection.recv(100)
        assert said == b"" or said.startswith(b"HTTP/1.1 408"), (route.path, said)
        connection.close()
    assert time.monotonic() - began < 30


PATHS = (
    "/",
    "//{}",
    "/{}/",
    "/v1/..{}",
    "{}%00",
    "/%2e%2e{}",
    "{}/../../etc/passwd",
    "{};a",
    "{}.json.bak",
    "/static{}",
    "/..%2f..%2fetc/passwd",
    "/x{}",
)


def test_paths_that_are_no_routes_lead_nowhere(guarded, routes):
    for route in routes:
        for pattern in PATHS:
            path = pattern.format(route.path)
            for token in (right_token(route), None):
                status = raw(guarded, f"{route.method} {path} HTTP/1.1", ["Host: localhost", bearer(token)])[0]
                assert status in (400, 401, 404), (path, status)


def test_an_encoded_path_needs_the_same_token(guarded):
    for path in ("/control/%70ause", "/%63ontrol/pause"):
        assert guarded.request("POST", path, b"{}", token=TOKEN)[0] in (401, 404)
        assert guarded.request("POST", path, b"{}")[0] in (401, 404)


def test_other_runs_cannot_control_the_server(guarded, routes):
    for route in bodies(routes):
        if route.audience == "control" and "run" in route.body["properties"]:
            parts = {"parts": ["kv_cache"]} if "parts" in route.body["properties"] else {}
            for run in ({"run": "another"}, {} if "run" not in route.body["required"] else {"run": "x"}):
                answer = guarded.json("POST", route.path, parts | run, status=409)
                assert answer["error"]["code"] == "other_run", route.path


def test_noise_that_is_no_http_does_not_hurt(guarded):
    for noise in (b"\x16\x03\x01" + bytes(range(200)), b"GET\r\n\r\n", b"\0" * 5000, b"A" * 100_000 + b"\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", guarded.port), timeout=60) as connection:
            try:
                connection.sendall(noise)
                assert not connection.recv(100).startswith(b"HTTP/1.1 2")
            except ConnectionError:
                continue


def test_the_tokens_are_never_said(guarded, routes):
    for route in routes:
        body = None if route.body is None else b"{}"
        for headers in TOKENS.values():
            said = guarded.request(route.method, route.path, body, headers=headers)[1]
            assert TOKEN.encode() not in said and ADMIN.encode() not in said


def test_every_route_of_the_table_is_served_and_documented(guarded, routes):
    paths = guarded.json("GET", "/openapi.json")["paths"]
    assert {(method.upper(), path) for path, operations in paths.items() for method in operations} == {
        (route.method, route.path) for route in routes
    }
    assert {(r.method, r.resource.canonical) for r in guarded.server.app.router.routes()} == {
        (route.method, route.path) for route in routes
    }


def test_elsewhere_than_loopback_only_allowed_names_are_ours():
    access = Access.of("0.0.0.0", token=TOKEN, admin_token=ADMIN, allowed_hosts=["Gpu7.example"])
    assert access.hosts == {"0.0.0.0", "gpu7.example"}


def bearer(token):
    return f"Authorization: Bearer {token}" if token else "Accept: */*"


def opened(guarded, text):
    connection = socket.create_connection(("127.0.0.1", guarded.port), timeout=60)
    connection.sendall(text.encode())
    return connection


def raw(guarded, line, headers):
    """(status, rest) of a request written by hand."""
    with opened(guarded, "\r\n".join([line, "Connection: close", *headers, "", ""])) as connection:
        said = b"".join(iter(lambda: connection.recv(65536), b""))
    return int(said.split(b" ", 2)[1]), said
