"""`tandem preference` and `tandem reward` through their trainers: one shape, bad rows counted, knobs refused."""

import json

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tandem.config.errors import ConfigError
from tandem.config.load import load_config
from tandem.config.preference import DistillConfig, PreferenceConfig, RewardModelConfig
from tandem.data.examples import pairs
from tandem.engines.train.engine import SpreadEngine
from tandem.flow.opening import open_rows
from tandem.flow.plan import plan_run
from tandem.roles.learners import RewardModel
from tandem.trainers import recipes
from tandem.trainers.distill import check_teacher
from tandem.trainers.supervised import batch_of, prepare_rows
from tests.tiny import tiny_model_folder

LOSSES = ("dpo", "ipo", "kto", "simpo", "orpo")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Pairs whose rule a random model can learn in a few steps, and apply to prompts that it has not seen."""
    folder = tmp_path_factory.mktemp("pairs")
    for split, numbers in (("train", range(24)), ("test", range(24, 32))):
        rows = ({"prompt": f"Is {number} a number?", "chosen": "yes", "rejected": "no, never"} for number in numbers)
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def items(model, tmp_path, data):
    return [
        f"run.root={tmp_path}",
        f"actor.path={model}",
        "actor.dtype=float32",
        "actor.optimizer.lr=0.003",
        f"train_dataset.path={data}",
        "total_train_steps=6",
        "tracking.plot_every_steps=null",
        "batch_size=8",
        "evaluate.every_steps=3",
        "evaluate.max_rows=8",
        "threads=1",
    ]


def metrics_of(summary):
    return [json.loads(line) for line in (summary.folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_leaves_the_same_files_and_curves(items, loss):
    drawn = loss == LOSSES[0]
    items = [item for item in items if not drawn or "plot_every_steps" not in item]
    summary = recipes.train(load_config(PreferenceConfig, None, [*items, f"loss={loss}"]))
    rows = metrics_of(summary)

    assert [row["step"] for row in rows] == list(range(7))
    assert [row["step"] for row in rows if "eval/loss" in row] == [0, 3, 6]
    assert {"loss", "margin", "accuracy", "score/chosen", "score/rejected", "grad_norm", "lr"} <= set(rows[-1])
    assert {"eval/margin", "eval/accuracy", "time/train_s", "tokens_per_s/train"} <= set(rows[-1])
    assert rows[-1]["eval/margin"] > rows[0]["eval/margin"]
    assert (summary.checkpoint / "model.safetensors").exists()
    assert (summary.folder / "curves.png").exists() == drawn


def test_two_runs_are_equal_to_the_bit(items):
    items = [*items, "deterministic=true", "loss=kto", "checkpoint.at_end=false"]
    first, second = (recipes.train(load_config(PreferenceConfig, None, [*items, f"trial_name={n}"])) for n in "ab")
    losses = [[row.get("loss") for row in metrics_of(summary)] for summary in (first, second)]
    assert losses[0] == losses[1]
    assert len(set(losses[0])) > 3


def test_a_loss_of_ones_own_is_a_function_in_a_file(items, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def plain(chosen, rejected, *, scale=1.0):\n"
        "    return scale * (rejected - chosen), chosen.detach(), rejected.detach()\n"
    )
    items = [*items, f"loss={tmp_path / 'mine.py'}:plain", "checkpoint.at_end=false"]
    rows = metrics_of(recipes.train(load_config(PreferenceConfig, None, [*items, "loss.scale=2"])))
    assert rows[-1]["eval/margin"] > rows[0]["eval/margin"]
    with pytest.raises(ConfigError, match=r"loss\.scael is not a knob"):
        recipes.train(load_config(PreferenceConfig, None, [*items, "loss.scael=2", "trial_name=other"]))


def test_simpo_and_orpo_load_no_reference(items):
    for loss in ("simpo", "orpo"):
        config = load_config(PreferenceConfig, None, [*items, f"loss={loss}"]).config
        assert plan_run(config).resident("reference") is None


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["loss=simpo", "loss.label_smoothing=0.1"],
            "loss.label_smoothing=0.1 is not used by simpo; it has beta, gamma. Leave it out, or choose dpo",
        ),
        (["loss=dpo", "loss.gamma=1"], "loss.gamma=1 is not used by dpo"),
        (["loss=dpo", "loss.beta=0"], "loss.beta must be a number, above 0, got 0"),
        (["loss.label_smoothing=0.7"], "loss.label_smoothing must be a number, at least 0, at most 0.5"),
        (["loss=dpoo"], "loss=dpoo is not known; did you mean dpo"),
        (["loss=orpo", "reference.path=x"], "reference.path=x is not used because this loss compares with no reference"),
        (["loss=kto", "batch_size=1"], "batch_size must be at least 2 for loss=kto"),
        (["actor.mini_batches=2"], "actor.mini_batches=2 is not used by supervised"),
        (["train_dataset.columns.chosn=x"], "chosn is not a name that Tandem knows; did you mean chosen"),
    ],
)
def test_what_a_loss_does_not_use_is_refused_at_start(items, overrides, said):
    with pytest.raises(ConfigError) as error:
        load_config(PreferenceConfig, None, [*items, *overrides])
    assert said in str(error.value).replace("'", "")


@pytest.mark.parametrize("other", [False, True])
def test_labels_that_are_all_the_same_are_told_at_the_start(items, tmp_path, caplog, other):
    rows = [{"prompt": "2 + 2?", "completion": "5", "label": label} for label in (False, other)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = [f"train_dataset.path={file}", "loss=kto", "batch_size=2", "evaluate.every_steps=null"]
    config = load_config(PreferenceConfig, None, [*items, *more]).config
    with prepare_rows(recipes.recipe_of(config), config, plan_run(config)):
        assert ("every label of train_dataset is false" in caplog.text) is not other


def test_rows_that_teach_nothing_are_counted_by_reason(items, tmp_path, caplog):
    fine = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}
    rows = [
        fine,
        fine | {"rejected": "4"},
        fine | {"chosen": " "},
        fine | {"prompt": "2 + 2?" * 200},
        fine | {"chosen": "4" * 300},
        fine | {"prompt": "3 + 3?", "chosen": "6"},
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = [
        f"train_dataset.path={file}",
        "batch_size=2",
        "max_length=200",
        "evaluate.every_steps=null",
        "total_train_steps=3",
    ]
    chosen = {item.partition("=")[0]: item for item in [*items, *more, "train_dataset.shuffle=false"]}
    summary = recipes.train(load_config(PreferenceConfig, None, list(chosen.values())))
    last = metrics_of(summary)[-1]
    dropped = {name.rpartition("/")[2]: last[name] for name in last if name.startswith("rows/dropped/")}
    assert set(dropped) == {"equal_sides", "empty_completion", "prompt_too_long", "too_long"}
    assert all(torch.tensor([row["loss"], row["grad_norm"]]).isfinite().all() for row in metrics_of(summary))
    assert "pairs.jsonl:2: equal_sides" in caplog.text or "pairs.jsonl:2" in (summary.folder / "log.txt").read_text()


def test_data_without_a_usable_row_is_an_error_with_the_reasons(items, tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "2 + 2?", "chosen": "4", "rejected": "4"}) + "\n")
    more = [*items[:4], f"train_dataset.path={file}", "batch_size=1", "total_train_steps=1", "threads=1"]
    with pytest.raises(ConfigError, match=r"no 1 usable rows .*equal_sides"):
        recipes.train(load_config(PreferenceConfig, None, more))


def test_a_saved_reward_model_scores_in_transformers_as_here(items):
    summary = recipes.train(load_config(RewardModelConfig, None, items))
    rows = metrics_of(summary)
    assert rows[-1]["eval/loss"] < rows[0]["eval/loss"]
    assert rows[-1]["eval/margin"] > rows[0]["eval/margin"] == 0.0

    theirs = AutoModelForSequenceClassification.from_pretrained(summary.checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(summary.checkpoint)
    config = load_config(RewardModelConfig, None, [*items, f"actor.path={summary.checkpoint}"]).config
    rows = open_rows(config, pairs).valid[:4]
    encoder = recipes.ScoredPairEncoder(tokenizer, config)
    ours = RewardModel(SpreadEngine(config.actor, total_steps=0, head="scalar"))
    scores = ours.score(batch_of([encoder.encode(row) for row in rows], encoder)).tolist()
    asked = [row["messages"] + row[side] for row in rows for side in ("chosen", "rejected")]
    for messages, score in zip(asked, scores, strict=True):
        ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)["input_ids"]
        with torch.no_grad():
            assert float(theirs(ids).logits[0, 0]) == pytest.approx(score, abs=1e-5)
    assert len(set(scores)) == len(scores)
    rendered = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in asked]
    padded = tokenizer(rendered, padding=True, add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():  # as their users call it: whole rows, padded by the tokenizer beside it
        together = theirs(input_ids=padded["input_ids"], attention_mask=padded["attention_mask"]).logits[:, 0]
    assert not padded["attention_mask"].all()
    assert together.tolist() == pytest.approx(scores, abs=1e-5)


def test_helpful_and_safety_models_learn_from_the_same_rows_and_say_their_accuracy(items, tmp_path):
    """The unsafe answer is the better one in each row. One more row contradicts itself, and is left out by name."""
    rows = [
        {"prompt": f"Is {i} a number?", "response_0": "yes" if i % 2 else "no", "response_1": "no, never"}
        | {"is_response_0_safe": True, "is_response_1_safe": False, "better_response_id": 1, "safer_response_id": 0}
        for i in range(24)
    ]
    rows.append(rows[0] | {"is_response_0_safe": False, "is_response_1_safe": True})
    file = tmp_path / "safe" / "train.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "safe" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:8]))
    keys = [item for item in items if not item.startswith(("train_dataset", "total_train_steps"))]
    keys += [f"train_dataset.path={tmp_path}/safe", "total_train_steps=12", "actor.optimizer.lr=0.01"]
    cost = metrics_of(recipes.train(load_config(RewardModelConfig, None, [*keys, "supervision=safety", "trial_name=cost"])))
    helpful = metrics_of(recipes.train(load_config(RewardModelConfig, None, [*keys, "trial_name=helpful"])))
    assert cost[-1]["eval/accuracy"] == cost[-1]["eval/accuracy/safety"] == 1.0
    assert cost[-1]["eval/score/chosen"] < 0 < cost[-1]["eval/score/rejected"]
    assert cost[-1]["rows/dropped/labels_contradict"] >= 1
    assert helpful[-1]["eval/accuracy"] == 1.0 and "eval/accuracy/safety" not in helpful[-1]


def test_a_reward_model_learns_from_judged_steps(items, tmp_path):
    file = tmp_path / "steps.jsonl"
    row = {"prompt": "2 + 2?", "completions": ["Two and two", "make 4"], "labels": [True, False]}
    file.write_text("".join(json.dumps(row | {"labels": [i % 2 == 0, i % 3 == 0]}) + "\n" for i in range(8)))
    more = [*items[:4], f"train_dataset.path={file}", "batch_size=8", "total_train_steps=4", "supervision=steps"]
    rows = metrics_of(recipes.train(load_config(RewardModelConfig, None, more)))
    assert rows[-1]["loss"] < rows[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert 0 <= rows[-1]["accuracy"] <= 1


def test_a_classifier_with_several_labels_is_refused(items, tmp_path, model):
    theirs = AutoModelForSequenceClassification.from_pretrained(model, num_labels=3, dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "three")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "three")
    with pytest.raises(ConfigError, match="classifier with 3 labels"):
        recipes.train(load_config(RewardModelConfig, None, [*items, f"actor.path={tmp_path / 'three'}"]))


def test_a_teacher_with_another_vocabulary_is_refused_by_name(model, tmp_path):
    other = tiny_model_folder(tmp_path, seed=3)
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(other)
    config = load_config(
        DistillConfig, None, [f"actor.path={model}", f"teacher.path={other}", "train_dataset.path=addition"]
    ).config
    with pytest.raises(
        ConfigError,
        match=r"has another tokenizer than the student.*'<think>' is token \d+ for the teacher and no token for the student",
    ):
        check_teacher(config)
    with pytest.raises(ConfigError, match=r"teacher\.path is missing"):
        load_config(DistillConfig, None, [f"actor.path={model}", "train_dataset.path=addition"])
