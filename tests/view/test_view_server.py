"""The viewer's server: who may ask, what a page may do, and what is told live."""

import asyncio
import json
from contextlib import asynccontextmanager

import aiohttp
import pytest

from tandem.protocol.access import Access
from tandem.protocol.server import Server
from tandem.view.pages import Viewer
from tests.view.runs import make_run, questions

TOKEN = "a-token-of-24-characters"


@asynccontextmanager
async def served(tmp_path, *, host="127.0.0.1", token=None, places=()):
    viewer = Viewer(questions(tmp_path, *places), tmp_path / "cache")
    server = Server(viewer, Access.of(host, token=token, admin_token=None))
    async with server.listening("127.0.0.1", 0) as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
        yield client, port


def run_with(tmp_path, body, **more):
    async def inside():
        async with served(tmp_path, **more) as (client, port):
            return await body(client, port)

    return asyncio.run(asyncio.wait_for(inside(), 30))


async def status(client, method, path, **more):
    async with client.request(method, path, **more) as answer:
        return answer.status


def test_pages_of_other_sites_and_other_names_are_refused(tmp_path):
    make_run(tmp_path / "runs/sums/one", steps=1)

    async def body(client, port):
        ask = {"method": "POST", "path": "/api/runs", "json": {}}
        wrong = [
            {"Origin": "http://evil.example"},
            {"Origin": "null"},
            {"Host": "evil.example"},
            {"Host": f"evil.example:{port}"},
        ]
        wrong += [{"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}]
        right = [{}, {"Host": f"localhost:{port}"}, {"Origin": f"http://127.0.0.1:{port}", "Sec-Fetch-Site": "same-origin"}]
        refused = [await status(client, **ask, headers=headers) for headers in wrong]
        refused += [await status(client, "GET", path, headers=wrong[2]) for path in ("/", "/js/app.js", "/api/events")]
        return refused, [await status(client, **ask, headers=headers) for headers in right]

    refused, answered = run_with(tmp_path, body)
    assert set(refused) == {403} and set(answered) == {200}


def test_without_its_token_a_server_tells_nothing_of_the_runs(tmp_path):
    make_run(tmp_path / "runs/sums/one", steps=1)

    async def body(client, _):
        wrong = [{}, {"Authorization": "Bearer nonsense"}, {"Authorization": f"Basic {TOKEN}"}]
        paths = [
            ("POST", "/api/runs"),
            ("POST", "/api/log"),
            ("GET", "/api/events"),
            ("POST", "/api/graph"),
            ("GET", "/nothing"),
        ]
        refused = [await status(client, *one, headers=headers) for one in paths for headers in wrong]
        told = await status(client, "POST", "/api/runs", json={}, headers={"Authorization": f"Bearer {TOKEN}"})
        return refused, told, await status(client, "GET", "/"), await status(client, "GET", "/js/app.js")

    refused, told, page, script = run_with(tmp_path, body, token=TOKEN)
    assert set(refused) == {401} and (told, page, script) == (200, 200, 200)


def test_every_answer_forbids_scripts_that_are_not_the_pages_own(tmp_path):
    async def body(client, _):
        found = []
        for path in ("/", "/js/app.js", "/api/nothing"):
            async with client.get(path) as answer:
                found.append((answer.headers["Content-Security-Policy"], answer.headers["X-Content-Type-Options"]))
        return found

    for policy, sniff in run_with(tmp_path, body):
        assert "default-src 'none'; script-src 'self';" in policy and "unsafe" not in policy and sniff == "nosniff"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"run": 3},
        {"run": "x", "more": 1},
        {"run": "sums/one", "after": -1, "file": ""},
        {"run": "x" * 501, "after": 0, "file": ""},
    ],
)
def test_a_question_that_is_none_is_refused_with_a_reason(tmp_path, body):
    make_run(tmp_path / "runs/sums/one", steps=1)

    async def refused(client, _):
        async with client.post("/api/curves", json=body) as answer:
            return answer.status, (await answer.json())["error"]["message"]

    code, words = run_with(tmp_path, refused)
    assert code == 400 and words


def test_who_listens_is_told_which_run_has_written(tmp_path):
    run = make_run(tmp_path / "runs/sums/one", steps=1)

    async def body(client, _):
        async with client.get("/api/events") as events:
            seen = []
            async for line in events.content:
                if line.startswith(b"data: "):
                    seen.append(json.loads(line[6:]))
                if len(seen) == 1:
                    await asyncio.sleep(1.2)  # the server has looked at least once
                    with (run / "metrics.jsonl").open("a") as file:
                        file.write('{"step": 2, "time": 3, "loss": 1}\n')
                if seen and seen[-1] and len(seen) > 1:
                    return seen

    assert run_with(tmp_path, body)[-1] == ["sums/one"]


def test_a_long_search_is_answered_once_the_index_is_made_beside_the_server(tmp_path):
    make_run(tmp_path / "runs/sums/one")
    question = {"run": "sums/one", "step": -1, "filter": "reward > 0", "order": "step", "offset": 0, "limit": 10}

    async def body(client, _):
        while True:
            async with client.post("/api/samples", json=question) as answer:
                said = await answer.json()
            if not said["pending"]:
                return said["fit"]
            await asyncio.sleep(0.1)

    assert run_with(tmp_path, body) == 15
