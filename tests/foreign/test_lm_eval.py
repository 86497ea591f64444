"""lm-evaluation-harness at `tandem serve`: the scores, answers and log-likelihoods of its own `hf` back end, to the sample.

Needs ``envs/lm_eval`` of ``scripts/foreign_agents.sh``, or the python of another environment in ``TANDEM_LM_EVAL_PYTHON``.
"""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tandem.models.catalog import resolve
from tests.foreign.peers import ENVS

PYTHON = Path(os.environ.get("TANDEM_LM_EVAL_PYTHON", ENVS / "lm_eval/bin/python"))
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
FACTS = [
    ("What is the capital of France?", "Paris", ["Rome", "Berlin", "Madrid"]),
    ("What is the capital of Japan?", "Tokyo", ["Beijing", "Seoul", "Bangkok"]),
    ("What colour is the sky on a clear day?", "blue", ["green", "red", "brown"]),
    ("Which animal says moo?", "a cow", ["a cat", "a duck", "a dog"]),
    ("What do bees make?", "honey", ["milk", "bread", "cheese made of sheep's milk"]),
    ("What is frozen water called?", "ice", ["steam", "sand", "smoke"]),
    ("How many days has a week?", "seven", ["five", "ten", "thirty-one"]),
    ("Which planet do we live on?", "Earth", ["Mars", "Venus", "Jupiter"]),
]
COMMON = {"dataset_path": "json", "test_split": "test", "doc_to_text": "Question: {{question}}\nAnswer:", "num_fewshot": 0}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not PYTHON.exists(), reason="lm-eval is not there; scripts/foreign_agents.sh makes it"),
]


def rows():
    draw, made = random.Random(0), []
    for question, right, wrong in FACTS:
        made.append((question, right, wrong))
    for _ in range(16):
        a, b = draw.randrange(1, 20), draw.randrange(1, 20)
        made.append((f"What is {a} + {b}?", str(a + b), [str(a + b + off) for off in (1, -1, 10)]))
    for question, right, wrong in made:
        choices = [right, *wrong]
        draw.shuffle(choices)
        yield {"question": question, "choices": choices, "answer": choices.index(right), "target": right}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A task of log-likelihoods and a task of answers, over a file."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    own = COMMON | {"dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
    choice = {"task": "choice", "output_type": "multiple_choice", "doc_to_choice": "{{choices}}"}
    choice |= {"doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}
    said = {"task": "said", "output_type": "generate_until", "doc_to_target": "{{target}}"}
    said |= {"generation_kwargs": {"until": ["\n"], "max_gen_toks": 24, "do_sample": False}}
    said |= {"metric_list": [{"metric": "exact_match"}], "filter_list": [{"name": "first", "filter": [_FIRST, _TAKE]}]}
    for task in (choice, said):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(own | task))
    return folder


_FIRST = {"function": "regex", "regex_pattern": r"(\d+|[A-Z]\w+)"}
_TAKE = {"function": "take_first"}


@pytest.fixture(scope="module")
def model():
    return resolve("smollm2-135m")


@pytest.fixture(scope="module")
def url(model, tmp_path_factory):
    """The command of the page, in float32, as `hf` computes here."""
    address = tmp_path_factory.mktemp("server") / "address.json"
    command = [sys.executable, "-m", "tandem", "serve", str(model), "--name", "smollm2-135m", "--port", "0"]
    command += ["--dtype", "float32", "--device", "cpu", "--address-file", str(address)]
    server = subprocess.Popen(command)
    try:
        until = time.monotonic() + 120
        while not address.is_file():
            assert server.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        yield json.loads(address.read_text())["url"]
    finally:
        server.terminate()
        server.wait(60)


def evaluated(tasks, out, task, kind, arguments, *more):
    """(scores, samples by their number) of one evaluation."""
    command = [str(PYTHON), "-m", "lm_eval", "run", "--model", kind, "--model_args", arguments, "--tasks", task]
    command += ["--include_path", str(tasks), "--output_path", str(out), "--log_samples", *more]
    done = subprocess.run(command, env=os.environ | OFFLINE, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    (scores,), (samples,) = out.rglob("results_*.json"), out.rglob("samples_*.jsonl")
    lines = map(json.loads, samples.read_text().splitlines())
    return json.loads(scores.read_text())["results"][task], {line["doc_id"]: line for line in lines}


def both(tasks, tmp_path, task, model, kind, route, *more):
    """What the harness finds by its own back end, and at the server."""
    served = f"model=smollm2-135m,base_url={route},tokenizer={model},num_concurrent=4"
    own = evaluated(tasks, tmp_path / "hf", task, "hf", f"pretrained={model},dtype=float32", "--device", "cpu", *more)
    return own, evaluated(tasks, tmp_path / "served", task, kind, served, *more)


def test_log_likelihoods_are_those_of_hf(tasks, model, url, tmp_path):
    (scores, own), (at_server, served) = both(tasks, tmp_path, "choice", model, "local-completions", f"{url}/v1/completions")
    assert scores == at_server and 0.2 < scores["acc,none"] < 1
    assert len(own) == len(served) == 24
    for number, sample in own.items():
        pairs = zip(sample["filtered_resps"], served[number]["filtered_resps"], strict=True)
        for (logprob, greedy), (other, also_greedy) in pairs:
            assert float(logprob) == pytest.approx(float(other), abs=1e-3) and str(greedy) == str(also_greedy)
        assert sample["acc"] == served[number]["acc"] and sample["acc_norm"] == served[number]["acc_norm"]


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_answers_are_those_of_hf(tasks, model, url, tmp_path, route):
    kind = "local-completions" if route == "completions" else "local-chat-completions"
    more = [] if route == "completions" else ["--apply_chat_template"]
    (scores, own), (at_server, served) = both(tasks, tmp_path, "said", model, kind, f"{url}/v1/{route}", *more)
    assert scores == at_server and (scores["exact_match,first"] > 0 or "chat" in route)  # in a chat it says whole sentences
    assert len({str(sample["resps"]) for sample in own.values()}) > 12
    assert [own[number]["resps"] for number in sorted(own)] == [served[number]["resps"] for number in sorted(own)]
