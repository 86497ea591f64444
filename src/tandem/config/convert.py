"""Translates a configuration of TRL or verl into one of Tandem, and gives the reason for each key that is not translated.

The meaning, default and values of a key come from the tables of `coming_from.md`. Numbers that follow from several keys are
computed here. The configuration may also be a shell script that starts a training, with ``key=value`` or ``--key value``.
"""

import ast
import json
import math
import operator
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tandem.config.algorithm import Component
from tandem.config.coming_from import ForeignName, foreign_names
from tandem.config.errors import ConfigError
from tandem.config.experiment import BaseConfig, SFTConfig, TrainConfig
from tandem.config.keys import flat, leaves
from tandem.config.load import load_config, plain_data
from tandem.config.preference import PreferenceConfig
from tandem.config.yaml_file import number

_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^{}$]*))?\}|\$(\w+)")
_SUM = re.compile(r"\$\(\(([^$]*?)\)\)")
_SET = re.compile(r"(?:export |local |declare )?([A-Za-z_]\w*)=(.*)", re.S)
_KEY = re.compile(r"\+{0,2}([a-z_]\w*(?:\.\w+)+)=(.*)", re.S)
_OPTION = re.compile(r"--([a-z]\w*)(?:=(.*))?", re.S)
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv},
}


def script_values(text: str) -> dict[str, str]:
    """Returns the keys and values (as text) of a shell script, with its variables inserted. Variables that the script does
    not set stay, such as ``$HOME``. An indented line, as in an `if`, only sets variables that are not set yet."""
    variables: dict[str, str] = {}
    values: dict[str, str] = {}
    for line in text.replace("\\\n", " ").splitlines():
        line = _expanded(line, variables)
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quote that ends on another line
            words = [word.strip("\"'") for word in line.split()]
        setting = _SET.fullmatch(" ".join(words))
        is_alone = len(words) <= 1 + line.lstrip().startswith("export ")
        if setting and is_alone and not (line[:1].isspace() and variables.get(setting[1])):
            variables[setting[1]] = setting[2]
        _collect(words, values)
    return values


def _collect(words: list[str], found: dict[str, str]) -> None:
    options = False
    for i, word in enumerate(words):
        if match := _KEY.fullmatch(word.lstrip("(").rstrip(")") if word.count("(") != word.count(")") else word):
            found[match[1]] = match[2]
        elif options and (match := _OPTION.fullmatch(word)):
            behind = words[i + 1 :]
            end = next((j for j, other in enumerate(behind) if other.startswith("--")), len(behind))
            values = [value.rstrip(",") for value in behind[:end]]
            name, on = (match[1][3:], "false") if match[1].startswith("no_") else (match[1], "true")
            found[name] = match[2] or (values[0] if len(values) == 1 else f"[{', '.join(values)}]" if values else on)
        options = options or word.endswith(".py") or word in ("grpo", "sft", "dpo", "rloo") or ".scripts." in word


