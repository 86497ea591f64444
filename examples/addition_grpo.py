"""GRPO on one-digit addition, the whole loop in one file: a real 135M model learns to add in a few minutes on two CPU cores.

    python examples/addition_grpo.py                                  # what `make train` runs
    python examples/addition_grpo.py trial_name=second actor.optimizer.lr=1e-5

The same run as a command: tandem train examples/addition_grpo.yaml. Simplified against it: one process, no reference model.
"""

from contextlib import ExitStack
from pathlib import Path

from tandem.cli.main import run_script
from tandem.config.arithmetic import evaluation_gconfig, is_evaluation_due, max_token_age, total_steps
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.engines.train.build import build_train_engine
from tandem.evaluation import Evaluation, evaluate
from tandem.flow.delivery import make_proof, make_publisher
from tandem.flow.parts import (
    check_names,
    make_loader,
    make_reward,
    make_rollout,
    make_workflow,
    open_rows,
    training_workflow,
)
from tandem.flow.process import start_process
from tandem.flow.session import make_engine
from tandem.lifecycle.summary import open_run, save_if_due
from tandem.models.catalog import resolve
from tandem.models.tokenizer import load_tokenizer
from tandem.roles.actor import Actor
from tandem.state.run_folder import RunFolder
from tandem.tracking.statistics import PhaseTimer, peak_memory_gib
from tandem.trainers.start import check_start

HERE = Path(__file__).parent


def main(overrides: list[str]) -> None:
    config = load_config(TrainConfig, HERE / "addition_grpo.yaml", overrides).config
    check_names(config)
    rows = open_rows(config)  # `train`, and `valid`: pairs that are never trained on
    check_start(config, rows)  # what cannot work is refused here, before there is a run folder
    process = start_process(config)  # threads, device, seeds
    if process.world_size > 1 or config.algorithm.kl.coefficient > 0:
        raise ConfigError("one process and no reference model here; run: tandem train examples/addition_grpo.yaml")
    steps = total_steps(config, len(rows.train))
    folder = resolve(config.actor.path)
    tokenizer = load_tokenizer(folder)

    with ExitStack() as stack:
        run, tracker = open_run(config, process, stack, steps=steps)

        # One engine generates, one trains, and the publisher brings the weights of one to the other.
        engine = make_engine(config, process, folder, run.id)
        stack.callback(engine.close)
        updates = steps * config.actor.mini_batches * config.actor.epochs_per_batch
        trainer = build_train_engine(config.actor, total_steps=updates, device=process.device)
        archive, verifier = make_proof(config, process, trainer, tokenizer, folder)  # keeps earlier weights for its scores
        publisher = make_publisher(config, process, trainer, engine, folder, run=run.id, archive=archive)
        stack.callback(publisher.close)

        # An episode: several answers to one question, each judged by the reward.
        reward = make_reward(config)
        stack.callback(reward.close)
        workflow = training_workflow(config, tokenizer, reward)
        examiner = make_workflow(config, tokenizer, reward, evaluation_gconfig(config))

        eta = max_token_age(config)
        loader = make_loader(config, rows)
        rollout = make_rollout(config, engine, loader)
        stack.callback(rollout.close)
        longest = config.gconfig.max_new_tokens
        actor = Actor(
            trainer, config.algorithm, config.actor, max_head_offpolicyness=eta, max_new_tokens=longest, seed=config.seed
        )

        def examine() -> Evaluation:  # answers to held-out pairs, greedy ones unless there are several of each
            n = config.evaluate.n_samples
            return rollout.run(evaluate(engine, examiner, rows.valid, seed=config.seed, n_samples=n))

        every, results = config.evaluate.every_steps, []
        if is_evaluation_due(every, 0, steps):
            results.append(examine())
            tracker.log(0, results[-1].metrics())
        timer = PhaseTimer()
        for step in range(1, steps + 1):
            with timer("generate"):
                batch = rollout.prepare_batch(loader, workflow)
            proof = verifier.verify_if_due(batch, step)  # which weights made these tokens? they are scored again
            with timer("train"):
                batch = actor.compute_proximal(batch)
                batch = actor.compute_advantages(batch)
                metrics = actor.ppo_update(batch)
            with timer("update_weights"):
                publisher.publish()
            rollout.end_step()

            metrics |= proof | rollout.metrics() | timer.metrics() | {"memory/peak_gib": peak_memory_gib()}
            if is_evaluation_due(every, step, steps):
                results.append(examine())
                metrics |= results[-1].metrics()
            tracker.log(step, metrics, rollout.last_groups, publisher.history)
            save_if_due(config, run, step, steps, trainer, tokenizer.save_pretrained)

    report(run, steps, results)


def report(run: RunFolder, steps: int, results: list[Evaluation]) -> None:
    if results:
        before, after = results[0], results[-1]
        print(f"accuracy on {before.rows} held-out pairs: {before.accuracy:.2f} before, {after.accuracy:.2f} after")
    print(f"curves: {run.path}/reward.png   model: {run.checkpoints}/step_{steps}")
    print("next, GSM8K: .venv/bin/tandem train examples/gsm8k_grpo.yaml train_dataset.path=openai/gsm8k async_training=true")


if __name__ == "__main__":
    run_script(main)
