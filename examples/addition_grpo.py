"""GRPO on one-digit addition, the whole loop in one file: a real 135M model learns to add in a few minutes on two CPU cores.

    python examples/addition_grpo.py                                  # what `make train` runs
    python examples/addition_grpo.py trial_name=second actor.optimizer.lr=1e-5

The same run as a command: tandem train examples/addition_grpo.yaml. Simplified against it: no reference model, no mixture
of data sets, one process.
"""

import sys
from contextlib import ExitStack
from pathlib import Path

from tandem.config.arithmetic import max_head_offpolicyness, placement
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config, to_yaml
from tandem.data.dataset import load_dataset
from tandem.data.loader import Loader
from tandem.engines.inference.build import build_inference_engine
from tandem.engines.train.build import build_train_engine
from tandem.models.catalog import resolve
from tandem.models.precision import resolve_dtype
from tandem.models.tokenizer import load_tokenizer
from tandem.rewards.build import build_reward
from tandem.roles.actor import Actor
from tandem.rollout.executor import Rollout
from tandem.rollout.workflows import Repeated, RLVRWorkflow
from tandem.state.checkpoint import save_checkpoint
from tandem.state.run_folder import RunFolder
from tandem.tracking.statistics import PhaseTimer, peak_memory_gib
from tandem.tracking.tracker import Tracker
from tandem.trainers.evaluation import evaluate, greedy
from tandem.trainers.process import start_process
from tandem.weights.publisher import WeightPublisher

HERE = Path(__file__).parent


def main(overrides: list[str]) -> None:
    config = load_config(TrainConfig, HERE / "addition_grpo.yaml", overrides).config
    process = start_process(config)  # threads, device, seeds
    name = f"{config.experiment_name}/{config.trial_name}"

    folder = resolve(config.actor.path)
    tokenizer = load_tokenizer(folder)
    loader = Loader(load_dataset(config.train_dataset, seed=config.seed, default_split="train"), seed=config.seed)
    held_out = list(load_dataset(config.valid_dataset, seed=config.seed, default_split="test"))
    reward = build_reward(config.reward, timeout_s=config.reward_timeout_s)

    with ExitStack() as stack:
        run = stack.enter_context(
            RunFolder.open(
                config.run.root, config.experiment_name, config.trial_name, config_text=to_yaml(config), seed=config.seed
            )
        )
        stack.callback(reward.close)
        # One engine generates, one trains, and the publisher brings the weights of one to the other.
        engine = build_inference_engine(
            config.rollout,
            folder=folder,
            placement=placement(config),
            threads=process.threads,
            device=process.device,
            deterministic=config.deterministic,
        )
        stack.callback(engine.close)
        trainer = build_train_engine(config.actor, total_steps=config.total_train_steps, device=process.device)
        actor = Actor(
            trainer, config.algorithm, config.actor, max_head_offpolicyness=max_head_offpolicyness(config), seed=config.seed
        )
        publisher = WeightPublisher(trainer, engine, run=name, dtype=resolve_dtype(config.rollout.dtype, process.device))
        stack.callback(publisher.close)

        # An episode: eight answers to one question, each judged by the reward.
        workflow = Repeated(RLVRWorkflow(reward, config.gconfig, tokenizer), config.gconfig.n_samples)
        examiner = RLVRWorkflow(reward, greedy(config), tokenizer)
        rollout = stack.enter_context(
            Rollout(
                engine,
                config.rollout,
                seed=config.seed,
                deterministic=config.deterministic,
                max_head_offpolicyness=max_head_offpolicyness(config),
            )
        )
        tracker = stack.enter_context(
            Tracker(run.path, config.tracking, total_steps=config.total_train_steps, run_name=name)
        )

        before = rollout.run(evaluate(engine, examiner, held_out))
        timer = PhaseTimer()
        for step in range(1, config.total_train_steps + 1):
            with timer("generate"):
                batch = rollout.prepare_batch(loader, workflow)
            with timer("train"):
                batch = actor.compute_proximal(batch)
                batch = actor.compute_advantages(batch)
                metrics = actor.ppo_update(batch)
            with timer("update_weights"):
                publisher.publish()
            rollout.end_step()
            metrics |= rollout.metrics() | timer.metrics() | {"memory/peak_gib": peak_memory_gib()}
            tracker.log(step, metrics, rollout.last_groups, publisher.history)
        after = rollout.run(evaluate(engine, examiner, held_out))

        checkpoint = save_checkpoint(run, config.total_train_steps, trainer.save, tokenizer.save_pretrained, keep_last=None)
        print(f"greedy accuracy on {before.rows} held-out pairs: {before.accuracy:.2f} before, {after.accuracy:.2f} after")
        print(f"curves: {run.path}/reward.png   model: {checkpoint}")


if __name__ == "__main__":
    main(sys.argv[1:])
