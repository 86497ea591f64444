"""Any program as an agent: a command line that gets an address, a key and a folder, and runs one episode."""

import io
import json
import os
import re
import shlex
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, Literal
from urllib.parse import urlsplit

from tandem.api.failures import DataFailure, EngineDied, InfrastructureFailure, SandboxLost, WrongWorkflow
from tandem.api.sandbox import Limits, Outcome, Program, Sandbox, Snapshot, Workspace
from tandem.api.workflow import GeneratesTokens, RewardFn, RolloutWorkflow, Sample
from tandem.config.errors import ConfigError
from tandem.config.rollout import GenerationConfig
from tandem.rollout.agents import judge_reply
from tandem.rollout.episode_engine import PROGRAM, inside
from tandem.rollout.recorder import SessionRecorder
from tandem.rollout.recording_session import RecordingSession, SessionLimits, read_verdict

_PLACE = re.compile(r"\{\{\w+\}\}|\{(\w+)\}")
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "fish", "csh", "tcsh")
_TAKES_SCRIPT = re.compile(r"-\w*c")

LONGEST_WORD = 128 << 10
"""Maximum size in bytes of one argument of a program on Linux, including the final zero byte."""


class Command:
    """A command line, split into words like a shell does. ``{name}`` in a word is replaced by a value; ``{{name}}`` means
    ``{name}``.

    The words are split before values are inserted, and no shell parses them, so a value always stays within its word.

    Example: ``Command("python3 agent.py --question {prompt}").words({"prompt": "What is 2 + 2?"})``
    """

    def __init__(self, text: str):
        try:
            self._words = tuple(shlex.split(text))
        except ValueError as error:
            raise ConfigError(f"workflow=program: command {text!r} cannot be cut into words: {error}") from None
        if not self._words:
            raise ConfigError("workflow=program: command is empty; write one, such as command='python3 agent.py {prompt}'")
        for before, word in zip(self._words, self._words[1:], strict=False):
            if _TAKES_SCRIPT.fullmatch(before) and any(PurePath(w).name in _SHELLS for w in self._words) and places(word):
                name = places(word)[0]
                raise ConfigError(
                    f"workflow=program: a shell would execute what a row puts at {{{name}}} as a command; give it to the "
                    f"script as an argument: sh -c '… \"$1\" …' sh {{{name}}}"
                )

    def words(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        """Returns the words with their values inserted: strings unchanged, other values as JSON.

        Raises:
            WrongWorkflow: there is no value for a name.
            DataFailure: ``prompt_too_long``: a word is longer than Linux allows, or contains a zero byte.
        """
        words = tuple(filled(word, values) for word in self._words)
        for word in words:
            if len(word.encode(errors="surrogateescape")) >= LONGEST_WORD or "\0" in word:
                raise DataFailure("prompt_too_long", "an argument of a command has 128 KiB at most; let it read {row}")
        return words


def places(text: str) -> list[str]:
    """Returns the names of the places ``{name}`` in a text."""
    return [match[1] for match in _PLACE.finditer(text) if match[1]]


def filled(text: str, values: Mapping[str, Any]) -> str:
    """Returns the text with values inserted at its places ``{name}``.

    Raises:
        WrongWorkflow: there is no value for a name.
    """

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return match[0][1:-1]
        if name not in values:
            raise WrongWorkflow(
                f"workflow=program: nothing fills {{{name}}}; a row fills {', '.join(sorted(values))}. For the literal text "
                f"write {{{{{name}}}}}"
            )
        value = values[name]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

    return _PLACE.sub(fill, text)


ROW, REWARD = ".tandem/row.json", ".tandem/reward.json"
"""Paths in the program's folder: the row, for the program to read, and the reward, which the program may write."""

REASONS = {"exit": "failed", "signal": "killed"}
"""Status of a program that failed → its reason, to which ``program_`` is prefixed; by default the status itself."""

DESCRIPTORS = 4096
"""Maximum number of open files of a process: interpreters load hundreds of modules at once."""

KEPT_CHARACTERS = 4000
"""Number of characters kept of the end of a program's output and of its errors."""

From = Literal["said", "exit", "reply", "output"]


class ProgramWorkflow(RolloutWorkflow):
    """A program as a workflow: it calls the model over HTTP from the sandbox, and has no other network access.

    ``command``: its command line, see `Command`. ``reward_from``: the source of the reward. `said`: the reward that the
    program posted to ``TANDEM_REWARD_URL`` or wrote to ``.tandem/reward.json``; without one, the configured reward of the
    last reply. `exit`: 1 for exit code 0, else 0. `reply`, `output`: the configured reward of the model's last reply, or of
    the program's output.
    """

    def __init__(
        self,
        command: str,
        reward: RewardFn | None,
        gconfig: GenerationConfig,
        recorder: SessionRecorder,
        sandbox: Sandbox,
        episode_timeout_s: float = 600.0,
        *,
        template: str | None = None,
        files: str | None = None,
        variables: Mapping[str, str] | None = None,
        reward_from: From = "said",
        timeout_s: float | None = None,
        memory_mib: int = 1024,
        processes: int = 64,
        file_mib: int = 64,
        output_kib: int = 1024,
        max_turns: int = SessionLimits.max_turns,
        max_concurrent: int = SessionLimits.max_concurrent,
        side_calls: Literal["skip", "train"] = "skip",
    ):
        """``template``: a folder copied into the program's folder. ``files``: the row's column with further files (path →
        text). ``variables``: further environment variables, with places as in the command. ``timeout_s``: maximum time of
        the program in seconds; None: 0.8 of the episode's."""
        most_s = PROGRAM * episode_timeout_s
        self.timeout_s = inside("workflow_args.timeout_s", timeout_s, most_s, episode_timeout_s)
        if reward_from in ("reply", "output") and reward is None:
            raise ConfigError(f"workflow=program: reward_from={reward_from} needs a reward; set reward")
        self.command, self.variables = Command(command), {str(k): str(v) for k, v in (variables or {}).items()}
        self.template = packed_folder(template) if template else None
        self.reward, self.gconfig, self.recorder, self.sandbox = reward, gconfig, recorder, sandbox
        self.reward_from, self.files, self.side_calls = reward_from, files, side_calls
        self.session_limits = SessionLimits(max_turns=max_turns, max_concurrent=max_concurrent)
        self.limits = Limits(
            wall_s=self.timeout_s,
            cpu_s=self.timeout_s,
            memory_mib=memory_mib,
            processes=processes,
            descriptors=DESCRIPTORS,
            output_bytes=output_kib << 10,
            file_mib=file_mib,
        )

    async def arun_episode(self, engine: GeneratesTokens, data: Mapping[str, Any]) -> Sample:
        """Runs one episode, see `RolloutWorkflow`.

        Raises:
            DataFailure: ``program_failed``, ``program_failed_on_cut_reply``, ``program_killed``, ``program_timeout``,
                ``program_memory``, ``program_output``; ``agent_never_called``, ``agent_exited_early``; ``two_rewards``,
                ``wrong_reward``, ``no_reward``.
        """
        limits, side_calls = self.session_limits, self.side_calls
        async with self.recorder.session(engine, self.gconfig, limits=limits, side_calls=side_calls) as session:
            outcome, written = await self._play(session, data)
        failure = session.failure
        if isinstance(failure, EngineDied) or (isinstance(failure, InfrastructureFailure) and outcome.status != "ok"):
            raise failure  # not the program's fault: the episode is retried
        self._check(outcome, session)
        _ = session.last  # a program that never spoke to the model has no reward
        verdict = await self._verdict(session, data, outcome, written)
        printed = {"stdout": _tail(outcome.stdout), "stderr": _tail(outcome.stderr)}
        return session.sample(
            **verdict
            | {
                "metrics": {"time/program_s": outcome.seconds, **verdict.get("metrics", {})},
                "words": {**verdict.get("words", {}), **{name: text for name, text in printed.items() if text}},
            }
        )

    async def _play(self, session: RecordingSession, data: Mapping[str, Any]) -> tuple[Outcome, bytes | None]:
        """Runs the program. Returns its outcome and the content of its reward file, or None."""
        address = urlsplit(session.base_url)
        limits = Limits(**vars(self.limits) | {"address": (address.hostname, address.port)})
        program = self._program(session, data)
        space = await self.sandbox.open(limits=limits)
        try:
            if self.template is not None:
                await space.restore(self.template)
            outcome = await space.exec(program)
            return outcome, await _reward_file(space) if self.reward_from == "said" else None
        finally:
            await space.close()

    def _program(self, session: RecordingSession, data: Mapping[str, Any]) -> Program:
        """Returns the command with its files and environment variables for this row."""
        root, keyed = (url.removesuffix("/v1") for url in (session.base_url, session.keyed_url))
        prompt = prompt_of(data)
        values = {**data, "prompt": prompt, "row": ROW, "base_url": session.base_url, "api_key": session.key}
        environment = {
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_BASE": session.base_url,
            "OPENAI_API_KEY": session.key,
            "ANTHROPIC_BASE_URL": root,
            "ANTHROPIC_API_KEY": session.key,
            "TANDEM_BASE_URL": session.keyed_url,
            "TANDEM_REWARD_URL": f"{keyed}/reward",
            "TANDEM_ROW": ROW,
            "TANDEM_REWARD_FILE": REWARD,
            "TANDEM_DEADLINE": f"{time.time() + self.timeout_s:.3f}",
        }
        environment |= {name: filled(text, values) for name, text in self.variables.items()}
        row = json.dumps(dict(data), ensure_ascii=False, default=str).encode(errors="replace")
        return Program(argv=self.command.words(values), files={**self._row_files(data), ROW: row}, environment=environment)

    def _row_files(self, data: Mapping[str, Any]) -> dict[str, bytes]:
        if self.files is None:
            return {}
        files = data.get(self.files)
        if not isinstance(files, Mapping):
            raise WrongWorkflow(f"workflow=program: files={self.files} must name a column that maps paths to texts")
        return {str(path): str(text).encode(errors="replace") for path, text in files.items()}

    def _check(self, outcome: Outcome, session: RecordingSession) -> None:
        """Raises an error if the program did not end as it should.

        Raises:
            DataFailure: the program failed.
            WrongWorkflow: the command cannot be executed for any row.
        """
        if outcome.status == "ok" or (outcome.status == "exit" and self.reward_from == "exit"):
            return
        words = _tail(outcome.stderr).strip()
        if outcome.status == "lost":
            raise SandboxLost(words)
        if outcome.status == "refused":
            if "cannot be executed" in words:
                raise WrongWorkflow(
                    f"workflow=program: {words}. The sandbox has the system's programs and Python, and the "
                    "folders that sandbox=auto(readable=[…]) names"
                )
            raise SandboxLost(words)
        last = words[-300:] or "nothing on stderr"
        causes = {"timeout": f"not done after {self.timeout_s:g} s", "exit": f"exit code {outcome.exit_code}"}
        failure_type = session.failed if outcome.status == "exit" else DataFailure
        reason, cause = (words.get(outcome.status, outcome.status) for words in (REASONS, causes))
        raise failure_type(f"program_{reason}", f"{cause}: {last}")

    async def _verdict(
        self, session: RecordingSession, data: Mapping[str, Any], outcome: Outcome, written: bytes | None
    ) -> dict[str, Any]:
        """Returns the reward with its details, as arguments of `RecordingSession.sample`."""
        if self.reward_from == "exit":
            return {"reward": float(outcome.status == "ok"), "accuracy": float(outcome.status == "ok"), "own_reward": True}
        if self.reward_from == "output":
            return await judge_reply(self.reward, session, data, outcome.stdout.decode(errors="replace"))
        if self.reward_from == "said":
            if written is not None and session.reward is not None:
                raise DataFailure("two_rewards", f"the program posted a reward and wrote one to {REWARD}; do only one")
            verdict = session.reward if written is None else _read_reward(written)
            if verdict is not None:
                return verdict
        return await judge_reply(self.reward, session, data)


def prompt_of(data: Mapping[str, Any]) -> str:
    """Returns the text of the row's last message."""
    messages = data.get("messages") or [{}]
    content = messages[-1].get("content", "")
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)


def packed_folder(folder: str) -> Snapshot:
    """Packs a folder into a snapshot of a workspace, without owners and times.

    Raises:
        ConfigError: the folder does not exist.
    """
    if not Path(folder).is_dir():
        raise ConfigError(f"workflow=program: template must be a folder, got {folder!r}")

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return member

    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name in sorted(os.listdir(folder)):
            archive.add(os.path.join(folder, name), name, filter=plain)
    return Snapshot(content.getvalue())


async def _reward_file(space: Workspace) -> bytes | None:
    try:
        return await space.read(REWARD)
    except OSError:
        return None


def _read_reward(written: bytes) -> dict[str, Any] | None:
    try:
        return read_verdict(json.loads(written))
    except (ValueError, RecursionError) as error:
        raise DataFailure("wrong_reward", f'{REWARD} must have a number, or {{"reward": number}}: {error}') from None


def _tail(output: bytes) -> str:
    return output.decode(errors="replace")[-KEPT_CHARACTERS:]
