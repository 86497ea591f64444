"""The watched file or folder of addresses, and `tandem fleet`, which writes it."""

import json

import pytest

from tandem.cli.fleet import last_rows, watched_by
from tandem.cli.main import main
from tandem.config.errors import ConfigError
from tandem.config.fleet import Address, parse_address
from tandem.engines.inference.fleet.addresses import add_address, ask_to_leave, read_addresses, remove_address

ONE, TWO = Address("tandem", "http://127.0.0.1:8000"), Address("vllm", "http://10.0.0.2:9000/base")


@pytest.fixture(params=["file", "folder"])
def watched(request, tmp_path):
    path = tmp_path / "servers"
    if request.param == "folder":
        path.mkdir()
    return path


def test_nothing_there_is_nobody(watched):
    assert read_addresses(watched).servers == ()


def test_what_was_added_is_read_and_what_was_removed_is_not(watched):
    assert add_address(watched, ONE) and add_address(watched, TWO)
    assert not add_address(watched, ONE)
    assert set(read_addresses(watched).servers) == {ONE, TWO}
    assert remove_address(watched, "http://10.0.0.2:9000/base/")
    assert read_addresses(watched).servers == (ONE,)
    assert remove_address(watched, str(ONE)) and not remove_address(watched, str(ONE))
    assert read_addresses(watched).servers == ()


def test_a_server_that_was_asked_to_leave_may_be_added_again(watched):
    ask_to_leave(watched, "embedded-1")
    ask_to_leave(watched, str(ONE))
    assert read_addresses(watched).leaving == {"embedded-1", str(ONE)}
    add_address(watched, ONE)
    assert read_addresses(watched).servers == (ONE,)
    assert read_addresses(watched).leaving == {"embedded-1"}


def test_a_line_that_says_nothing_is_named_and_hurts_no_other(tmp_path):
    file = tmp_path / "servers"
    file.write_text(f"# mine\n{ONE}  # the first\nhttp://no.kind:1\n\nvllm=ftp://x\n{TWO}/\n")
    found = read_addresses(file)
    assert found.servers == (ONE, TWO)
    assert len(found.problems) == 2 and "line 3" in found.problems[0] and "line 5" in found.problems[1]


@pytest.mark.parametrize("text", ["http://x", "embedded=http://x", "tandem=x:80", "vllm=http://", "tandem=http://a?b=c", ""])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ConfigError, match=r"KIND=URL|is not an address"):
        parse_address(text)


class TestCommand:
    @pytest.fixture
    def run(self, tmp_path):
        (tmp_path / "config.yaml").write_text("train_dataset: {path: addition}\nrollout: {backend: embedded:d2}\n")
        states = [
            ("embedded-0", "starting", "healthy", 0),
            ("embedded-1", "healthy", "fenced", 3),
            ("old", "stale", "retired", 0),
        ]
        lines = [
            json.dumps({"time": 1.0, "server": name, "from": before, "to": after, "why": "because", "moved": moved})
            for name, before, after, moved in states
        ]
        (tmp_path / "fleet.jsonl").write_text("\n".join(lines) + '\n{"time": 2.0, "ser')
        return tmp_path

    def test_list_shows_the_last_state_of_each_server(self, run, capsys):
        assert main(["fleet", "list", str(run)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[:2] for line in lines] == [["embedded-0", "healthy"], ["embedded-1", "fenced"]]
        assert "moved 3" in lines[1]
        assert main(["fleet", "list", "--json", str(run)]) == 0
        assert [json.loads(line)["to"] for line in capsys.readouterr().out.splitlines()] == ["healthy", "fenced"]
        assert "old" not in last_rows(run)

    def test_add_and_remove_write_what_the_run_watches(self, run, capsys):
        assert main(["fleet", "add", str(ONE), str(run)]) == 0
        assert read_addresses(run / "servers").servers == (ONE,)
        assert main(["fleet", "remove", ONE.url, str(run)]) == 0
        assert read_addresses(run / "servers").servers == ()
        assert main(["fleet", "remove", "embedded-1", str(run)]) == 0
        assert read_addresses(run / "servers").leaving == {"embedded-1"}

    def test_the_configured_file_is_the_one_that_is_written(self, run, tmp_path):
        other = tmp_path / "elsewhere"
        (run / "config.yaml").write_text(
            f"train_dataset: {{path: addition}}\nrollout: {{backend: attached, fleet: {{watch: {other}}}}}\n"
        )
        assert watched_by(run) == other

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["add", "RUN"], "tandem fleet add SERVER RUN"),
            (["list", "a", "RUN"], "tandem fleet list RUN"),
            (["add", "http://x", "RUN"], "KIND=URL"),
            (["remove", "embedded-7", "RUN"], "no server embedded-7; it has embedded-0, embedded-1"),
            (["list", "/nowhere"], "there is no run /nowhere"),
        ],
    )
    def test_what_cannot_be_done_says_what_to_write(self, run, capsys, arguments, words):
        assert main(["fleet", *(str(run) if word == "RUN" else word for word in arguments)]) == 2
        assert words in capsys.readouterr().err

    def test_a_run_without_a_fleet_says_so(self, run, capsys):
        (run / "config.yaml").write_text("train_dataset: {path: addition}\n")
        assert main(["fleet", "add", str(ONE), str(run)]) == 2
        assert "there is no fleet" in capsys.readouterr().err
