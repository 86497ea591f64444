"""Run folders for the viewer's tests, made by the recorder itself."""

import json

from tandem.api.workflow import Dropped
from tandem.view.questions import RunAnswers
from tandem.view.runs import Runs
from tests.tracking.test_recorder import MESSAGES, group, record, sample


def make_run(folder, *, steps=3, status="finished", **info):
    """A run of a few steps: in each a group with a chat that calls a tool, a plain one, and a dropped prompt."""
    folder.mkdir(parents=True)
    rows = [
        {"step": n, "time": 1e9 + n, "reward/mean": n / steps, "time/step_s": 2.0, "time/train_s": 1.5}
        for n in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.json").write_text(json.dumps({"status": status, "started": "2030-05-01T09:30:00+0000", **info}))
    (folder / "config.yaml").write_text(f"trial_name: {folder.name}\ntotal_train_steps: {steps}\nactor:\n  path: nowhere\n")
    (folder / "log.txt").write_text("2030-05-01 09:30:01,000 WARNING tandem.roles.actor: this step\n  changes nothing\n")
    for step in range(1, steps + 1):
        groups = [
            group(10 * step, *(sample(reward, messages=MESSAGES, accuracy=reward) for reward in (0.25, 1.0))),
            group(
                10 * step + 1,
                *(
                    sample(reward, prompt_text="5 + 6 =", completion_text=f"it is {step}11")
                    for reward in (0.5, step / steps)
                ),
            ),
        ]
        record(
            folder,
            step,
            groups,
            dropped=[Dropped("reward_timeout", "reward_timeout: too late", group(10 * step + 2, sample(0.1)))],
        )
    return folder


def questions(tmp_path, *places):
    return RunAnswers(Runs(places or [tmp_path / "runs"]), tmp_path / "cache")


def every_file(folder):
    """Path → (bytes, time of change) of all that is below a folder."""
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(folder.rglob("*")) if path.is_file()}
