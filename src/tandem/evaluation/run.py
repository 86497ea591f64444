"""`tandem eval`: evaluates a model on data sets, wave by wave. An interrupted evaluation continues from its folder.

Consumes rows; produces `samples.jsonl` and `results.json`. A wave waits for its slowest sample; nothing else waits.
"""

import contextlib
import hashlib
import itertools
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tandem.api.engines import InferenceEngine
from tandem.api.plugins import is_file_spec
from tandem.api.services import Services
from tandem.api.workflow import RolloutWorkflow
from tandem.config.arithmetic import partner_of, workflow_of
from tandem.config.devices import usable_cores
from tandem.config.evaluation import EvaluationConfig
from tandem.config.experiment import TrainConfig
from tandem.config.load import plain_data
from tandem.config.rollout import CACHE_GIB, RolloutConfig
from tandem.config.services import NAMED, SERVICES
from tandem.config.terms import read_term
from tandem.config.train_engine import ActorConfig
from tandem.engines.inference.build import build_inference_engine
from tandem.engines.inference.check import check_inference_engine, context_of, warn_of_cut
from tandem.evaluation.asking import Answer, Ask, AskingTerms, KeptSamples, ask, open_scorer, paths_of
from tandem.evaluation.folder import RESULTS, SETTINGS, EvaluationFolder, read_settings
from tandem.evaluation.questions import Questions, make_judges, open_questions, specs_of
from tandem.evaluation.scores import (
    DataScores,
    Estimate,
    ProgressLine,
    judged_by,
    mean_interval,
    notes,
    score_data,
    table,
)
from tandem.flow.plan import RunPlan, plan_scores
from tandem.flow.process import KERNELS, kernels_here
from tandem.flow.residents import check_models, check_scores
from tandem.flow.scoring import EpisodeScores
from tandem.flow.services import asked_columns_of, asks_for_reward, check_names, make_workflow, open_services, refuse_unused
from tandem.flow.writing import WritingModel
from tandem.models.catalog import describing, fingerprint, resolve
from tandem.models.hardware import resolve_dtype, uses_gpu
from tandem.models.tokenizer import check_template_options, check_vocabulary, load_tokenizer
from tandem.rewards.reward import Reward
from tandem.rollout.event_loop import BackgroundLoop
from tandem.state.machine import memory_available_gib, versions


def file_digests(specs: Iterable[str]) -> dict[str, str]:
    """Returns the digest of each user's file that a spec such as `my_file.py:name` names."""
    files = sorted({Path(spec.rpartition(":")[0]) for spec in specs if is_file_spec(spec)})
    return {str(file): hashlib.sha256(file.expanduser().read_bytes()).hexdigest()[:16] for file in files if file.exists()}


log = logging.getLogger(__name__)

SHARED = ("reward_timeout_s", "workflow", "workflow_args", "system_prompt", "chat_template_kwargs", "gconfig", *NAMED)
"""Keys that have the same meaning in an evaluation and in a run."""

CACHE_SHARE = 1 / 3
"""Share of the free memory for the keys and values of all engines together, on a CPU."""


@dataclass(frozen=True)
class EvaluationMachine:
    """Properties of the machine that influence the last bits of the results."""

    device: str
    threads: int
    dtype: str
    kv_cache_gib: float | None
    """Memory for the keys and values of each engine; None: as much as the GPU's memory allows."""


@dataclass(frozen=True)
class EvaluationResult:
    """The results of a finished evaluation."""

    folder: Path
    results: Mapping[str, Any]
    text: str
    judged: int
    """Number of samples that did not fail."""

    answers: Sequence[Answer] = ()


def evaluation_path(config: EvaluationConfig) -> Path:
    return Path(config.out).expanduser() / str(config.label)


@dataclass(frozen=True)
class Checked:
    """The parts of an evaluation that `check_evaluation` has checked."""

    machine: EvaluationMachine
    questions: Sequence[Questions]
    services: Services
    workflow: RolloutWorkflow
    judges: Reward
    tokenizer: PreTrainedTokenizerBase
    asked: TrainConfig
    """The evaluation's model, workflow and rewards in the form of a run's configuration, for code shared with training."""

    rewards: RunPlan
    """The plan of the rewards that need a model."""

    models: EpisodeScores
    """The rewards that need a model and that the workflow awaits within an episode."""

    partner: str | None = None
    """Path of the model that the workflow talks to."""


