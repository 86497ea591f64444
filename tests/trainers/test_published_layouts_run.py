"""Each published layout goes through the command that it is made for, which says what is read of it."""

import json

import pytest

from tandem.cli.main import main
from tandem.data.examples import conversations, safety, steps
from tandem.data.rows import normalise
from tests.data.layouts import LAYOUTS, filled
from tests.tiny import CHATML, tiny_model_folder

SHOWS_CALLS = "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}" + CHATML.replace(
    "message['content']", "message['content'] + (message.tool_calls | tojson if message.tool_calls else '')"
)
COMMANDS = {normalise: "train", conversations: "sft", safety: "reward", steps: "reward"}
CASES = [(name, COMMANDS.get(layout.reader, "preference")) for name, layout in LAYOUTS.items()]
CASES += [("UltraFeedback binarised", "reward"), ("GSM8K", "eval"), ("MATH-500", "eval"), ("SVAMP", "eval")]
OPTIONS = {
    "train": ["reward=math", "rollout.batch_size=2", "gconfig.n_samples=2", "gconfig.max_new_tokens=4"],
    "sft": ["batch_size=2"],
    "preference": ["batch_size=2"],
    "reward": ["batch_size=2"],
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("models"), chat_template=SHOWS_CALLS)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "command"), CASES)
def test_a_published_layout_runs_and_says_what_is_read(tiny, tmp_path, name, command, capsys):
    layout, file = LAYOUTS[name], tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(filled(layout.row, n)) + "\n" for n in range(5)))
    if command == "eval":
        words = ["eval", str(tiny), "--data", str(file), "gconfig.max_new_tokens=4", "reward=math", f"out={tmp_path}"]
        assert main([*words, "threads=1"]) == 0
        assert f"rows {layout.reads}" in capsys.readouterr().err
        return
    special = {safety: ["supervision=safety"], steps: ["supervision=steps"]}
    kto = ["loss=kto"] if name == "KTO" else []
    same = [f"run.root={tmp_path / 'runs'}", f"actor.path={tiny}", f"train_dataset.path={file}", "total_train_steps=1"]
    same += ["device=cpu", "threads=1", *OPTIONS[command], *special.get(layout.reader, []), *kto]
    assert main([command, *same]) == 0
    assert f"train_dataset {layout.reads}" in capsys.readouterr().out
    (page,) = (tmp_path / "runs").glob("*/*/README.md")
    assert f"train_dataset {layout.reads}" in page.read_text()
