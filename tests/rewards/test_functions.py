"""A user's function as a reward: what it may take and return, and what becomes of one that misbehaves."""

import asyncio
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from decimal import Decimal

import numpy
import psutil
import pytest
import torch

from tandem.api.failures import RewardFailure
from tandem.api.workflow import RewardResult
from tandem.config.devices import usable_cores
from tandem.config.errors import ConfigError
from tandem.rewards.build import build_reward
from tandem.rewards.function import most_workers
from tandem.rewards.signatures import compared, read_outcome
from tests.zygote import gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="worker processes are watched through Linux's process table")

SOURCE = """
import asyncio, os, subprocess, sys, time
from fractions import Fraction

def length(completion): return len(completion)
def whole(prompt, completion, prompt_ids, completion_ids, **row):
    return (prompt, completion, prompt_ids, completion_ids, row) == ("p", "c", (1,), (2, 3), {"answer": "a"})
def column(answer, *, completion="", weight=2): return weight * (answer == "a")
def parts(completion): return {"correct": 1.0, "format": 0.2, "accuracy": 1}
def result(completion):
    from tandem.api.workflow import RewardResult
    return RewardResult(0.5, {"a": 0.5}, 1.0)
def echo(returned): return eval(returned)
def raises(completion):
    raise KeyError("no such thing")
def hangs(completion): time.sleep(1000)
def spins(completion):
    while True: pass
def hangs_with_children(path):
    children = [subprocess.Popen(["sleep", "1000"]), subprocess.Popen(["setsid", "sleep", "1000"])]
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            open(path, "a").write(f"{os.getpid()}\\n")
            time.sleep(1000)
        os._exit(0)
    open(path, "a").write("".join(f"{child.pid}\\n" for child in children))
    time.sleep(1000)
def dies_with_children(path):
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(0.5); import os; os.kill({os.getpid()}, 9)"])
    hangs_with_children(path)
def leaves_children(path):
    open(path, "w").write(str(subprocess.Popen(["sleep", "1000"]).pid))
    return 1.0
def forks(completion):
    os.fork()
    return 0.75
def prints(completion):
    print("x" * 200000); sys.stdout.flush(); os.write(1, b"raw")
    return 1.0
def exits(completion): os._exit(3)
def quits(completion): sys.exit("enough")
def crashes(completion): os.kill(os.getpid(), 11)
def forges(completion):
    for fd in range(3, 64):
        try: os.write(fd, b"\\0" * 7 + b"\\x10" + b'{"value": 100.0}')
        except OSError: pass
    return 0.0
def slowly(completion, path=None):
    began = time.monotonic()
    time.sleep(0.3)
    if path: open(path, "a").write(f"{began} {time.monotonic()}\\n")
    return 1.0
BUSY = "import time\\nwhile time.process_time() < 0.4: pass"
def computes(completion):
    end = time.process_time() + 0.4
    while time.process_time() < end: pass
    return 1.0
def computes_in_a_child(completion):
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    return 1.0
def process(completion): return os.getpid()
async def soon(completion):
    await asyncio.sleep(0)
    return {"a": 1, "b": 2}
async def never(completion): await asyncio.sleep(1000)
async def stubborn(completion):
    while True:
        try: await asyncio.sleep(1)
        except asyncio.CancelledError:
            if completion == "c": return 1.0
async def fails(completion): raise ValueError("bad")
async def fails_silently(completion): raise ValueError
def needs(answr): return 1.0
class Judge:
    def __call__(self, completion): return 'good'
judge = Judge()
not_callable = 3
"""


@pytest.fixture
def reward(tmp_path):
    """Builds the reward of that name from a user's file, and closes it."""
    file, built = tmp_path / "my_rewards.py", []
    file.write_text(textwrap.dedent(SOURCE))

    def build(name, timeout_s=20.0, workers=None):
        built.append(build_reward(f"{file}:{name}", timeout_s=timeout_s, workers=workers))
        return built[-1]

    yield build
    for one in built:
        one.close()


