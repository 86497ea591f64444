"""Agents that nobody here wrote: how each is started at a session, and what is expected of its history.

They live in environments of their own, made by ``scripts/foreign_agents.sh`` (envs/agents and envs/agents2 for Python,
envs/npm for Node), or where ``TANDEM_FOREIGN`` says.
"""

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.foreign.forced import asked_numbers, hermes

ROOT = Path(__file__).parents[2]
ENVS = Path(os.environ.get("TANDEM_FOREIGN", ROOT / "envs"))
PYTHON, NODE = ENVS / "agents/bin/python", ENVS / "npm/node_modules/.bin"
SCRIPTS = Path(__file__).parent / "agents"
EPISODE_S = 800.0


def adding(prompt):
    """Calls the tool, calls it again with the result, and answers."""
    a, b = asked_numbers(prompt)
    results = prompt.count("<tool_response>\n")
    return [hermes("add", a=a, b=b), hermes("add", a=a + b, b=1), f"It is {a + b + 1}."][results]


def calling_as_text(prompt):
    """The same for smolagents, where results come back as the user's words, and the answer is a call too."""
    a, b = asked_numbers(prompt)
    results = prompt.rpartition("What is")[2].count("Observation:\n")
    final = hermes("final_answer", answer=f"It is {a + b + 1}.")
    return [hermes("add", a=a, b=b), hermes("add", a=a + b, b=1), final][results]


def writing_code(prompt):
    """The same as code."""
    a, b = asked_numbers(prompt)
    results = prompt.rpartition("What is")[2].count("Observation:\n")
    lines = [f"x = add({a}, {b})\nprint(x)", "x = add(x, 1)\nprint(x)", "final_answer(f'It is {x}.')"]
    return f"Thought: I go on.\n<code>\n{lines[results]}\n</code>"


def in_fields(prompt):
    """The same in dspy's fields: two calls, the end of them, and the answer, for which another prompt asks."""
    a, b = asked_numbers(prompt)
    done = prompt.count("[[ ## observation_")
    if "next_tool_name" not in prompt:
        return f"[[ ## reasoning ## ]]\nI added.\n\n[[ ## answer ## ]]\nIt is {a + b + 1}.\n\n[[ ## completed ## ]]"
    name, arguments = [("add", {"a": a, "b": b}), ("add", {"a": a + b, "b": 1}), ("finish", {})][done]
    fields = {"next_thought": "I go on.", "next_tool_name": name, "next_tool_args": json.dumps(arguments)}
    return "\n\n".join(f"[[ ## {key} ## ]]\n{value}" for key, value in fields.items()) + "\n\n[[ ## completed ## ]]"


def in_a_shell(tool, argument):
    """A script for a coding agent: writes the sum into a file, reads it, and answers; a title where one is asked for."""

    def script(prompt):
        a, b = asked_numbers(prompt)
        if f'"{tool}"' not in prompt:
            return "A short title"
        results = prompt.count("<tool_response>\n")
        commands = [f"echo {a + b + 1} > made.txt", "cat made.txt"]
        return f"It is {a + b + 1}." if results == 2 else hermes(tool, **{argument: commands[results]})

    return script


async def in_one_process(python, script, kind, sessions, folder):
    """The answers of a Python agent whose episodes run in one process."""
    command = [str(python), str(SCRIPTS / script), *([kind] if kind else [])]
    out = await _run(command, json.dumps(sessions).encode(), folder, {})
    return json.loads(out.splitlines()[-1])


async def in_own_processes(prepare, sessions, folder):
    """The answers of a program, one process an episode, each with a home and a working folder of its own."""

    async def episode(number, session):
        home, work = folder / f"home{number}", folder / f"work{number}"
        home.mkdir()
        work.mkdir()
        words, environment = prepare(session, home)
        await _run(words, b"", work, environment | {"HOME": str(home)})
        return f"It is {(work / 'made.txt').read_text().strip()}."

    return await asyncio.gather(*(episode(number, session) for number, session in enumerate(sessions)))


