"""Every page in a real browser: on whole, running, crashed, empty and torn runs, live, and with hostile texts."""

import asyncio
import json
import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tandem.state.existing import take_lock
from tandem.view.pages import report
from tests.tracking.test_recorder import group, record, sample
from tests.view.chromium import browser, needs_chromium
from tests.view.runs import make_run, questions
from tests.view.test_view_server import TOKEN, served

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, needs_chromium]
PACKAGE = find_spec("axe_playwright_python")  # not imported: its library, playwright, is not needed for the file in it
AXE = os.environ.get("TANDEM_AXE") or (PACKAGE and Path(PACKAGE.origin).with_name("axe.min.js"))
PAGES = ("curves", "samples", "samples step=all", "prompts", "time", "setup", "log")
DEEP = ("samples step=2 group=20", "samples step=2 group=21 with=1:11", "tokens step=2 group=21 line=2", "time step=2")
HOSTILE = [
    "</script><script>document.title = 'broken'</script>",
    "<img src=x onerror=\"document.title = 'broken'\">",
    '"><svg onload="document.title = \'broken\'">',
    "' onmouseover='document.title = \"broken\"",
    "javascript:document.title='broken'",
    "![picture](http://evil.example/x.png) [link](javascript:alert(1))",
    "\u001b[31mred\u001b[0m \u001b]0;title\u0007 \r\b",
    "\u202eright to left\u202c \u2066isolated\u2069 \ufeff\u200b",
    "NUL \x00 and half a pair \ud800 and \udfff",
    "{{constructor.constructor('document.title=1')()}} ${document.title = 1}",
    "&lt;b&gt; &#x3c;script&#x3e; %3Cscript%3E <!-- --> ]]>",
    "<style>* { display: none }</style><base href='http://evil.example/'><meta http-equiv=refresh content=0>",
]
# the same in other clothes: 60 in all
HOSTILE += [
    dress.format(bad)
    for bad in ("document.title='broken'", "document.title=`broken`", "alert(1)", "fetch('http://evil.example/')")
    for dress in (
        "<ScRiPt>{}</sCrIpT>",
        "<script\x0c>{}</script\x0c>",
        "<svg/onload={}>",
        "<body onload={}>",
        '<a href="javascript:{}">x</a>',
        "<iframe srcdoc='<script>{}</script>'></iframe>",
        "<math><mtext></table><mglyph><style><img src onerror={}>",
        "<details open ontoggle={}>",
        '" autofocus onfocus="{}" x="',
        "</textarea></title></style></pre><script>{}</script>",
        '![x](http://evil.example/x.png?{} "onload=y")',
        "\u202e<img src=x onerror={}>\x1b[8m\x07",
    )
]


def address(port, page, run):
    name, *more = page.split()
    return f"http://127.0.0.1:{port}/#{name}?run={run}" + "".join(f"&{one}" for one in more)


def watched(tmp_path, body, **more):
    async def inside():
        async with served(tmp_path, **more) as (_, port), browser() as page:
            await body(page, port)
            return page.complaints

    return asyncio.run(asyncio.wait_for(inside(), 280))


