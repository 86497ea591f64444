"""The bug report: complete, and without anything private."""

import json

import pytest

from tandem.cli.doctor import environment, examine, private, redact, text, writable
from tandem.cli.main import main


def test_the_report_says_what_matters(capsys, tmp_path):
    assert main(["doctor", "--json", "--root", str(tmp_path)]) == 0

    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["python"] and report["versions"]["torch"]
    assert report["machine"]["cores"] >= 1 and report["machine"]["cpu"]
    assert report["run_root"]["writable"] is True and report["run_root"]["free_gib"] > 0
    assert report["optional"].keys() >= {"wandb", "vllm"}
    assert isinstance(report["torch"]["fast_bfloat16"], bool)
    assert (
        report["sandbox"]["back_end"] in ("bubblewrap", "landlock", None) and "madvise" in report["sandbox"]["not_limited"]
    )


def test_the_text_has_every_section_and_no_private_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "maria-b"))
    monkeypatch.setenv("WANDB_API_KEY", "secret-123")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home" / "maria-b" / "hf"))
    report = examine(tmp_path)

    said = text(redact(report, private()))
    assert [line for line in said.splitlines() if not line.startswith(" ")] == [name.replace("_", " ") for name in report]
    assert "maria-b" not in said and "secret-123" not in said and str(tmp_path) not in said


def test_variables_are_told_as_numbers_or_as_set(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("LD_PRELOAD", "/home/someone/lib.so")

    found = environment()
    assert (found["OMP_NUM_THREADS"], found["LD_PRELOAD"]) == ("3", "set")


def test_private_text_is_replaced_wherever_it_stands():
    report = {"a": ["/home/x/models", {"b": "by maria"}], "n": 3, "none": None}

    assert redact(report, {"/home/x": "~", "maria": "<user>"}) == {
        "a": ["~/models", {"b": "by <user>"}],
        "n": 3,
        "none": None,
    }


@pytest.mark.parametrize("name", ["", "deep/er/still"])
def test_a_folder_that_does_not_exist_is_judged_by_its_parent(tmp_path, name):
    assert writable(tmp_path / name)[0] is True


def test_a_long_name_does_not_run_into_its_value():
    said = text({"torch": {"imported_before_tandem": False, "A_VARIABLE_WITH_A_NAME_AS_LONG_AS_THIS_LINE": 64}})
    assert [line.split()[1] for line in said.splitlines()[1:]] == ["no", "64"]
