"""A workflow of one's own, in one file: ask again, the wrong answer in context, until it is right or the turns are spent.

    python examples/multi_turn.py
    tandem train examples/multi_turn.yaml workflow=examples/multi_turn.py:RetryUntilCorrect

What is trained on is exactly what the engine saw and made: a chat only appends tokens, the reply's as they came, and text is
never tokenised again. Where a chat template rewrites earlier turns (as those do that strip the thinking), the sample goes on
in a new trajectory. The script prints one sample token by token: those in [brackets] are trained on.
"""

from pathlib import Path

from tandem import ChatWorkflow, PhaseTimer, TrainConfig, load_config, open_training, run_script

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
    with open_training(config, passes=("reference", "proximal", "advantages")) as (run, session):
        rollout, actor, reference, publisher = session.rollout, session.actor, session.reference, session.publisher
        timer = PhaseTimer()

        run.log(0, run.evaluate_if_due(session, 0))
        for step in range(1, run.steps + 1):
            with timer("generate"):
                batch = rollout.prepare_batch(session.loader, session.workflow)  # groups of this file's episodes
            proof = session.verifier.verify_if_due(batch)

            with timer("train"):
                if reference is not None:
                    batch = reference.compute_logprobs(batch)
                batch = actor.compute_proximal(batch)
                batch = actor.compute_advantages(batch)
                metrics = actor.ppo_update(batch)
                if reference is not None:
                    reference.refresh_if_due()

            with timer("update_weights"):
                publisher.publish()
            rollout.end_step()

            metrics |= proof | rollout.metrics() | timer.metrics() | run.evaluate_if_due(session, step)
            run.log(step, metrics, rollout.last_groups, publisher.history, batch, rollout.take_dropped())
            run.save_if_due(step, session.models)

        if run.folder is not None:  # on rank 0
            longest = max((s for g in rollout.last_groups for s in g.samples), key=lambda s: s.metrics.get("turns", 1))
            print(show(longest, session.tokenizer))


if __name__ == "__main__":
    run_script(main)
