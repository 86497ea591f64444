"""The built-in tools, and MCP servers: what they answer, and what becomes of an episode when they die."""

import asyncio
import contextlib
import gc
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import venv
from contextlib import AsyncExitStack

import psutil
import pytest
from aiohttp import web

from tandem.api.failures import InfrastructureFailure
from tandem.api.services import factory_of
from tandem.config.errors import ConfigError
from tandem.rollout.tools.files import FilesBox
from tandem.rollout.tools.mcp import McpBox
from tandem.rollout.tools.python import PythonBox
from tandem.rollout.tools.search import SearchBox
from tandem.rollout.tools.tool import ToolFailure
from tandem.sandbox.choose import choose_sandbox
from tests.zygote import gone

SERVER = r"""
import json, os, sys, time
def say(**fields):
    print(json.dumps({"jsonrpc": "2.0", **fields}), flush=True)
print("a word that is no message", flush=True)
for line in sys.stdin:
    message = json.loads(line)
    number, method, given = message.get("id"), message.get("method"), message.get("params") or {}
    if method == "initialize":
        hello = {"protocolVersion": "2024-11-05", "capabilities": {}, "serverInfo": {"name": "t", "version": "1"}}
        say(id=number, result=hello)
    elif method == "tools/list":
        names = ["pid", "add"] if not given.get("cursor") else ["die", "sleep", "fail"]
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
        page = {"tools": [{"name": name, "description": name, "inputSchema": schema} for name in names]}
        say(id=number, result=page | ({} if given.get("cursor") else {"nextCursor": "2"}))
    elif method == "tools/call":
        name, n = given["name"], given["arguments"].get("n", 0)
        if name == "die":
            os._exit(3)
        if name == "sleep":
            time.sleep(30)
        text = str(os.getpid() if name == "pid" else n + 1)
        say(id=99, method="ping")
        say(id=number, result={"content": [{"type": "text", "text": text}], "isError": name == "fail"})
    elif number is not None:
        say(id=number, error={"code": -32601, "message": "no such method"})
"""


@pytest.fixture(scope="module")
def sandbox():
    made = choose_sandbox(size=1)
    yield made
    made.close()


def use(box, *work, data=None):
    """Opens the box's tools for one episode, and runs coroutine functions on them by name."""

    async def run():
        async with AsyncExitStack() as stack:
            tools = {tool.name: tool for tool in await stack.enter_async_context(box.open(data or {}))}
            return [await one(tools) for one in work]

    try:
        return asyncio.run(asyncio.wait_for(run(), 60))
    finally:
        box.close()


def call(name, **arguments):
    async def run(tools):
        try:
            return await tools[name].run(arguments)
        except ToolFailure as failure:
            return f"Error: {failure}"

    return run


@pytest.fixture
def server(tmp_path):
    file = tmp_path / "server.py"
    file.write_text(SERVER)
    return f"{sys.executable} {file}"


def test_python_keeps_its_variables_between_calls_and_not_between_episodes(sandbox):
    box = PythonBox(sandbox)
    said = use(
        box, call("python", code="x = 20\nprint('é')"), call("python", code="y = 1\nx * 2 + y"), call("python", code="1 / 0")
    )
    assert said == ["é\n", "41\n", "ZeroDivisionError: division by zero\n"]
    assert use(box, call("python", code="x"), call("python", code="pass")) == [
        "NameError: name 'x' is not defined\n",
        "(nothing was printed)",
    ]


def test_a_python_that_dies_or_is_cut_off_begins_again_and_says_so(sandbox):
    async def cut(tools):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await tools["python"].run({"code": "while True: pass"})

    said = use(
        PythonBox(sandbox),
        call("python", code="import os; os._exit(4)"),
        call("python", code="1"),
        cut,
        call("python", code="open('/etc/hostname')"),
    )
    assert said[0] == "Error: Python ended (exit); its variables are gone"
    assert said[1] == "(Python was restarted: earlier variables are gone.)\n1\n"
    assert said[3].startswith("(Python was restarted") and "Error" in said[3]  # the walls stand


