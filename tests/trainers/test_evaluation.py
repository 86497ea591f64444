"""`tandem eval`: what it measures, what it leaves, that it goes on where it was, and what it refuses."""

import contextlib
import fcntl
import io
import json
import logging
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tandem.api.failures import RewardFailure
from tandem.api.workflow import RolloutWorkflow
from tandem.cli.main import main
from tandem.config.errors import ConfigError
from tandem.config.evaluation import load_evaluation
from tandem.config.experiment import TrainConfig
from tandem.evaluation.asking import Ask, AskingTerms, ask
from tandem.evaluation.folder import read_samples
from tandem.evaluation.questions import make_judges, open_questions, specs_of
from tandem.evaluation.scores import ProgressLine, judged_by, metrics_of, row_values, score_data, vote_key
from tandem.flow.plan import plan_scores
from tandem.rollout.book import NoBatch
from tandem.rollout.event_loop import BackgroundLoop
from tests.rollout.clockwork import ClockworkEngine, OneAnswer, rows
from tests.trainers.evaluating import DATA, answer, contents, evaluated, settings

REWARDS = Path(__file__).parent / "small_rewards.py"


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """An evaluation that nobody interrupted."""
    return evaluated(model, tmp_path_factory.mktemp("evaluations"), f"data=[{DATA}/gsm8k, {DATA}/svamp]")


def test_rows_of_numbers_are_judged_by_math_where_no_reward_is_named(model, tmp_path):
    found = evaluated(model, tmp_path, "reward=null", "max_rows=2").results["data"]["gsm8k"]
    assert (found["judged_by"], found["failed"]) == ("math", {})


class Judged(RolloutWorkflow):
    """Its judgement fails in all rows but ``fine``."""

    async def arun_episode(self, engine, data):
        if data["fine"]:
            return await OneAnswer().arun_episode(engine, data)
        raise RewardFailure("reward_raised", "my.py:reward: ValueError: no (my.py:7 in reward: return int(completion))")


@pytest.mark.parametrize(("fine", "early"), [(None, True), (3, True), (None, False)])
def test_an_evaluation_whose_first_answers_all_fail_by_the_reward_ends_early(fine, early, caplog):
    items = [Ask("d", i, 0, {**row, "fine": i == fine}) for i, row in enumerate(rows(40))]
    terms = AskingTerms(ends_early=early, max_concurrent=1)
    with contextlib.closing(BackgroundLoop()) as loop:
        if early and fine is None:
            says = r"the first 24 answers all failed.*\(my.py:7 in reward: return int"
            with pytest.raises(NoBatch, match=says):
                ask(ClockworkEngine(), loop, Judged(), items, terms)
        else:  # one came through; or it is beside training, which goes on
            answers = ask(ClockworkEngine(), loop, Judged(), items, terms)
            assert sum(one.failed is not None for one in answers) == (40 if fine is None else 39)
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 1 and "my.py:7" in warned[0].getMessage()


def test_it_leaves_one_line_a_sample_and_a_result_by_data_set(whole):
    lines = [json.loads(line) for line in (whole.folder / "samples.jsonl").read_text().splitlines()]
    assert [(line["data"], line["row"], line["sample"]) for line in lines] == [
        (data, row, sample) for data in ("gsm8k", "svamp") for row in range(6) for sample in range(2)
    ]
    assert {"text", "answer", "extracted", "reward", "accuracy", "stop_reason", "tokens", "failed"} <= lines[0].keys()
    results = json.loads((whole.folder / "results.json").read_text())
    assert results == json.loads(json.dumps(whole.results))
    for name in ("gsm8k", "svamp"):
        found, own = results["data"][name], [line for line in lines if line["data"] == name]
        assert found["truncated"] == sum(line["stop_reason"] == "length" for line in own) / 12
        assert found["extraction_failed"] == sum(line["answer"] is None for line in own) / 12
        assert found["completion_length"] == sum(line["tokens"] for line in own) / 12
        assert set(found["measures"]) == {"accuracy", "pass@2", "maj@2"}
        assert found["judged_by"] == "gsm8k"
    assert set(results["mean"]) == {"accuracy", "pass@2", "maj@2"}
    for word in ("gsm8k", "svamp", "mean", "avg@2", "pass@2", "maj@2", "truncated", "no answer", "Intervals"):
        assert word in whole.text