def call(function, **row):
    """One call in an event loop of its own."""
    return asyncio.run(acall(function, **row))


async def acall(function, **row):
    row = row or {"answer": "a"}
    return await function(prompt="p", completion="c", prompt_ids=(1,), completion_ids=(2, 3), row=row)


def failure_of(function, **row):
    with pytest.raises(RewardFailure) as caught:
        call(function, **row)
    return caught.value


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("length", RewardResult(1.0)),
        ("whole", RewardResult(1.0)),
        ("column", RewardResult(2.0)),
        ("parts", RewardResult(1.2, {"correct": 1.0, "format": 0.2}, 1.0)),
        ("result", RewardResult(0.5, {"a": 0.5}, 1.0)),
        ("soon", RewardResult(3.0, {"a": 1.0, "b": 2.0})),
        ("prints", RewardResult(1.0)),
    ],
)
def test_a_function_takes_what_it_names_and_returns_a_number_or_parts(reward, name, expected):
    assert call(reward(name)) == expected


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        (numpy.bool_(True), 1.0),
        (numpy.float32(0.5), 0.5),
        (numpy.array(2), 2.0),
        (torch.tensor([0.5], dtype=torch.bfloat16, requires_grad=True), 0.5),
        (torch.tensor(True), 1.0),
        (Decimal("0.5"), 0.5),
        ({"a": numpy.bool_(True), "b": Decimal(1), "accuracy": torch.tensor(0.5)}, 2.0),
    ],
    ids=repr,
)
def test_what_is_a_number_to_a_person_is_a_reward(returned, value):
    result = read_outcome(returned)
    assert result.value == value and type(result.value) is float
    assert all(type(part) is float for part in (*result.rewards.values(), result.accuracy or 0.0))
    assert result.rewards or compared("mine", [returned], 1) == [result]


def test_a_wrong_type_names_value_type_line_and_what_is_expected(reward):
    line = SOURCE.splitlines().index("def echo(returned): return eval(returned)") + 1
    said = str(failure_of(reward("echo"), returned="'yes'"))
    assert "my_rewards.py:echo: the value is no number but a str, 'yes'; a reward returns a number, parts such as" in said
    assert said.endswith(f"(my_rewards.py:{line} in echo)") and "TRL" not in said
    assert "part 'a' is no number but a NoneType, None" in str(failure_of(reward("echo"), returned="{'a': None}"))
    assert "a list for several completions is TRL's" in str(failure_of(reward("echo"), returned="[1.0]"))
    line = SOURCE.splitlines().index("    def __call__(self, completion): return 'good'") + 1
    assert str(failure_of(reward("judge"))).endswith(f"(my_rewards.py:{line} in __call__)")


def test_a_class_of_another_kind_is_told_what_to_derive_from(reward):
    with pytest.raises(ConfigError, match=r"class Judge is not derived from tandem.RewardFn; write class Judge\(RewardFn\)"):
        reward("Judge")


THEIRS = {
    "trl": "def trl(prompts, completions, answer, **kwargs): return [c == a for c, a in zip(completions, answer)]",
    "strict": "def strict(completions, answer): return [float(c == a) for c, a in zip(completions, answer)]",
    "waits": "async def waits(completions, answer, **kwargs): return [completions[0] == answer[0]]",
    "array": "def array(completions, answer, **_):\n"
    "    import numpy as np\n    return np.array(completions) == np.array(answer)",
    "none": "def none(prompts, completions, answer, trainer_state, log_metric, **_):\n"
    "    log_metric('seen', 1)\n    return [1.0 if c == a else None for c, a in zip(completions, answer)]",
    "compute_score": "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    "    return {'score': solution_str == ground_truth, 'acc': 1.0, 'pred': solution_str}",
    "plain": "def plain(data_source, solution_str, ground_truth, extra_info): return solution_str == ground_truth",
    "columns": "def columns(data_source, solution_str, ground_truth, extra_info, **kwargs):\n"
    "    return (solution_str == ground_truth) * (data_source == 'here') * extra_info['weight']",
}
"""Rewards as TRL's and verl's users write them, unchanged."""


