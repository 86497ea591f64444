"""A program that plays an episode in a sandbox, on an engine whose words are a script."""

import asyncio
import json
import re
import socket
import threading
import time
from pathlib import Path

import pytest
import yaml

from tandem.api.failures import DataFailure, EngineDied, WrongWorkflow
from tandem.api.requests import StopReason
from tandem.api.workflow import RewardFn, RewardResult
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.rollout.program import Command, ProgramWorkflow
from tandem.rollout.recorder import SessionRecorder
from tandem.sandbox.choose import choose_sandbox
from tests.rollout.scripted import GCONFIG, ScriptedEngine
from tests.sandbox.machine import descendants

ROW = {"messages": [{"role": "user", "content": "What is 2 + 2?"}], "answer": 4}

ASK = """
import json, os, sys, urllib.request
def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
def ask(*texts):
    messages = []
    for text in texts:
        messages.append({"role": "user", "content": text})
        answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"model": "any", "messages": messages})
        messages.append(answer["choices"][0]["message"])
    return messages[-1]["content"]
"""


class Longest(RewardFn):
    """The length of what it judges."""

    async def __call__(self, *, prompt, completion, prompt_ids, completion_ids, row):
        return RewardResult(float(len(completion)), words={"longest": "seen"})


@pytest.fixture(scope="module", params=["bubblewrap", "landlock", "none"])
def sandbox(request):
    try:
        made = choose_sandbox(request.param, size=1)
    except ConfigError as error:
        pytest.skip(f"{request.param} does not work here: {str(error).splitlines()[1]}")
    yield made
    made.close()


@pytest.fixture(scope="module")
def walls():
    """The sandbox of this machine, for what does not depend on its kind."""
    made = choose_sandbox(size=1)
    yield made
    made.close()


def play(sandbox, source, row=ROW, engine=None, reward=None, times=1, command="python3 -c {source} {prompt}", **knobs):
    """The samples, or failures, of episodes at once; and the engine."""
    engine = engine or ScriptedEngine(lambda request, number: "four")
    recorder = SessionRecorder(engine.tokenizer)

    async def episodes():
        workflow = ProgramWorkflow(command, reward, GCONFIG, recorder, sandbox, **{"timeout_s": 30.0} | knobs)
        rows = [{**row, "source": ASK + each} for each in ([source] * times if isinstance(source, str) else source)]
        return await asyncio.gather(*(workflow.arun_episode(engine, each) for each in rows), return_exceptions=True)

    try:
        return asyncio.run(episodes()), engine
    finally:
        recorder.close()


def test_a_program_plays_an_episode_and_its_turns_are_trained_as_they_were_sampled(sandbox):
    source = 'print(ask(sys.argv[1], "Sure?"))\npost(os.environ["TANDEM_REWARD_URL"], {"reward": 0.5})'
    (sample,), engine = play(sandbox, source)
    assert sample.reward == 0.5 and sample.words == {"stdout": "four\n"}
    (trajectory,) = sample.trajectories
    assert len(engine.log) == 2 and trajectory.loss_mask.sum() == sum(len(r.output_ids) for _, r in engine.log)
    assert sample.messages[0] == ROW["messages"][0] and sample.metrics["rollout/recorded/turns"] == 2
    assert sample.metrics["time/program_s"] > 0


def test_a_program_reaches_the_recorder_and_no_other_address(walls):
    heard = []
    other = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=lambda: heard.append(other.accept()), daemon=True).start()
    source = f"""
import socket
ask("x")
try:
    socket.create_connection(("127.0.0.1", {other.getsockname()[1]}), 2)
except OSError as error:
    print(error)
json.dump(1, open(os.environ["TANDEM_REWARD_FILE"], "w"))
"""
    (sample,), _ = play(walls, source)
    other.close()
    assert "Permission denied" in sample.words["stdout"] and not heard


HELLO = 'said = ask("Hello")\n'
FILE = 'json.dump({"reward": 3, "metrics": {"moves": 2}}, open(os.environ["TANDEM_REWARD_FILE"], "w"))\n'
POST = 'post(os.environ["TANDEM_REWARD_URL"], {"reward": 2})\n'
REWARDS = {
    "posted": (HELLO + POST, {}, 2.0),
    "written to a file": (HELLO + FILE, {}, 3.0),
    "nothing said, so the configured reward of the last reply": (HELLO, {"reward": Longest()}, 4.0),
    "exit code 0": (HELLO, {"reward_from": "exit"}, 1.0),
    "another exit code": (HELLO + "sys.exit(3)", {"reward_from": "exit"}, 0.0),
    "the reply, whatever the program says": (HELLO + POST, {"reward_from": "reply", "reward": Longest()}, 4.0),
    "the output": (HELLO + "print(said * 2)", {"reward_from": "output", "reward": Longest()}, 9.0),
}