def test_files_are_read_written_edited_and_tested_in_a_workspace_of_their_own(sandbox, tmp_path):
    (tmp_path / "sum.py").write_text("def add(a, b):\n    return a - b\n")
    box = FilesBox(sandbox, folder=str(tmp_path), test="python3 -c 'from sum import add; assert add(1, 2) == 3' && cat note")
    said = use(
        box,
        call("list_files"),
        call("run_tests"),
        call("edit_file", path="sum.py", old="a - b", new="a + b"),
        call("edit_file", path="sum.py", old="x", new="y"),
        call("read_file", path="sum.py"),
        call("write_file", path="note", content="é"),
        call("run_tests"),
        call("read_file", path="../secret"),
        call("read_file", path="nothing"),
        data={"files": {"b.txt": "B"}},
    )
    assert said[0] == "b.txt\nsum.py"
    assert said[1].startswith("The tests fail (exit).") and "AssertionError" in said[1]
    assert said[3].startswith("Error: the text occurs 0 times")
    assert said[4] == "def add(a, b):\n    return a + b\n"
    assert said[6] == "The tests pass.\né"
    assert "must be relative" in said[7] and said[8].startswith("Error")
    assert (tmp_path / "sum.py").read_text().endswith("a - b\n")


def test_search_finds_passages_by_words_and_reads_on(tmp_path):
    (tmp_path / "rivers.md").write_text(
        "The Danube runs through Ulm.\n\n" + "Water. " * 300 + "\n\nThe Rhine runs through Basel."
    )
    (tmp_path / "rows.jsonl").write_text(json.dumps({"title": "Cheese", "text": "Basel has cheese \" OR ' too."}) + "\n")
    box = SearchBox(str(tmp_path), results=2)
    found, none, odd, _, absent = use(
        box,
        call("search", query="the Danube's"),
        call("search", query="xylophone"),
        call("search", query='cheese" OR ("'),
        call("read", number=1),
        call("read", number=99),
    )
    assert found.startswith("[2] rivers.md\nThe Danube")
    assert (
        none == "Nothing was found."
        and odd.startswith("[")
        and "Cheese" in odd
        and absent == "Error: there is no passage 99"
    )
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no text"):
        SearchBox(str(empty))


def test_a_server_that_dies_in_a_call_or_between_two_is_started_again(server):
    box = McpBox(command=server)

    async def kill(tools):
        os.kill(int(await tools["pid"].run({})), signal.SIGKILL)
        await asyncio.sleep(0.5)

    first, _, second, died, third, failed = use(
        box, call("pid"), kill, call("pid"), call("die"), call("add", n=4), call("fail", n=1)
    )
    assert first != second and third == "5" and failed == "Error: 2"
    assert "ended during the call" in died and "exit code 3" in died


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the loop that is closed too early
def test_a_server_whose_loop_was_closed_without_a_word_leaves_no_descriptor_open(server):
    async def pid(box):
        async with box.open({}) as tools:
            return int(await {tool.name: tool for tool in tools}["pid"].run({}))

    before = len(os.listdir("/proc/self/fd"))
    box, loop = McpBox(command=server), asyncio.new_event_loop()
    number = loop.run_until_complete(pid(box))
    loop.close()
    box.close()
    assert len(os.listdir("/proc/self/fd")) == before and gone(number, 10)
    del box, loop
    gc.collect()  # the warnings belong to this test


def test_a_call_that_hangs_is_cut_off_and_disturbs_no_other(server):
    async def cut(tools):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await tools["sleep"].run({})

    assert use(McpBox(command=server, each_episode=True), cut) == [None]


