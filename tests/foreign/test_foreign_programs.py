"""Agents that nobody here wrote, each as the program of an episode: in the sandbox, with only the run's address to reach."""

import asyncio
import shlex

import pytest

from tandem.api.workflow import RewardFn, RewardResult
from tandem.config.errors import ConfigError
from tandem.rollout.program import ProgramWorkflow
from tandem.rollout.recorder import SessionRecorder
from tandem.sandbox.choose import choose_sandbox
from tests.foreign.peers import NODE, PYTHON
from tests.rollout.scripted import GCONFIG, ScriptedEngine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

OPENAI_AGENTS = """
import sys
from agents import Agent, Runner, set_default_openai_api, set_tracing_disabled
set_tracing_disabled(True)
set_default_openai_api("chat_completions")
print(Runner.run_sync(Agent(name="solver", model="policy"), sys.argv[1]).final_output)
"""
PI = """
mkdir -p .pi/agent
cat > .pi/agent/models.json <<END
{"providers": {"tandem": {"baseUrl": "$OPENAI_BASE_URL", "api": "openai-completions", "apiKey": "$OPENAI_API_KEY", "models":
  [{"id": "policy", "name": "policy", "reasoning": false, "input": ["text"], "contextWindow": 100000, "maxTokens": 1000,
    "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}}]}}}
END
exec node NODE/pi -p --no-session --provider tandem --model policy "$1"
"""
SERVED = 'model_providers.tandem={ name="tandem", base_url="{base_url}", env_key="OPENAI_API_KEY", wire_api="responses" }'
SET = f"-c model=policy -c web_search=disabled -c model_provider=tandem -c {shlex.quote(SERVED)}"
COMMANDS = {
    "OpenAI Agents SDK": f"{PYTHON} -c {shlex.quote(OPENAI_AGENTS)} {{prompt}}",
    "pi": f"sh -ec {shlex.quote(PI.replace('NODE', str(NODE)))} sh {{prompt}}",
    "Codex": f"node {NODE}/codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox {SET} {{prompt}}",
}


class AlwaysOne(RewardFn):
    """1."""

    async def __call__(self, *, prompt, completion, prompt_ids, completion_ids, row):
        return RewardResult(1.0)


@pytest.mark.parametrize("walls", ["bubblewrap", "landlock"])
@pytest.mark.parametrize("agent", COMMANDS)
def test_an_agent_plays_in_the_sandbox_and_what_it_asked_is_recorded(agent, walls):
    folder = PYTHON.parents[1] if agent == "OpenAI Agents SDK" else NODE.parents[1]
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there: sh scripts/foreign_agents.sh")
    try:
        sandbox = choose_sandbox(walls, size=1, readable=[str(folder)])
    except ConfigError as error:
        pytest.skip(str(error).splitlines()[-1])
    engine = ScriptedEngine(lambda request, number: "It is four.")
    recorder = SessionRecorder(engine.tokenizer)
    row = {"messages": [{"role": "user", "content": "What is 2 + 2?"}]}

    async def episode():
        knobs = {"timeout_s": 240.0, "memory_mib": 4096, "processes": 256}
        workflow = ProgramWorkflow(COMMANDS[agent], AlwaysOne(), GCONFIG, recorder, sandbox, **knobs)
        return await workflow.arun_episode(engine, row)

    try:
        sample = asyncio.run(episode())
    finally:
        recorder.close()
        sandbox.close()
    assert "It is four." in sample.words["stdout"] and sample.metrics["rollout/recorded/turns"] == 1
    assert any("2 + 2" in message["content"] for message in sample.messages)
