"""Preference learning with the loop in sight: pairs of a right and a wrong sum; DPO unless another loss is named.

python examples/addition_preference.py loss=simpo total_train_steps=20
"""

from contextlib import ExitStack
from pathlib import Path

from tandem.cli.main import run_script
from tandem.config.arithmetic import total_steps
from tandem.config.load import load_config
from tandem.config.preference import PreferenceConfig
from tandem.data.loader import Loader
from tandem.engines.train.build import build_train_engine
from tandem.flow.process import start_process
from tandem.lifecycle.summary import open_run, save_if_due
from tandem.models.catalog import resolve
from tandem.models.tokenizer import load_tokenizer
from tandem.roles.preference import PreferenceLearner
from tandem.trainers.preference import make_encoder, make_reference, reader_of
from tandem.trainers.supervised import BatchMaker, open_examples

HERE = Path(__file__).parent


def main(overrides: list[str]) -> None:
    config = load_config(PreferenceConfig, HERE / "addition_preference.yaml", overrides).config
    rows = open_examples(config, reader_of(config))
    process = start_process(config)
    steps = total_steps(config, len(rows.train))
    tokenizer = load_tokenizer(resolve(config.actor.path))

    with ExitStack() as stack:
        run, tracker = open_run(config, process, stack, steps=steps)  # None on ranks other than 0
        engine = build_train_engine(config.actor, total_steps=steps, device=process.device)
        reference = make_reference(config, process.device, engine)  # None where the loss compares with none
        learner = PreferenceLearner(engine, config.loss, reference=reference)
        loader = Loader(rows.train, seed=config.seed, shuffle=config.train_dataset.shuffle)
        batches = BatchMaker(loader, make_encoder(tokenizer, config), config.batch_size)

        for step in range(1, steps + 1):
            batch = batches.next_batch()
            batch = learner.compute_reference(batch)
            batch = learner.compute_baseline(batch)  # KTO's z; the other losses have none
            metrics = learner.train_preference(batch)
            save_if_due(config, run, step, steps, engine, tokenizer.save_pretrained)
            if tracker is not None:
                tracker.log(step, metrics)


if __name__ == "__main__":
    run_script(main)
