"""The spellings of a reward: a sum as text, a list of terms with options, and a recipe for each row."""

import pytest

from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config, to_yaml
from tandem.config.recipes import recipes_of, sum_of, sums_of
from tandem.config.terms import Options, read_term, read_terms


def reward_of(tmp_path, text, *more):
    file = tmp_path / "run.yaml"
    file.write_text(f"train_dataset: {{path: addition}}\n{text}")
    return load_config(TrainConfig, file, list(more)).config


def test_a_list_of_terms_is_the_sum_with_the_same_options_as_knobs(tmp_path):
    config = reward_of(
        tmp_path,
        """reward:
  - math
  - {name: format, weight: 0}
  - {name: model, path: a b, label: kind, weight: 0.5, normalise: running, clip: [-3, 3], gate: format > 0.5}
  - 2*my.py:short
""",
    )
    knobs = "path='a b', name=kind, normalise=running, clip=[-3, 3], gate=format>0.5"
    one, two = read_terms(config.reward), read_terms(f"math + 0*format + 0.5*model({knobs}) + 2*my.py:short")
    assert [(t.name, t.weight, t.knobs, t.options.clip) for t in one] == [
        (t.name, t.weight, t.knobs, t.options.clip) for t in two
    ]
    assert one[2].label == "kind" and one[2].options == Options("running", (-3.0, 3.0), "format > 0.5")
    assert (two[2].options.gate_name, two[2].options.gate_above) == ("format", 0.5)
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config(TrainConfig, tmp_path / "again.yaml").config == config


def test_a_value_in_quotes_may_be_a_name_with_knobs_of_its_own():
    term = read_term("tools(tools='search(folder=my/docs, results=1)', max_turns=3, note=\"it's (a=b, c=d)\")", "workflow")
    assert term.knobs == {"tools": "search(folder=my/docs, results=1)", "max_turns": 3, "note": "it's (a=b, c=d)"}
    assert read_term(term.spelling, "workflow") == term


def test_a_text_with_quotes_inside_keeps_what_looks_like_a_file():
    (term,) = read_terms(r"judge(question='it\'s in mine.py:f', model=x)")
    assert term.knobs == {"question": "it's in mine.py:f", "model": "x"}
    recipes = r"by(column='task', recipes={'a': 'judge(question=\"it\'s in mine.py:f\", model=x)'})"
    (term,) = read_terms(sum_of({"task": "a"}, recipes))
    assert term.knobs["question"] == "it's in mine.py:f"


def test_a_recipe_is_chosen_by_a_column_or_by_the_data_set(tmp_path):
    text = "reward:\n  by: task\n  recipes:\n    sums: [math, {name: format, weight: 0.2}]\n    chat: {name: length}\n"
    config = reward_of(tmp_path, text)
    assert sum_of({"task": "sums"}, config.reward) == "math + 0.2*format" and sums_of("math") == ("math",)
    assert sum_of({"task": "chat", "tandem.reward": "gsm8k"}, config.reward) == "gsm8k"  # its data set has one of its own
    assert sum_of({"task": "chat"}, reward_of(tmp_path, text, "reward.recipes.chat=0.5*format").reward) == "0.5*format"
    assert recipes_of(config.reward).column == "task" and set(sums_of(config.reward)) == {"math + 0.2*format", "length"}
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config(TrainConfig, tmp_path / "again.yaml").config == config


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("math + length(gate=formt) + format", "gate=formt names no other term of the sum; did you mean 'format'"),
        ("math(gate=math)", "there is no other term; add one, such as 0\\*format"),
        ("math(gate=format) + format(gate=math)", "'math' and 'format' wait for each other"),
        ("math(gate='a > b') + format", "gate must be the name of another term, as in"),
        ("math(clip=3)", r"clip must be \[low, high\]"),
        ("math(clip=[3, 1])", "two numbers with low below high"),
        ("math(normalise=runing)", "normalise must be one of none, running, group, got 'runing'"),
    ],
)
def test_an_option_that_cannot_be_is_refused_with_what_was_perhaps_meant(spec, words):
    with pytest.raises(ConfigError, match=words):
        read_terms(spec)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "reward must be a list of terms, and it is empty"),
        ("[math, {nam: format}]", "a mapping with name and knobs"),
        ("[{name: math, weight: heavy}]", "the weight of a term must be a finite number, got 'heavy'"),
        ("{by: task}", "reward needs both: by, the name of a column"),
        ("{by: task, recipe: {a: math}}", "recipe"),
        ("{by: task, recipes: {a: {by: x, recipes: {b: math}}}}", "recipe 'a' of the reward chooses by row again"),
    ],
)
def test_a_list_or_a_choice_that_cannot_be_read_says_why(tmp_path, text, words):
    with pytest.raises(ConfigError, match=words):
        sums_of(reward_of(tmp_path, f"reward: {text}").reward)


def test_a_row_that_names_no_recipe_is_told_the_nearest():
    spec = "by(column='task', recipes={'chat': 'format', 'sums': 'math'})"
    with pytest.raises(ConfigError, match=r"column 'task' is 'caht', .* did you mean 'chat'"):
        sum_of({"task": "caht"}, spec)
    with pytest.raises(ConfigError, match=r"reward.by=task, and the row has no such column; did you mean 'tasks'"):
        sum_of({"tasks": "chat"}, spec)


def test_a_folder_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="there is no runs/mine/step_60/config"):
        read_terms("runs/mine/step_60")


@pytest.mark.parametrize(
    ("spec", "key", "write"),
    [
        ("mine.py", "reward", "reward=mine.py:score"),
        ("mine.score", "reward", "reward=mine.py:score"),
        ("mine:Judge", "reward", "reward=mine.py:Judge"),
        ("mine.py", "workflow", "workflow=mine.py:score"),
        ("mine.skore", "reward", "reward=mine.py:score"),
        ("./mine.py", "reward", "reward=mine.py:score"),
    ],
)
def test_a_file_without_its_function_is_answered_with_those_it_has(spec, key, write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def _help(): ...\nasync def score(answer): ...\nclass Judge: ...\n")
    with pytest.raises(ConfigError) as error:
        read_term(spec, key)
    assert str(error.value) == f"{key} {spec!r}: mine.py has: score, Judge; write {write}"
    assert read_term("mine.py:score", key).name == "mine.py:score"
