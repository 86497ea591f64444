"""Runs whose reward normalises, clips and gates its terms, and chooses by row."""

import json
import re
import statistics

import pytest
import torch
from safetensors.torch import load_file

from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.rollout.book import NoBatch
from tandem.trainers.loop import train
from tests.scalar_judge import save_judge
from tests.tiny import tiny_model_folder

MINE = '''
async def even(completion_ids):
    """Share of even token ids."""
    return sum(token % 2 == 0 for token in completion_ids) / max(1, len(completion_ids))

def long(completion_ids):
    return float(len(completion_ids))
'''
"""A coroutine, and a function for a worker process: its file imports nothing, so that a worker starts soon."""

CLASSES = '''
from tandem import GroupReward
from tandem.api.workflow import FrozenModel, Score

class Shortest(GroupReward):
    async def compare(self, samples, row):
        least = min(sample.num_trained_tokens for sample in samples)
        return [float(sample.num_trained_tokens == least) for sample in samples]

class Counts(Score):
    """How many sequences it was asked for, all together, is the score of each."""

    asked = 0

    def __init__(self, path):
        self.model = FrozenModel(path)

    def score(self, batch, model):
        import torch
        sequences = len(batch["cu_seqlens"]) - 1
        Counts.asked += sequences
        return torch.full((sequences,), float(Counts.asked))

class Longest(GroupReward):
    """1 for the longest samples of a prompt."""

    async def compare(self, samples, row):
        most = max(sample.num_trained_tokens for sample in samples)
        return [float(sample.num_trained_tokens == most) for sample in samples]

class Single(Counts):
    """One score too few."""

    def score(self, batch, model):
        return super().score(batch, model)[1:]
'''


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A policy, a reward model, and two files of a user."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "mine.py").write_text(MINE)
    (folder / "classes.py").write_text(CLASSES)
    policy = tiny_model_folder(folder)
    save_judge(folder / "judge", policy, policy)
    return folder


@pytest.fixture
def run(overrides, models):
    """Trains by further keys, in which MINE, CLASSES and JUDGE stand for the files."""

    def begin(*more, **how):
        items = [*overrides, "total_train_steps=2", "tracking.trajectories_per_step=99", "deterministic=true", *more]
        files = {"MINE": "mine.py", "CLASSES": "classes.py", "JUDGE": "judge"}
        items = [re.sub("|".join(files), lambda found: f"{models}/{files[found[0]]}", item) for item in items]
        keys = {item.partition("=")[0]: item for item in items}
        return train(load_config(TrainConfig, None, list(keys.values())), **how)

    return begin


def steps(summary):
    clock = ("time", "tokens_per_s", "memory/", "engine/")
    rows = [json.loads(line) for line in (summary.folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(clock)} for row in rows]


def samples_of(summary, step=1):
    return [json.loads(line) for line in (summary.folder / f"trajectories/step_{step}.jsonl").read_text().splitlines()]


SPEC = "MINE:even + 0.5*model(path=JUDGE, normalise=running, clip=[-1, 1]) + 0.1*MINE:long(normalise=group)"


def test_rules_and_models_are_normalised_clipped_summed_and_each_is_a_metric(run):
    summary = run(f"reward={SPEC}", "total_train_steps=1")
    samples = samples_of(summary)
    raw = [sample["raw_rewards"]["model"] for sample in samples]
    mean, spread = statistics.fmean(raw), statistics.pstdev(raw)
    for sample in samples:
        value = (sample["raw_rewards"]["model"] - mean) / (spread + 1e-6)
        assert sample["rewards"]["model"] == pytest.approx(0.5 * max(-1, min(1, value)), abs=1e-5)
        assert sample["reward"] == pytest.approx(sum(sample["rewards"].values()), abs=1e-6)
    for number in {sample["group"] for sample in samples}:
        group = [sample for sample in samples if sample["group"] == number]
        assert sum(sample["rewards"]["long"] for sample in group) == pytest.approx(0, abs=1e-6)
    (row,) = steps(summary)
    assert row["raw_rewards/model"] == pytest.approx(mean) and "raw_rewards/long" in row and "raw_rewards/even" not in row
    assert row["reward/mean"] == pytest.approx(sum(row[f"rewards/{name}"] for name in ("even", "model", "long")))


@pytest.mark.slow
@pytest.mark.invariant
def test_a_run_that_was_cut_off_and_goes_on_has_the_means_of_one_that_never_was(run):
    keys = [f"reward={SPEC}", "total_train_steps=4", "checkpoint.every_steps=1", "evaluate.every_steps=2"]
    whole = run(*keys, "trial_name=whole")
    run(*keys, "trial_name=cut", until=2)
    cut = run(*keys, "trial_name=cut")
    assert steps(whole) == steps(cut)
    one, two = (load_file(summary.checkpoint / "model.safetensors") for summary in (whole, cut))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert any("eval/reward" in row for row in steps(whole))


def test_the_order_of_terms_changes_no_bit_of_a_run(run):
    terms = [term.strip() for term in SPEC.split(" + ")]
    found = [steps(run(f"reward={' + '.join(order)}", f"trial_name=t{i}")) for i, order in enumerate((terms, terms[::-1]))]
    assert found[0] == found[1]


def test_a_model_is_asked_only_where_the_gate_is_open(run):
    reward = "0*MINE:even + CLASSES:Counts(path=JUDGE/../tiny-llama-0, gate='even > 0.5')"
    summary = run(f"reward={reward}", "total_train_steps=1")
    samples = samples_of(summary)
    through = [sample for sample in samples if sample["raw_rewards"]["even"] > 0.5]
    assert 0 < len(through) < len(samples)
    assert {sample["reward"] for sample in through} == {float(len(through))}  # it has read no more than these
    assert {sample["reward"] for sample in samples if sample not in through} == {0.0}
    assert steps(summary)[0]["gate/Counts"] == pytest.approx(len(through) / len(samples))


