"""Clients that leave, servers that are full, paused or ending; readiness and metrics."""

import asyncio
import http.client
import json
import threading
import time

import pytest

from tandem.engines.inference.remote.tandem_server import TandemServer
from tests.serve.served import ADMIN, Served, one_by_one, request_of

LONG = {"input_ids": [5, 6, 7], "sampling": {"max_new_tokens": 500, "min_new_tokens": 500}}


@pytest.fixture
def served(folder):
    with Served(folder, max_requests=3, max_connections=6) as server:
        yield server


def until(condition, timeout_s=60.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def statistics(served):
    return served.json("GET", "/control/statistics")


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "stream"])
def test_a_client_that_leaves_frees_its_request(served, path):
    body = {"model": "tiny", "prompt": [5, 6], "max_tokens": 500, "min_tokens": 500, "n": 2, "stream": path == "stream"}
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    body, path = (LONG, path) if path == "/generate" else (body, "/v1/completions")
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    until(lambda: statistics(served)["generated_tokens"] > 4)
    connection.sock.close()
    connection.close()

    until(lambda: statistics(served)["running"] == 0)
    assert statistics(served)["cancelled"] == (1 if path == "/generate" else 2)
    until(lambda: served.service.under_way == 0)
    assert statistics(served)["generated_tokens"] < 400  # long before it would have ended by itself


def test_one_request_too_many_is_told_to_come_again(served):
    served.json("POST", "/control/pause", {})
    threads = [
        threading.Thread(target=served.request, args=("POST", "/generate", LONG | {"deadline_s": 60})) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    until(lambda: served.service.under_way == 3)

    answer = served.json("POST", "/generate", LONG, status=503)
    assert answer["error"]["code"] == "full"
    served.json("POST", "/control/resume", {})
    for thread in threads:
        thread.join(60)
    assert served.json("POST", "/generate", {"input_ids": [5]})["output_ids"]


def test_one_connection_too_many_is_closed(served):
    held = []
    for _ in range(6):
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
        connection.request("GET", "/health")
        assert connection.getresponse().read()
        held.append(connection)
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        served.request("GET", "/health")
    for connection in held:
        connection.close()
    until(lambda: not _refused(served))


def _refused(served):
    try:
        served.request("GET", "/health")
    except (http.client.HTTPException, ConnectionError):
        return True
    return False


def test_the_time_of_an_openai_answer_is_bounded(folder):
    with Served(folder, request_timeout_s=0.05) as served:
        served.json("POST", "/control/pause", {})
        body = {"model": "tiny", "prompt": "a"}
        assert served.json("POST", "/v1/completions", body, status=504)["error"]["code"] == "deadline"
        assert served.json("POST", "/v1/completions", body | {"stream": True}, status=504)["error"]["code"] == "deadline"


def test_ready_means_a_token_was_generated(served):
    before = statistics(served)["generated_tokens"]
    assert served.json("GET", "/ready")["ready"] is True
    assert statistics(served)["generated_tokens"] == before + 1
    served.json("GET", "/ready")
    assert statistics(served)["generated_tokens"] == before + 1  # recently enough

    served.json("POST", "/control/pause", {})
    assert "paused" in served.json("GET", "/ready", status=503)["error"]["message"]
    assert served.json("GET", "/health")["paused"] is True


def test_metrics_count_requests_and_tokens(served):
    served.json("POST", "/generate", {"input_ids": [5], "sampling": {"max_new_tokens": 3, "min_new_tokens": 3}})
    served.json("POST", "/generate", {}, status=400)
    page = served.request("GET", "/metrics")[1].decode()

    assert 'tandem_requests_total{route="/generate",status="200"} 1.0' in page
    assert 'tandem_requests_total{route="/generate",status="400"} 1.0' in page
    assert 'tandem_engine{name="generated_tokens"} 3.0' in page
    assert "tandem_weights_version 0.0" in page and "tandem_engine_up 1.0" in page


def test_running_requests_end_before_the_server_does(folder):
    body = LONG | {"sampling": {"max_new_tokens": 150, "min_new_tokens": 150}}
    with Served(folder) as served:
        answers = []
        thread = threading.Thread(target=lambda: answers.append(served.request("POST", "/generate", body)))
        thread.start()
        until(lambda: statistics(served)["generated_tokens"] > 2)
        ending = threading.Thread(target=served.end)
        ending.start()
        until(lambda: served.service.draining)
        assert served.json("POST", "/generate", LONG, status=503)["error"]["code"] == "draining"
        thread.join(60)
        ending.join(60)

    assert answers[0][0] == 200 and len(json.loads(answers[0][1])["output_ids"]) == 150
    with pytest.raises(ConnectionRefusedError):
        served.request("GET", "/health")


@pytest.mark.slow
@pytest.mark.invariant
def test_requests_that_run_too_long_do_not_keep_the_server(folder):
    with Served(folder, shutdown_s=0.1) as served:
        served.json("POST", "/control/pause", {})
        answers = []

        def ask():
            try:
                answers.append(served.request("POST", "/generate", LONG)[0])
            except (http.client.HTTPException, ConnectionError) as error:
                answers.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        until(lambda: served.service.under_way == 1)
        began = time.monotonic()
        served.end()
        thread.join(30)
    assert time.monotonic() - began < 30 and answers[0] != 200


def test_an_engine_that_is_gone_is_said_and_ends_the_server(folder):
    with Served(folder) as served:
        told = threading.Event()
        served.service.on_death = told.set
        served.engine.close()

        assert told.wait(60)  # nobody had to ask
        assert served.json("POST", "/generate", LONG, status=503)["error"]["code"] == "engine_died"
        assert served.json("GET", "/health")["status"] == "dead"
        assert "engine is gone" in served.json("GET", "/ready", status=503)["error"]["message"]
        assert "tandem_engine_up 0.0" in served.request("GET", "/metrics")[1].decode()


def test_a_cancelled_caller_of_the_client_frees_the_request(served):

    remote = TandemServer.attach(served.url, run="r", admin_token=ADMIN)

    async def leave():
        task = asyncio.ensure_future(remote.agenerate(request_of([5, 6], max_new_tokens=500, min_new_tokens=500)))
        while not (await asyncio.to_thread(remote.statistics))["generated_tokens"]:
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    until(lambda: statistics(served)["running"] == 0)
    assert statistics(served)["cancelled"] == 1
    assert one_by_one(remote, [request_of([5], max_new_tokens=1)])[0].output_ids
    remote.close()
