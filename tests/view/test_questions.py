"""The questions of the viewer's pages: what a run's files say, whole or torn, without writing to them."""

import json
import os
import subprocess
import sys

import pytest

from tandem.config.errors import ConfigError
from tandem.config.experiment import TrackingConfig
from tandem.tracking.tracker import Tracker
from tandem.view.index import read_filter
from tandem.view.questions import SCHEMAS
from tests.tracking.test_recorder import group, record, sample
from tests.view.runs import every_file, make_run, questions

ALL = {"step": -1, "order": "step", "offset": 0, "limit": 100}


@pytest.fixture
def asked(tmp_path):
    make_run(tmp_path / "runs/sums/one")
    found = questions(tmp_path)
    found.index(tmp_path / "runs/sums/one").update()
    return found


def fitting(asked, text, **more):
    return asked.ask("samples", {"run": "sums/one", "filter": text, **ALL, **more})


def test_a_filter_finds_by_figures_flags_reasons_and_words(asked):
    assert fitting(asked, "")["fit"] == 15
    assert [row["reward"] for row in fitting(asked, "reward > 0.9 step = 3")["rows"]] == [1.0, 1.0]
    assert fitting(asked, "truncated and reward >= 1")["fit"] == 4
    assert fitting(asked, "not truncated")["fit"] == 0
    assert {row["dropped"] for row in fitting(asked, "failed: reward_timeout")["rows"]} == {"reward_timeout"}
    assert {row["step"] for row in fitting(asked, '"IT IS 211"')["rows"]} == {2}
    assert fitting(asked, '"IT IS 211" reward > 0.5', step=2)["fit"] == 1
    assert fitting(asked, "tokens > 0", limit=2, offset=14)["rows"][0]["step"] == 1
    assert fitting(asked, "reward == .25")["fit"] == fitting(asked, "reward = 0.25 reward ≥ 0")["fit"] == 3
    assert fitting(asked, '"stop_reason"')["fit"] == 0, "words are looked for in texts, not in the names of the record"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("size > 3", "reward, advantage"),
        ("colour: red", "failed, dropped"),
        ("reward > 1.2.3", "is not a number"),
        ('not "x"', "before"),
        ("reward > abc", "is not a number"),
        ("reward", "write terms such as"),
        ("truncated OR dropped", "all of which must hold"),
        ("(truncated)", "put any other words in quotes"),
        ('"it is', "a quote is not closed"),
    ],
)
def test_a_filter_that_cannot_be_read_says_what_there_is(text, words):
    with pytest.raises(ConfigError, match=words):
        read_filter(text)


def test_a_filter_is_never_part_of_the_question_to_the_data_base(asked):
    fitting(asked, "failed: \"'; DROP TABLE samples; --\" '; DELETE FROM samples")
    assert fitting(asked, "")["fit"] == 15


def test_a_group_has_all_that_was_recorded_and_tokens_have_their_figures(asked, tmp_path):
    step = {"run": "sums/one", "step": 2}
    best, worst = asked.ask("group", {**step, "group": 20})
    assert (best["reward"], worst["reward"]) == (1.0, 0.25) and best["messages"][1]["tool_calls"]
    told = asked.ask("tokens", {**step, "line": best["line"], "first": 0})
    (first, second) = told["trajectories"]
    assert (first["length"], first["trained"]) == (4, [0, 1, 1, 1]) and second["length"] == 5
    assert first["pieces"] == list(map(str, first["ids"])) and "nowhere" in told["note"]
    assert len(first["columns"]["advantages"]) == 4 and first["columns"]["versions"][1:] == [0, 0, 0]
    with pytest.raises(ConfigError, match="not trained"):
        asked.ask("tokens", {**step, "line": asked.ask("group", {**step, "group": 22})[0]["line"], "first": 0})


def test_prompts_have_their_success_over_time(asked):
    said = asked.ask("prompts", {"run": "sums/one", "order": "learnt", "offset": 0})
    by_text = {row["text"]: [cell[0] for cell in row["cells"].values()] for row in said["rows"]}
    assert by_text == {"5 + 6 =": [pytest.approx(x, abs=1e-3) for x in (0.4167, 0.5833, 0.75)], "3 + 4 = ü": [0.625] * 3}
    assert said["rows"][0]["text"] == "5 + 6 =" and said["edges"] == [1, 2, 3] and said["pending"] == 0