def test_every_page_opens_on_a_run_in_any_state(tmp_path):
    root = tmp_path / "runs/sums"
    make_run(root / "finished")
    running = take_lock(make_run(root / "running", status="running"))
    make_run(root / "crashed", status="failed", error="ValueError: <b>no</b>")
    torn = make_run(root / "torn")
    for file in [path for path in torn.rglob("*") if path.is_file()]:
        os.truncate(file, file.stat().st_size // 2)
    cut = make_run(root / "cut", status="running")  # killed while it wrote its last record, and nobody has its lock
    for file in (cut / "metrics.jsonl", cut / "trajectories/step_3.jsonl", cut / "batches/step_3.safetensors.gz"):
        os.truncate(file, file.stat().st_size - 25)
    (make_run(root / "begun", steps=1) / "metrics.jsonl").write_text("")
    (tmp_path / "sums/empty").mkdir(parents=True)
    states = []

    async def body(page, port):
        await page.open(f"http://127.0.0.1:{port}/")
        each = "[row.querySelector('a').textContent, row.querySelector('.badge').textContent]"
        states.extend(await page.value(f"[...document.querySelectorAll('tbody tr')].map((row) => {each})"))
        for name in ("finished", "running", "crashed", "torn", "cut", "begun", "empty"):
            for one in PAGES:
                await page.open(address(port, one, f"sums/{name}"))
                assert len(await page.text()) > 10, (name, one)
        await page.open(address(port, "log", "sums/crashed"))
        assert "ValueError: <b>no</b>" in await page.text()
        await page.open(address(port, "tokens step=2 group=21 line=2", "sums/cut"))
        await page.until("document.querySelectorAll('.token.trained').length === 7")

    assert watched(tmp_path, body, places=(tmp_path / "runs", tmp_path / "sums/empty")) == []
    running.close()
    names = ("finished", "running", "crashed", "torn", "cut", "begun", "empty")
    said = ("finished", "running", "failed", "no run.json", "killed", "finished", "empty")
    assert dict(states) == {f"sums/{name}": words for name, words in zip(names, said, strict=True)}


@pytest.mark.skipif(AXE is None, reason="no axe-core: make setup installs it, or TANDEM_AXE names its axe.min.js")
def test_axe_finds_nothing_on_any_page_in_the_dark_and_in_the_light(tmp_path):
    make_run(tmp_path / "runs/sums/one", error="ValueError: no")
    make_run(tmp_path / "runs/sums/two")
    told = {"step": 3, "name": "weights_stand_still", "sign": "…", "remedy": "…"}
    (tmp_path / "runs/sums/one/health.jsonl").write_text(json.dumps(told) + "\n")
    spans = [[["rollout", "generate", 1.0, 3.0], ["actor", "update", 3.0, 4.0]]] * 2
    (tmp_path / "runs/sums/one/timeline.jsonl").write_text(json.dumps({"step": 2, "ranks": spans}) + "\n")
    script, findings = Path(AXE).read_text(), []

    async def body(page, port):
        both = ("curves run=sums/two smooth=0.6", "setup other=sums/two")
        for theme in ("light", "dark"):
            for one in ("runs", *PAGES, *DEEP, *both):
                await page.open(address(port, one, "sums/one"))
                await page.value(f"document.documentElement.dataset.theme = '{theme}'")
                await page.value(f"{script};0")
                seen = await page.value(
                    "axe.run().then((all) => all.violations.map((one) => [one.impact, one.id, one.nodes[0].html]))"
                )
                findings.extend((theme, one, *finding) for finding in seen)

    assert watched(tmp_path, body) == []
    assert findings == []


def test_the_pages_of_the_first_hour_answer_what_it_asks(tmp_path):
    run = make_run(tmp_path / "runs/addition/first")
    spans = [[["rollout", "generate", 1.0, 3.0], ["actor", "update", 3.0, 4.0]]]
    (run / "timeline.jsonl").write_text(json.dumps({"step": 2, "ranks": spans}) + "\n")
    pages = re.findall(r"^    http://127.0.0.1:8700/(#.*)$", (ROOT / "docs/first_hour.md").read_text(), re.M)

    async def body(page, port):
        prompts, dropped, time = (f"http://127.0.0.1:{port}/{one}" for one in pages)
        await page.open(prompts)
        await page.until("document.querySelectorAll('.heat .cell.there').length === 6")
        first = "document.querySelector('.heat .row:not(.head)').textContent"
        assert (await page.value(first)).startswith("5 + 6 =")  # the prompt whose success rose
        await page.value("document.querySelector('.heat .cell.there').click()")
        await page.until("document.querySelectorAll('.again option').length === 3")
        await page.value(
            "{ const all = document.querySelector('.again select'); all.selectedIndex = 2;"
            " all.dispatchEvent(new Event('change')); }"
        )
        await page.until("document.querySelectorAll('.again .card').length === 2")
        await page.open(dropped)
        await page.until("document.querySelectorAll('.samples tbody tr').length === 2")
        assert "reward_timeout: too late" in await page.text()
        await page.open(time)
        spans = await page.value("[...document.querySelectorAll('.lanes .span')].map((one) => one.textContent)")
        assert spans == ["generate 2 s", "update 1 s"]

    assert watched(tmp_path, body) == []


def test_the_branches_of_a_session_share_what_they_have_in_common(tmp_path):
    turns = lambda *words: [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(words)]  # noqa: E731
    run = make_run(tmp_path / "runs/sums/one", steps=1)
    file = run / "trajectories/step_1.jsonl"
    first, *others = map(json.loads, file.read_text().splitlines())
    first["conversations"] = [turns("plan", "look"), turns("plan", "ask", "no", "why"), turns("plan", "ask", "no", "well")]
    file.write_text("".join(json.dumps(line) + "\n" for line in (first, *others)))

    async def body(page, port):
        await page.open(address(port, f"samples step=1 group={first['group']}", "sums/one"))
        said = "[...document.querySelectorAll('.card')].find((card) => card.querySelector('.branch'))"
        words = await page.value(f"[...{said}.querySelectorAll('.said')].map((one) => one.textContent)")
        assert words == ["plan", "look", "ask", "no", "why", "well"]
        assert await page.value(f"{said}.querySelectorAll('.branch').length") == 4

    assert watched(tmp_path, body) == []


def test_one_comes_from_the_list_to_a_token_by_clicks_and_keys(tmp_path):
    make_run(tmp_path / "runs/sums/one")

    async def body(page, port):
        await page.open(f"http://127.0.0.1:{port}/")
        await page.value("document.querySelector('td.name a').click()")
        await page.until("document.querySelectorAll('.panel canvas').length >= 3")
        await page.press("2")
        await page.until("document.querySelectorAll('table.groups tbody tr').length === 3")
        await page.press("k")
        await page.until("document.querySelector('.tools b')?.textContent === 'step 2'")
        await page.value("document.querySelector('table.groups tbody tr').click()")
        await page.until("document.querySelectorAll('.card').length === 2")
        cards = await page.value("[...document.querySelectorAll('.card .reward')].map((one) => one.textContent)")
        assert cards == ["1", "0.25"]
        assert await page.value("[...document.querySelectorAll('details.call')].every((one) => !one.open)")
        await page.value("document.querySelector('.card a.button').click()")
        await page.until("document.querySelectorAll('.token.trained').length === 7")
        await page.value(
            "document.querySelector('.token.trained').dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))"
        )
        assert "advantage" in await page.value("document.querySelector('.tip.there').textContent")
        link = await page.value("location.href")
        await page.open(link)
        await page.until("document.querySelectorAll('.token.trained').length === 7")
        before = await page.value("document.documentElement.dataset.theme")
        await page.press("t")
        await page.until(f"document.documentElement.dataset.theme !== '{before}'")

    assert watched(tmp_path, body) == []


def test_a_page_follows_a_run_that_goes_on(tmp_path):
    run = make_run(tmp_path / "runs/sums/one")

    async def body(page, port):
        await page.open(address(port, "curves", "sums/one"))
        await page.until(
            "document.querySelector('.live.live') && document.querySelector('.panel .value').textContent.trim() === '1'"
        )
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 4, "time": 1e9 + 4, "reward/mean": 0.375}) + "\n")
        await page.until("document.querySelector('.panel .value').textContent.trim() === '0.375'")
        await page.open(address(port, "samples", "sums/one"))
        record(run, 9, [group(90)])
        await page.until("document.querySelector('.tools b')?.textContent === 'step 9'")

    assert watched(tmp_path, body) == []