@pytest.mark.parametrize("name", REWARDS)
def test_the_reward_comes_from_where_the_knob_says(walls, name):
    source, knobs, expected = REWARDS[name]
    (sample,), _ = play(walls, source, **knobs)
    assert sample.reward == expected, sample
    if name == "written to a file":
        assert sample.metrics["moves"] == 2
    if name == "the output":
        assert sample.words == {"longest": "seen", "stdout": "fourfour\n"}


ENDS = {
    "ends without asking": ("print(1)", {}, "agent_never_called"),
    "ends before it has the reply": (
        "import threading\nthreading.Thread(target=ask, args=('x',), daemon=True).start()\nimport time\ntime.sleep(0.5)",
        {},
        "agent_exited_early",
    ),
    "raises": ("ask('x')\n1 / 0", {}, "program_failed"),
    "raises after a reply that was cut at its length": ("ask('cut')\n1 / 0", {}, "program_failed_on_cut_reply"),
    "hangs": ("ask('x')\nimport time\ntime.sleep(60)", {"timeout_s": 1.0}, "program_timeout"),
    "never asks and never ends": ("while True: pass", {"timeout_s": 1.0}, "program_timeout"),
    "dies by a signal": ("ask('x')\nos.kill(os.getpid(), 11)", {}, "program_killed"),
    "floods its output": ("ask('x')\nwhile True: print('x' * 1000)", {"output_kib": 64}, "program_output"),
    "takes all memory": ("ask('x')\nx = bytearray(1 << 40)", {}, "program_memory"),
    "forks without end": ("ask('x')\nwhile True: os.fork()", {"timeout_s": 2.0}, "program_failed program_timeout"),
    "says two rewards": (HELLO + POST + FILE, {}, "two_rewards"),
    "writes no reward": (HELLO + 'open(os.environ["TANDEM_REWARD_FILE"], "w").write("{")', {}, "wrong_reward"),
    "says nothing": (HELLO, {}, "no_reward"),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_program_that_misbehaves_is_dropped_by_name_beside_one_that_does_not(walls, name):
    source, knobs, reason = ENDS[name]
    delay_s = 1.0 if "has the reply" in name else 0.0

    def line(request, number):
        cut = "user\ncut" in engine.tokenizer.decode(request.input_ids)
        return ("four", StopReason.LENGTH) if cut else "four"

    engine = ScriptedEngine(line, delay_s=lambda number: delay_s)
    (failure, sample), _ = (
        play(walls, [source, HELLO + POST], engine=engine, **{"timeout_s": 15.0} | knobs)
        if name
        not in (
            "hangs",
            "never asks and never ends",
            "forks without end",
        )
        else play_beside(walls, source, knobs)
    )
    assert isinstance(failure, DataFailure), failure
    assert failure.reason in reason.split(), failure
    assert sample.reward == 2.0
    assert_nothing_left(walls)


def play_beside(sandbox, source, knobs):
    """As `play`, with another time for the one that behaves."""
    (failure,), engine = play(sandbox, source, **knobs)
    (sample,), _ = play(sandbox, HELLO + POST)
    return (failure, sample), engine


OWN = {"bubblewrap": 2, "landlock": 0, "none": 0}
"""Processes below a worker that waits."""


def assert_nothing_left(sandbox):
    until = time.monotonic() + 60
    while any(len(descendants(pid)) > OWN[sandbox.name] for pid in sandbox.pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert [len(descendants(pid)) for pid in sandbox.pids] == [OWN[sandbox.name]] * len(sandbox.pids)


def test_a_program_that_forks_leaves_no_process(sandbox):
    source = HELLO + POST + "\nif os.fork() == 0:\n    os.setsid()\n    import time\n    time.sleep(600)"
    (sample,), _ = play(sandbox, source)
    assert sample.reward == 2.0
    assert_nothing_left(sandbox)


def test_a_program_has_its_own_folder_with_the_template_and_the_files_of_its_row(sandbox, tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "data.txt").write_text("from the template")
    (tmp_path / "run.sh").write_text("echo run")
    source = """
ask("x")
row = json.load(open(os.environ["TANDEM_ROW"]))
print(open("pkg/data.txt").read(), open("deep/mine.txt").read(), row["answer"], sorted(os.listdir(".")))
open("pkg/data.txt", "w").write("changed")
"""
    row = {**ROW, "mine": {"deep/mine.txt": "from the row"}}
    knobs = {"template": str(tmp_path), "files": "mine", "reward": Longest(), "times": 2}
    samples, _ = play(sandbox, source, row=row, **knobs)
    expected = "from the template from the row 4 ['.tandem', 'deep', 'pkg', 'run.sh']\n"
    assert [sample.words["stdout"] for sample in samples] == [expected] * 2
    assert (tmp_path / "pkg" / "data.txt").read_text() == "from the template"


NASTY = "'; touch /tmp/escaped; \" $(touch escaped) `touch escaped` {answer} \\ \n -- é"


def test_what_a_row_says_stays_one_argument(walls):
    row = {"messages": [{"role": "user", "content": NASTY}], "answer": 4}
    source = 'ask("x")\nprint(json.dumps(sys.argv[1:]), os.environ["HINT"], os.listdir("."))'
    command = "python3 -c {source} --ask={prompt} {answer} {{answer}} 'two words'"
    (sample,), _ = play(walls, source, row=row, command=command, variables={"HINT": "is {answer}"}, reward=Longest())
    arguments = json.dumps([f"--ask={NASTY}", "4", "{answer}", "two words"])
    assert sample.words["stdout"] == f"{arguments} is 4 ['.tandem']\n"


def test_a_shell_that_the_command_names_gets_a_row_as_an_argument_only(walls):
    with pytest.raises(ConfigError, match=r"give it to the script as an argument"):
        Command("sh -c 'echo {prompt}'")
    with pytest.raises(ConfigError, match=r"cannot be cut into words"):
        Command("echo 'x")
    source = 'ask("x")\nprint(sys.argv[1])'
    command = """sh -ec 'python3 -c "$1" "$2"' sh {source} {prompt}"""
    (sample,), _ = play(walls, source, row={"messages": [{"content": NASTY}]}, command=command, reward=Longest())
    assert sample.words["stdout"] == NASTY + "\n"


def test_a_command_that_no_row_can_make_right_ends_the_run(walls):
    (missing,), _ = play(walls, "", command="no-such-agent {prompt}")
    assert isinstance(missing, WrongWorkflow) and "readable" in str(missing)
    (place,), _ = play(walls, "", command="echo {promt}")
    assert isinstance(place, WrongWorkflow) and "{promt}" in str(place)
    (long,), _ = play(walls, "", row={"messages": [{"content": "x" * 200_000}]})
    assert isinstance(long, DataFailure) and long.reason == "prompt_too_long"


def test_the_time_of_a_program_lies_within_the_episodes():
    def made(**knobs):
        return ProgramWorkflow("true", None, GCONFIG, None, None, **knobs)

    assert made(episode_timeout_s=100.0).limits.wall_s == 80.0
    with pytest.raises(ConfigError, match=r"below rollout\.episode_timeout_s"):
        made(episode_timeout_s=100.0, timeout_s=100.0)
    with pytest.raises(ConfigError, match="template must be a folder"):
        made(template="/no/such")
    with pytest.raises(ConfigError, match="needs a reward"):
        made(reward_from="output")


def test_an_engine_that_dies_is_no_fault_of_the_program(walls):
    engine = ScriptedEngine(lambda request, number: EngineDied("gone"))
    (failure,), _ = play(walls, HELLO, engine=engine)
    assert isinstance(failure, EngineDied)


def test_a_cancelled_episode_leaves_no_program(sandbox):
    engine = ScriptedEngine(lambda request, number: "four")
    recorder = SessionRecorder(engine.tokenizer)

    async def cancelled():
        workflow = ProgramWorkflow("python3 -c {source}", None, GCONFIG, recorder, sandbox, timeout_s=60.0)
        task = asyncio.create_task(
            workflow.arun_episode(engine, {**ROW, "source": ASK + HELLO + "import time; time.sleep(60)"})
        )
        while not engine.log:
            await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(cancelled())
    recorder.close()
    assert_nothing_left(sandbox)


def test_eight_programs_at_once_are_told_apart(walls):
    engine = ScriptedEngine(lambda request, number: f"reply {number}", delay_s=lambda number: 0.05)
    sources = [f'said = ask("I am {i}", "And?")\nprint(said)\n' + POST for i in range(8)]
    samples, engine = play(walls, sources, engine=engine)
    for i, sample in enumerate(samples):
        assert sample.messages[0]["content"] == f"I am {i}"
        assert sample.messages[-1]["content"] == sample.words["stdout"].strip()
        assert sample.trajectories[0].stop_reason == StopReason.STOP
    assert sum(int(t.loss_mask.sum()) for s in samples for t in s.trajectories) == sum(
        len(r.output_ids) for _, r in engine.log
    )


PAGE = Path(__file__).parents[2] / "docs/agents_programs.md"


def test_the_page_lists_how_programs_end():
    table = PAGE.read_text().partition("<!-- from the tests: programs -->\n")[2].partition("<!-- end -->")[0]
    rows = [f"| {name} | {' or '.join(f'`{reason}`' for reason in ENDS[name][2].split())} |" for name in ENDS]
    assert table.splitlines() == ["| the program | reason |", "|---|---|", *rows]


def test_the_program_and_the_run_of_the_page_work(walls, tmp_path):
    (program,) = re.findall(r"^```python3\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    run, shell = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    (tmp_path / "play.py").write_text(program)
    (tmp_path / "run.yaml").write_text(run)
    arguments = load_config(TrainConfig, tmp_path / "run.yaml").config.workflow_args
    (sample,), _ = play(walls, "", **dict(arguments) | {"template": str(tmp_path)})
    assert sample.reward == pytest.approx(4 / 9) and sample.metrics["rollout/recorded/turns"] == 2
    assert Command(yaml.safe_load(shell)["command"]).words({"prompt": "x"})[-1] == "x"
