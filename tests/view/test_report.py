"""The report is one file with everything in it; the page's own code can never read a text as HTML."""

import base64
import hashlib
import json
import re

import pytest

from tandem.cli.main import main
from tandem.launch.local import EXIT_CONFIG
from tandem.view import pages as writing
from tandem.view.pages import STATIC
from tests.tracking.test_recorder import group, record, sample
from tests.view.runs import make_run, questions

OWN = sorted((STATIC / "js").rglob("*.js"))
AS_HTML = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|setHTML|createContextualFragment|srcdoc|\beval\(|"
    r"new Function|javascript:|setAttributeNS|\bimport\("
)
VENDORED = {
    "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    "uPlot.iife.min.js": "4408ace91a18b4888998171e122da65b9ab28711c30f19a6a591491c5a82caf1",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""uPlot 1.6.32, MIT; SHA-256 of each file."""


def held(page):
    """The answers in a report."""
    return json.loads(re.search(r'<script type="application/json" id="answers">(.*?)</script>', page, re.DOTALL)[1])[
        "answers"
    ]


def test_no_text_is_ever_read_as_html_and_no_script_is_long():
    files = [*OWN, STATIC / "uplot/uPlot.iife.min.js", STATIC / "index.html"]
    assert len(OWN) > 8 and [(path.name, found[0]) for path in files if (found := AS_HTML.search(path.read_text()))] == []
    assert sum(len(path.read_text().splitlines()) for path in OWN) <= 2500
    assert "http" not in "".join(path.read_text() for path in [*OWN, STATIC / "index.html", STATIC / "style.css"]).replace(
        "http://www.w3.org/2000/svg", ""
    )


def test_the_vendored_library_is_what_was_published():
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (STATIC / "uplot").iterdir()} == VENDORED


def test_a_report_holds_all_that_its_pages_ask_for(tmp_path):
    make_run(tmp_path / "runs/sums/one")
    page = writing.report(questions(tmp_path))
    answers = held(page)
    assert answers['["steps",{"run":"sums/one"}]'] == [1, 2, 3]
    assert [one["reward"] for one in answers['["group",{"group":20,"run":"sums/one","step":2}]']] == [1.0, 0.25]
    assert answers['["tokens",{"first":0,"line":0,"run":"sums/one","step":3}]']["trajectories"]
    assert answers['["prompts",{"offset":0,"order":"forgotten","run":"sums/one"}]']["count"] == 2
    assert not re.search(r"(src|href)=\"(?!data:)", page)


def test_the_policy_of_a_report_names_its_scripts_and_nothing_else(tmp_path):
    make_run(tmp_path / "runs/sums/one", steps=1)
    page = writing.report(questions(tmp_path))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(scripts) == 2 and all(digest in policy for digest in digests)
    assert "unsafe" not in policy and policy.startswith("default-src 'none'; script-src 'sha256-")


def test_no_text_of_a_run_can_end_its_place_in_a_report(tmp_path):
    run = make_run(tmp_path / "runs/sums/one", steps=1)
    hostile = "</script><script>alert(1)</script><!-- \ud800 \u2028"
    record(run, 2, [group(7, sample(1.0, prompt_text=hostile, completion_text=hostile))])
    page = writing.report(questions(tmp_path))
    assert page.count("<script") == 3 and page.count("</script") == 3 and "<!--" not in page.split("<script>")[0]
    (told,) = held(page)['["group",{"group":7,"run":"sums/one","step":2}]']
    assert told["completion"].startswith("</script><script>alert(1)")


def test_a_long_run_leaves_samples_out_of_its_report_and_keeps_the_last_step(tmp_path, monkeypatch):
    run = make_run(tmp_path / "runs/sums/one", steps=1)
    for step in range(2, 30):
        record(run, step, [group(step, sample(1.0, completion_text="word " * 6000))])
    monkeypatch.setattr(writing, "MOST_BYTES", 200_000)
    page = writing.report(questions(tmp_path))
    steps = held(page)['["steps",{"run":"sums/one"}]']
    assert len(page) < 420_000 and 29 in steps and len(steps) < 12  # the scripts and the style are the rest


def test_the_command_writes_the_file_and_says_what_is_in_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    make_run(tmp_path / "runs/sums/one", steps=1)
    file = tmp_path / "one.html"
    assert main(["report", str(tmp_path / "runs/sums/one"), "-o", str(file)]) == 0
    assert "sums/one" in capsys.readouterr().out and file.read_text().startswith("<!doctype html>")
    assert main(["report", str(tmp_path / "runs/sums/one"), "-o", str(tmp_path / "no/one.html")]) == 2
    (tmp_path / "link.html").symlink_to(file)
    file.unlink()
    assert main(["report", str(tmp_path / "runs/sums/one"), "-o", str(tmp_path / "link.html")]) == 0
    assert (tmp_path / "link.html").is_symlink() and file.is_file()
    assert main(["report", str(tmp_path / "runs/sums/one"), "-o", str(tmp_path)]) == 2
    assert "is not a file" in capsys.readouterr().err
    (tmp_path / "notes.md").write_text("# what I saw")
    assert main(["report", str(tmp_path / "runs/sums/one"), "-o", str(tmp_path / "notes.md")]) == 2
    assert "not an HTML page" in capsys.readouterr().err and (tmp_path / "notes.md").read_text() == "# what I saw"
    assert main(["report", str(tmp_path / "nothing"), "-o", str(file)]) == 2
    assert "there is no run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ['import "./x.js";', 'import * as a from "./dom.js";', "export default 3;", 'export { a } from "./dom.js";']
)
def test_a_module_that_a_report_could_not_take_is_refused(tmp_path, text):
    (tmp_path / "app.js").write_text(f"{text}\n")
    (tmp_path / "dom.js").write_text("")
    with pytest.raises(AssertionError, match="imports or exports"):
        writing.bundle(tmp_path, "app.js")


def test_a_report_of_a_folder_without_a_run_is_refused(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty"), "-o", str(tmp_path / "a.html")]) == EXIT_CONFIG
    assert "there is no run in these folders" in capsys.readouterr().err and not (tmp_path / "a.html").exists()