@pytest.mark.parametrize("kept", [0, 3, 4, 9, 13, 24])
def test_a_killed_evaluation_goes_on_and_gives_the_same_to_the_byte(whole, model, tmp_path, kept):
    folder = tmp_path / "first"
    shutil.copytree(whole.folder, folder)
    record = folder / "samples.jsonl"
    lines = record.read_bytes().splitlines(keepends=True)
    record.write_bytes(b"".join(lines[:kept]) + (lines[kept][:20] if kept < len(lines) else b""))  # cut in the middle
    (folder / "results.json").unlink()
    evaluated(model, tmp_path, f"data=[{DATA}/gsm8k, {DATA}/svamp]")

    ours, theirs = contents(folder), contents(whole.folder)
    assert ours["samples.jsonl"] == theirs["samples.jsonl"]
    assert ours["results.json"] == theirs["results.json"]


@pytest.mark.slow
def test_a_kill_of_the_process_leaves_a_folder_that_goes_on(model, tmp_path):
    slow = tmp_path / "slow.py"
    body = "    time.sleep(0.1)\n    return float(len(completion_ids) > 6)\n"
    slow.write_text(f"import time\n\n\ndef score(completion_ids):\n{body}")
    items = settings(model, tmp_path / "killed", f"reward={slow}:score", "max_rows=8")
    command = [sys.executable, "-m", "tandem", "eval", *items]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    record, deadline = tmp_path / "killed/first/samples.jsonl", time.monotonic() + 90
    while not (record.exists() and record.stat().st_size) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130, said
    assert "the same command goes on from there" in said
    assert 0 < len(record.read_bytes().splitlines()) < 16
    assert not (tmp_path / "killed/first/results.json").exists()

    evaluated(model, tmp_path / "killed", f"reward={slow}:score", "max_rows=8")
    evaluated(model, tmp_path / "unbroken", f"reward={slow}:score", "max_rows=8")
    assert record.read_bytes() == (tmp_path / "unbroken/first/samples.jsonl").read_bytes()


def test_a_finished_evaluation_is_told_again_without_a_model(whole, model, tmp_path):
    folder = tmp_path / "first"
    shutil.copytree(whole.folder, folder)
    began = time.monotonic()
    again = evaluated(model, tmp_path, f"data=[{DATA}/gsm8k, {DATA}/svamp]")
    assert again.results == whole.results
    assert "tok/s" not in again.text and time.monotonic() - began < 30


OTHERWISE = [["wave_samples=12"], ["wave_samples=1000", "engine.max_running=3"], ["data=[DATA/svamp, DATA/gsm8k]"]]


@pytest.mark.parametrize("more", OTHERWISE)
def test_what_is_drawn_depends_on_row_and_sample_and_not_on_batching_or_other_data(whole, model, tmp_path, more):
    more = [item.replace("DATA", str(DATA)) for item in more]
    other = evaluated(model, tmp_path, f"data=[{DATA}/gsm8k]", *more)
    theirs = {(a.data, a.row, a.sample): a for a in read_samples(whole.folder)}
    ours = read_samples(other.folder)
    assert len(ours) >= 12
    assert all(one == theirs[one.data, one.row, one.sample] for one in ours)


def test_another_seed_draws_other_answers_and_greedy_needs_none(model, tmp_path):
    one = ["gconfig.n_samples=1"]
    asked = {"a": ["seed=1"], "b": ["seed=2"], "c": one, "d": [*one, "seed=5"]}
    texts = {}
    for label, more in asked.items():
        texts[label] = [a.text for a in read_samples(evaluated(model, tmp_path, f"label={label}", *more).folder)]
    assert texts["a"] != texts["b"]
    assert texts["c"] == texts["d"] and len(texts["c"]) == 6


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["seed=9"], "seed was 0 and is 9 now"),
        (["gconfig.max_new_tokens=13"], "gconfig.max_new_tokens was 12 and is 13 now"),
        (["max_rows=5"], "max_rows was 6 and is 5 now"),
        ([f"data=[{DATA}/svamp]"], "data"),
    ],
)
def test_other_settings_are_refused_by_name_with_both_values(whole, model, more, words):
    before = contents(whole.folder)
    with pytest.raises(ConfigError, match=words):
        evaluated(model, whole.folder.parent, f"data=[{DATA}/gsm8k, {DATA}/svamp]", *more)
    assert contents(whole.folder) == before