def _expanded(line: str, variables: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        known = variables.get(match[1] or match[3])
        return (match[0] if known is None else known) if match[2] is None else known or match[2]

    for _ in range(4):  # the default of a variable may contain variables; four levels are enough in practice
        line = _VARIABLE.sub(value, line)
    while match := _SUM.search(line):
        names = re.sub(r"[A-Za-z_]\w*", lambda m: variables.get(m[0], m[0]), match[1])
        result = _computed(names)
        line = line[: match.start()] + (f"${{{names}}}" if result is None else str(result)) + line[match.end() :]
    return line


def _computed(text: str) -> int | None:
    def of(node: Any) -> int | None:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = of(node.left), of(node.right)
            known = left is not None and right is not None and (right or not isinstance(node.op, ast.Div))
            return _OPERATORS[type(node.op)](left, right) if known and left is not None and right is not None else None
        return None

    try:
        return of(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError:
        return None


TRAINERS: dict[str, tuple[str, type[BaseConfig], frozenset[str]]] = {
    "grpo": ("TRL", TrainConfig, frozenset({"num_generations", "max_completion_length", "num_iterations", "epsilon"})),
    "rloo": ("TRL", TrainConfig, frozenset({"normalize_advantages", "reward_clip_range"})),
    "sft": ("TRL", SFTConfig, frozenset({"packing", "dataset_text_field", "completion_only_loss", "assistant_only_loss"})),
    "dpo": ("TRL", PreferenceConfig, frozenset({"label_smoothing", "precompute_ref_log_probs", "loss_weights"})),
    "ppo": ("verl", TrainConfig, frozenset()),
}
"""Trainer → (its system, Tandem's configuration class, keys that only a file of this trainer has)."""

OPEN = (
    *("train_dataset.path", "train_dataset.split", "train_dataset.prompt_column", "valid_dataset.", "evaluate.", "reward"),
    *("actor.backend", "rollout.backend", "rollout.fleet.", "algorithm.correction."),
)
"""Tandem keys that are written as comments, because only the user knows them: data, reward, machines."""

LOSSES = {
    **{"vanilla": "ppo_clip", "geo_mean": "gmpo", "dppo_tv": "dppo", "dppo_kl": "dppo"},
    **{name: name for name in ("gspo", "sapo", "cispo", "clip_cov", "kl_cov", "vespo", "luspo")},
}
GATES = {
    "sapo": {"sapo_temperature_pos": "tau_positive", "sapo_temperature_neg": "tau_negative"},
    "vespo": {
        **{"vespo_k_pos": "power_positive", "vespo_lambda_pos": "rate_positive"},
        **{"vespo_k_neg": "power_negative", "vespo_lambda_neg": "rate_negative"},
    },
}
_WORDS = {"on": True, "off": False, "none": None, "true": True, "false": False, "null": None, "": None}


def value_of(text: Any) -> Any:
    """Parses a foreign value that is written as text, such as `on`, `1e-6`, `[a, b]`. Values of other types stay as they
    are."""
    if not isinstance(text, str):
        return text
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        value = number(text) if text[:1] not in "[{-.0123456789" else yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return number(value) if isinstance(value, str) else value


def read_foreign(system: str, file: Path) -> dict[str, Any]:
    """Reads the keys and values of a foreign configuration. verl's keys have dots, and lose the prefix `actor_rollout_ref.`.

    Raises:
        ConfigError: the file cannot be read, or has no keys.
    """
    try:
        text = file.read_text(encoding="utf-8")
        shell = file.suffix in (".sh", ".bash")
        data = script_values(text) if shell else (json.loads if file.suffix == ".json" else yaml.safe_load)(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; give a YAML or JSON file, or a script (.sh)") from error
    if not isinstance(data, Mapping) or not data:
        raise ConfigError(f"{file} has no keys; give a YAML or JSON file of {system}, or a script (.sh) that starts it")
    if shell:  # other commands of the script have options too
        data = {key: value for key, value in data.items() if ("." in key) == (system == "verl")}
    entries = data.items() if system == "TRL" else flat(data)
    return {str(key).removeprefix("actor_rollout_ref."): value_of(value) for key, value in entries}


def trainer_of(system: str, given: Mapping[str, Any]) -> str:
    """Recognises the trainer by the keys of its file.

    Raises:
        ConfigError: a TRL file fits no trainer, or several.
    """
    if system == "verl":
        return "ppo"
    fits = [name for name, (_, _, keys) in TRAINERS.items() if keys & set(given)]
    fits = ["rloo"] if fits == ["grpo", "rloo"] else fits
    if len(fits) != 1:
        raise ConfigError("the keys do not say whose configuration this is; write --trainer grpo, rloo, sft or dpo")
    return fits[0]


class Conversion:
    """The translation of one file: its values, and the result for each key."""

    def __init__(self, trainer: str, given: Mapping[str, Any], processes: int = 1) -> None:
        self.system, self.kind, _ = TRAINERS[trainer]
        self.trainer, self.given, self.processes = trainer, given, processes
        sections = ("", f"{trainer.upper()}Config")
        self.names = {f.name: f for f in foreign_names() if f.system == self.system and f.section in sections}
        self.ours: dict[str, tuple[Any, str]] = {}
        """Tandem key → (value, the foreign keys that it comes from)."""

        self.open: dict[str, tuple[Any, str]] = {}
        """The same for keys that the user fills in (`OPEN`)."""

        self.left: dict[str, str] = {}
        """Foreign key → reason why it is not translated."""

        self._read: set[str] = set()
        self._translated: set[str] = set()
        config = load_config(self.kind, None, ["train_dataset.path=addition"]).config
        self._defaults = {key: plain_data(value) for key, value in leaves(config)}
        self._components = tuple(f"{key}." for key, value in leaves(config) if isinstance(value, Component))

    def read(self, name: str) -> Any:
        """Returns the foreign value or its default, and counts the key as read: the caller must translate it."""
        self._read.add(name)
        value, default = self.given.get(name), value_of(self.names[name].default)
        if isinstance(value, str) and "$" in value:
            read = "" if default is None else f"; read as {_shown(default)}, the default"
            self.left[name] = f"what it stands for is not in this file{read}"
            return default
        return default if value is None else value

    def number(self, name: str, least: int | None = None) -> Any:
        """Calls `read` for a number; with ``least``, a whole number of at least this. Raises `ConfigError` otherwise."""
        value = self.read(name)
        good = value is None or (isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18)
        if not good or (least is not None and value is not None and (value < least or value % 1)):
            kind = "a number" if least is None else f"a whole number of at least {least}"
            raise ConfigError(f"{name} must be {kind}, got {value!r:.50}")
        return value

    def word(self, name: str) -> Any:
        """Calls `read` for a key whose value must be text or null. Raises `ConfigError` otherwise."""
        value = self.read(name)
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{name} must be text, got {value!r}")
        return value

    def put(self, key: str, value: Any, *names: str, how: str = "") -> None:
        """Sets a Tandem key, unless the value is Tandem's default and the file sets none of the foreign keys ``names``."""
        if not key.startswith(self._components) and key not in self._defaults:
            self.left |= {n: f"{key} is no key of this command here" for n in names if n in self.given}
        elif self._defaults.get(key) != value or not self.given.keys().isdisjoint(names):
            source = ", ".join(n if n in self.given else f"{n}: default of {self.system}" for n in names)
            target = self.open if key.startswith(OPEN) else self.ours
            self._translated |= set(names)
            target[key] = value, f"{source}: {how}" if how else source

    def idle(self, why: str, *names: str) -> None:
        """Records that foreign keys have no effect in this file, and ``why``."""
        self._read |= set(names)
        self.left |= {name: why for name in names if name in self.given}

    def copy(self, *names: str) -> None:
        """Translates the keys ``names`` one by one, by the tables of `coming_from.md`."""
        for name in names:
            self._copy(name, self._find(name))

    def _find(self, name: str) -> ForeignName | None:
        if name in self.names:
            return self.names[name]
        sections = [n for n in self.names if n.endswith(".*") and f"{name}.".startswith(n[:-1])]
        return self.names[max(sections, key=len)] if sections else None

    def _copy(self, name: str, foreign: ForeignName | None) -> None:
        if foreign is None:
            self.left[name] = f"unknown: {self.system} has no such key either, in the version of docs/coming_from.md"
            return
        value = self.read(name) if name in self.names else None
        if name in self.left:
            self.left[name] += f". Nearest: {', '.join(foreign.ours) or 'none'}"
        elif not foreign.ours:
            self._leave(name, foreign.differs)
        elif value is not None or name not in self.names or "none" in dict(foreign.values):
            self._put_word(name, foreign, value)

    def _leave(self, name: str, why: str) -> None:
        if name in self.given:
            self.left[name] = why

    def _put_word(self, name: str, foreign: ForeignName, value: Any) -> None:
        word = str(value).lower()
        target = dict(foreign.values).get(word) if foreign.values else value if foreign.alone else None
        assigns = bool(foreign.values) and "=" in str(target)
        if target is None or not (assigns or foreign.alone):
            self._leave(name, f"set by hand: {', '.join(foreign.ours)}. {foreign.differs}")
        elif not (name.endswith(("_steps", "_freq", "_samples")) and (self.number(name) or 0) <= 0):
            for part in str(target).split() if assigns else [f"{foreign.ours[0]}="]:
                key, _, text = part.partition("=")
                self.put(key, value_of(text or target), name)

    def finish(self) -> None:
        """Translates every key that no rule has read."""
        names = [n for n in self.given if n not in self._read]
        self.copy(*names, *(n for n, f in self.names.items() if f.default and n not in self._read | self.given.keys()))

        for name in self.given.keys() - self._translated - self.left.keys():
            self.left[name] = "with this value there is nothing to set"

    def text(self) -> str:
        """Returns the YAML file; keys that are not translated are comments at its end."""
        lines = [f"# from a configuration of {self.system}, by tandem convert-config; # says where a value comes from"]
        lines += [f"{key}: {_shown(value)}  # {why}" for key, (value, why) in self.ours.items()]
        lines += ["", "# fill in and take the # away:"]
        lines += [f"# {key}: {_shown(value)}  # {why}" for key, (value, why) in self.open.items()]
        return "\n".join([*lines, "", f"# not translated ({len(self.left)} keys):", *self.listed("#   ")]) + "\n"

    def overrides(self) -> list[str]:
        """Returns the translated keys as ``key=value``."""
        return [f"{key}={_shown(value)}" for key, (value, _) in self.ours.items()]

    def listed(self, indent: str = "  ") -> list[str]:
        """Returns a line for each key that is not translated."""
        return [f"{indent}{name} = {_shown(self.given.get(name))}: {why}" for name, why in self.left.items()]


def _shown(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("...\n").strip()


def convert(trainer: str, given: Mapping[str, Any], processes: int = 1) -> Conversion:
    """Translates a file of ``trainer`` (a key of `TRAINERS`). ``processes``: number of devices that a TRL run trained on.

    Raises:
        ConfigError: a TRL batch is not a whole number of groups, or a count is not a number.
    """
    c = Conversion(trainer, given, processes)
    c.open["train_dataset.path"] = "FOLDER, FILE or hub name", "which columns are read: docs/data.md"
    if c.kind is TrainConfig:
        c.open["reward"] = "my_file.py:function", "yours as it stands: docs/writing_a_reward.md#from-trl-or-verl"
    _verl(c) if c.system == "verl" else _trl(c)
    c.finish()
    return c


def _trl(c: Conversion) -> None:
    each, accumulate = c.number("per_device_train_batch_size", 1), c.number("gradient_accumulation_steps", 1)
    names, step, updates = ("per_device_train_batch_size", "gradient_accumulation_steps"), each * accumulate * c.processes, 1
    how = f"{each} × {accumulate} accumulated × {c.processes} processes (--processes)"
    if c.kind is TrainConfig:
        updates = _trl_groups(c, step, names)
        (_trl_rloo if c.trainer == "rloo" else _trl_loss)(c)
        _truncated(c, "top_p", "top_k")
        if c.read("use_vllm"):
            each = c.number("vllm_tensor_parallel_size", 1) or 1
            layout = f"vllm:d{max(1, c.processes // each)}t{each}"
            c.put("rollout.backend", layout, "use_vllm", how=f"{c.processes} devices, where vLLM is installed")
            c.idle("the place follows async_training", "vllm_mode")
    else:
        c.put("batch_size", step, *names, how=how)
    if c.trainer == "dpo":
        kinds = c.read("loss_type")
        kind = kinds[0] if isinstance(kinds, list) and len(kinds) == 1 else kinds
        c.given = {**c.given, "loss_type": kind} if "loss_type" in c.given else c.given
        c.copy("loss_type")
    total = c.number("max_steps")
    if total > 0:
        c.idle("max_steps ends the run", "num_train_epochs")
        c.put("total_train_steps", math.ceil(total / updates), "max_steps", how=f"/ {updates} optimizer steps a batch")
    _warmup(c, "warmup_steps", "warmup_ratio", total, 1)
    kwargs = c.read("lr_scheduler_kwargs") or {}
    if isinstance(kwargs, dict) and "min_lr_rate" in kwargs:
        c.put("actor.optimizer.min_lr_ratio", kwargs["min_lr_rate"], "lr_scheduler_kwargs")
    for strategy, name, key in (("save_strategy", "save_steps", "checkpoint"), ("eval_strategy", "eval_steps", "evaluate")):
        kind, steps = c.read(strategy), c.number(name)
        if kind == "steps" and steps and steps >= 1:
            c.put(f"{key}.every_steps", math.ceil(steps / updates), name, how=f"/ {updates} optimizer steps a batch")
        elif kind == "epoch":
            c.left[strategy] = f"counted in steps here: {key}.every_steps"
    if not c.read("use_peft"):
        c.idle("use_peft is off", "lora_r", "lora_alpha", "lora_target_modules", "lora_dropout")
    elif c.trainer != "sft":
        c.idle("dropout would make log-probabilities random, and this training compares those of two passes", "lora_dropout")
    _sinks(c, "report_to")


def _trl_groups(c: Conversion, step: int, names: tuple[str, ...]) -> int:
    """Sets batch and mini-batches from a `GRPOConfig`. ``step``: completions of one optimizer step. Returns the number of
    optimizer steps in a batch."""
    n, once = c.number("num_generations", 1), step // c.number("gradient_accumulation_steps", 1)
    batch_size, times = c.number("generation_batch_size", 1), c.number("steps_per_generation", 1)
    completions = batch_size or once * (times or c.number("gradient_accumulation_steps", 1))
    batch = max(completions, step)
    if batch % n or batch % step:
        raise ConfigError(
            f"{completions} completions are generated at once and {step} make an optimizer step with {c.processes} "
            f"process(es): no whole groups of {n} or no whole steps; say on how many devices it ran, by --processes N"
        )
    names = (*names, "steps_per_generation" if times else "generation_batch_size")[: 3 if batch_size or times else 2]
    how = f"{batch} completions, {step} an optimizer step, {c.processes} processes (--processes)"
    c.put("rollout.batch_size", batch // n, *names, "num_generations", how=f"{how}, {n} a prompt")
    c.put("actor.mini_batches", batch // step, *names, how=how)
    c.put("gconfig.n_samples", n, "num_generations")
    passes = c.number("num_iterations", 1)
    c.put("actor.epochs_per_batch", passes, "num_iterations")
    return int(batch // step * passes)


def _trl_loss(c: Conversion) -> None:
    kind, low, high = c.word("loss_type"), c.number("epsilon"), c.number("epsilon_high")
    names = ("epsilon", "epsilon_high")
    loss = LOSSES.get(kind, "gspo" if c.read("importance_sampling_level") == "sequence" else "ppo_clip")
    c.put("algorithm.policy_loss", loss, "loss_type", "importance_sampling_level")
    mean = {"grpo": "sequence_mean", "dr_grpo": "constant", "sapo": "sequence_mean", "luspo": "sequence_mean"}
    c.put("algorithm.aggregation", mean.get(kind, "token_mean"), "loss_type")
    if kind == "bnpo":
        c.left["loss_type"] = "bnpo averages over the tokens of one device's batch; token_mean over those of all"
    if loss == "cispo":
        c.put("algorithm.policy_loss.clip_high", (high or low) - 1, *names, how="the cap itself there, 1 + clip_high here")
    elif loss in ("ppo_clip", "gspo", "luspo"):
        c.put("algorithm.policy_loss.clip_low", low, "epsilon")
        c.put("algorithm.policy_loss.clip_high", low if high is None else high, *names[high is not None :])
    if loss != "ppo_clip":
        c.idle(f"no key of {loss}", "delta")
    for other, knobs in GATES.items():
        for name, knob in knobs.items():
            if loss == other and name in c.given:
                c.put(f"algorithm.policy_loss.{knob}", c.read(name), name)
            elif loss != other:
                c.idle(f"loss_type is {kind}", name)
    if c.read("multi_objective_aggregation") == "normalize_then_sum":
        c.put("algorithm.advantage", "gdpo", "multi_objective_aggregation")
        c.idle("gdpo normalises each reward", "scale_rewards")
    if c.number("beta") > 0:
        c.copy("beta", "use_bias_correction_kl")
        if c.read("sync_ref_model"):
            c.put("reference.refresh_every_steps", c.read("ref_model_sync_steps"), "ref_model_sync_steps")
    else:
        c.idle("beta is 0", "use_bias_correction_kl", "sync_ref_model", "ref_model_sync_steps")
    if (threshold := c.read("off_policy_mask_threshold")) is not None:
        c.put("algorithm.correction.reject", "negative_drift", "off_policy_mask_threshold")
        c.put("algorithm.correction.reject.threshold", threshold, "off_policy_mask_threshold")
    share = c.number("top_entropy_quantile")
    if share < 1:
        c.put("algorithm.token_filter", "top_entropy", "top_entropy_quantile")
        c.put("algorithm.token_filter.share", share, "top_entropy_quantile")
    level, _, weight = c.word("vllm_importance_sampling_mode").partition("_")
    if "vllm_importance_sampling_mode" in c.given:
        c.put("algorithm.correction.weight", weight, "vllm_importance_sampling_mode")
        c.put("algorithm.correction.level", level, "vllm_importance_sampling_mode")


def _trl_rloo(c: Conversion) -> None:
    c.ours["algorithm.preset"] = "rloo", "--trainer rloo"
    others = [f for f in foreign_names() if (f.system, f.section) == ("TRL", "") and "algorithm" in " ".join(f.ours)]
    c.idle(
        "of GRPOConfig",
        *(
            f.name
            for f in others
            if f.name not in ("beta", "reward_clip_range", "normalize_advantages", "mask_truncated_completions")
        ),
    )
    if c.number("beta") > 0:
        c.put("algorithm.kl.coefficient", c.read("beta"), "beta")
        c.put("algorithm.kl.where", "reward", "beta")


def _truncated(c: Conversion, p: str, k: str) -> None:
    if (c.number(p) or 1) < 1 or (c.number(k) or 0) > 0:
        c.put("algorithm.allow_truncated_sampling", True, p, k)
    c.put("gconfig.top_p", c.read(p), p)
    c.put("gconfig.top_k", max(c.number(k) or 0, 0), k)


def _warmup(c: Conversion, steps: str, ratio: str, total: int | None, updates: int) -> None:
    """Sets the warm-up. Tandem's schedule counts optimizer steps; ``updates`` is their number in one step of the foreign
    schedule."""
    count, share, key = c.number(steps) or 0, c.number(ratio) or 0, "actor.optimizer.warmup_steps"
    if 0 < count < 1:
        count, share = 0, count
    if count > 0:
        c.put(key, int(count) * updates, steps, how=f"× {updates} optimizer steps")
    elif share > 0 and total and total > 0:
        c.put(key, math.ceil(share * total) * updates, steps, ratio, how=f"{share} of {total} steps × {updates}")
    elif share > 0:
        c.open[key] = share, f"{steps}, {ratio}: a share there; write this share of the run's optimizer steps"


def _sinks(c: Conversion, name: str) -> None:
    reported = c.read(name) or []
    names = [str(name) for name in (reported if isinstance(reported, list) else [reported])]
    c.put("tracking.sinks", [n for n in names if n in ("wandb", "tensorboard", "trackio")], name)
    if not {"wandb", "trackio"} & set(names):
        c.idle("only wandb and trackio have projects", "project" if c.system == "TRL" else "trainer.project_name")
    if other := [n for n in names if n not in ("wandb", "tensorboard", "trackio", "console", "none")]:
        c.left[name] = f"{', '.join(other)}: tracking.sinks has wandb, tensorboard and trackio, and my_file.py:Name"


def _verl(c: Conversion) -> None:
    prompts, mini = c.number("data.train_batch_size", 1), c.number("actor.ppo_mini_batch_size", 1)
    number_of, passes = max(1, prompts // mini), c.number("actor.ppo_epochs", 1)
    c.put("rollout.batch_size", prompts, "data.train_batch_size")
    sizes = ("data.train_batch_size", "actor.ppo_mini_batch_size")
    c.put("actor.mini_batches", number_of, *sizes, how=f"{prompts} / {mini} prompts")
    c.put("actor.epochs_per_batch", passes, "actor.ppo_epochs")
    memory = ("actor.ppo_micro_batch_size", "actor.ppo_micro_batch_size_per_gpu", "actor.ppo_max_token_len_per_gpu")
    c.idle("memory only: actor.max_tokens_per_micro_batch is chosen by the plan", *memory, "actor.use_dynamic_bsz")
    if (betas := c.read("actor.optim.betas")) is not None:
        if not isinstance(betas, list) or len(betas) != 2:
            raise ConfigError(f"actor.optim.betas must be a list of two numbers, got {betas!r}")
        for key, beta in zip(("beta1", "beta2"), betas, strict=True):
            c.put(f"actor.optimizer.{key}", beta, "actor.optim.betas")
    if prompts % mini:
        c.left["actor.ppo_mini_batch_size"] = (
            f"{prompts} is no multiple of {mini}: {number_of} mini-batches of equal size here"
        )
    total = c.number("trainer.total_training_steps")
    if total:
        c.idle("total_training_steps ends the run", "trainer.total_epochs")
        c.put("total_train_steps", total, "trainer.total_training_steps")
    _warmup(c, "actor.optim.lr_warmup_steps", "actor.optim.lr_warmup_steps_ratio", total, number_of * passes)
    _truncated(c, "rollout.top_p", "rollout.top_k")
    longest = c.number("data.max_prompt_length", 0) + c.number("data.max_response_length", 0)
    lengths = ("data.max_prompt_length", "data.max_response_length")
    c.put("rollout.engine.max_model_len", longest, *lengths, how="their sum")
    c.put("gconfig.max_new_tokens", c.read(lengths[1]), lengths[1])
    _verl_loss(c)
    _verl_kl(c)
    if c.read("model.lora_rank"):
        c.copy("model.lora_rank")
    else:
        c.idle("model.lora_rank is 0", "model.lora_alpha", "model.target_modules")
    if c.read("algorithm.filter_groups.enable"):
        c.put("algorithm.filter", "dynamic_sampling", "algorithm.filter_groups.enable")
        if draws := c.read("algorithm.filter_groups.max_num_gen_batches"):
            c.put("algorithm.filter.max_draws", draws, "algorithm.filter_groups.max_num_gen_batches")
    else:
        c.idle("filter_groups is off", "algorithm.filter_groups.max_num_gen_batches")
    _verl_machines(c)
    _sinks(c, "trainer.logger")


def _verl_loss(c: Conversion) -> None:
    c.copy("algorithm.adv_estimator")
    if (kind := c.read("algorithm.adv_estimator")) == "grpo" and not c.read("algorithm.norm_adv_by_std_in_grpo"):
        c.put("algorithm.advantage", "dr_grpo", "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo")
    if (scale := c.read("actor.loss_scale_factor")) and c.read("actor.loss_agg_mode") == "seq-mean-token-sum-norm":
        c.put("algorithm.aggregation", "constant", "actor.loss_agg_mode")
        c.put("algorithm.aggregation.max_tokens", scale, "actor.loss_scale_factor")
    if kind != "gae":
        c.idle(f"no critic with adv_estimator={kind}", *(n for n in (*c.names, *c.given) if n.startswith("critic.")))
        c.idle("knobs of gae", "algorithm.gamma", "algorithm.lam", "trainer.critic_warmup")
    mode, base = c.word("actor.policy_loss.loss_mode"), "algorithm.policy_loss"
    if mode not in LOSSES:
        c.left["actor.policy_loss.loss_mode"] = f"{mode} is no loss here; see tandem algorithms --parts"
        return
    loss = LOSSES[mode]
    c.put(base, loss, "actor.policy_loss.loss_mode")
    ends = [("actor.clip_ratio_low", "clip_low"), ("actor.clip_ratio_high", "clip_high")]
    knobs = {
        "ppo_clip": [*ends, ("actor.clip_ratio_c", "dual_clip")],
        "gmpo": [("actor.clip_ratio_high", "clip")],
        "sapo": [("actor.tau_pos", "tau_positive"), ("actor.tau_neg", "tau_negative")],
        "dppo": [("actor.clip_ratio_high", "threshold")],
    }.get(loss, ends)
    read = {name for name, _ in knobs}
    for name, knob in knobs:
        most = 1.0 if (loss, knob) == ("cispo", "clip_low") else math.inf  # a ratio is never below 0
        c.put(f"{base}.{knob}", min(c.number(name), most), name)
    if loss == "dppo":
        c.put(f"{base}.divergence", mode.removeprefix("dppo_"), "actor.policy_loss.loss_mode")
    others = {"actor.clip_ratio_low", "actor.clip_ratio_high", "actor.clip_ratio_c", "actor.tau_pos", "actor.tau_neg"} - read
    c.idle(f"no knob of {loss}", *sorted(others))


def _verl_kl(c: Conversion) -> None:
    estimators = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "k3+": "k3_plus", "low_var_kl+": "k3_plus"}
    estimators |= {name: name for name in ("k1", "k2", "k3")}
    in_loss = ("actor.use_kl_loss", "actor.kl_loss_coef", "actor.kl_loss_type")
    in_reward = ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty")
    adaptive = ("algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.horizon")
    chosen = in_loss if c.read(in_loss[0]) else in_reward
    for switch, weight, kind in (in_loss, in_reward):
        if not c.read(switch) or (switch, weight, kind) != chosen or not c.read(weight):
            c.idle("this penalty is off" if not c.read(switch) else "one penalty here, loss or reward", switch, weight, kind)
            continue
        c.put("algorithm.kl.coefficient", c.read(weight), weight)
        c.put("algorithm.kl.where", "reward" if chosen is in_reward else "loss", switch)
        if c.word(kind) in estimators:
            c.put("algorithm.kl.estimator", estimators[c.read(kind)], kind)
        else:
            c.left[kind] = f"{c.read(kind)} is no estimator here: k1, k2, k3, k3_plus"
    if c.read("algorithm.kl_ctrl.type") == "adaptive" and chosen is in_reward and c.read(in_reward[0]):
        c.copy(*adaptive)
    else:
        c.idle("the coefficient is fixed", *adaptive)


def _verl_machines(c: Conversion) -> None:
    gpus = value_of(c.read("trainer.nnodes")), value_of(c.read("trainer.n_gpus_per_node"))
    names, engine = ("trainer.nnodes", "trainer.n_gpus_per_node"), c.read("rollout.name")
    if all(isinstance(n, int) and n > 0 for n in gpus):
        together, each = math.prod(gpus), c.number("rollout.tensor_model_parallel_size", 1)
        c.put("actor.backend", f"fsdp:d{together}", *names, how="all GPUs; the result does not depend on it")
        if engine in ("vllm", "sglang") and isinstance(each, int):
            layout = f"{engine}:d{max(1, together // each)}t{each}"
            c.put("rollout.backend", layout, "rollout.name", "rollout.tensor_model_parallel_size")