def check_evaluation(config: EvaluationConfig, questions: Sequence[Questions] | None = None) -> Checked:
    """Checks that an evaluation can start on this machine, without downloading weights from the hub. The caller must close
    the services of the result. ``questions``: None loads those of ``config.data``.

    Raises:
        ConfigError: the device, data, model, reward or workflow cannot be used.
    """
    train_config = TrainConfig(
        reward=config.reward or TrainConfig.reward,
        actor=ActorConfig(path=config.model, dtype=config.dtype),
        device=config.device,
        rollout=RolloutConfig(episode_timeout_s=config.episode_timeout_s, engine=config.engine),
        **{name: getattr(config, name) for name in SHARED},
    )
    questions = questions or open_questions(config)
    rewards = plan_scores(train_config, specs_of(questions))
    check_names(train_config, rewards)
    partner = partner_of(train_config)
    machine = settle_machine(config, engines=1 if partner is None else 2)
    folder = describing(config.model)
    tokenizer = load_tokenizer(folder, chats=True)
    rows = [row for data in questions for row in data.rows]
    check_vocabulary(tokenizer, folder, rows)
    check_inference_engine(rollout_of(config, machine), folder, machine.device)
    warn_of_cut(config.gconfig.max_new_tokens, context_of(config.engine, folder))
    asked_rows = rows if workflow_of(train_config).name in SERVICES["workflow"] else []
    check_template_options(tokenizer, asked_rows, config.system_prompt, config.chat_template_kwargs)
    if partner is not None:
        load_tokenizer(describing(partner), chats=True)
        check_inference_engine(rollout_of(config, machine), describing(partner), machine.device)
    if rewards.scores:
        check_scores(train_config, rewards, tokenizer)
        check_models(rewards, machine.device, tokenizer, rows)
    services, asks = open_services(train_config, tokenizer), asks_for_reward(train_config)
    try:
        models = services.keep(EpisodeScores(rewards))
        services.add(models.rewards)
        new_judges = make_judges(questions, config.reward_timeout_s, rewards, services, asked=asks, awaited=models.rewards)
        judges = services.keep(new_judges)
        workflow = make_workflow(train_config, services, judges, config.gconfig)
        refuse_unused(train_config, services)
        for question in questions:
            print(
                question.name, question.reading.describe(asked_columns_of(train_config, judges)), file=sys.stderr, flush=True
            )
        return Checked(machine, questions, services, workflow, judges, tokenizer, train_config, rewards, models, partner)
    except BaseException:
        services.close()
        raise


def try_evaluation(config: EvaluationConfig) -> None:
    """Checks that `evaluate_model` could start or continue; writes nothing.

    Raises:
        ConfigError: as for `evaluate_model`.
    """
    checked = check_evaluation(config)
    checked.services.close()
    path = evaluation_path(config)
    if path.exists():
        model = resolve(config.model)  # the whole model is needed to compare its fingerprint with that in the folder
        EvaluationFolder.check(path, settings(config, checked, model))
    else:
        EvaluationFolder.check(path, None)


def evaluate_model(config: EvaluationConfig, questions: Sequence[Questions] | None = None) -> EvaluationResult:
    """Runs or continues an evaluation of ``questions``; None: of those of ``config.data``.

    Raises:
        ConfigError: the configuration, data, model or folder cannot be used; raised before the model is loaded.
        EngineDied: the engine has died; recorded samples stay.
    """
    checked = check_evaluation(config, questions)
    machine, questions, workflow = checked.machine, checked.questions, checked.workflow
    waves = plan(questions, config)
    total = sum(map(len, waves))
    with contextlib.ExitStack() as stack:
        stack.callback(checked.services.close)
        model = resolve(config.model)
        torch.set_num_threads(machine.threads)
        recorded_settings = settings(config, checked, model)
        folder = stack.enter_context(EvaluationFolder.open(evaluation_path(config), recorded_settings))
        answers = folder.recorded(waves)
        progress = ProgressLine(total, len(answers), success=config.success)
        if len(answers) < total:
            warn_of_comparisons(workflow, checked.judges)
            tell_of_cache(config, machine)
            engine = make_engine(config, machine, model)
            checked.services.get("engine").start(engine)
            stack.callback(engine.close)
            if checked.partner is not None:
                partner = make_partner(config, machine, resolve(checked.partner))
                stack.callback(partner.close)
                checked.services.get("partner").start(partner.engine, partner.tokenizer)
            scorer = None
            if checked.rewards.scores:
                scorer = open_scorer(
                    checked.asked, checked.rewards, checked.judges, checked.tokenizer, machine.device, machine.threads
                )
                stack.callback(scorer.close)
                checked.models.start(scorer.roles, machine.device)
            with contextlib.closing(
                BackgroundLoop()
            ) as loop:  # closing takes a bounded time, whatever a user's coroutine does
                for wave in left(waves, len(answers)):
                    sample_store = KeptSamples()
                    terms = AskingTerms(
                        config.seed,
                        config.episode_timeout_s,
                        config.max_retries,
                        workflow.at_once,
                        together=config.deterministic,
                        ends_early=True,
                        on_samples=None if scorer is None else sample_store.keep,
                    )
                    wave_answers = ask(engine, loop, workflow, wave, terms, on_answer=progress.answered)
                    wave_answers = wave_answers if scorer is None else sample_store.scored(scorer, wave_answers)
                    folder.append(wave_answers)
                    answers += wave_answers
        results, scores, average = conclude(answers, questions, config)
        folder.finish(results)
        lines = [table(scores, average), *notes(scores, answers), f"Results and samples: {folder.path}"]
        if progress.made:
            kernels = recorded_settings["machine"]["kernels"]
            lines.append(progress.summary() + (f", with {KERNELS[kernels]}" if kernels else ""))
        judged = sum(answer.failed is None for answer in answers)
        return EvaluationResult(folder.path, results, "\n".join(lines), judged, answers)