def test_an_evaluation_says_which_kernels_computed_and_goes_on_with_no_others(model, tmp_path, monkeypatch):
    monkeypatch.setattr("tandem.evaluation.run.kernels_here", lambda *_: found)
    found = "torch"
    finished = evaluated(model, tmp_path, "max_rows=2")
    assert finished.text.endswith("tok/s, with torch's operators")
    assert json.loads((finished.folder / "evaluation.json").read_text())["machine"]["kernels"] == "torch"
    found = "compiled"
    with pytest.raises(ConfigError, match=r'machine.kernels was "torch" and is "compiled" now'):
        evaluated(model, tmp_path, "max_rows=2")


@pytest.mark.parametrize(
    ("free_gib", "asked", "taken"),
    [
        (16.0, "null", 5.0),
        (5.0, "null", 2.0),  # never less
        (16.0, "0.05", 0.05),
    ],
)
def test_the_cache_may_take_a_third_of_free_memory(model, tmp_path, monkeypatch, capsys, free_gib, asked, taken):
    monkeypatch.setattr("tandem.evaluation.run.memory_available_gib", lambda: free_gib)
    folder = evaluated(model, tmp_path, "max_rows=2", f"engine.kv_cache_gib={asked}").folder
    assert json.loads((folder / "evaluation.json").read_text())["machine"]["kv_cache_gib"] == taken
    assert ("keys and values may take 5 GiB (engine.kv_cache_gib): a third" in capsys.readouterr().err) == (taken == 5)
    monkeypatch.setattr("tandem.evaluation.run.memory_available_gib", lambda: 64.0)
    (folder / "results.json").unlink()
    evaluated(model, tmp_path, "max_rows=2", f"engine.kv_cache_gib={asked}")  # it keeps what it began with


def test_a_model_that_was_trained_on_meanwhile_is_another_one(model, tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    evaluated(copy, tmp_path, "max_rows=2")
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    with pytest.raises(ConfigError, match="model_fingerprint"):
        evaluated(copy, tmp_path, "max_rows=2")


def test_a_record_that_was_changed_is_refused_with_its_line(whole, model, tmp_path):
    folder = tmp_path / "first"
    shutil.copytree(whole.folder, folder)
    lines = (folder / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "samples.jsonl").write_bytes(b"".join([lines[1], lines[0], *lines[2:]]))
    with pytest.raises(ConfigError, match=r"samples.jsonl:1 "):
        evaluated(model, tmp_path, f"data=[{DATA}/gsm8k, {DATA}/svamp]")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["data=[gsm8kk]"], "did you mean 'gsm8k'"),
        (["data=[{path: x, benchmark: gsm8kk}]"], "did you mean 'gsm8k'"),
        (["data=[/nowhere/at/all]"], "nowhere"),
        (["model=/nowhere/model"], "nowhere"),
        (["model="], "model is missing"),
        (["data=[]"], "data is missing"),
        (["k=[1, 4]"], "k must lie in 1…gconfig.n_samples"),
        (["k=[0]"], "k must be at least 1, got 0"),
        (["gconfig.greedy=true"], "equal answers"),
        (["gconfig.n_samples=1", "gconfig.greedy=true", "gconfig.temperature=0.5"], "temperature=0.5 is not used"),
        (["reward=mathh"], "did you mean 'math'"),
        (["workflow=rlvrr"], "did you mean 'rlvr'"),
        (["max_row=3"], "max_rows"),
        (["wave_samples=0"], r"wave_samples must be a whole number, at least 1, got 0 \(command line\)"),
        (["gconfig.temperature=0"], "temperature=0 is greedy, which one sample of each row is anyway"),
        (["label=a/b"], "label must be the name of one folder"),
        (["engine.keep_kv_on_update=true"], "has no effect"),
        ([f"data=[{DATA}/gsm8k, {DATA}/gsm8k]"], "two data sets are called 'gsm8k'"),
        ([f"data=[{{path: {DATA}/svamp, benchmark: math500}}]"], "problem"),
    ],
)
def test_what_cannot_work_is_refused_before_the_model_is_loaded(model, tmp_path, more, words):
    with pytest.raises(ConfigError, match=words):
        evaluated(model, tmp_path, *more)
    assert not (tmp_path / "first").exists()


