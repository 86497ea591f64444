"""`tandem serve` as a command: files, signals, what it leaves behind; and `tandem chat` with both kinds of partner."""

import argparse
import asyncio
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import openai
import psutil
import pytest
import torch

from tandem.cli import generating, serving
from tandem.cli.generate import CHAT
from tandem.cli.listening import access_of
from tandem.cli.main import main
from tandem.cli.serve import SERVE
from tandem.config.errors import ConfigError
from tandem.config.rollout import EmbeddedEngineConfig
from tandem.engines.inference.remote.tandem_server import start_tandem_server
from tandem.engines.inference.serve.routes import ServedEngine
from tandem.launch.local import EXIT_CONFIG
from tandem.protocol.access import Access, token_from
from tandem.protocol.server import Server
from tests.serve.served import TOKEN, Served, one_by_one, request_of, update_of
from tests.tiny import tiny_model_folder
from tests.tiny_media import tiny_idefics3

ENGINE = ["--threads", "1", "--device", "cpu", "--dtype", "float32", "--kv-cache-gib", "0.05"]


def parsed(module, *argv):
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return parser.parse_args(argv)


def mode(file):
    return file.stat().st_mode & 0o777


@pytest.mark.slow
@pytest.mark.invariant
def test_the_command_serves_until_sigterm_and_leaves_nothing(folder, tmp_path, capfd):
    """In this process, whose main thread it needs; the engine is a process of its own."""
    address, seen = tmp_path / "address.json", {}
    before = psutil.Process().children(recursive=True)  # of other tests in this process

    def use():
        while not address.is_file():
            time.sleep(0.02)
        facts = seen["facts"] = json.loads(address.read_text())
        seen["children"] = [child for child in psutil.Process().children(recursive=True) if child not in before]
        with openai.OpenAI(base_url=f"{facts['url']}/v1", api_key="-", max_retries=0, timeout=30) as client:
            ask = {"model": "tiny", "prompt": "There are", "max_tokens": 300, "seed": 1, "extra_body": {"min_tokens": 300}}
            pieces = []
            for chunk in client.completions.create(stream=True, **ask):
                pieces.append(chunk.choices[0].text)
                if len(pieces) == 5:
                    os.kill(os.getpid(), signal.SIGTERM)  # an answer that runs is ended in peace
            seen["pieces"], seen["reason"] = pieces, chunk.choices[0].finish_reason

    thread = threading.Thread(target=use)
    thread.start()
    tokens = ["--admin-token-file", str(tmp_path / "admin")]
    assert (
        main(["serve", str(folder), "--port", "0", "--name", "tiny", "--address-file", str(address), *tokens, *ENGINE]) == 0
    )
    thread.join(30)

    assert seen["reason"] == "length" and len(seen["pieces"]) > 50
    assert seen["facts"]["pid"] == os.getpid() and not address.exists()
    assert seen["children"] and not any(child.is_running() for child in seen["children"])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(seen["facts"]["url"].rsplit(":", 1)[1])), timeout=60)
    assert mode(tmp_path / "admin") == 0o600
    said = capfd.readouterr()
    assert seen["facts"]["url"] in said.out and str(tmp_path / "admin") in said.out
    assert (tmp_path / "admin").read_text().strip() not in said.out + said.err


@pytest.mark.slow
@pytest.mark.invariant
def test_a_server_of_the_runs_own_is_started_used_and_ended(folder, tmp_path, monkeypatch):
    other = tiny_model_folder(tmp_path / "weights", seed=3)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    before = set(temporary.iterdir())
    server = start_tandem_server(
        folder,
        EmbeddedEngineConfig(threads=1, kv_cache_gib=0.05),
        torch.float32,
        "cpu",
        run="r",
        log_file=tmp_path / "log",
        weights_roots=[tmp_path / "weights"],
        startup_timeout_s=120,
    )
    assert set(temporary.iterdir()) == before  # its tokens are nowhere but in memory
    port = int(server.url.rsplit(":", 1)[1])
    processes = [p for p in psutil.process_iter(["cmdline"]) if str(folder) in (p.info["cmdline"] or [])]
    update = update_of(other, 1)
    server.prepare_weights(update)
    server.commit_weights(update.version)
    (response,) = one_by_one(server, [request_of([5, 6])])
    server.close()

    assert set(response.versions) == {1} and processes
    assert not any(process.is_running() for process in processes)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=60)


