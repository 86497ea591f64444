"""Measures the viewer on a long run: how long its pages take in a browser, and how much memory its server has.

    python benchmarks/viewer.py /tmp/long            # makes the run if it is not there: 2,000 steps of 512 samples

Texts are random words; the last step has tokens, of which one answer has 4,000. Chromium must be there.
Beside each time stands the CPU time of server and browser together: at most about what a page takes on an idle machine.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch

from tandem.api.shared_files import json_line
from tandem.api.workflow import Group, Sample, Trajectory
from tandem.rollout.executor import collate
from tandem.tracking.records import FROM_LINES, Pick, packed_tensors

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.view.chromium import browser

STEPS, GROUPS, SAMPLES, METRICS, LONG = 2000, 64, 8, 60, 4000
PROMPTS = 4096


def make(run: Path) -> None:
    """The run, as the recorder writes it."""
    words = random.Random(0)
    vocabulary = ["".join(words.choices("abcdefghij", k=words.randint(2, 9))) for _ in range(500)]
    texts = [" ".join(words.choices(vocabulary, k=90)) for _ in range(400)]
    for folder in ("trajectories", "batches"):
        (run / folder).mkdir(parents=True, exist_ok=True)
    (run / "run.json").write_text(json.dumps({"status": "finished", "started": "2030-05-01T09:30:00+0000", "seconds": 9e5}))
    (run / "config.yaml").write_text(f"total_train_steps: {STEPS}\nactor:\n  path: smollm2-135m\n")
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, STEPS + 1):
            row = {
                "step": step,
                "time": 1.9e9 + 450 * step,
                "reward/mean": step / STEPS + words.random() / 5,
                "time/step_s": 450,
            }
            file.write(json.dumps(row | {f"part/{n}": words.random() for n in range(METRICS)}) + "\n")
    nothing = dict.fromkeys(sorted(FROM_LINES))
    for step in range(STEPS, 0, -1):
        if (run / f"trajectories/step_{step}.jsonl").is_file():
            continue
        with (run / f"trajectories/step_{step}.jsonl").open("w") as file:
            for number in range(GROUPS * SAMPLES):
                group = (step * GROUPS + number // SAMPLES) % PROMPTS
                prompt, answer = f"{group}: {texts[group % 400]}", words.choice(texts)
                reward = float(words.random() < step / STEPS)
                told = {
                    "step": step,
                    "group": step * GROUPS + number // SAMPLES,
                    "sample": number % SAMPLES,
                    "prompt": prompt,
                }
                told |= {"sample_id": number, "completion": answer, "reward": reward, "accuracy": reward, "tokens": 90}
                told |= {"advantage": reward - 0.5, "stop_reason": ["stop" if number % 9 else "length"], "source": "words"}
                told |= {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}
                file.write(json_line(nothing | told) + "\n")
    picks = [Pick(Group([sample(LONG if n == 0 else 300)], group_id=n), 0, n) for n in range(GROUPS * SAMPLES)]
    batch = dict(collate([pick.group for pick in picks], version=0, max_head_offpolicyness=0).items())
    batch |= {
        name: torch.randn(len(batch["input_ids"])) for name in ("advantages", "proximal_logprobs", "reference_logprobs")
    }
    (run / f"batches/step_{STEPS}.safetensors.gz").write_bytes(packed_tensors(batch, picks))


def sample(size: int) -> Sample:
    tokens, mask = torch.randint(100, 49000, (size + 100,)), torch.arange(size + 100) >= 100
    return Sample((Trajectory(tokens, mask, torch.randn(size + 100), torch.where(mask, 3, -1)),), reward=1.0)


async def timed(page, what: str, url: str, drawn: str) -> None:
    await page.call("Page.navigate", url="about:blank")
    began, busy = time.perf_counter(), cpu_s()
    await page.call("Page.navigate", url=url)
    await page.until(f"document.documentElement?.dataset.ready && ({drawn})")
    print(f"{what:<48}{time.perf_counter() - began:7.2f} s {cpu_s() - busy:7.2f} s CPU", flush=True)


def cpu_s() -> float:
    """CPU seconds of the server and of all processes of the browser so far."""
    times = (process.cpu_times() for process in psutil.Process().children(recursive=True))
    return sum(one.user + one.system for one in times)


async def measure(run: Path, port: int, server: psutil.Process) -> None:
    base, name = f"http://127.0.0.1:{port}/", f"{run.parent.name}/{run.name}"
    search = f"{base}#samples?run={name}&step=all&filter="
    async with browser() as page:
        await timed(page, "the browser's first page at all", base, "document.querySelector('tbody tr')")
        for _ in range(2):
            await timed(page, "list of runs", base, "document.querySelector('tbody tr')")
            await timed(page, "curves", f"{base}#curves?run={name}", "document.querySelectorAll('.panel canvas').length > 2")
            await timed(
                page, "groups of the last step", f"{base}#samples?run={name}", "document.querySelector('.groups tr.open')"
            )
            at = f"{base}#tokens?run={name}&step={STEPS}&group={GROUPS * STEPS}&line=0"
            await timed(
                page, f"an answer of {LONG} tokens", at, f"document.querySelectorAll('.token.trained').length === {LONG}"
            )
            memory = server.memory_info().rss / 2**20
            print(f"{'memory of the server':<48}{memory:7.0f} MiB")
        began = time.perf_counter()
        whole = "!document.querySelector('main').textContent.includes('still being read')"
        await page.call("Page.navigate", url=f"{base}#prompts?run={name}")
        async with asyncio.timeout(500):
            while not await page.value(f"document.querySelector('.heat') && {whole}"):
                await asyncio.sleep(0.2)
        print(f"{'the index of all samples is made, beside':<48}{time.perf_counter() - began:7.2f} s")
        await timed(page, "prompts over time", f"{base}#prompts?run={name}", "document.querySelector('.heat')")
        await timed(
            page, "filter over all steps", f"{search}truncated%20reward%3E0", "document.querySelector('.samples td')"
        )
        await timed(page, "words in all steps", f"{search}%22abcabc%22", whole)
    print(f"{'memory of the server, at most':<48}{int(peak(server)) / 2**10:7.0f} MiB")


def peak(server: psutil.Process) -> str:
    status = Path(f"/proc/{server.pid}/status").read_text()
    return status.partition("VmHWM:")[2].split()[0]


def main() -> None:
    run = Path(sys.argv[1]) / "words" / "long"
    if not (run / f"batches/step_{STEPS}.safetensors.gz").is_file():
        make(run)
    address = run.parent.parent / "address"
    cache = run.parent.parent / "cache"
    words = [sys.executable, "-m", "tandem", "view", str(run), "--port", "0", "--address-file", str(address)]
    server = subprocess.Popen(words, env=os.environ | {"TANDEM_CACHE": str(cache)})
    try:
        while not address.is_file():
            time.sleep(0.1)
        port = int(json.loads(address.read_text())["url"].rpartition(":")[2])
        asyncio.run(measure(run, port, psutil.Process(server.pid)))
    finally:
        server.terminate()
        server.wait(20)


if __name__ == "__main__":
    main()
