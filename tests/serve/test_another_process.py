"""Another process behind an address that a run knows: nothing that it says is taken for a word of the one before."""

import http.client

import pytest

from tandem.api.failures import ServerFailed
from tandem.engines.inference.remote.tandem_server import INSTANCE_HEADER, TandemServer
from tests.serve.served import ADMIN, Served, one_by_one, request_of, update_of
from tests.tiny import tiny_model_folder

PROMPT = tuple(range(10, 20))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    tiny_model_folder(folder, seed=1)
    return folder


@pytest.fixture
def served(folder, root):
    with Served(folder, roots=[root]) as server:
        yield server


@pytest.fixture
def remote(served):
    """A client that attached before the server was replaced by another process of the same run."""
    server = TandemServer.attach(served.url, run="r", admin_token=ADMIN)
    server.pause()
    server.resume()
    served.service.instance = "another process"
    yield server
    server.close()


CALLS = {
    "pause": lambda remote, update: remote.pause(),
    "resume": lambda remote, update: remote.resume(),
    "flush": lambda remote, update: remote.flush(),
    "sleep": lambda remote, update: remote.sleep(("kv_cache",)),
    "wake": lambda remote, update: remote.wake(("kv_cache",)),
    "statistics": lambda remote, update: remote.statistics(),
    "prepare": lambda remote, update: remote.prepare_weights(update),
    "commit, which it refuses": lambda remote, update: remote.commit_weights(update.version),
    "discard": lambda remote, update: remote.discard_weights(),
    "generate": lambda remote, update: one_by_one(remote, [request_of(PROMPT, max_new_tokens=1)]),
    "generate, which it refuses": lambda remote, update: one_by_one(remote, [request_of((9999,))]),
}


@pytest.mark.parametrize("call", CALLS)
def test_no_answer_of_another_process_is_believed_and_no_refusal_either(remote, root, call):
    with pytest.raises(ServerFailed, match="was restarted") as failure:
        CALLS[call](remote, update_of(root / "tiny-llama-1", 1))
    assert failure.value.status is None  # a status would be judged as that of the server that is meant
    assert remote.version.number == 0


def test_another_process_is_not_ready_for_the_client_of_the_one_before(remote):
    assert not remote.ready()


def test_a_client_gives_nothing_back_to_another_process(remote, served):
    remote.close()
    assert served.json("GET", "/health")["run"] == "r"


def test_each_route_says_which_process_answers_whether_it_answers_or_refuses(served):
    for route in served.server.routes:
        for token in (None, ADMIN):
            for body in (None, b"{"):
                _, headers = answer(served, route.method, route.path, token, body)
                assert headers[INSTANCE_HEADER] == served.service.instance, (route.method, route.path)
    status, headers = answer(served, "GET", "/nothing", None, None)
    assert (status, headers[INSTANCE_HEADER]) == (404, served.service.instance)


def answer(served, method, path, token, body):
    """Status and headers."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    sent = {"Content-Type": "application/json"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
    try:
        connection.request(method, path, body, sent)
        got = connection.getresponse()
        got.read()
        return got.status, dict(got.getheaders())
    finally:
        connection.close()
