"""Supervised fine-tuning on GSM8K: the loss stands on the solution's tokens only.

python examples/gsm8k_sft.py train_dataset.path=PATH total_train_steps=50
"""

from contextlib import ExitStack
from pathlib import Path

from tandem.cli.main import run_script
from tandem.config.arithmetic import is_evaluation_due, total_steps
from tandem.config.experiment import SFTConfig
from tandem.config.load import load_config
from tandem.data.examples import conversations
from tandem.data.loader import Loader
from tandem.engines.train.build import build_train_engine
from tandem.flow.process import start_process
from tandem.lifecycle.summary import open_run, save_if_due
from tandem.models.catalog import resolve
from tandem.models.tokenizer import load_tokenizer
from tandem.roles.language_model import LanguageModel
from tandem.tracking.statistics import PhaseTimer
from tandem.trainers.sft import BatchMaker, Encoder
from tandem.trainers.supervised import open_examples, validation_batches

HERE = Path(__file__).parent


def main(overrides: list[str]) -> None:
    config = load_config(SFTConfig, HERE / "gsm8k_sft.yaml", overrides).config
    process = start_process(config)
    rows = open_examples(config, conversations)
    steps = total_steps(config, len(rows.train))
    tokenizer = load_tokenizer(resolve(config.actor.path))

    with ExitStack() as stack:
        run, tracker = open_run(config, process, stack, steps=steps)  # None on ranks other than 0
        trainer = build_train_engine(config.actor, total_steps=steps, device=process.device)
        model = LanguageModel(trainer)
        loader = Loader(rows.train, seed=config.seed, shuffle=config.train_dataset.shuffle)
        batches = BatchMaker(loader, Encoder(tokenizer, config), config.batch_size)
        valid = validation_batches(batches).all_of(rows.valid) if config.evaluate.every_steps else None
        timer = PhaseTimer()

        def evaluated(step: int) -> dict[str, float]:
            due = is_evaluation_due(config.evaluate.every_steps, step, steps)
            return {f"eval/{name}": value for name, value in model.evaluate_lm(valid).items()} if due else {}

        if (before := evaluated(0)) and tracker is not None:
            tracker.log(0, before)
        for step in range(1, steps + 1):
            batch = batches.next_batch()
            with timer("train"):
                metrics = model.train_lm(batch)
            metrics |= evaluated(step)
            save_if_due(config, run, step, steps, trainer, tokenizer.save_pretrained)
            if tracker is not None:
                tracker.log(step, metrics | timer.metrics())


if __name__ == "__main__":
    run_script(main)
