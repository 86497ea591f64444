"""Evaluation of GSM8K rows: `tandem eval`'s engine, workflow and reward, beside a vLLM server driven by the official client.

    vllm serve MODEL --dtype bfloat16 --served-model-name model --port 8000 &
    python benchmarks/evaluation.py --model MODEL --gsm8k DATA/gsm8k --vllm-url http://127.0.0.1:8000/v1

Both answer the same questions through the same chat template, greedily, with exactly the same number of tokens each; both
answers are judged by the same reward. The other side is what a user would write: the `openai` package's asynchronous
client, all requests at once. The two take turns in one run, so the ratio does not depend on the machine's mood. Loading the
model and a warm-up on other rows are left out on both sides. Prints a table, and one JSON object as the last line. Needs
`pip install openai` for the comparison.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tandem.api.workflow import RewardFn
from tandem.config.evaluation import EvaluationConfig, load_evaluation
from tandem.evaluation.asking import Ask, AskingTerms, ask
from tandem.evaluation.folder import EvaluationFolder
from tandem.evaluation.questions import make_judges
from tandem.evaluation.run import check_evaluation, conclude, make_engine, plan, settings
from tandem.models.catalog import resolve
from tandem.rollout.event_loop import BackgroundLoop

Row = Mapping[str, Any]

SPARE = 4
"""Rows of the warm-up."""


class Ours:
    """The work of `tandem eval` once the model is loaded: ask, judge, record and conclude."""

    name = "tandem"

    def __init__(self, config: EvaluationConfig):
        checked = check_evaluation(config)
        self.config, self.machine, self.model = config, checked.machine, resolve(config.model)
        self.workflow = checked.workflow
        torch.set_num_threads(self.machine.threads)
        found = checked.questions[0]
        self.spare = found.rows[-SPARE:]
        self.questions = [replace(found, rows=found.rows[:-SPARE], digests=found.digests[:-SPARE])]
        self.checked = replace(checked, questions=self.questions)
        self.judges = make_judges(self.questions, config.reward_timeout_s, checked.rewards)
        self.engine = make_engine(config, self.machine, self.model)
        checked.services.get("engine").start(self.engine)
        self.loop = BackgroundLoop()

    def warm_up(self) -> None:
        """The first requests, on rows that are not measured."""
        asks = [Ask("spare", i, 0, row) for i, row in enumerate(self.spare)]
        ask(self.engine, self.loop, self.workflow, asks, AskingTerms(together=True))

    def run(self) -> tuple[int, int, float]:
        """(prompt tokens, tokens made, accuracy)."""
        before = self.engine.statistics()
        answers = []
        with tempfile.TemporaryDirectory() as scratch:
            found = settings(self.config, self.checked, self.model)
            with EvaluationFolder.open(Path(scratch) / "evaluation", found) as folder:
                waves = plan(self.questions, self.config)
                folder.recorded(waves)
                for wave in waves:
                    some = ask(self.engine, self.loop, self.workflow, wave, AskingTerms(timeout_s=3600.0, together=True))
                    folder.append(some)
                    answers += some
                results, _, _ = conclude(answers, self.questions, self.config)
                folder.finish(results)
        prompts = int(self.engine.statistics()["prefill_tokens"] - before["prefill_tokens"])
        accuracy = results["data"]["gsm8k"]["measures"]["accuracy"]["value"]
        return prompts, sum(answer.tokens for answer in answers), accuracy

    def close(self) -> None:
        """Ends the engine and the reward's workers."""
        self.loop.close()
        self.engine.close()
        self.judges.close()
        self.checked.services.close()


class VLLM:
    """A running vLLM server, asked by the `openai` package's client."""

    name = "vllm"

    def __init__(self, url: str, config: EvaluationConfig, rows: Sequence[Row], spare: Sequence[Row], reward: RewardFn):
        from openai import AsyncOpenAI  # noqa: PLC0415 — optional

        self.client = lambda: AsyncOpenAI(base_url=url, api_key="none", timeout=3600.0, max_retries=0)
        self.config, self.rows, self.spare, self.reward = config, rows, spare, reward

    def warm_up(self) -> None:
        """The first requests, on rows that are not measured."""
        asyncio.run(self._run(self.spare))

    def run(self) -> tuple[int, int, float]:
        """(prompt tokens, tokens made, accuracy)."""
        return asyncio.run(self._run(self.rows))

    async def _run(self, rows: Sequence[Row]) -> tuple[int, int, float]:
        client = self.client()
        model = (await client.models.list()).data[0].id
        found = await asyncio.gather(*(self._one(client, model, row) for row in rows))
        await client.close()
        prompts, tokens, scores = zip(*found, strict=True)
        return sum(prompts), sum(tokens), sum(scores) / len(scores)

    async def _one(self, client: Any, model: str, row: Row) -> tuple[int, int, float]:
        tokens = self.config.gconfig.max_new_tokens
        answer = await client.chat.completions.create(
            model=model,
            messages=row["messages"],
            temperature=0.0,
            max_tokens=tokens,
            extra_body={"ignore_eos": True, "min_tokens": tokens},
        )
        text = answer.choices[0].message.content or ""
        result = await self.reward(prompt="", completion=text, prompt_ids=(), completion_ids=(), row=row)
        return answer.usage.prompt_tokens, answer.usage.completion_tokens, float(result.accuracy or 0.0)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--gsm8k", type=Path, required=True, help="folder with test.jsonl")
    parser.add_argument("--vllm-url", help="…/v1 of a running server of the same model")
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    arguments = parser.parse_args()
    tokens = arguments.new_tokens
    keys = [f"gconfig.max_new_tokens={tokens}", f"gconfig.min_new_tokens={tokens}", f"wave_samples={arguments.rows}"]
    keys += [f"model={arguments.model}", f"data=[{{path: {arguments.gsm8k}, benchmark: gsm8k}}]"]
    keys += [f"max_rows={arguments.rows + SPARE}", f"threads={arguments.threads}", f"dtype={arguments.dtype}"]
    config: EvaluationConfig = load_evaluation(None, keys).config
    ours = Ours(config)
    rows = ours.questions[0].rows
    sides: list[Ours | VLLM] = [ours]
    if arguments.vllm_url:
        sides.append(VLLM(arguments.vllm_url, config, rows, ours.spare, ours.judges))
    times: dict[str, list[float]] = {side.name: [] for side in sides}
    for side in sides:
        side.warm_up()
    for _ in range(arguments.repeats):
        for side in sides:
            began = time.perf_counter()
            prompts, made, accuracy = side.run()
            times[side.name].append(time.perf_counter() - began)
            if made != len(rows) * tokens:
                raise SystemExit(f"{side.name} made {made} tokens instead of {len(rows) * tokens}")
            said = f"{prompts} prompt tokens, {made} made, accuracy {accuracy:.1%}"
            print(f"{side.name:>7}  {times[side.name][-1]:7.1f} s  {said}", flush=True)
    ours.close()
    seconds = {name: statistics.median(values) for name, values in times.items()}
    ratio = seconds["vllm"] / seconds["tandem"] if "vllm" in seconds else None
    if ratio is not None:
        print(f"tandem is {ratio:.2f}x as fast (reach: 1.3x)")
    print(json.dumps({"rows": len(rows), "new_tokens": tokens, "dtype": ours.machine.dtype, **seconds, "ratio": ratio}))


if __name__ == "__main__":
    main()
