"""`tandem compare`: paired by row, with a test of significance, and refused where the rows are not the same."""

import json

import pytest
from safetensors.torch import save_file

from tandem.cli.main import main
from tandem.config.errors import ConfigError
from tandem.evaluation.compare import compare, describe, find_pair, open_recorded
from tandem.evaluation.folder import line_of
from tests.trainers.evaluating import DATA, answer, evaluated


def recorded(folder, scores, *, digests=None, data="d", reward="math", n=1, **config):
    """A folder as `tandem eval` leaves it; ``scores`` has a list a row."""
    folder.mkdir(parents=True)
    settings = {
        "config": {"label": folder.name, "out": "x", "k": [n] if n > 1 else [], "gconfig": {"n_samples": n}, **config},
        "data": {data: {"rows": len(scores), "digest": "", "reward": reward}},
        "row_digests": {data: " ".join(digests or (f"row{i}" for i in range(len(scores))))},
        "files": {},
    }
    (folder / "evaluation.json").write_text(json.dumps(settings))
    answers = [answer(row, s, sample=i, data=data) for row, own in enumerate(scores) for i, s in enumerate(own)]
    (folder / "samples.jsonl").write_bytes(b"".join(map(line_of, answers)))
    return open_recorded(folder)


def test_one_sample_a_row_is_compared_by_mcnemar(tmp_path):
    first = recorded(tmp_path / "a", [[1.0]] * 10 + [[0.0]] * 2 + [[1.0]] * 20 + [[0.0]] * 8)
    second = recorded(tmp_path / "b", [[0.0]] * 10 + [[1.0]] * 2 + [[1.0]] * 20 + [[0.0]] * 8, seed=3)
    one, _ = compare(first, second).differences
    assert (one.only_first, one.only_second, one.test) == (10, 2, "McNemar, exact")
    assert one.p_value == pytest.approx(158 / 4096)
    assert (one.first, one.second, one.difference) == (0.75, 0.55, pytest.approx(-0.2))
    assert -0.4 < one.low < -0.2 < one.high < 0
    said = describe(compare(first, second))
    assert "10 rows right only with a, 2 only with b" in said and "seed (None / 3)" in said


def test_several_samples_a_row_are_compared_by_sign_flips(tmp_path):
    first = recorded(tmp_path / "a", [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]], n=2)
    second = recorded(tmp_path / "b", [[1.0, 0.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]], n=2)
    found = {one.measure: one for one in compare(first, second).differences}
    assert set(found) == {"accuracy", "pass@2", "maj@2", "reward"}
    assert found["accuracy"].difference == pytest.approx(0.375)
    assert found["accuracy"].p_value == pytest.approx(2 / 8)
    assert found["pass@2"].difference == pytest.approx(0.25)


def test_an_evaluation_against_itself_has_no_difference(tmp_path):
    one = recorded(tmp_path / "a", [[1.0], [0.0]])
    found, _ = compare(one, one).differences
    assert (found.difference, found.p_value) == (0.0, 1.0)
    assert "No difference is significant" in describe(compare(one, one))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"data": "e"}, "different data"),
        ({"scores": [[1.0]]}, "2 rows"),
        ({"digests": ["row0", "changed"]}, "differ, first in row 1"),
        ({"reward": "gsm8k"}, "different rewards"),
        ({"success": "reward >= 0"}, "the reward alone and --success 'reward >= 0'"),
    ],
)
def test_different_data_is_refused(tmp_path, other, words):
    first = recorded(tmp_path / "a", [[1.0], [0.0]])
    second = recorded(tmp_path / "b", **{"scores": [[1.0], [1.0]], **other})
    with pytest.raises(ConfigError, match=words):
        compare(first, second)