async def _run(command, given, folder, environment):
    pipe = asyncio.subprocess.PIPE
    quiet = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OPENAI", "ANTHROPIC"))}
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=folder, env=quiet | {"PWD": str(folder)} | environment
    )
    try:
        out, error = await asyncio.wait_for(process.communicate(given), EPISODE_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, (out.decode()[-1000:], error.decode()[-4000:])
    return out.decode()


def codex(session, home):
    """Codex speaks the responses dialect."""
    provider = {"name": "tandem", "base_url": session["base_url"], "env_key": "SESSION_KEY", "wire_api": "responses"}
    written = ", ".join(f"{name} = {json.dumps(value)}" for name, value in provider.items())
    settings = ["model_provider=tandem", f"model_providers.tandem={{ {written} }}", 'web_search="disabled"']
    words = [str(NODE / "codex"), "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    words += [word for setting in settings for word in ("-c", setting)] + ["-m", "policy", session["question"]]
    return words, {"CODEX_HOME": str(home), "SESSION_KEY": session["key"]}


def pi(session, home):
    """pi takes a file of models."""
    model = {"id": "policy", "contextWindow": 65536, "maxTokens": 32000}
    provider = {"baseUrl": session["base_url"], "api": "openai-completions", "apiKey": session["key"], "models": [model]}
    (home / ".pi/agent").mkdir(parents=True)
    (home / ".pi/agent/models.json").write_text(json.dumps({"providers": {"tandem": provider}}))
    return [str(NODE / "pi"), "-p", "--offline", "--provider", "tandem", "--model", "policy", session["question"]], {}


def opencode(session, home):
    """OpenCode takes a file of settings."""
    model = {"name": "policy", "tool_call": True, "limit": {"context": 65536, "output": 32000}}
    options = {"baseURL": session["base_url"], "apiKey": session["key"]}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "tandem", "options": options, "models": {"policy": model}}
    settings = {
        "provider": {"tandem": provider},
        "model": "tandem/policy",
        "permission": {"*": "allow"},
        "autoupdate": False,
    }
    path = home / "opencode.json"
    path.write_text(json.dumps(settings))
    environment = {"OPENCODE_CONFIG": str(path), "OPENCODE_DISABLE_MODELS_FETCH": "1", "XDG_DATA_HOME": str(home / "data")}
    return [str(NODE / "opencode"), "run", session["question"]], environment


@dataclass(frozen=True)
class Peer:
    """One agent, and what is known of its history."""

    name: str
    dialect: str
    program: str
    """What must be there, below the folder of environments."""

    script: Callable
    kind: str = ""
    start: Callable | None = None
    """Of a program that has a process for each episode."""

    episodes: int = 8
    """So many run at once."""

    roots: int = 1
    turns: int = 3
    side_calls: int = 0
    history: str = "appends"
    needs: str = "nothing"

    @property
    def there(self):
        return (ENVS / self.program).exists()

    def play(self, sessions, folder):
        """Its answers to the sessions' questions."""
        if self.start is not None:
            return in_own_processes(self.start, sessions, folder)
        file, _, kind = self.kind.partition(" ")
        return in_one_process(ENVS / self.program, file, kind, sessions, folder)


_PY2, _OWN = "agents2/bin/python", "each turn in a prompt of its own, the answer too"
_PY, _SMOL = "agents/bin/python", "writes its own turns anew, as text"
PEERS = (
    Peer("OpenAI Agents SDK", "chat", _PY, adding, "openai_agents.py chat"),
    Peer("OpenAI Agents SDK, streamed", "chat", _PY, adding, "openai_agents.py chat-stream"),
    Peer("OpenAI Agents SDK, responses", "responses", _PY, adding, "openai_agents.py responses"),
    Peer("OpenAI Agents SDK, responses, streamed", "responses", _PY, adding, "openai_agents.py responses-stream"),
    Peer("pydantic-ai", "chat", _PY, adding, "pydantic_agent.py chat"),
    Peer("pydantic-ai, responses", "responses", _PY, adding, "pydantic_agent.py responses"),
    Peer("LangGraph with langchain-openai", "chat", _PY, adding, "langgraph_agent.py"),
    Peer("smolagents ToolCallingAgent", "chat", _PY, calling_as_text, "smol_agents.py tools", roots=3, history=_SMOL),
    Peer("smolagents CodeAgent", "chat", _PY, writing_code, "smol_agents.py code", roots=3, history=_SMOL),
    Peer("Inspect AI", "chat", _PY, adding, "inspect_agent.py"),
    Peer("agno", "chat", _PY2, adding, "agno_agent.py"),
    Peer("LlamaIndex FunctionAgent, streamed", "chat", _PY2, adding, "llama_index_agent.py"),
    Peer("Strands Agents, streamed", "chat", _PY2, adding, "strands_agent.py"),
    Peer("AutoGen AssistantAgent", "chat", _PY2, adding, "autogen_agent.py"),
    Peer("dspy ReAct", "chat", _PY2, in_fields, "dspy_react.py", roots=4, turns=4, history=_OWN),
    Peer("Anthropic SDK's tool runner", "messages", _PY, adding, "anthropic_tools.py whole"),
    Peer("Anthropic SDK's tool runner, streamed", "messages", _PY, adding, "anthropic_tools.py stream"),
    Peer(
        "Codex",
        "responses",
        "npm/node_modules/.bin/codex",
        in_a_shell("exec_command", "cmd"),
        start=codex,
        needs='`-c web_search="disabled"`: only functions can be called',
    ),
    Peer("pi", "chat", "npm/node_modules/.bin/pi", in_a_shell("bash", "command"), start=pi),
    Peer(
        "OpenCode",
        "chat",
        "npm/node_modules/.bin/opencode",
        in_a_shell("bash", "command"),
        start=opencode,
        side_calls=1,
        history="appends; asks for a title beside it",
    ),
)
