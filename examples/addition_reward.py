"""A reward model with the loop in sight: it learns to score a right sum higher than a wrong one.

python examples/addition_reward.py total_train_steps=20

The checkpoint is a sequence classifier: AutoModelForSequenceClassification.from_pretrained(FOLDER).
"""

from contextlib import ExitStack
from pathlib import Path

from tandem.cli.main import run_script
from tandem.config.arithmetic import total_steps
from tandem.config.load import load_config
from tandem.config.preference import RewardModelConfig
from tandem.data.examples import pairs
from tandem.data.loader import Loader
from tandem.engines.train.build import build_train_engine
from tandem.flow.process import start_process
from tandem.lifecycle.summary import open_run, save_if_due
from tandem.models.catalog import resolve
from tandem.models.tokenizer import load_tokenizer
from tandem.roles.reward_model import RewardModel
from tandem.trainers.reward import ScoredPairEncoder
from tandem.trainers.supervised import BatchMaker, open_examples

HERE = Path(__file__).parent


def main(overrides: list[str]) -> None:
    config = load_config(RewardModelConfig, HERE / "addition_reward.yaml", overrides).config
    rows = open_examples(config, pairs)
    process = start_process(config)
    steps = total_steps(config, len(rows.train))
    tokenizer = load_tokenizer(resolve(config.actor.path))

    with ExitStack() as stack:
        run, tracker = open_run(config, process, stack, steps=steps)  # None on ranks other than 0
        engine = build_train_engine(config.actor, total_steps=steps, device=process.device, head="scalar")
        model = RewardModel(engine)
        loader = Loader(rows.train, seed=config.seed, shuffle=config.train_dataset.shuffle)
        batches = BatchMaker(loader, ScoredPairEncoder(tokenizer, config), config.batch_size)

        for step in range(1, steps + 1):
            batch = batches.next_batch()
            metrics = model.train_pairs(batch)
            save_if_due(config, run, step, steps, engine, tokenizer.save_pretrained)
            if tracker is not None:
                tracker.log(step, metrics)


if __name__ == "__main__":
    run_script(main)
