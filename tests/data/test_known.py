"""Benchmarks by name."""

import pytest

from tandem.config.data import DatasetConfig
from tandem.config.errors import ConfigError
from tandem.config.services import SERVICES
from tandem.data.dataset import load_dataset
from tandem.data.known import KNOWN, benchmark_of, find_benchmark, locate, recognise


@pytest.mark.parametrize(
    ("name", "found"),
    [("gsm8k", "gsm8k"), ("GSM8K", "gsm8k"), ("MATH_500", "math500"), ("human-eval", "humaneval"), ("aime_2024", "aime24")],
)
def test_a_name_is_found_whatever_its_case_and_dashes(name, found):
    assert benchmark_of(name) is KNOWN[found]


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("data/gsm8k", "gsm8k"),
        ("data/gsm8k/test.jsonl", "gsm8k"),
        ("openai/gsm8k", "gsm8k"),
        ("openai/gsm8k:socratic", "gsm8k"),
        ("HuggingFaceH4/MATH-500", "math500"),
        ("data/svamp.jsonl", "svamp"),
        ("data/mine", None),
    ],
)
def test_a_path_is_recognised_by_its_last_part_or_its_hub_name(path, found):
    assert recognise(path) is (KNOWN[found] if found else None)


@pytest.mark.parametrize("name", ["humaneval", "mbpp", "livecodebench", "apps"])
def test_rows_of_programs_are_recognised_by_their_columns(name):
    row = dict.fromkeys(KNOWN[name].columns, "x")
    assert recognise("data/mine", [row]) is KNOWN[name]
    assert recognise("data/mine", [{"question": "x"}]) is None


def test_every_benchmark_has_a_judge():
    assert {known.reward for known in KNOWN.values()} <= set(SERVICES["reward"])


def test_a_known_name_is_a_folder_below_the_root_else_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "root" / "MATH-500").mkdir(parents=True)
    assert locate("math500", str(tmp_path / "root")) == (str(tmp_path / "root" / "MATH-500"), False)
    assert locate("gsm8k", None) == (KNOWN["gsm8k"].hub, True)
    assert locate("owner/name", None) == ("owner/name", True)
    assert locate("reasoning_gym:chain_sum", None) == ("reasoning_gym:chain_sum", False)
    with pytest.raises(ConfigError, match="no folder gsm8k; there are: math-500"):
        locate("gsm8k", str(tmp_path / "root"))


def test_a_word_that_nobody_knows_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'svamp'"):
        locate("swamp", None)
    with pytest.raises(ConfigError, match=r"no data set is called 'additon', and no file or folder in .* mean 'addition'"):
        load_dataset(DatasetConfig(path="additon"))
    with pytest.raises(ConfigError, match="did you mean 'aime24'"):
        find_benchmark("aime25")