def test_what_is_not_finished_or_not_there_is_refused(tmp_path):
    recorded(tmp_path / "a", [[1.0], [0.0]])
    lines = (tmp_path / "a/samples.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "a/samples.jsonl").write_bytes(lines[0])
    with pytest.raises(ConfigError, match="1 of 2 samples"):
        open_recorded(tmp_path / "a")
    with pytest.raises(ConfigError, match="holds no evaluation"):
        open_recorded(tmp_path / "nowhere")
    (tmp_path / "a/evaluation.json").write_text('{"config": {}}')
    with pytest.raises(ConfigError, match="does not hold an evaluation's settings, or was changed"):
        open_recorded(tmp_path / "a")


def test_a_seed_below_zero_is_refused(tmp_path, capsys):
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--seed", "-1"]) == 2
    assert "--seed must be at least 0, got -1" in capsys.readouterr().err


def test_two_real_evaluations_with_other_prompts_are_compared_by_the_command(model, tmp_path, capsys):
    for label, more in {"plain": [], "asked": ["prompt_suffix= Answer!", "gconfig.temperature=0.5"]}.items():
        evaluated(model, tmp_path, f"label={label}", *more)
    assert main(["compare", str(tmp_path / "plain"), str(tmp_path / "asked"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {one["measure"] for one in found["differences"]} == {"accuracy", "pass@2", "maj@2", "reward"}
    assert {key for key, _, _ in found["settings"]} == {"prompt_suffix", "gconfig.temperature"}
    evaluated(model, tmp_path, "label=other", f"data=[{DATA}/svamp]")
    assert main(["compare", str(tmp_path / "plain"), str(tmp_path / "other")]) == 2
    assert "different data" in capsys.readouterr().err


def test_evaluations_are_found_by_label_and_by_the_run_they_are_of(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for step in (1, 2):
        folder = tmp_path / f"runs/sums/one/checkpoints/step_{step}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        save_file({}, folder / "model.safetensors")
        recorded(tmp_path / f"evaluations/at{step}", [[0.0], [1.0]], model=str(folder))
    recorded(tmp_path / "evaluations/else", [[0.0]], model=str(tmp_path / "runs/sums/one/checkpoints/step_2"))
    named = [tuple(one.label for one in find_pair(*names)) for names in (("sums/one@1", "sums/one"), ("at2", "sums/one@1"))]
    assert named == [("at1", "at2"), ("at2", "at1")]
    with pytest.raises(ConfigError, match="there is no evaluation at3; did you mean 'at2'"):
        find_pair("at3", "at1")
    with pytest.raises(ConfigError, match="0 pairs of evaluations of sums/one and sums/one"):
        find_pair("sums/one", "sums/one")


def test_rewards_without_an_accuracy_are_compared_by_their_means(tmp_path):
    rewards = [[0.2, 1.2], [1.2, 0.2], [-1.0, 0.2], [1.2, 1.2], [0.2, 0.2]]
    without = {"accuracy": None, "answer": None, "extracted": None}
    folders = [recorded(tmp_path / name, [[0.0, 0.0]] * 5, n=2, success="reward >= 1") for name in "ab"]
    for shift, folder in zip((0.0, 0.1), folders, strict=True):
        own = [
            answer(row, 0.0, sample=i, **without, reward=r + shift)
            for row, rs in enumerate(rewards)
            for i, r in enumerate(rs)
        ]
        (folder.path / "samples.jsonl").write_bytes(b"".join(map(line_of, own)))
    found = compare(*(open_recorded(folder.path) for folder in folders))
    by_measure = {one.measure: one for one in found.differences}
    assert set(by_measure) == {"accuracy", "pass@2", "reward"}
    assert (by_measure["accuracy"].first, by_measure["pass@2"].first) == (0.4, 0.6)  # 4 of 10 samples, 3 of 5 rows
    mean = by_measure["reward"]
    assert (mean.first, mean.difference, mean.low) == (pytest.approx(0.48), pytest.approx(0.1), pytest.approx(0.1))
    assert mean.p_value == 2 / 2**5 and "+0.1 [+0.1, +0.1]" in describe(found)
