"""GRPO on GSM8K, synchronous or asynchronous: the same lines.

    python examples/gsm8k_grpo.py train_dataset.path=PATH
    python examples/gsm8k_grpo.py train_dataset.path=PATH async_training=true trial_name=asynchronous
    torchrun --nproc-per-node 2 examples/gsm8k_grpo.py train_dataset.path=PATH actor.backend=fsdp:d2

Against addition_grpo.py it has a reference model, where `algorithm.kl` asks for one, and measures how far generation and
training overlap. Every rank runs the same lines: `prepare_batch` gives all of them the global batch, and only rank 0
generates and writes.
"""

from pathlib import Path

from tandem import PhaseTimer, TrainConfig, load_config, open_training, run_script

HERE = Path(__file__).parent


def main(overrides: list[str]) -> None:
    config = load_config(TrainConfig, HERE / "gsm8k_grpo.yaml", overrides).config
    with open_training(config, passes=("reference", "proximal", "advantages")) as (run, session):
        rollout, actor, reference, publisher = session.rollout, session.actor, session.reference, session.publisher
        timer = PhaseTimer()

        run.log(0, run.evaluate_if_due(session, 0))
        for step in range(1, run.steps + 1):
            with timer("generate"):
                batch = rollout.prepare_batch(session.loader, session.workflow)
            proof = session.verifier.verify_if_due(batch)  # which weights made these tokens? they are scored again

            with timer("train"), session.meter:
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

            metrics |= proof | rollout.metrics() | session.meter.metrics() | timer.metrics()
            metrics |= run.evaluate_if_due(session, step)
            run.log(step, metrics, rollout.last_groups, publisher.history, batch, rollout.take_dropped())
            run.save_if_due(step, session.models)

    if run.folder is not None:
        print(f"curves: {run.folder.path}/reward.png   model: {run.folder.checkpoints}")


if __name__ == "__main__":
    run_script(main)