def written(folder: Path, *rows: dict) -> Path:
    folder.mkdir()
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_data_without_answers_is_refused_with_the_row(model, tmp_path):
    data = written(tmp_path / "sums", {"question": "1 + 1?", "answer": "2"}, {"question": "1 + 2?", "answer": " "})
    with pytest.raises(ConfigError, match=r"test.jsonl:2 of data set 'sums'.*answer_column"):
        evaluated(model, tmp_path, f"data=[{data}]")
    none = written(tmp_path / "none", {"question": "1 + 1?"})
    with pytest.raises(ConfigError, match=r"test\.jsonl:1 of data set 'none'"):
        evaluated(model, tmp_path, f"data=[{none}]")


def test_any_folder_works_with_its_columns(model, tmp_path):
    data = written(tmp_path / "mine", {"text": "1 + 1?", "label": "2"}, {"text": "1 + 2?", "label": "3"})
    found = evaluated(model, tmp_path, f"data=[{data}]", "prompt_column=text", "answer_column=label", "prompt_suffix=!")
    assert found.results["data"]["mine"]["rows"] == 2


PROGRAM = {
    "task_id": "t/0",
    "prompt": "def two():\n",
    "canonical_solution": "    return 2\n",
    "test": "def check(candidate):\n    assert candidate() == 2",
    "entry_point": "two",
}


@pytest.mark.parametrize("name", ["humaneval", "programs"])
def test_programs_are_recognised_and_run_in_a_sandbox(model, tmp_path, name):
    data = written(tmp_path / name, PROGRAM)
    keys = (f"data=[{data}]", "reward=null", "gconfig.n_samples=3", "k=[1,2]")
    found = evaluated(model, tmp_path, *keys).results["data"]["humaneval"]
    assert found["judged_by"] == "code" and not found["failed"]
    assert {"accuracy", "pass@1", "pass@2"} <= set(found["measures"])
    own = tmp_path / "own.py"
    own.write_text("def score(completion, test, entry_point):\n    return float(entry_point in completion)\n")
    found = evaluated(model, tmp_path, f"data=[{data}]", f"reward={own}:score", "label=own")
    assert found.results["data"]["humaneval"]["measures"]["accuracy"]["value"] == 0.0


def test_rewards_that_fail_are_counted_by_reason_and_never_lost(model, tmp_path):
    found = evaluated(model, tmp_path, f"reward={REWARDS}:raises", "max_rows=2")
    data = found.results["data"]["gsm8k"]
    assert data["failed"] == {"reward_raised": 4}
    assert data["measures"]["accuracy"]["value"] == 0.0
    assert re.search("reward_raised 4, first row 0, sample 0: .*this reward is broken", found.text)
    assert all("this reward is broken" in one.error and one.text for one in read_samples(found.folder))


def test_an_evaluation_that_judged_nothing_is_a_failure(model, tmp_path, capsys):
    assert main(["eval", *settings(model, tmp_path, f"reward={REWARDS}:raises", "max_rows=1")]) == 1
    said = capsys.readouterr()
    assert "no sample could be judged" in said.err and "reward_raised 2" in said.out


def test_a_reward_that_is_no_share_gives_its_mean_and_no_accuracy(model, tmp_path):
    reward = tmp_path / "long.py"
    reward.write_text("def length(completion_ids):\n    return float(len(completion_ids))\n")
    found = evaluated(model, tmp_path, f"reward={reward}:length", "max_rows=2")
    assert found.results["data"]["gsm8k"]["measures"] == {}
    assert found.results["data"]["gsm8k"]["reward"] > 1
    assert "no accuracy" in found.text


def test_a_workflow_of_several_turns_is_evaluated_with_its_own_metrics(model, tmp_path):
    found = evaluated(model, tmp_path, "workflow=multi_turn", "max_rows=2", "gconfig.max_new_tokens=6")
    assert found.results["data"]["gsm8k"]["metrics"]["turns"] >= 1


