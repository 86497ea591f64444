"""GRPO on one-digit addition, the whole loop in one file: a real 135M model learns to add in a few minutes on two CPU cores.

    python examples/addition_grpo.py                                  # what `make train` runs
    python examples/addition_grpo.py trial_name=second actor.optimizer.lr=1e-5

The same run as a command: tandem train examples/addition_grpo.yaml. Simplified against it: no reference model, no critic.
"""

from pathlib import Path

from tandem import PhaseTimer, TrainConfig, load_config, open_training, peak_memory_gib, run_script

HERE = Path(__file__).parent


def main(overrides: list[str]) -> None:
    config = load_config(TrainConfig, HERE / "addition_grpo.yaml", overrides).config
    with open_training(config, passes=("proximal", "advantages")) as (run, session):
        loader, workflow, rollout, verifier = session.loader, session.workflow, session.rollout, session.verifier
        actor, publisher, timer = session.actor, session.publisher, PhaseTimer()

        before = run.evaluate_if_due(session, 0)  # greedy answers to held-out pairs
        run.log(0, before)
        for step in range(1, run.steps + 1):
            with timer("generate"):  # several answers to each question, every one judged by the reward
                batch = rollout.prepare_batch(loader, workflow)
            proof = verifier.verify_if_due(batch)  # which weights made these tokens? they are scored again

            with timer("train"):
                batch = actor.compute_proximal(batch)
                batch = actor.compute_advantages(batch)
                metrics = actor.ppo_update(batch)

            with timer("update_weights"):  # verified, then the engine's next version
                publisher.publish()
            rollout.end_step()

            metrics |= proof | rollout.metrics() | timer.metrics() | {"memory/peak_gib": peak_memory_gib()}
            metrics |= run.evaluate_if_due(session, step)
            run.log(step, metrics, rollout.last_groups, publisher.history, batch, rollout.take_dropped())
            run.save_if_due(step, session.models)

    if run.folder is None:  # rank 0 speaks for all
        return
    if before:
        first, last = (figures.get("eval/accuracy", float("nan")) for figures in (before, metrics))
        print(f"accuracy on {len(run.rows.valid)} held-out pairs: {first:.2f} before, {last:.2f} after")
    print(f"curves: {run.folder.path}/reward.png   model: {run.folder.checkpoints}/step_{run.steps}")
    print("next, GSM8K: .venv/bin/tandem train examples/gsm8k_grpo.yaml train_dataset.path=openai/gsm8k async_training=true")


if __name__ == "__main__":
    run_script(main)
