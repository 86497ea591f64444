"""A reward model with the loop in sight: it learns to score a right sum higher than a wrong one.

python examples/addition_reward.py total_train_steps=20

The checkpoint is a sequence classifier: AutoModelForSequenceClassification.from_pretrained(FOLDER).
"""

from pathlib import Path

from tandem import RewardModel, RewardModelConfig, load_config, open_training, run_script

HERE = Path(__file__).parent


def main(overrides: list[str]) -> None:
    config = load_config(RewardModelConfig, HERE / "addition_reward.yaml", overrides).config
    with open_training(config) as (run, session):
        model = RewardModel(session.engine)

        run.log(0, session.evaluate_if_due(model.evaluate_pairs, 0))
        for step in range(1, run.steps + 1):
            batch = session.batches.next_batch()
            metrics = model.train_pairs(batch)

            metrics |= session.evaluate_if_due(model.evaluate_pairs, step)
            run.log(step, metrics)
            run.save_if_due(step, session.models)


if __name__ == "__main__":
    run_script(main)