def test_a_server_that_cannot_be_started_is_a_named_infrastructure_failure():
    for command, words in (
        (f"{sys.executable} nothing.py", "exit code 2; .*No such file"),
        (f"{sys.executable} -c pass", "exit code 0"),
    ):
        with pytest.raises(InfrastructureFailure, match=words) as raised:
            use(McpBox(command=command), call("pid"))
        assert raised.value.reason == "mcp_server"
    with pytest.raises(ConfigError, match=r"command .* or url"):
        McpBox()
    with pytest.raises(ConfigError, match="'no-such-program' names no program"):
        McpBox(command="no-such-program")


@pytest.mark.parametrize(
    "begins", ["", "import sys; sys.stdin.readline(); ", "import os, time; os.close(0); time.sleep(0.1); "]
)
def test_a_server_that_ends_is_named_with_its_exit_code_whoever_notices_it_first(begins):
    program = f"{begins}import sys; print('no licence', file=sys.stderr); sys.exit(3)"
    with pytest.raises(InfrastructureFailure, match=r"did not start: .*exit code 3; no licence"):
        use(McpBox(command=shlex.join([sys.executable, "-c", program])))


def test_a_server_over_http_answers_as_json_or_as_events_and_may_lose_its_session():
    sessions, asked = [], []

    async def answer(request):
        message = await request.json()
        asked.append(message["method"])
        if message["method"] == "initialize":
            sessions.append(f"s{len(sessions)}")
            hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "t", "version": "1"}}
            result = {"jsonrpc": "2.0", "id": message["id"], "result": hello}
            return web.json_response(result, headers={"Mcp-Session-Id": sessions[-1]})
        if request.headers.get("Mcp-Session-Id") not in sessions[-1:]:
            return web.Response(status=404)
        if message["method"] == "tools/list":
            listed = {"tools": [{"name": "ask", "inputSchema": {"type": "object"}}]}
            return web.json_response({"jsonrpc": "2.0", "id": message["id"], "result": listed})
        if "id" not in message:
            return web.Response(status=202)
        event = {"jsonrpc": "2.0", "id": message["id"], "result": {"content": [{"type": "text", "text": sessions[-1]}]}}
        progress = {"jsonrpc": "2.0", "method": "notifications/progress"}
        text = "".join(f"event: message\ndata: {json.dumps(one)}\n\n" for one in (progress, event))
        return web.Response(text=text, content_type="text/event-stream")

    async def run():
        app = web.Application()
        app.router.add_post("/mcp", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        box = McpBox(url=f"http://127.0.0.1:{runner.addresses[0][1]}/mcp", prefix="web_")
        async with box.open({}) as (tool,):
            said = [tool.name, await tool.run({})]
            sessions.append("forgotten")
            with pytest.raises(ToolFailure, match="started again"):
                await tool.run({})
            said.append(await tool.run({}))
        await runner.cleanup()
        return said

    assert asyncio.run(run()) == ["web_ask", "s0", "s2"]
    assert asked.count("initialize") == 2


OF_THE_SDK = """
import subprocess, sys, time
from mcp.server import MCPServer
server = MCPServer("t")
@server.tool()
def add(a: int, b: int = 1) -> int:
    "Adds."
    return a + b
@server.tool()
async def hang() -> None:
    time.sleep(60)
@server.tool()
def child() -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid
server.run(**({"transport": "streamable-http", "port": int(sys.argv[1])} if sys.argv[1:] else {}))
"""


@contextlib.contextmanager
def of_the_sdk(tmp_path, over):
    """The arguments of `McpBox` for a real server, over a pipe or over HTTP."""
    file = tmp_path / "server.py"
    file.write_text(OF_THE_SDK)
    if over == "pipe":
        yield {"command": f"{sys.executable} {file}"}
        return
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(file), str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield {"url": f"http://127.0.0.1:{port}/mcp"}
    finally:
        process.kill()
        process.wait()


def test_without_the_library_of_mcp_the_tool_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)  # as Python itself marks what is not there
    with pytest.raises(ConfigError, match=r"tool 'mcp' needs a library that is missing: .*pip install .*\[mcp\]"):
        factory_of("tool", "mcp")