@contextlib.contextmanager
def command_of(folder, address):
    """(process of the command, process of its engine) once it answers."""
    files = ["--address-file", str(address), "--admin-token-file", str(address.with_name("admin"))]
    command = [sys.executable, "-m", "tandem", "serve", str(folder), "--port", "0", *files, *ENGINE]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        while not address.is_file():
            assert process.poll() is None
            time.sleep(0.1)
        _keeper, engine = psutil.Process(process.pid).children(recursive=True)
        yield process, engine
    finally:
        process.kill()
        process.communicate(timeout=60)


@pytest.mark.slow
@pytest.mark.invariant
def test_a_killed_server_leaves_no_process_and_no_port(folder, tmp_path):
    with command_of(folder, tmp_path / "address.json") as (process, engine):
        url = json.loads((tmp_path / "address.json").read_text())["url"]
        process.kill()
        engine.wait(60)

    assert not engine.is_running()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=60)


@pytest.mark.slow
def test_a_server_whose_engine_was_killed_ends_and_says_so(folder, tmp_path):
    with command_of(folder, tmp_path / "address.json") as (process, engine):
        engine.kill()
        assert process.wait(60) == 1
        said = process.stderr.read()

    assert "killed by SIGKILL" in said and not (tmp_path / "address.json").exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "70000"], "--port"),
        (["--host", ""], "--host is empty"),
        (["--host", "a..b"], "cannot listen at a..b"),
        (["--threads", "0"], "--threads"),
        (["--request-timeout", "0"], "--request-timeout"),
        (["--max-completions", "0"], "--max-completions"),
        (["--run", ""], "--run"),
        (["--weights-root", "/nothing/here"], "--weights-root"),
        (["--address-file", "/nothing/here/a"], "--address-file"),
    ],
)
def test_values_that_cannot_be_are_refused(argv, words):
    with pytest.raises(ConfigError, match=words):
        serving.check(parsed(SERVE, "m", "--port", "0", *argv))


def test_a_media_host_is_a_name_as_urls_spell_it(capsys):
    given = [word for host in ("Images.Example.org", "::1", "[::1]") for word in ("--media-host", host)]
    assert parsed(SERVE, "m", *given).media_host == ["images.example.org", "::1", "::1"]
    for wrong in ("http://images.example.org", "images.example.org:80", "a/b", ""):
        with pytest.raises(SystemExit):
            parsed(SERVE, "m", "--media-host", wrong)
    assert "give the name alone" in capsys.readouterr().err


def test_a_new_token_is_long_and_readable_by_its_owner_only(tmp_path):
    token = token_from(tmp_path / "token")

    assert len(token) >= 32 and mode(tmp_path / "token") == 0o600
    assert token_from(tmp_path / "token") == token != token_from(tmp_path / "another")


BAD_FILES = [("a" * 32, 0o644, "chmod 600"), *((text, 0o600, "at least 16") for text in ("", "short", "two words " * 4))]


@pytest.mark.parametrize(("content", "mode", "words"), BAD_FILES)
def test_a_token_file_that_protects_nothing_is_refused(tmp_path, content, mode, words):
    file = tmp_path / "token"
    file.write_text(content)
    file.chmod(mode)

    with pytest.raises(ConfigError, match=words):
        token_from(file)


def access(*argv):
    with contextlib.ExitStack() as stack:
        rules, files = access_of(parsed(SERVE, "m", *argv), stack, control=True)
        return rules, {name: mode(file) for name, file in files.items()}, [Path(file).parent for file in files.values()]


def test_on_loopback_only_the_control_routes_need_a_token():
    rules, modes, folders = access()

    assert rules.token is None and len(rules.admin_token) >= 32 and modes == {"admin token": 0o600}
    assert not any(folder.exists() for folder in folders)  # what was made for the process goes with it


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.2", "::", "gpu7.example"])
def test_elsewhere_everyone_needs_a_token(host):
    rules, modes, _ = access("--host", host)

    assert len(rules.token) >= 32 and rules.token != rules.admin_token and modes == {"admin token": 0o600, "token": 0o600}