def test_hostile_texts_and_names_are_shown_as_text(tmp_path):
    name = "one<img src=x onerror=document.title='broken'>"
    run = make_run(tmp_path / f"runs/sums/{name}", steps=1, error=HOSTILE[0])
    assert len(HOSTILE) == 60
    samples = [sample(n / 9, prompt_text=text, completion_text=text, words={text: text}) for n, text in enumerate(HOSTILE)]
    samples.append(sample(2.0, completion_text="x" * 10_000_000))
    record(run, 2, [group(7, *samples, source=HOSTILE[1], failure_words=(HOSTILE[2],))])
    (run / "log.txt").write_text("\n".join(HOSTILE), errors="replace")
    (run / "config.yaml").write_text(HOSTILE[1])
    titles = []

    async def body(page, port):
        await page.open(f"http://127.0.0.1:{port}/")
        for one in (*PAGES, "samples step=2", "samples step=2 group=7", "tokens step=2 group=7 line=0"):
            await page.open(address(port, one, f"sums/{name}".replace("<", "%3C").replace(">", "%3E").replace(" ", "%20")))
            titles.append(await page.value("document.title"))
            inside = await page.value(
                "document.querySelectorAll('main script, main img, main svg[onload], main style, main base').length"
            )
            assert inside == 0 and len(await page.text()) > 10, one
            if one.endswith("group=7") and one.startswith("samples"):
                said = await page.text()
                assert all(text in said for text in HOSTILE[:6]) and "more characters" in said
                assert "\\u001b[31m" in said and "\\u202e" in said and "\\u0000" in said and "\x1b" not in said
        assert all(url.startswith((f"http://127.0.0.1:{port}", "data:", "about:")) for url in page.requests)

    assert watched(tmp_path, body) == []
    assert not any(title == "broken" or title == "1" for title in titles)


def test_a_report_opens_from_a_file_without_any_request(tmp_path):
    make_run(tmp_path / "runs/sums/one", error=HOSTILE[0])
    file = tmp_path / "report.html"
    file.write_text(report(questions(tmp_path)))

    async def body(page, _):
        await page.open(file.as_uri())
        for one in (
            "curves",
            "samples",
            "samples step=2 group=20",
            "tokens step=2 group=20 line=0",
            "prompts",
            "time",
            "setup",
            "log",
        ):
            await page.open(
                f"{file.as_uri()}#{one.split()[0]}?run=sums/one" + "".join(f"&{more}" for more in one.split()[1:])
            )
            assert len(await page.text()) > 10 and "not in the report" not in await page.text()
        assert {url.split("#")[0] for url in page.requests} <= {file.as_uri(), "about:blank", "data:,"}

    assert watched(tmp_path, body) == []


def test_a_server_with_a_token_asks_for_it_or_takes_it_from_the_link(tmp_path):
    make_run(tmp_path / "runs/sums/one")

    async def body(page, port):
        await page.open(f"http://127.0.0.1:{port}/")
        await page.until("document.querySelector('input[type=password]')")
        await page.open(f"http://127.0.0.1:{port}/#token={TOKEN}")
        await page.until("document.querySelectorAll('tbody tr').length === 1")
        assert TOKEN not in await page.value("location.href")
        assert not any(TOKEN in url.split("#")[0] for url in page.requests)

    watched(tmp_path, body, token=TOKEN)
