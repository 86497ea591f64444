"""RLHF with the loop in sight: PPO with a reward model, a critic, and a penalty for leaving the reference.

    python examples/rlhf.py                                    # after the commands of docs/recipes/rlhf_on_a_laptop.md
    python examples/rlhf.py trial_name=near algorithm.kl.coefficient=0.5

The same run as a command: tandem train examples/rlhf_ppo.yaml. Simplified against it: a killed run begins anew.
"""

from pathlib import Path

from tandem import Actor, ConfigError, PhaseTimer, TrainConfig, load_config, open_training, peak_memory_gib, run_script

HERE = Path(__file__).parent
PASSES = ("reference", "values", "proximal", "advantages")


def main(overrides: list[str]) -> None:
    config = load_config(TrainConfig, HERE / "rlhf_ppo.yaml", overrides).config
    if config.algorithm.kl.coefficient == 0:
        raise ConfigError(
            "this loop has a reference, so algorithm.kl.coefficient must be above 0: 0.001 hardly holds anything"
        )
    with open_training(config, passes=PASSES) as (run, session):
        loader, workflow, rollout, verifier = session.loader, session.workflow, session.rollout, session.verifier
        actor, critic, reference = session.actor, session.critic, session.reference
        publisher, timer = session.publisher, PhaseTimer()
        assert isinstance(actor, Actor) and reference is not None and critic is not None, "as PPO with KL has"

        before = run.evaluate_if_due(session, 0)
        run.log(0, before)
        for step in range(1, run.steps + 1):
            with timer("generate"):  # answers, and when the last of them ends, the reward model's score of each
                batch = rollout.prepare_batch(loader, workflow)
            proof = verifier.verify_if_due(batch)  # which weights made these tokens? they are scored again

            with timer("train"):
                batch = reference.compute_logprobs(batch)  # how probable was each token before any training?
                batch = critic.compute_values(batch)  # which score is to be expected, before each token?
                batch = actor.compute_proximal(batch)  # only if something reads it: one optimizer step a batch needs none
                batch = actor.compute_advantages(batch)  # how much better than expected was each token?
                metrics = actor.ppo_update(batch)  # rests while the critic warms up
                metrics |= critic.update(batch)

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
        print(f"on held-out questions: reward {before['eval/reward']:.2f} before, {metrics['eval/reward']:.2f} after")
        first, last = (figures.get("eval/accuracy", float("nan")) for figures in (before, metrics))
        print(f"the true preference, which nothing learnt from: {first:.2f} before, {last:.2f} after")
    print(f"curves: {run.folder.path}/reward.png   model: {run.folder.checkpoints}/step_{run.steps}")


if __name__ == "__main__":
    run_script(main)