@pytest.mark.parametrize("name", THEIRS)
def test_a_function_of_trl_or_verl_judges_as_it_stands(tmp_path, name, caplog):
    (tmp_path / "theirs.py").write_text(THEIRS[name])
    row = {"answer": "c", "data_source": "here", "extra_info": {"weight": 1}}
    with caplog.at_level("INFO"), closing(build_reward(f"{tmp_path}/theirs.py:{name}", timeout_s=20.0)) as built:
        built.check_row(row)
        assert call(built, **row).value == 1.0
        assert call(built, **(row | {"answer": "other", "prompt": "a column"})).value == 0.0
        with pytest.raises(ConfigError, match="needs 'answer', which is no column of the row"):
            built.check_row({"data_source": "here"})
    origin = "verl" if "solution_str" in THEIRS[name] else "TRL"
    assert f"theirs.py:{name} has the signature of {origin}: it is called so" in caplog.text


def test_a_function_of_trl_gets_chats_where_the_rows_have_chats(tmp_path):
    source = "def chats(prompts, completions): return [prompts[0][-1]['content'] == completions[0][0]['content']]"
    (tmp_path / "theirs.py").write_text(source)
    with closing(build_reward(f"{tmp_path}/theirs.py:chats", timeout_s=20.0)) as built:
        assert call(built, prompt=[{"role": "user", "content": "c"}]).value == 1.0


def test_a_function_that_asks_for_the_completion_is_ours_whatever_columns_it_has(tmp_path, caplog):
    (tmp_path / "own.py").write_text("def own(completion, prompts): return completion == 'c' and prompts == ['a', 'b']")
    with closing(build_reward(f"{tmp_path}/own.py:own", timeout_s=20.0)) as built:
        assert call(built, prompts=["a", "b"]).value == 1.0
    assert "signature of" not in caplog.text


def test_the_score_of_a_verl_function_is_the_reward_and_acc_its_accuracy(tmp_path):
    (tmp_path / "theirs.py").write_text(THEIRS["compute_score"])
    with closing(build_reward(f"{tmp_path}/theirs.py:compute_score", timeout_s=20.0)) as built:
        found = call(built, answer="c")
    assert (found.value, found.accuracy, found.rewards) == (1.0, 1.0, {})


def test_what_is_no_finite_number_is_a_named_failure(reward):
    echo = reward("echo")
    assert call(echo, returned="True").value == 1.0
    assert call(echo, returned="Fraction(1, 2)").value == 0.5
    for returned in (
        "None",
        "'1.0'",
        "[1.0]",
        "{}",
        "{'accuracy': 1.0}",
        "{'a': None}",
        "{'a': 1, 'accuracy': 2}",
        "__import__('numpy').zeros(2)",
        "__import__('numpy').str_('1')",
        "1j",
        "echo",
    ):
        assert failure_of(echo, returned=returned).reason == "reward_wrong_type", returned
    for returned in ("float('nan')", "float('inf')", "{'a': float('nan')}", "10**400", "{'a': 1e308, 'b': 1e308}", "-1e19"):
        assert failure_of(echo, returned=returned).reason == "reward_not_finite", returned


@pytest.mark.parametrize("accuracy", [-0.1, 1.1])
def test_an_accuracy_lies_between_0_and_1(accuracy):
    with pytest.raises(RewardFailure, match=f"accuracy must lie in 0…1, got {accuracy}"):
        read_outcome({"right": 1.0, "accuracy": accuracy})


@pytest.mark.parametrize(
    ("name", "words"), [("raises", "KeyError"), ("quits", "SystemExit: enough"), ("fails", "ValueError: bad")]
)
def test_a_reward_that_raises_keeps_its_cause(reward, name, words):
    failure = failure_of(reward(name))

    assert failure.reason == "reward_raised" and words in str(failure)
    assert failure.__cause__ is not None


