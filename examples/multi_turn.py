"""A workflow of one's own, in one file: ask again, the wrong answer in context, until it is right or the turns are spent.

    python examples/multi_turn.py
    tandem train examples/multi_turn.yaml workflow=examples/multi_turn.py:RetryUntilCorrect

What is trained on is exactly what the engine saw and made: a chat only appends tokens, the reply's as they came, and text is
never tokenised again. Where a chat template rewrites earlier turns (as those do that strip the thinking), the sample goes on
in a new trajectory. The script prints one sample token by token: those in [brackets] are trained on.
"""

from contextlib import ExitStack
from pathlib import Path

from tandem.cli.main import run_script
from tandem.config.arithmetic import total_steps
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.evaluation import evaluate_if_due
from tandem.flow.parts import check_names, open_rows
from tandem.flow.plan import plan_run
from tandem.flow.process import start_process
from tandem.flow.session import open_session
from tandem.lifecycle.summary import open_run, run_id, save_if_due
from tandem.rollout.workflows import ChatWorkflow
from tandem.tracking.statistics import PhaseTimer
from tandem.trainers.start import check_start

HERE = Path(__file__).parent
MAX_TURNS = 3
TURN_DISCOUNT = 0.8


class RetryUntilCorrect(ChatWorkflow):
    """One sample; the reward shrinks with each turn that it took."""

    async def arun_episode(self, engine, data):
        chat = self.start(data)
        for turn in range(MAX_TURNS):
            response = await engine.agenerate(chat.request(self.gconfig))
            chat.add(response)  # trained on: tokens, log-probabilities and weight versions stay aligned
            result = await self.judge(chat, data)
            if result.value > 0 or response.truncated or turn + 1 == MAX_TURNS:
                break
            chat.say("That is not correct. Try again.")  # context only: masked out of the loss
        return chat.sample(result.value * TURN_DISCOUNT**turn, accuracy=result.accuracy, metrics={"turns": turn + 1.0})


def show(sample, tokenizer) -> str:
    """The tokens of a sample's trajectories as text; those that are trained on in brackets."""
    lines = []
    for trajectory in sample.trajectories:
        text, inside = "", False
        for token, trained in zip(trajectory.input_ids.tolist(), trajectory.loss_mask.tolist(), strict=True):
            text += ("[" if trained and not inside else "]" if inside and not trained else "") + tokenizer.decode([token])
            inside = trained
        lines.append(text + ("]" if inside else ""))
    return "\n--- a new trajectory of the same sample ---\n".join(lines)


def main(overrides: list[str]) -> None:
    own = f"workflow={__file__}:RetryUntilCorrect"  # another `workflow=` on the command line comes later, and wins
    config = load_config(TrainConfig, HERE / "multi_turn.yaml", [own, *overrides]).config
    check_names(config)
    rows = open_rows(config)
    check_start(config, rows)  # what cannot work is refused here, before there is a run folder
    if plan_run(config).stage("values") is not None:
        raise ConfigError(f"{config.algorithm.preset} needs a critic, which this script has not; use `tandem train`")
    process = start_process(config)
    steps = total_steps(config, len(rows.train))

    with ExitStack() as stack:
        run, tracker = open_run(config, process, stack, steps=steps)  # None on ranks other than 0
        session = stack.enter_context(open_session(config, process, rows, steps, run_id(run)))
        rollout, actor = session.rollout, session.actor
        timer = PhaseTimer()

        if before := evaluate_if_due(config, session, rows, 0, steps):
            tracker.log(0, before)
        for step in range(1, steps + 1):
            with timer("generate"):
                batch = rollout.prepare_batch(session.loader, session.workflow)  # groups of this file's episodes
            proof = session.verifier.verify_if_due(batch, step)
            with timer("train"):
                if session.reference is not None:
                    batch = session.reference.compute_logprobs(batch)
                batch = actor.compute_proximal(batch)
                batch = actor.compute_advantages(batch)
                metrics = actor.ppo_update(batch)
                if session.reference is not None:
                    session.reference.refresh_if_due(session.trainer, actor.version)
            with timer("update_weights"):
                session.publisher.publish()
            rollout.end_step()

            save_if_due(config, run, step, steps, session.trainer, session.tokenizer.save_pretrained)
            metrics |= proof | rollout.metrics() | timer.metrics() | evaluate_if_due(config, session, rows, step, steps)
            if tracker is not None:
                tracker.log(step, metrics, rollout.last_groups, session.publisher.history)

        if run is not None:
            longest = max((s for g in rollout.last_groups for s in g.samples), key=lambda s: s.metrics.get("turns", 1))
            print(show(longest, session.tokenizer))


if __name__ == "__main__":
    run_script(main)
