"""A run's objects, made in order and closed in reverse, whatever happens."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from tandem.api.collective import together
from tandem.api.engines import InferenceEngine, TrainEngine
from tandem.api.workflow import RolloutWorkflow
from tandem.config.arithmetic import evaluation_gconfig, max_token_age, placement
from tandem.config.experiment import TrainConfig
from tandem.data.curriculum import Curriculum
from tandem.data.loader import Loader
from tandem.engines.inference.build import build_inference_engine
from tandem.engines.inference.remote.kept import Keeping
from tandem.flow.critic import Models
from tandem.flow.delivery import make_proof, make_publisher, weights_folder
from tandem.flow.meter import EngineMeter
from tandem.flow.parts import (
    RewardBySource,
    Rows,
    make_loader,
    make_reward,
    make_rollout,
    make_workflow,
    training_workflow,
)
from tandem.flow.plan import RunPlan, Stage, plan_run
from tandem.flow.process import Process
from tandem.flow.residents import open_critic, open_model, open_reference
from tandem.launch.rank import kept_servers
from tandem.models.catalog import resolve
from tandem.models.tokenizer import check_chat_template, load_tokenizer
from tandem.proof.verification import Verifier
from tandem.roles.actor import Actor
from tandem.roles.critic import Critic, SharedCritic
from tandem.roles.reference import Reference
from tandem.roles.teacher import Student, Teacher
from tandem.rollout.executor import Rollout
from tandem.state.run_folder import run_path
from tandem.weights.publisher import WeightPublisher


@dataclass(frozen=True)
class Session:
    """Everything that the loop uses. On ranks other than 0 ``engine`` is None: one rank generates for all."""

    tokenizer: PreTrainedTokenizerBase
    loader: Loader | Curriculum
    actor: Actor | Student
    trainer: TrainEngine
    plan: RunPlan
    reference: Reference | None
    teacher: Teacher | None
    critic: Critic | SharedCritic | None
    engine: InferenceEngine | None
    rollout: Rollout
    reward: RewardBySource
    workflow: RolloutWorkflow
    examiner: RolloutWorkflow
    publisher: WeightPublisher
    verifier: Verifier
    meter: EngineMeter

    def add_fields(self, stage: Stage, batch: TensorDict) -> TensorDict:
        """Runs a pass of the plan: the batch with the fields that it adds."""
        found: TensorDict = getattr(getattr(self, stage.role), stage.call)(batch)
        return found

    @property
    def models(self) -> Models:
        """What is saved."""
        return Models(self.trainer, self.critic, self.tokenizer)


@contextlib.contextmanager
def open_session(
    config: TrainConfig, process: Process, rows: Rows, steps: int, run: str, plan: RunPlan | None = None
) -> Iterator[Session]:
    """Makes the objects of a run. On leaving, engine, workers and shared memory are gone, also after an error.

    ``run``: names it to servers that several runs may reach, so no other run may have it; the same on all ranks. ``plan``:
    says which models there are; None takes that of ``config``.
    """
    plan = plan or plan_run(config)
    policy = plan.resident("actor")
    assert policy is not None, "every plan has an actor"
    folder = resolve(config.actor.path)
    tokenizer = load_tokenizer(folder)
    check_chat_template(tokenizer)
    with contextlib.ExitStack() as stack:
        with together():
            engine = make_engine(config, process, folder, run)
            if engine is not None:
                stack.callback(engine.close)
        optimizer_steps = (steps - config.critic.warmup_steps) * config.actor.mini_batches * config.actor.epochs_per_batch
        trainer = open_model(policy, process.device, optimizer_steps=optimizer_steps)
        reference = open_reference(plan, process.device, trainer)
        critic = open_critic(plan, config, process.device, trainer, steps, tokenizer)
        actor = Actor(
            trainer,
            config.algorithm,
            config.actor,
            reference=reference,
            shared_critic=critic if isinstance(critic, SharedCritic) else None,
            max_head_offpolicyness=max_token_age(config),
            max_new_tokens=config.gconfig.max_new_tokens,
            seed=config.seed,
        )
        judge = plan.resident("teacher")
        teacher = None if judge is None else Teacher(open_model(judge, process.device))
        archive, verifier = make_proof(config, process, trainer, tokenizer, folder)
        publisher = make_publisher(config, process, trainer, engine, folder, run=run, archive=archive)
        stack.callback(publisher.close)
        with together():
            reward = make_reward(config)
            stack.callback(reward.close)
            loader = make_loader(config, rows)
            rollout = make_rollout(config, engine, loader)
            stack.callback(rollout.close)
        yield Session(
            tokenizer=tokenizer,
            loader=loader,
            actor=actor if teacher is None else Student(actor),
            trainer=trainer,
            plan=plan,
            reference=reference,
            teacher=teacher,
            critic=critic,
            engine=engine,
            rollout=rollout,
            reward=reward,
            workflow=training_workflow(config, tokenizer, reward),
            examiner=make_workflow(config, tokenizer, reward, evaluation_gconfig(config)),
            publisher=publisher,
            verifier=verifier,
            meter=EngineMeter(engine),
        )


def make_engine(config: TrainConfig, process: Process, folder: Path, run: str) -> InferenceEngine | None:
    """The inference engine, on rank 0."""
    if not process.is_main:
        return None
    kept = kept_servers()
    return build_inference_engine(
        config.rollout,
        folder=folder,
        placement=placement(config),
        threads=process.generation_threads(placement(config)),
        device=process.device,
        deterministic=config.deterministic,
        run_folder=run_path(config.run.root, config.experiment_name, config.trial_name),
        run=run,
        weights_folder=weights_folder(config),
        gconfig=config.gconfig,
        keeping=None if kept is None else Keeping(*kept),
    )