SECOND_TURNS = """
import asyncio
import time
from pathlib import Path

from tandem import ChatWorkflow

LOG, SLOW = (Path(__file__).with_name(name) for name in ("log", "slow_tools_s"))


class Again(ChatWorkflow):
    async def arun_episode(self, engine, data):
        chat = self.start(data)
        chat.add(await engine.agenerate(chat.request(self.gconfig)))
        chat.say("Again.")
        if SLOW.exists() and len(data["messages"][-1]["content"]) % 2:  # a tool that is slower than the samples without it
            until = time.monotonic() + float(SLOW.read_text())
            while time.monotonic() < until and "answered" not in LOG.read_text():
                await asyncio.sleep(0.05)
        write("asked")
        chat.add(await engine.agenerate(chat.request(self.gconfig)))
        write("answered")
        return chat.sample(1.0)


def write(word):
    with LOG.open("a") as log:
        print(word, file=log)
"""


def test_samples_take_their_turns_together_whatever_their_tools_take(model, tmp_path):
    (tmp_path / "own.py").write_text(SECOND_TURNS)
    keys = [f"workflow={tmp_path}/own.py:Again", "wave_samples=12", "gconfig.max_new_tokens=3"]

    def run(label, *more):
        (tmp_path / "log").write_text("")
        found = evaluated(model, tmp_path, *keys, f"label={label}", *more)
        return (found.folder / "samples.jsonl").read_bytes(), (tmp_path / "log").read_text().split()

    quick = run("quick")
    (tmp_path / "slow_tools_s").write_text("0.4")
    slow = run("slow")
    (tmp_path / "slow_tools_s").write_text("60")
    free = run("free", "deterministic=false")
    assert slow == quick and slow[1] == ["asked"] * 12 + ["answered"] * 12
    assert "answered" in free[1][:11], "no sample went on before the others"


def test_known_formats_find_question_answer_and_judge():
    config = load_evaluation(None, ["model=m", f"data=[{DATA}/gsm8k, {DATA}/svamp, {DATA}/math500]", "max_rows=2"]).config
    found = {one.name: one for one in open_questions(config)}
    assert list(found) == ["gsm8k", "svamp", "math500"]
    assert {one.reward for one in found.values()} == {"math"}
    texts = {name: one.rows[0]["messages"][-1]["content"] for name, one in found.items()}
    assert texts["gsm8k"].startswith("Janet") and "####" in texts["gsm8k"]
    assert "87 oranges" in texts["svamp"] and "How big is each group of bananas?" in texts["svamp"]
    assert "polar coordinates" in texts["math500"] and "\\boxed{}" in texts["math500"]
    assert found["svamp"].rows[0]["answer"] == "145"
    plan = plan_scores(TrainConfig(), specs_of(list(found.values())))
    make_judges(list(found.values()), 5.0, plan).close()


