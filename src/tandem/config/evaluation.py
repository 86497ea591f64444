"""Evaluation without training (`tandem eval`): its configuration, loading and checks."""

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from tandem.config.check import out_of_bounds
from tandem.config.coming_from import REMOVED
from tandem.config.errors import refuse
from tandem.config.keys import leaves
from tandem.config.load import Draft, Resolved
from tandem.config.parts import Count, KnobRule, Natural, Seconds, Seed, Threads
from tandem.config.rollout import EmbeddedEngineConfig, GenerationConfig
from tandem.config.terms import Spec
from tandem.config.yaml_file import COMMAND_LINE, Assignment, read_file, read_override

LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
NOT_PART_OF_THE_RESULT = ("out", "label", "success")
"""Keys that may differ when an evaluation is resumed, because they do not change the answers."""

SUCCESS = re.compile(r"\s*([A-Za-z_][\w./-]*)\s*(>=|<=|==|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class EvaluationData:
    """One data set of an evaluation. A key that is null takes the value of the same key at the top level, and if that is
    null too, the benchmark's."""

    path: str
    """Known benchmark, folder, file, hub name, `addition`, or `reasoning_gym:NAME`."""

    benchmark: str | None = None
    """Known format of the rows; null recognises it by the last part of `path`, `none` reads the rows unchanged."""

    name: str | None = None
    """Name in results; null takes the benchmark's name, else the last part of the path."""

    split: str | None = None
    """Split of a folder or hub data set."""

    prompt_column: str | None = None
    """Column that holds the user's question."""

    answer_column: str | None = None
    """Column that holds the expected answer."""

    prompt_suffix: str | None = None
    """Text after every question."""

    reward: Spec | None = None
    """Reward that judges the answers: a name, or `my_file.py:function`."""

    max_rows: int | None = None
    """Use only the first `max_rows` rows."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation of a model on one or several data sets: `tandem eval`."""

    model: str = ""
    """Model folder (a checkpoint), hub name, or a built-in name such as smollm2-135m."""

    data: tuple[EvaluationData, ...] = ()
    """The data sets."""

    data_root: str | None = None
    """Folder with a sub-folder for each known benchmark; null fetches them from the Hugging Face hub."""

    split: str | None = None
    """Split of folders and hub data sets; null takes the benchmark's, else `test`."""

    prompt_column: str | None = None
    """Column of the user's question; null takes the benchmark's, else looks for messages, prompt, question."""

    answer_column: str | None = None
    """Column of the expected answer; null takes the benchmark's, else looks for answer, solution, completion."""

    prompt_suffix: str | None = None
    """Text after every question; null takes the benchmark's, else none."""

    reward: Spec | None = None
    """Reward that judges the answers: a name, or `my_file.py:function`; null takes the benchmark's, else `math`."""

    success: str | None = None
    """Condition for a right sample, such as `reward >= 1` or `format == 1` (a part of the reward); null: accuracy is 1. If
    it changes, a finished evaluation is counted again from its recorded samples."""

    reward_timeout_s: Seconds = 15.0
    """A reward call that takes longer is killed, and its sample counts as failed."""

    max_rows: Count | None = None
    """Use only the first `max_rows` rows of each data set; null uses all. On the command line it replaces the
    `data[].max_rows` of the file."""

    workflow: Spec = "rlvr"
    """Registered workflow that makes each sample, such as `multi_turn(max_turns=5)`, or `my_file.py:ClassOrFunction`."""

    workflow_args: Mapping[str, Any] = field(default_factory=dict)
    """Knobs of the workflow, as in training."""

    judge: Spec | None = None
    """Your judging service, as in training; passed to a workflow or reward with an argument `judge`."""

    environment: Spec | None = None
    """Your environment, as in training."""

    agent: Spec | None = None
    """Your agent, as in training."""

    partner: Spec | None = None
    """The other model that the workflow talks to, as in training."""

    sandbox: Spec = "auto"
    """The sandbox in which untrusted programs run, as in training."""

    system_prompt: str | None = None
    """System message before each prompt; null: none."""

    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Additional arguments for the model's chat template."""

    gconfig: GenerationConfig = field(default_factory=lambda: GenerationConfig(n_samples=1, max_new_tokens=512, greedy=True))
    """Sampling. Greedy unless `n_samples`, `temperature`, `top_p` or `top_k` is set."""

    k: tuple[int, ...] = ()
    """Values of k for pass@k and maj@k; empty takes 2, 4, 8 … and `gconfig.n_samples`."""

    confidence: Annotated[float, KnobRule(above=0.0, high=0.9999)] = 0.95
    """Level of the confidence intervals."""

    seed: Seed = 0
    """Seed of sampling and of the bootstrap."""

    wave_samples: Count = 256
    """Number of samples generated and recorded together (a wave); a kill loses at most one wave."""

    deterministic: bool = True
    """All samples of a wave take each turn together, so that the composition of batches does not depend on timing. False:
    each sample continues as soon as it can, which is faster with slow tools or environments."""

    threads: Threads | None = None
    """CPU threads; null takes all cores that the process may use."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; auto takes a GPU if there is one."""

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Precision of generation (auto: bfloat16 if the device has instructions for it, else float32)."""

    engine: EmbeddedEngineConfig = field(default_factory=EmbeddedEngineConfig)
    """Settings of the embedded engine."""

    episode_timeout_s: Seconds = 21600.0
    """A sample that takes longer, including its waiting time in the wave, fails with the reason `deadline`."""

    max_retries: Natural = 2
    """Number of times that a sample is run again after a failure of the infrastructure."""

    out: str = "evaluations"
    """Folder that has the folders of all evaluations."""

    label: str | None = None
    """Name of the evaluation and its folder; null makes one from `model` and `data`."""


def load_evaluation(file: Path | str | None = None, overrides: Sequence[str | Assignment] = ()) -> Resolved[Any]:
    """Loads and checks the configuration of an evaluation: defaults, overridden by the YAML file, overridden by
    ``overrides`` (``key=value``). See `load_config`.

    Raises:
        ConfigError: the message has every wrong key with its value, the rule and the remedy.
    """
    draft = Draft(EvaluationConfig)
    if file is not None:
        draft.apply(read_file(Path(file)))
    for item in overrides:
        draft.apply([item] if isinstance(item, Assignment) else read_override(item))
    refuse(draft.errors)
    config: EvaluationConfig = draft.build()
    written = dict(draft.sources)
    if written.get("max_rows") == COMMAND_LINE and written.get("data") != COMMAND_LINE:  # overrides the file's numbers
        config = replace(config, data=tuple(replace(data, max_rows=None) for data in config.data))
    if "gconfig.greedy" not in written:
        sampled = any(f"gconfig.{key}" in written for key in ("temperature", "top_p", "top_k"))
        config = replace(config, gconfig=replace(config.gconfig, greedy=config.gconfig.n_samples == 1 and not sampled))
        written["gconfig.greedy"] = "follows from gconfig"
    refuse([*_problems(config, written)])
    if config.label is None:
        parts = [label_of(name) for name in (config.model, *(d.name or d.path for d in config.data))]
        config = replace(config, label="-".join(parts)[:100])
        written["label"] = "follows from model and data"
    if not config.k:
        config = replace(config, k=usual_k(config.gconfig.n_samples))
    return Resolved(config, {key: written.get(key, "default") for key, _ in leaves(config)})


def usual_k(n_samples: int) -> tuple[int, ...]:
    """Returns 2, 4, 8 … below ``n_samples``, and ``n_samples``; empty for one sample.

    >>> usual_k(10)
    (2, 4, 8, 10)
    """
    powers = [2**i for i in range(1, n_samples.bit_length()) if 2**i < n_samples]
    return (*powers, n_samples) if n_samples > 1 else ()


def label_of(model: str) -> str:
    """Makes a folder's name from a model's: `runs/addition/grpo/checkpoints/step_18` becomes `addition-grpo-step_18`."""
    parts = [part for part in model.rstrip("/").split("/") if part not in ("", ".", "..")]
    if len(parts) > 3 and parts[-2] == "checkpoints":
        parts = [*parts[-4:-2], parts[-1]]
    else:
        parts = parts[-1:]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts)).lstrip(".-")[:100] or "model"


def _problems(config: EvaluationConfig, written: Container[str]) -> Iterator[str]:
    bounded = config
    if config.gconfig.temperature == 0:
        yield (
            "gconfig.temperature=0 is greedy, which one sample of each row is anyway: leave it out, or set "
            "gconfig.greedy=true"
        )
        bounded = replace(config, gconfig=replace(config.gconfig, temperature=1.0))
    yield from out_of_bounds(bounded, written)
    if not config.model:
        yield "model is missing: give a folder (a checkpoint), a hub name, or smollm2-135m"
    if not config.data:
        yield "data is missing: give --data with a known benchmark, a folder, a file or a hub name"
    if config.label is not None and (not LABEL.fullmatch(config.label) or len(config.label) > 100):
        yield f"label must be the name of one folder: letters, digits, '.', '_' and '-', at most 100; got {config.label!r}"
    if config.success is not None and not SUCCESS.fullmatch(config.success):
        yield f"success is NAME >= NUMBER, such as 'reward >= 1', with >=, >, <=, < or ==; got {config.success!r}"
    if config.engine.keep_kv_on_update:
        yield "engine.keep_kv_on_update=true has no effect: an evaluation updates no weights; leave it out"
    yield from _samples(config, written)


def _samples(config: EvaluationConfig, written: Container[str]) -> Iterator[str]:
    sampling = config.gconfig
    if sampling.greedy and sampling.n_samples > 1:
        yield (
            f"gconfig.n_samples={sampling.n_samples} with gconfig.greedy=true makes {sampling.n_samples} equal answers; "
            "set gconfig.greedy=false and a temperature, or gconfig.n_samples=1"
        )
    if sampling.greedy:
        for key in ("temperature", "top_p", "top_k"):
            if f"gconfig.{key}" in written:
                yield f"gconfig.{key}={getattr(sampling, key)} is not used with gconfig.greedy=true; leave one of them out"
    for k in config.k:
        if k < 1:
            yield f"k must be at least 1, got {k}: pass@k is the chance that one of k samples is right"
        elif k > sampling.n_samples:
            yield (
                f"k must lie in 1…gconfig.n_samples ({sampling.n_samples}), got {k}: pass@{k} needs at least {k} samples of "
                f"each prompt; set gconfig.n_samples={k} or leave it out"
            )
    if sampling.min_new_tokens > sampling.max_new_tokens:
        yield (
            f"gconfig.min_new_tokens must be at most gconfig.max_new_tokens ({sampling.max_new_tokens}), "
            f"got {sampling.min_new_tokens}"
        )
    longest = config.engine.max_model_len
    if longest is not None and longest <= sampling.max_new_tokens:
        yield (
            f"engine.max_model_len must exceed gconfig.max_new_tokens ({sampling.max_new_tokens}), so that a prompt fits "
            f"before the answer; got {longest}"
        )
    for i, data in enumerate(config.data):
        if data.max_rows is not None and data.max_rows < 1:
            yield f"data[{i}].max_rows must be at least 1 or null, got {data.max_rows}"


def differences(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields (key, value in ``one``, value in ``other``) of every value that differs; keys of nested mappings are joined by
    dots. Removed keys, which only an older evaluation has, are left out."""
    for key in dict.fromkeys([*one, *other]):
        if not (key in one and key in other) and f"{prefix}{key}".removeprefix("config.") in REMOVED:
            continue
        a, b = one.get(key), other.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from differences(a, b, f"{prefix}{key}.")
        elif a != b:
            yield f"{prefix}{key}", a, b