def test_curves_grow_by_what_is_new_and_begin_anew_when_a_run_goes_back(asked, tmp_path):
    ask = lambda known: asked.ask("curves", {"run": "sums/one", "after": known["at"], "file": known["file"]})  # noqa: E731
    first = ask({"at": 0, "file": ""})
    assert first["step"] == [1, 2, 3] and first["about"]["reward/mean"][0] == "reward" and not first["fresh"]
    file = tmp_path / "runs/sums/one/metrics.jsonl"
    with file.open("a") as opened:
        opened.write('{"step": 4, "time": 5, "reward/mean": null, "new": 7}\n{"step": 5, "ti')
    more = ask(first)
    assert (more["fresh"], more["step"], more["values"]) == (True, [4], {"new": [7.0]})
    other = file.with_name("other")
    other.write_text('{"step": 1, "time": 5}\n')
    os.replace(other, file)  # as a run that goes on from a checkpoint does
    again = ask(more)
    assert (again["fresh"], again["step"]) == (False, [1])


def test_a_torn_run_is_told_as_far_as_it_goes(tmp_path):
    run = make_run(tmp_path / "runs/sums/torn", status="running")
    for name, cut in (("metrics.jsonl", 20), ("run.json", 30), ("config.yaml", 40), ("trajectories/step_3.jsonl", 100)):
        os.truncate(run / name, (run / name).stat().st_size - cut)
    os.truncate(run / "batches/step_3.safetensors.gz", 200)
    (run / "batches/step_2.safetensors.gz").write_bytes(b"no gzip")
    (run / "trajectories/step_1.jsonl").write_bytes(b'\x00\xff{"a": \n[1]\n"x"\n' + b"[" * 100_000 + b"\n")
    asked = questions(tmp_path)
    (line,) = asked.ask("runs", {})
    assert (line["status"], line["steps"]) == ("unknown", 2)
    assert asked.ask("curves", {"run": "sums/torn", "after": 0, "file": ""})["step"] == [1, 2]
    found = asked.ask("samples", {"run": "sums/torn", "filter": "", **ALL, "step": 3})
    assert found["fit"] == 4 and asked.ask("samples", {"run": "sums/torn", "filter": "", **ALL, "step": 1})["fit"] == 0
    for step in (2, 3):
        with pytest.raises(ConfigError, match="damaged"):
            asked.ask("tokens", {"run": "sums/torn", "step": step, "line": 0, "first": 0})
    assert asked.ask("differences", {"run": "sums/torn", "other": "sums/torn"}) == []


def test_a_record_that_is_made_again_or_goes_changes_the_index(asked, tmp_path):
    run = tmp_path / "runs/sums/one"
    record(run, 3, [group(7, sample(0.125))])
    (run / "trajectories/step_1.jsonl").unlink()
    assert asked.index(run).pending() == [3, 1]
    asked.index(run).update()
    assert fitting(asked, "")["fit"] == 6 and fitting(asked, "reward = 0.125")["fit"] == 1