def test_a_number_of_rows_on_the_command_line_overrules_the_file(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("model: m\ndata:\n  - path: one\n    max_rows: 128\nmax_rows: 5\n")
    for overrides, most in ([], (128, 5)), (["max_rows=300"], (None, 300)):
        config = load_evaluation(file, overrides).config
        assert (config.data[0].max_rows, config.max_rows) == most


def test_the_command_takes_short_options_and_keys(model, tmp_path, capsys):
    keys = settings(model, tmp_path)[2:]
    more = [item for item in keys if not item.startswith(("gconfig.", "max_rows", "label"))]
    options = ["--data", f"gsm8k={DATA}/gsm8k", "--n", "2", "--max-new-tokens", "6", "--max-rows", "2", "--label", "short"]
    assert main(["eval", str(model), *more, *options, "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["data"]["gsm8k"]["rows"] == 2
    assert main(["eval", str(model), *more, *options, "--k", "4"]) == 2
    assert "k must lie in" in capsys.readouterr().err
    assert main(["eval", str(model), *more, *options, "--dry-run"]) == 0
    assert "n_samples: 2" in capsys.readouterr().out


def test_two_processes_never_write_to_one_folder(whole, model):
    with (whole.folder / ".lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="being written"):
            evaluated(model, whole.folder.parent, f"data=[{DATA}/gsm8k, {DATA}/svamp]")


# ---------------------------------------------------------------------- figures of known answers


def test_figures_of_known_answers():
    first = [(1.0, "1"), (0.0, "2"), (0.0, "2.0"), (1.0, "1")]
    answers = [answer(0, score, sample=i, said=said) for i, (score, said) in enumerate(first)]
    answers += [answer(1, 0.0, sample=i, said=None, stop_reason="length", tokens=8) for i in range(4)]
    values = row_values(answers, (1, 2, 4))
    assert values["accuracy"] == [0.5, 0.0]
    assert values["pass@2"] == [pytest.approx(1 - 1 / 6), 0.0]
    assert values["maj@4"] == [0.5, 0.0]  # 2 and 2.0 are one answer: two against two
    by_a_rule = row_values(judged_by(answers, "reward >= 1"), (2, 4), votes=False)
    assert set(by_a_rule) == {"accuracy", "pass@2", "pass@4"}, "answers that succeed by a rule need not be alike"
    found = score_data(answers, (4,), confidence=0.95, seed=0)
    assert (found.truncated, found.extraction_failed, found.completion_length) == (0.5, 0.5, 4.0)


def test_a_failed_sample_counts_as_wrong_and_takes_no_part_in_rates():
    answers = [answer(0, 1.0), answer(1, None, said=None, failed="deadline", extracted=None, reward=None, accuracy=None)]
    found = score_data(answers, (), confidence=0.95, seed=0)
    assert found.measures["accuracy"].value == 0.5
    assert (found.failed, found.extraction_failed, found.truncated) == ({"deadline": 1}, 0.0, 0.0)


def test_there_is_no_vote_where_nobody_looks_for_an_answer():
    answers = [answer(0, 1.0, sample=i, said=None, extracted=None) for i in range(2)]
    assert set(row_values(answers, (2,))) == {"accuracy", "pass@2"}
    assert score_data(answers, (2,), confidence=0.95, seed=0).extraction_failed is None


def test_metrics_of_a_step_have_a_share_for_each_source():
    answers = [answer(0, 1.0, data="a"), answer(1, 0.0, data="b")]
    found = metrics_of(answers, 1)
    assert (found["eval/accuracy"], found["eval/accuracy/a"], found["eval/accuracy/b"]) == (0.5, 1.0, 0.0)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("1,000", "1000.0", True),
        ("\\dfrac{1}{2}", "\\frac{1}{2}", True),
        ("\\left(1, 2\\right)", "(1,2)", True),
        ("x", "y", False),
    ],
)
def test_answers_that_are_written_alike_vote_together(one, other, same):
    assert (vote_key(one) == vote_key(other)) is same


def test_progress_tells_what_is_done_and_what_is_left():
    said = io.StringIO()
    progress = ProgressLine(total=4, done=1, file=said)
    progress.answered(answer(1, 1.0, tokens=10))
    progress.answered(answer(2, 0.0, tokens=10))
    assert "1 of 4 samples are recorded already" in said.getvalue()
    assert re.fullmatch(r"d  3/4 samples  accuracy 50\.0%  \d+ tok/s  ETA \d+:\d\d", progress.line("d"))
    assert progress.summary().startswith("2 samples, 20 tokens in ")


@pytest.mark.parametrize(
    ("success", "right"),
    [("reward >= 1", [1.0, 0.0]), ("reward>0.1", [1.0, 1.0]), ("form == 1", [0.0, 1.0]), ("reward < .5e0", [0.0, 1.0])],
)
def test_a_success_is_said_of_the_reward_or_of_a_part_of_it(success, right):
    answers = [
        answer(row, None, reward=reward, rewards={"form": form})
        for row, (reward, form) in enumerate([(1.2, 0.0), (0.2, 1.0)])
    ]
    assert row_values(judged_by(answers, success), ())["accuracy"] == right
    assert row_values(judged_by(answers, None), ()) == {}
    with pytest.raises(ConfigError, match="no 'from'; did you mean 'form'"):
        judged_by(answers, "from == 1")


def test_another_success_counts_a_finished_evaluation_anew(model, tmp_path):
    before = evaluated(model, tmp_path, "success=reward > 1")
    after = evaluated(model, tmp_path, "success=reward >= 0")
    values = [one.results["data"]["gsm8k"]["measures"]["accuracy"]["value"] for one in (before, after)]
    assert values == [0.0, 1.0]
    assert json.loads((tmp_path / "first/evaluation.json").read_text())["config"]["success"] == "reward >= 0"
    with pytest.raises(ConfigError, match="success is NAME >= NUMBER"):
        evaluated(model, tmp_path, "success=right")