@pytest.mark.parametrize("over", ["pipe", "http"])
def test_a_real_server_answers_and_when_it_hangs_is_cut_off(tmp_path, over):
    async def cut(tools):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await tools["hang"].run({})

    async def describe(tools):
        return tools["add"].schema["function"]["parameters"]["properties"]["b"]["default"]

    with of_the_sdk(tmp_path, over) as server:
        box = McpBox(**server)
        added, wrong, default, child = use(box, call("add", a=2, b=3), call("add", a="x"), describe, call("child"))
        assert added == "5" and wrong.startswith("Error") and default == 1
        begun = time.monotonic()
        assert use(McpBox(**server), cut) == [None] and time.monotonic() - begun < 20
    if over == "pipe":
        assert gone(int(child), within_s=15)


def test_a_server_that_never_lists_its_tools_is_cut_off_with_its_programs(tmp_path):
    script = f"echo slow >&2; echo $$ > {tmp_path}/pid; sleep 60"
    program = f"import subprocess; subprocess.run(['sh', '-c', {script!r}], start_new_session=True)"
    begun = time.monotonic()
    with pytest.raises(InfrastructureFailure, match=r"it listed no tools in 2 s; .*slow"):
        use(McpBox(command=shlex.join([sys.executable, "-c", program]), start_s=2))
    assert time.monotonic() - begun < 10
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_server_whose_keeper_is_killed_is_started_again_and_leaves_nothing(tmp_path):
    async def kill_keeper(tools):
        child = await tools["child"].run({})
        keeper = psutil.Process(int(child)).parent().parent()
        assert "keeper.py" in " ".join(keeper.cmdline())
        keeper.kill()
        with pytest.raises(ToolFailure, match=r"exit code -9\); it is started again by the next call"):
            await tools["hang"].run({})
        assert gone(int(child), within_s=15)
        return await tools["add"].run({"a": 2})

    with of_the_sdk(tmp_path, "pipe") as server:
        assert use(McpBox(**server), kill_keeper) == ["3"]


def test_a_program_that_cannot_be_executed_is_named(tmp_path):
    program = tmp_path / "server"
    program.write_text("#!/nowhere/python\n")
    program.chmod(0o755)
    with pytest.raises(
        InfrastructureFailure, match=r"exit code 127; .*/server cannot be started: No such file or directory$"
    ):
        use(McpBox(command=str(program)))


def test_a_hanging_server_ends_when_its_run_is_killed(tmp_path):
    server = f"import os, time; print(os.getpid(), file=open({str(tmp_path / 'pid')!r}, 'w'), flush=True); time.sleep(60)"
    words = ["import asyncio, sys", "from tandem.rollout.tools.mcp import McpBox", "box = McpBox(command=sys.argv[1])"]
    words.append("asyncio.run(box.open({}).__aenter__())")
    command = [sys.executable, "-c", "\n".join(words), shlex.join([sys.executable, "-c", server])]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}) as run:
        deadline = time.monotonic() + 60
        while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        pid = int((tmp_path / "pid").read_text())
        assert not gone(pid)
        run.kill()
    assert gone(pid, within_s=15)


@pytest.mark.slow
def test_a_published_server_tells_the_time(tmp_path):
    venv.create(tmp_path / "peer", with_pip=True)
    python = tmp_path / "peer" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "mcp-server-time"], check=True, timeout=240)
    box = McpBox(command=f"{python} -m mcp_server_time --local-timezone UTC")
    now, wrong = use(box, call("get_current_time", timezone="Asia/Tokyo"), call("get_current_time", timezone="Nowhere"))
    assert json.loads(now)["timezone"] == "Asia/Tokyo" and wrong.startswith("Error")