def test_looking_writes_nothing_into_a_run_and_imports_no_torch(tmp_path):
    run = make_run(tmp_path / "runs/sums/one")
    before = every_file(run)
    bodies = {
        "after": 0,
        "file": "",
        "other": "sums/one",
        "name": "log.txt",
        "filter": "it",
        "step": 1,
        "offset": 0,
        "limit": 9,
    }
    bodies |= {"group": 10, "line": 0, "first": 0, "run": "sums/one"}
    asked = {
        name: {key: bodies.get(key, "learnt" if name == "prompts" else "step") for key in SCHEMAS[name]["required"]}
        for name in SCHEMAS
    }
    script = f"""if True:
        import json, sys
        from pathlib import Path
        import tandem.cli.view
        from tandem.view.questions import RunAnswers
        from tandem.view.pages import report
        from tandem.view.runs import Runs
        found = RunAnswers(Runs([Path({str(run)!r})]), Path({str(tmp_path / "cache")!r}))
        found.index(Path({str(run)!r})).update()
        for name, body in json.loads({json.dumps(asked)!r}).items():
            json.dumps(found.ask(name, body), allow_nan=False)
        report(found)
        print([name for name in ("torch", "transformers", "tensordict") if name in sys.modules])
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
    assert every_file(run) == before and not (run / ".lock").exists()


def test_runs_have_names_and_a_name_is_never_a_path(tmp_path):
    for place in ("runs/sums/one", "other/sums/one"):
        make_run(tmp_path / place, steps=1)
    empty = tmp_path / "runs/sums/empty"
    empty.mkdir()
    asked = questions(tmp_path, tmp_path / "runs", tmp_path / "other", empty)
    assert {line["name"]: line["status"] for line in asked.ask("runs", {})} == {
        "sums/one": "finished",
        "sums/one~2": "finished",
        "sums/empty": "empty",
    }
    assert asked.ask("differences", {"run": "sums/one", "other": "sums/one~2"}) == []
    for name in ("../runs/sums/one", str(empty), "sums", ""):
        with pytest.raises(ConfigError, match="no run"):
            asked.ask("config", {"run": name})
    (tmp_path / "secret").write_text("x")
    assert asked.ask("log", {"run": "sums/one", "name": "../../../secret"})["entries"] == []


def test_a_metric_that_became_no_number_is_named_with_its_first_step(tmp_path):
    run = make_run(tmp_path / "runs/sums/lost", steps=1)
    values = [0.5, None, 0.25, None, None]
    rows = [{"step": n, "time": 1.0, "loss": value, "big": 10**400} for n, value in enumerate(values, 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = questions(tmp_path)
    told = asked.ask("curves", {"run": "sums/lost", "after": 0, "file": ""})
    assert told["lost"] == {"loss": 4, "big": 1} and told["values"]["loss"][2] == 0.25
    assert asked.ask("runs", {})[0]["metrics"].get("big") is None


def test_a_run_that_cannot_be_read_hides_no_other(tmp_path):
    for name in ("one", "two"):
        make_run(tmp_path / "runs/sums" / name, steps=1)
    (tmp_path / "runs/sums/two/config.yaml").unlink()
    (tmp_path / "runs/sums/two/config.yaml").symlink_to("config.yaml")  # a loop
    (tmp_path / "runs/sums/one/servers-logs").mkdir()
    (tmp_path / "runs/sums/one/servers-logs/x.log").symlink_to("/etc/passwd")
    (tmp_path / "runs/sums/one/servers-logs/y.log").symlink_to("y.log")
    (tmp_path / "runs/sums/one/config.yaml").unlink()
    (tmp_path / "runs/sums/one/config.yaml").symlink_to("/etc/passwd")
    asked = questions(tmp_path)
    assert [line["name"] for line in asked.ask("runs", {})] == ["sums/one", "sums/two"]
    assert asked.ask("log", {"run": "sums/one", "name": "x"})["logs"] == ["log.txt"], "a link leads out of the run"
    assert "root" not in json.dumps(asked.ask("config", {"run": "sums/one"}))


def test_a_cache_that_cannot_be_made_is_named(tmp_path):
    make_run(tmp_path / "runs/sums/one", steps=1)
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ConfigError, match="set TANDEM_CACHE"):
        fitting(questions(tmp_path), "")


def test_a_log_has_entries_with_their_tracebacks(asked):
    (entry,) = asked.ask("log", {"run": "sums/one", "name": "log.txt"})["entries"]
    assert (entry["level"], entry["who"], entry["text"]) == (
        "WARNING",
        "tandem.roles.actor",
        "this step\n  changes nothing\n",
    )


def test_the_line_of_a_run_has_what_was_told_of_its_health(tmp_path):
    run = make_run(tmp_path / "runs/sums/one", steps=1)
    told = {"step": 3, "name": "weights_stand_still", "sign": "…", "remedy": "…"}
    (run / "health.jsonl").write_text(f'{json.dumps(told)}\n{{"step": 4, "na')
    assert questions(tmp_path).ask("runs", {})[0]["health"] == [told]


def test_the_same_prompt_is_found_at_other_steps_and_in_other_runs(asked, tmp_path):
    run = make_run(tmp_path / "runs/sums/two", steps=1)
    asked.index(run).update()
    ask = lambda other: asked.ask("again", {"run": "sums/one", "step": 2, "group": 21, "other": other})  # noqa: E731
    assert [row[:3] for row in ask("sums/one")["groups"]] == [[1, 11, 2], [2, 21, 2], [3, 31, 2]]
    assert ask("sums/two") == {"groups": [[1, 11, 2, 0.75]], "pending": 0}


def test_a_timeline_has_the_spans_of_each_rank_and_of_a_step_made_again_the_last(tmp_path):
    run = make_run(tmp_path / "runs/sums/one", steps=1)
    tracker = Tracker(run, TrackingConfig(trajectories_per_step=0), progress=False)
    spans = [[("rollout", "generate", 100.0, 103.0), ("actor", "update", 103.0, 104.5)], [("actor", "update", 103.5, 104.0)]]
    tracker.log(2, {}, spans=[[("rollout", "generate", 1.0, 2.0)]])
    tracker.log(2, {}, spans=spans)
    tracker.close(draw=False)
    ask = lambda step: questions(tmp_path).ask("timeline", {"run": "sums/one", "step": step})  # noqa: E731
    assert ask(2) == [[("rollout", "generate", 0.0, 3.0), ("actor", "update", 3.0, 4.5)], [("actor", "update", 3.5, 4.0)]]
    os.truncate(run / "timeline.jsonl", (run / "timeline.jsonl").stat().st_size - 3)
    assert ask(1) == ask(2) == []
    for number in ("NaN", "9" * 400):
        with (run / "timeline.jsonl").open("a") as file:
            file.write(f'\n{{"step": 2, "ranks": [[["actor", "update", {number}, 2.0]]]}}\n')
        assert ask(2) == []