def left(waves: Sequence[Sequence[Ask]], recorded: int) -> Iterator[Sequence[Ask]]:
    """Yields the waves that are not recorded yet. ``recorded``: number of recorded samples."""
    for wave, total in zip(waves, itertools.accumulate(map(len, waves)), strict=True):
        if total > recorded:
            yield wave


def settle_machine(config: EvaluationConfig, engines: int) -> EvaluationMachine:
    """Resolves device, threads, precision and cache size on this machine, for ``engines`` engines.

    Raises:
        ConfigError: `device=cuda` without a GPU, or the folder cannot be read.
    """
    device = "cuda" if uses_gpu(config.device) else "cpu"
    dtype = str(resolve_dtype(config.dtype, device)).removeprefix("torch.")
    return EvaluationMachine(device, config.threads or usable_cores(), dtype, settle_cache(config, device, engines))


def rollout_of(config: EvaluationConfig, machine: EvaluationMachine) -> RolloutConfig:
    """Returns the engine's configuration in the form of a run's."""
    engine = replace(config.engine, kv_cache_gib=machine.kv_cache_gib)
    return RolloutConfig(dtype=machine.dtype, engine=engine)  # type: ignore[arg-type]


def settle_cache(config: EvaluationConfig, device: str, engines: int) -> float | None:
    """Returns the size of each engine's cache in GiB: `engine.kv_cache_gib` if set; None on a GPU; on a CPU a share of the
    free memory in whole GiB, divided by ``engines``. A continued evaluation keeps its first value, because the cache size
    decides which requests are computed together, and so influences the last bits.
    """
    if config.engine.kv_cache_gib is not None or device != "cpu":
        return config.engine.kv_cache_gib
    path = evaluation_path(config)
    before = read_settings(path).get("machine", {}) if (path / SETTINGS).exists() else {}
    return before.get("kv_cache_gib") or max(CACHE_GIB, memory_available_gib() * CACHE_SHARE // engines)


def tell_of_cache(config: EvaluationConfig, machine: EvaluationMachine) -> None:
    """Prints the cache size if it was derived from the free memory of this machine."""
    if config.engine.kv_cache_gib is None and machine.kv_cache_gib not in (None, CACHE_GIB):
        words = f"keys and values may take {machine.kv_cache_gib:g} GiB (engine.kv_cache_gib): a third of the memory that is"
        print(f"{words} free", file=sys.stderr, flush=True)


def make_engine(config: EvaluationConfig, machine: EvaluationMachine, model: Path) -> InferenceEngine:
    return build_inference_engine(
        rollout_of(config, machine),
        folder=model,
        placement="colocate",
        threads=machine.threads,
        device=machine.device,
        deterministic=config.deterministic,
    )


def make_partner(config: EvaluationConfig, machine: EvaluationMachine, model: Path) -> WritingModel:
    """Loads the model that the workflow talks to."""
    settings = replace(rollout_of(config, machine).engine, threads=machine.threads, max_model_len=None)
    dtype = resolve_dtype(config.dtype, machine.device)
    partner = WritingModel(model, settings, dtype, machine.device, threads=machine.threads, member=True)
    partner.engine()
    return partner


def plan(questions: Sequence[Questions], config: EvaluationConfig) -> list[list[Ask]]:
    """Splits the samples into waves of whole rows, each of one data set. So the samples that are computed together do not
    depend on the other data sets."""
    samples = config.gconfig.n_samples
    rows = max(1, config.wave_samples // samples)
    waves = []
    for question in questions:
        for start in range(0, len(question.rows), rows):
            places = range(start, min(start + rows, len(question.rows)))
            waves.append(
                [Ask(question.name, row, sample, question.rows[row]) for row in places for sample in range(samples)]
            )
    return waves


def settings(config: EvaluationConfig, checked: Checked, model: Path) -> dict[str, Any]:
    """Returns everything on which the answers depend. An evaluation is continued only if its settings are equal."""
    machine, questions, partner, paths = checked.machine, checked.questions, checked.partner, paths_of(checked.rewards)
    named = {name: spec for name in NAMED if (spec := getattr(config, name)) is not None}
    terms = [read_term(spec, key) for key, spec in {"workflow": config.workflow, **named}.items()]
    specs = [*(term.name for term in terms), *(question.reward for question in questions)]
    models = {name: fingerprint(resolve(path)) for name, path in paths.items()}
    return {
        "config": plain_data(config),
        "data": {
            question.name: {"rows": len(question.rows), "digest": question.digest, "reward": question.reward}
            for question in questions
        },
        "row_digests": {question.name: " ".join(question.digests) for question in questions},
        "model_fingerprint": fingerprint(model),
        "partner_fingerprint": None if partner is None else fingerprint(resolve(partner)),
        **({"reward_fingerprints": models} if models else {}),
        "files": file_digests(specs),
        "machine": {**asdict(machine), "kernels": kernels_here(rollout_of(config, machine), machine.device)},
        "versions": versions(("tandem-rl", "torch", "transformers", "numpy", "math-verify")),
    }


def warn_of_comparisons(workflow: RolloutWorkflow, judges: Reward) -> None:
    """Warns of rewards and workflows that compare samples with each other, because an evaluation does not."""
    terms = ((summed, term) for summed in judges.sums.values() for term in summed.terms)
    for summed, term in terms:
        if summed.compares(term):
            log.warning("reward %r compares the samples of a prompt; an evaluation leaves it out", term.label)
        elif term.options.normalise:
            log.warning("reward %r: an evaluation ignores normalise=%s", term.label, term.options.normalise)
    if type(workflow).finish_group is not RolloutWorkflow.finish_group:
        name = type(workflow).__name__
        log.warning("%s has a finish_group; evaluation judges each sample by itself and does not call it", name)


def conclude(
    answers: Sequence[Answer], questions: Sequence[Questions], config: EvaluationConfig
) -> tuple[dict[str, Any], dict[str, DataScores], dict[str, Estimate]]:
    """Returns (the content of `results.json`, scores by data set, means over data sets)."""
    by_data = {question.name: [answer for answer in answers if answer.data == question.name] for question in questions}
    scores = {
        name: score_data(
            judged_by(data_answers, config.success),
            config.k,
            confidence=config.confidence,
            seed=config.seed,
            votes=config.success is None,
        )
        for name, data_answers in by_data.items()
    }
    average = mean_over_data(scores) if len(by_data) > 1 else {}
    results = {
        "model": config.model,
        "label": config.label,
        "samples_of_each_row": config.gconfig.n_samples,
        "greedy": config.gconfig.greedy,
        "confidence": config.confidence,
        "success": config.success,
        "data": {
            question.name: {"digest": question.digest, "judged_by": question.reward, **asdict(scores[question.name])}
            for question in questions
        },
        "mean": {name: asdict(estimate) for name, estimate in average.items()},
    }
    return results, scores, average


def mean_over_data(scores: Mapping[str, DataScores]) -> dict[str, Estimate]:
    """Returns the mean over data sets of each measure that all data sets have. Each data set has the same weight."""
    means = {}
    for name in next(iter(scores.values())).measures:
        estimates = [data_scores.measures[name] for data_scores in scores.values() if name in data_scores.measures]
        if len(estimates) == len(scores):
            value = sum(estimate.value for estimate in estimates) / len(estimates)
            means[name] = Estimate(
                value, *mean_interval([(estimate.value, estimate.low, estimate.high) for estimate in estimates])
            )
    return means


def state_of(config: EvaluationConfig) -> str:
    """Returns the sentence printed after Ctrl-C: how many samples are recorded, and how to go on."""
    folder = evaluation_path(config)
    file = folder / "samples.jsonl"
    if not file.exists():
        return "Nothing was recorded."
    done = file.read_bytes().count(b"\n")
    hint = "" if (folder / RESULTS).exists() else "; the same command goes on from there"
    return f"{folder} has {done} samples{hint}."
