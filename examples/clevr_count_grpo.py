"""GRPO on counting, from the model that `clevr_count_sft.py` leaves: the same loop as for text, for pictures are named in
the batch and not carried in it. `addition_grpo.py` shows it with proofs and times.

    python examples/clevr_count_grpo.py total_train_steps=10
"""

from pathlib import Path

from tandem import TrainConfig, load_config, open_training, run_script

HERE = Path(__file__).parent


def main(overrides: list[str]) -> None:
    config = load_config(TrainConfig, HERE / "clevr_count_grpo.yaml", overrides).config
    with open_training(config, passes=("proximal", "advantages")) as (run, session):
        rollout, actor, publisher = session.rollout, session.actor, session.publisher

        run.log(0, run.evaluate_if_due(session, 0))
        for step in range(1, run.steps + 1):
            batch = rollout.prepare_batch(session.loader, session.workflow)
            batch = actor.compute_proximal(batch)
            batch = actor.compute_advantages(batch)
            metrics = actor.ppo_update(batch)
            publisher.publish()
            rollout.end_step()

            metrics |= rollout.metrics() | run.evaluate_if_due(session, step)
            run.log(step, metrics, rollout.last_groups, publisher.history, batch, rollout.take_dropped())
            run.save_if_due(step, session.models)


if __name__ == "__main__":
    run_script(main)