def test_the_two_tokens_must_differ(tmp_path):
    with pytest.raises(ConfigError, match="must differ"):
        access("--token-file", str(tmp_path / "t"), "--admin-token-file", str(tmp_path / "t"))


def test_an_address_that_cannot_be_had_is_refused_before_anything_is_made(tmp_path, capsys):
    taken = socket.create_server(("127.0.0.1", 0))
    with taken:
        for where in ["--host", "192.0.2.1"], ["--port", str(taken.getsockname()[1])]:
            for command in ["view", str(tmp_path)], ["serve", "no-such-model"], ["serve-reward", "m=no-such-model"]:
                assert main([*command, *where, "--token-file", str(tmp_path / "token")]) == EXIT_CONFIG
                assert "cannot listen at" in capsys.readouterr().err and not (tmp_path / "token").exists(), command


def test_an_address_that_is_taken_is_said(folder):
    with Served(folder) as first, pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{first.port}"):
        asyncio.run(listen_again(first))


async def listen_again(served):
    server = Server(ServedEngine(served.service), Access.of("127.0.0.1", token=None, admin_token=TOKEN))
    async with server.listening("127.0.0.1", served.port):
        raise AssertionError("two servers at one address")


def conversation(partner, lines):
    """Replies to lines, one a line."""
    read = iter(lines)

    def line():
        try:
            return next(read)
        except StopIteration:
            raise EOFError from None

    with contextlib.redirect_stdout(io.StringIO()) as said:
        generating.converse(partner, line)
    return said.getvalue()


def test_a_chat_with_a_folder_only_appends(folder):
    partner = generating.LocalPartner(parsed(CHAT, str(folder), "--threads", "1", "--dtype", "float32", "--device", "cpu"))
    seen = []
    try:
        for text in ("What is 3 + 4?", "And 5 more?", "And then?"):
            said = conversation(partner, [text])
            seen.append(partner.tokens)
            assert said.endswith("\n")
    finally:
        partner.close()

    assert len(seen[0]) < len(seen[1]) < len(seen[2])
    assert seen[1][: len(seen[0])] == seen[0] and seen[2][: len(seen[1])] == seen[1]


def test_a_text_that_spells_the_mark_of_an_image_is_not_sent_and_the_chat_goes_on(tmp_path):
    path = tiny_idefics3(tmp_path)
    partner = generating.LocalPartner(parsed(CHAT, str(path), "--threads", "1", "--dtype", "float32", "--device", "cpu"))
    try:
        said = conversation(partner, ["What is in <image>?", "What is 3 + 4?"])
    finally:
        partner.close()
    refused, answered = said.split("\n", 1)
    assert refused.startswith("— not sent") and "<image>" in refused and answered.strip()


def test_a_chat_with_an_address_sends_what_was_said(folder, tmp_path):
    file = tmp_path / "token"
    file.write_text(TOKEN)
    sampling = ["--greedy", "--max-new-tokens", "12", "--system", "Answer."]
    with Served(folder, token=TOKEN) as served:
        partner = generating.partner_of(parsed(CHAT, f"{served.url}/v1", "--token-file", str(file), *sampling))
        first = conversation(partner, ["What is 3 + 4?", "", "And 5 more?", "/quit", "never said"])
        messages = [message["role"] for message in partner.messages]
        again = conversation(partner, ["/new", "What is 3 + 4?"])

    assert messages == ["user", "assistant"] * 2
    assert again.split("\n", 1)[1].rstrip("\n") == partner.messages[1]["content"]
    assert first.startswith(partner.messages[1]["content"])


@pytest.mark.parametrize("argv", [["--temperature", "0"], ["--top-p", "2"], ["--max-new-tokens", "0"], ["--threads", "0"]])
def test_a_chat_cannot_have_these(argv):
    with pytest.raises(ConfigError, match=argv[0]):
        generating.check_chat(parsed(CHAT, "m", *argv))
