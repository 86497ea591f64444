"""Preference learning with the loop in sight: pairs of a right and a wrong sum; DPO unless another loss is named.

python examples/addition_preference.py loss=simpo total_train_steps=20
"""

from pathlib import Path

from tandem import PreferenceConfig, PreferenceLearner, load_config, open_training, run_script

HERE = Path(__file__).parent


def main(overrides: list[str]) -> None:
    config = load_config(PreferenceConfig, HERE / "addition_preference.yaml", overrides).config
    with open_training(config) as (run, session):
        learner = PreferenceLearner(session.engine, config.loss, reference=session.reference)

        def evaluate(batch):
            return learner.evaluate_preference(learner.compute_baseline(learner.compute_reference(batch)))

        run.log(0, session.evaluate_if_due(evaluate, 0))
        for step in range(1, run.steps + 1):
            batch = session.batches.next_batch()
            batch = learner.compute_reference(batch)
            batch = learner.compute_baseline(batch)  # KTO's z; the other losses have none
            metrics = learner.train_preference(batch)

            metrics |= session.evaluate_if_due(evaluate, step)
            run.log(step, metrics)
            run.save_if_due(step, session.models)


if __name__ == "__main__":
    run_script(main)
