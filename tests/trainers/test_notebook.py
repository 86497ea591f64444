"""A real Jupyter kernel: the tutorial runs, an interrupted cell leaves a run that goes on, mistakes are one sentence."""

import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="the extra dev has it, with nbclient")
nbclient = pytest.importorskip("nbclient", reason="the extra dev has it")
pytest.importorskip("ipykernel", reason="the extra dev has it")

TUTORIAL = Path(__file__).parents[2] / "examples/first_run.ipynb"
SMALL = {
    "smollm2-135m": "{model}",
    '"max_new_tokens": 16': '"max_new_tokens": 4',
    '"rollout.batch_size": 8': '"rollout.batch_size": 4, "rollout.engine.kv_cache_gib": 0.05, "threads": 1',
    "total_train_steps=20": "total_train_steps=5",
}


def text_of(cell):
    """What a reader sees below a cell."""
    parts = [out.get("text", "") or out.get("data", {}).get("text/plain", "") for out in cell.outputs]
    return "".join(parts) + "".join("\n".join(out.traceback) for out in cell.outputs if out.output_type == "error")


def client_of(notebook, folder, **more):
    return nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}, **more
    )


@pytest.mark.slow
def test_the_tutorial_runs_from_the_first_cell_to_the_last(model, tmp_path):
    notebook = nbformat.read(TUTORIAL, as_version=4)
    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code"), "it is kept without outputs"
    for cell in notebook.cells:
        for usual, small in SMALL.items():
            cell.source = cell.source.replace(usual, small.format(model=model))
    client_of(notebook, tmp_path).execute()
    cells = {cell.source: text_of(cell) for cell in notebook.cells if cell.cell_type == "code"}
    first, rest = cells["trainer.train(until=3)"], cells["done = trainer.train()\ndone"]
    assert re.findall(r"step (\d)/5", first) == ["1", "2", "3"] and re.findall(r"step (\d)/5", rest) == ["4", "5"]
    assert re.search(r"<5 steps, reward/mean \S+, .*checkpoint runs/tandem/notebook/checkpoints/step_5>", rest)
    (shown,) = [text for source, text in cells.items() if "metrics.jsonl" in source]
    assert [step for step, _ in eval(shown)] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_an_interrupted_cell_leaves_a_run_that_goes_on_and_mistakes_are_one_sentence(model, tmp_path):
    start = f"""
import threading

from tandem import GRPOTrainer

factor, lock = 2, threading.Lock()


def even(completion_ids):
    return factor * sum(token % 2 == 0 for token in completion_ids) / len(completion_ids)


def locked(completion):
    with lock:
        return 1.0


rows = [{{"question": f"{{a}}+{{b}}=", "answer": str(a + b)}} for a in range(6) for b in range(6)]
keys = {{"rollout.batch_size": 4, "gconfig.n_samples": 4, "gconfig.max_new_tokens": 4, "threads": 1}}
keys |= {{"rollout.engine.kv_cache_gib": 0.05}}
trainer = GRPOTrainer({str(model)!r}, even, train_dataset=rows, total_train_steps=1000, options=keys)
"""
    sources = [
        start,
        "trainer.train()",
        "trainer.train(until=STEP)",
        f"GRPOTrainer({str(model)!r}, locked, train_dataset=rows)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    client, metrics = client_of(notebook, tmp_path, allow_errors=True), tmp_path / "runs/tandem/trial/metrics.jsonl"

    def interrupt():
        end = time.monotonic() + 200
        while time.monotonic() < end and (not metrics.is_file() or len(metrics.read_text().splitlines()) < 2):
            time.sleep(0.1)
        os.kill(client.km.provisioner.pid, signal.SIGINT)

    with client.setup_kernel():
        client.execute_cell(notebook.cells[0], 0)
        threading.Thread(target=interrupt, daemon=True).start()
        client.execute_cell(notebook.cells[1], 1)
        last = json.loads(metrics.read_text().splitlines()[-1])["step"]
        notebook.cells[2].source = f"trainer.train(until={last + 1})"
        client.execute_cell(notebook.cells[2], 2)
        client.execute_cell(notebook.cells[3], 3)
    assert 2 <= last < 1000
    said = text_of(notebook.cells[1])
    assert said.endswith("Interrupted after a whole step, which is saved: the same call goes on from there.")
    assert re.findall(r"step (\d+)/1000", text_of(notebook.cells[2])) == [str(last + 1)]
    assert re.match(
        r"ConfigError: reward_funcs: locked cannot be sent to the processes that rewards run in: .*lock[^\n]*$",
        text_of(notebook.cells[3]),
    )