def test_rows_are_judged_by_the_recipe_that_a_column_names(run, tmp_path, caplog):
    rows = [{"prompt": f"{i}?", "answer": "1", "task": "models" if i % 2 else "rules"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipes = "{by: task, recipes: {models: ['model(path=JUDGE)', {name: format, weight: 0.5}], rules: 'MINE:even'}}"
    keys = [f"train_dataset.path={tmp_path}/rows.jsonl", f"reward={recipes}", "total_train_steps=1", "rollout.batch_size=8"]
    samples = samples_of(run(*keys))
    assert {frozenset(sample["rewards"]) for sample in samples} == {frozenset({"model", "format"}), frozenset()}
    run(keys[0], keys[1].replace("recipes: {", "recipes: {idle: length, "), "trial_name=idle", dry_run=True)
    assert "no row is judged by the recipe 'length'" in caplog.text
    rows[5]["task"] = "modles"
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(
        ConfigError, match=r"rows.jsonl:6 \(data set 'rows'\): column 'task' is 'modles', .*did you mean 'models'"
    ):
        run(*keys, "trial_name=wrong")


def test_rows_are_judged_by_their_data_set(run):
    sources = "train_dataset.sources=[{path: addition, name: a}, {path: addition, name: b}]"
    recipes = "reward={by: source, recipes: {a: 'MINE:even(clip=[0, 0.5])', b: 'MINE:long + 0*format'}}"
    samples = samples_of(run("train_dataset.path=null", sources, recipes, "total_train_steps=1"))
    assert {(s["source"], *sorted(s["rewards"])) for s in samples} == {("a", "even"), ("b", "format", "long")}
    assert max(s["reward"] for s in samples if s["source"] == "a") <= 0.5


def test_an_evaluation_leaves_out_the_terms_that_compare_samples_with_options_too(run):
    summary = run("reward=MINE:even + CLASSES:Longest(normalise=group)", "evaluate.every_steps=1", "total_train_steps=1")
    before, after = steps(summary)
    assert 0 < before["eval/reward"] < 1 and "rewards/Longest" in after


def test_the_filter_of_groups_sees_the_whole_reward(run):
    keys = ["algorithm.filter=dynamic_sampling", "train_dataset.size=64"]
    kept = run(*keys, "reward=MINE:even(normalise=running)")
    assert all(row["groups/without_spread"] == 0 for row in steps(kept))
    with pytest.raises(NoBatch, match="the filter of groups kept 0 of"):
        run(*keys, "reward=MINE:even(clip=[5, 6])", "trial_name=same")


def test_evaluation_judges_samples_alone_also_where_an_optional_term_compares_them(run):
    summary = run("reward=MINE:even + CLASSES:Shortest(clip=[0.5, 1])", "evaluate.every_steps=1", "evaluate.max_rows=2")
    assert all(0 <= row["eval/reward"] <= 1 for row in steps(summary))
    assert all(row["rewards/Shortest"] >= 0.5 for row in steps(summary) if "reward/mean" in row)


def test_a_score_too_few_says_what_was_expected(run):
    with pytest.raises(Exception, match=r"one score for each sequence, \[16\]; it gave \[15\]"):
        run("reward=CLASSES:Single(path=JUDGE/../tiny-llama-0, normalise=running)")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["reward={by: source, recipes: {a: 'model(path=JUDGE, name=even)', b: 'MINE:even'}}"], "'even' is the name of"),
        (["reward={by: source, recipes: {a: 'MINE:even', b: 'model(path=JUDGE, name=even)'}}"], "'even' is the name of"),
        (["reward=math(normalise=running)", "workflow=multi_turn"], "whose options are .* in the middle of an episode"),
        (["reward=math(clip=[0, 1])", "algorithm=ttrl"], "vote"),
        (["reward=MINE:even(clip=[0, 1], words=3)"], "only a class takes knobs: leave words out"),
        (["reward=model(path=JUDGE, normalise=running, gate=frmat) + format"], "did you mean 'format'"),
        (["reward=compare(url='http://127.0.0.1:1', model=m, clip=[0, 1])", "algorithm.update_samples=2"], "compares"),
        (["reward=compare(url='http://a', model=m) + format(gate=compare)", "algorithm.update_samples=2"], "open no gate"),
    ],
)
def test_options_that_cannot_count_are_refused_before_the_run(run, keys, words):
    with pytest.raises(ConfigError, match=words):
        run(*keys, dry_run=True)


def test_raw_values_and_parts_are_means_over_the_same_samples_for_any_weight(run, tmp_path):
    rows = [{"prompt": f"{i}?", "answer": "1", "task": "half" if i % 2 else "whole"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipes = "reward={by: task, recipes: {half: '0.5*MINE:even + MINE:long', whole: 'MINE:even + MINE:long'}}"
    summary = run(f"train_dataset.path={tmp_path}/rows.jsonl", recipes, "rollout.batch_size=8", "total_train_steps=1")
    (row,) = map(json.loads, (summary.folder / "metrics.jsonl").read_text().splitlines())
    said = [json.loads(line) for line in (summary.folder / "trajectories/step_1.jsonl").read_text().splitlines()]
    raw = [one["raw_rewards"]["even"] for one in said]
    assert {one["rewards"]["even"] / one["raw_rewards"]["even"] for one in said if one["raw_rewards"]["even"]} == {0.5, 1.0}
    assert row["raw_rewards/even"] == pytest.approx(statistics.fmean(raw)) and row["rewards/even"] < row["raw_rewards/even"]
    assert not any("long" in one["raw_rewards"] for one in said), "it is the same number in both"
