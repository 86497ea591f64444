"""A model that sees learns to count the things in a scene from answers; nothing here knows that there are pictures.

python examples/clevr_count_sft.py total_train_steps=20
"""

from pathlib import Path

from tandem import LanguageModel, PhaseTimer, SFTConfig, load_config, open_training, run_script

HERE = Path(__file__).parent


def main(overrides: list[str]) -> None:
    config = load_config(SFTConfig, HERE / "clevr_count_sft.yaml", overrides).config
    with open_training(config) as (run, session):
        model, timer = LanguageModel(session.engine), PhaseTimer()

        run.log(0, session.evaluate_if_due(model.evaluate_lm, 0))
        for step in range(1, run.steps + 1):
            batch = session.batches.next_batch()
            with timer("train"):
                metrics = model.train_lm(batch)

            metrics |= timer.metrics() | session.evaluate_if_due(model.evaluate_lm, step)
            run.log(step, metrics)
            run.save_if_due(step, session.models)


if __name__ == "__main__":
    run_script(main)