def test_an_error_names_its_place_also_in_an_async_reward_and_needs_no_text(reward):
    line = SOURCE.splitlines().index("async def fails_silently(completion): raise ValueError") + 1
    assert str(failure_of(reward("fails_silently"))).endswith(
        f"fails_silently: ValueError (my_rewards.py:{line} in fails_silently: {SOURCE.splitlines()[line - 1]})"
    )


@pytest.mark.parametrize(("name", "words"), [("exits", "exit code 3"), ("crashes", "SIGSEGV")])
def test_a_worker_that_dies_is_a_failure_and_is_replaced(reward, name, words):
    function = reward(name)
    for _ in range(2):
        failure = failure_of(function)
        assert failure.reason == "reward_raised" and words in str(failure)


@pytest.mark.parametrize("name", ["hangs", "spins", "never", "stubborn"])
def test_a_reward_past_its_deadline_is_a_timeout(reward, name):
    start = time.monotonic()
    failure = failure_of(reward(name, timeout_s=0.5))

    assert failure.reason == "reward_timeout" and "(reward_timeout_s=0.5) and was" in str(failure)
    assert time.monotonic() - start < 60


def test_close_kills_a_call_under_way_with_its_children_also_detached_ones(reward, tmp_path):
    pids = tmp_path / "pids"
    function = reward("hangs_with_children", timeout_s=30.0)

    async def hang():
        task = asyncio.create_task(acall(function, path=str(pids)))
        while not pids.exists() or pids.read_text().count("\n") < 3:
            await asyncio.sleep(0.02)
        started = [int(pid) for pid in pids.read_text().split()]
        assert all(psutil.pid_exists(pid) for pid in started)
        function.close()
        with pytest.raises(RewardFailure):
            await task
        return started

    started = asyncio.run(hang())
    assert len(started) == 3 and all(gone(pid, within_s=60) for pid in started)


def test_the_deadline_kills_the_children_too(reward, tmp_path):
    pids = tmp_path / "pids"
    for timeout_s in (2.0, 20.0, 100.0):  # a busy machine may need longer to start them
        pids.write_text("")
        failure = failure_of(reward("hangs_with_children", timeout_s=timeout_s), path=str(pids))
        started = [int(pid) for pid in pids.read_text().split()]
        if len(started) == 3:
            break

    assert failure.reason == "reward_timeout"
    assert len(started) == 3 and all(gone(pid, within_s=60) for pid in started)


def test_what_a_killed_worker_has_started_ends_with_it(reward, tmp_path):
    pids = tmp_path / "pids"
    for _ in range(3):  # a busy machine may need longer to start them
        pids.write_text("")
        failure = failure_of(reward("dies_with_children", timeout_s=60.0), path=str(pids))
        started = [int(pid) for pid in pids.read_text().split()]
        if len(started) == 3:
            break

    assert failure.reason == "reward_raised" and "SIGKILL" in str(failure)
    assert len(started) == 3 and all(gone(pid, within_s=60) for pid in started)


def test_children_left_behind_end_with_the_call(reward, tmp_path):
    assert call(reward("leaves_children"), path=str(tmp_path / "pid")).value == 1.0
    assert gone(int((tmp_path / "pid").read_text()), within_s=60)


def test_a_reward_that_forks_answers_once(reward):
    forks = reward("forks")
    assert [call(forks).value for _ in range(3)] == [0.75] * 3


def test_a_forged_answer_is_not_taken(reward):
    with pytest.raises(RewardFailure):
        call(reward("forges"))


def test_a_hanging_call_does_not_hold_up_others(reward):
    function = reward("slowly")
    hanging = reward("spins", timeout_s=100.0)

    async def both():
        stuck = asyncio.create_task(acall(hanging))
        values = await asyncio.gather(*(acall(function) for _ in range(4)))
        assert not stuck.done()
        hanging.close()
        with pytest.raises(RewardFailure):
            await stuck
        return values

    assert [result.value for result in asyncio.run(both())] == [1.0] * 4


