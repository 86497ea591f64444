"""GRPO on GSM8K, synchronous or asynchronous: the same lines.

    python examples/gsm8k_grpo.py train_dataset.path=PATH
    python examples/gsm8k_grpo.py train_dataset.path=PATH async_training=true trial_name=asynchronous
    torchrun --nproc-per-node 2 examples/gsm8k_grpo.py train_dataset.path=PATH actor.backend=fsdp:d2

addition_grpo.py makes every object itself; here `open_session` makes them, and the loop is what is left. Every rank runs
the same lines: `prepare_batch` gives all of them the global batch, and only rank 0 generates and writes.
"""

from contextlib import ExitStack
from pathlib import Path

from tandem.cli.main import run_script
from tandem.config.arithmetic import total_steps
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.evaluation import evaluate_if_due
from tandem.flow.parts import check_names, open_rows
from tandem.flow.plan import plan_run
from tandem.flow.process import start_process
from tandem.flow.session import open_session
from tandem.lifecycle.summary import open_run, run_id, save_if_due
from tandem.tracking.statistics import PhaseTimer
from tandem.trainers.start import check_start

HERE = Path(__file__).parent


def main(overrides: list[str]) -> None:
    config = load_config(TrainConfig, HERE / "gsm8k_grpo.yaml", overrides).config
    check_names(config)
    rows = open_rows(config)
    check_start(config, rows)  # what cannot work is refused here, before there is a run folder
    if plan_run(config).stage("values") is not None:
        raise ConfigError(f"{config.algorithm.preset} needs a critic, which this script has not; use `tandem train`")
    process = start_process(config)
    steps = total_steps(config, len(rows.train))

    with ExitStack() as stack:
        run, tracker = open_run(config, process, stack, steps=steps)  # None on ranks other than 0
        session = stack.enter_context(open_session(config, process, rows, steps, run_id(run)))
        rollout, actor, publisher = session.rollout, session.actor, session.publisher
        timer = PhaseTimer()

        if before := evaluate_if_due(config, session, rows, 0, steps):
            tracker.log(0, before)
        for step in range(1, steps + 1):
            with timer("generate"):
                batch = rollout.prepare_batch(session.loader, session.workflow)
            proof = session.verifier.verify_if_due(batch, step)  # which weights made these tokens? they are scored again
            with timer("train"), session.meter:
                if session.reference is not None:
                    batch = session.reference.compute_logprobs(batch)
                batch = actor.compute_proximal(batch)
                batch = actor.compute_advantages(batch)
                metrics = actor.ppo_update(batch)
                if session.reference is not None:
                    session.reference.refresh_if_due(session.trainer, actor.version)
            with timer("update_weights"):
                publisher.publish()
            rollout.end_step()

            save_if_due(config, run, step, steps, session.trainer, session.tokenizer.save_pretrained)
            metrics |= proof | rollout.metrics() | session.meter.metrics() | timer.metrics()
            metrics |= evaluate_if_due(config, session, rows, step, steps)
            if tracker is not None:
                tracker.log(step, metrics, rollout.last_groups, publisher.history)

    if run is not None:
        print(f"curves: {run.path}/reward.png   model: {run.checkpoints}")


if __name__ == "__main__":
    run_script(main)