def workers_of(function, count, **row):
    """The workers that there are when so many calls have been made at once."""

    async def all_of_them():
        await asyncio.gather(*(acall(function, **row) for _ in range(count)))

    asyncio.run(all_of_them())
    return len(function.pool.pids)


def test_calls_that_wait_overlap_beyond_the_cores(reward, tmp_path):
    slowly, times = reward("slowly", workers=12), tmp_path / "times"
    workers_of(slowly, 12)  # the workers are started
    assert workers_of(slowly, 24, path=str(times)) > usable_cores()
    calls = [tuple(map(float, line.split())) for line in times.read_text().splitlines()]
    assert len(calls) == 24
    assert max(sum(began <= moment < ended for began, ended in calls) for moment, _ in calls) > usable_cores()


def test_calls_that_compute_start_no_more_workers_than_cores(reward):
    workers = workers_of(reward("computes", workers=12), 6 * usable_cores())
    assert workers <= usable_cores() + 1


def test_a_child_that_computes_is_a_call_that_computes(reward):
    workers = workers_of(reward("computes_in_a_child", workers=12), 4 * usable_cores())
    assert workers <= usable_cores() + 1


def test_the_number_of_workers_follows_from_cores_and_samples_unless_it_is_said(reward):
    cores = usable_cores()
    assert most_workers(1) == cores
    assert most_workers(10**6) == most_workers() == max(cores, min(8 * cores, 64))
    assert workers_of(reward("slowly", workers=1), 3) == 1


def test_workers_are_reused_and_close_leaves_no_process(reward):
    process = reward("process")

    async def many():
        return {(await acall(process)).value for _ in range(5)} | {
            r.value for r in await asyncio.gather(*(acall(process) for _ in range(8)))
        }

    workers = {int(pid) for pid in asyncio.run(many())}
    keepers = process.pool.pids
    assert 1 <= len(workers) <= usable_cores() + 1 and all(psutil.pid_exists(pid) for pid in workers)
    process.close()
    process.close()

    assert all(gone(pid, within_s=60) for pid in [*workers, *keepers])
    with pytest.raises(RuntimeError, match="closed"):
        call(process)


def test_workers_end_with_a_run_that_is_killed(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    script = f"""
import asyncio
from tandem.rewards.build import build_reward
from tandem.rewards.signatures import compared, read_outcome
reward = build_reward({str(tmp_path / "mine.py")!r} + ":hangs_with_children", timeout_s=1000)
asyncio.run(reward(prompt="", completion="", prompt_ids=(), completion_ids=(), row={{"path": {str(tmp_path / "pids")!r}}}))
"""
    run = subprocess.Popen([sys.executable, "-c", script])
    pids = tmp_path / "pids"
    while not pids.exists() or pids.read_text().count("\n") < 3:
        assert run.poll() is None
        time.sleep(0.05)
    family = [child.pid for child in psutil.Process(run.pid).children(recursive=True)]
    run.kill()
    run.wait()

    assert len(family) >= 5 and all(gone(pid, within_s=60) for pid in family)


def test_a_worker_does_not_import_torch():
    code = "import sys, tandem.rewards.worker, tandem.rewards.signatures, tandem.api.plugins; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_missing_column_names_those_that_are_there(reward):
    needs = reward("needs")
    assert "'answr'" in str(failure_of(needs)) and "columns there: answer" in str(failure_of(needs))
    with pytest.raises(ConfigError, match="columns there: answer"):
        needs.check_row({"answer": 1})


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("mth", "did you mean 'math'"),
        ("length(target=3)", "did you mean 'target_tokens'"),
        ("math +", "cannot be read"),
        ("math*math", "a weight is a finite number"),
        ("math + math", "twice"),
        ("no_such_file.py:reward", "there is no file"),
        ("FILE:lenght", "length"),
        ("FILE:not_callable", "must be a function"),
    ],
)
def test_a_spec_that_cannot_work_says_what_to_do(tmp_path, spec, words):
    (tmp_path / "mine.py").write_text(SOURCE)
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        build_reward(spec.replace("FILE", str(tmp_path / "mine.py")), timeout_s=1.0)
