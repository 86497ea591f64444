"""Training as an object or a function, for a script or a notebook, with rows, functions and models that are in memory.

The rows, functions and models are written into files beside the run folder, and the run reads these files. So the run works
like one that a command started: it can be resumed, and its workers load the functions and apply the same deadlines.
"""

import base64
import contextlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import yaml

from tandem.api.failures import RankFailed
from tandem.api.plugins import forget
from tandem.cli.main import import_object
from tandem.cli.running import TRAINING
from tandem.config.arithmetic import folder_of, run_path, trainer_ranks
from tandem.config.errors import ConfigError, nearest_names
from tandem.config.experiment import TrainConfig
from tandem.config.keys import flat
from tandem.config.load import load_config
from tandem.config.terms import read_terms
from tandem.state.existing import existing_run, is_held
from tandem.state.resuming import pinned, pins
from tandem.trainers.loop import Summary

LOAD_S = 300.0
"""Longest time to load a function and the libraries that it imports, in seconds."""

INPUTS = ".inputs"
"""Suffix of the folder beside the run folder that holds the rows, functions and models from memory."""


def train(
    file: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    command: str = "train",
    override: bool = False,
    until: int | None = None,
) -> Summary:
    """Trains like ``tandem train FILE key=value…``. An interrupted run in the same folder is continued.

    Args:
        file: the YAML file; None takes the defaults.
        overrides: keys and values, as ``{"actor.optimizer.lr": 2e-5}`` or nested.
        command: `train`, `sft`, `preference`, `reward` or `distill`.
        override: continue the run even if the learning rate, lengths or counts have changed.
        until: the step after which training stops; a later call without it continues the run.

    Raises:
        ConfigError: the configuration or the rows are invalid; raised before the model is loaded.
        TandemError: the run failed.
    """
    if command not in TRAINING:
        raise ConfigError(f"there is no command {command!r}; {nearest_names(command, TRAINING)}")
    if not isinstance(file, str | Path | None):
        raise ConfigError(
            f"file is of type {type(file).__name__}; give the name of a YAML file, and values as overrides={{…}}"
        )
    if until is not None and until < 1:
        raise ConfigError(f"until={until}: the first step is 1")
    kind, items = TRAINING[command], items_of(dict(flat(_keys("overrides", overrides))))
    resolved = pinned(load_config(kind.config, file, items))
    config = resolved.config
    if trainer_ranks(config) == 1 and not config.recover.max_restarts:
        options: dict[str, Any] = {"override": True} if override else {}
        summary: Summary = import_object(kind.loop).train(resolved, until=until, **options)
        return summary
    words = [*([str(file)] if file else []), *items, *pins(resolved), *(["--override"] if override else [])]
    words += [f"--until={until}"] if until else []
    code = subprocess.run([sys.executable, "-P", "-m", "tandem", command, *words], check=False).returncode
    folder = folder_of(config)
    run = existing_run(folder)
    if code or run is None:
        raise RankFailed(f"tandem {command} ended with exit status {code}; its messages are above, and in {folder}/log.txt")
    return Summary(folder, run.steps, run.metrics, _checkpoint(folder))


def _checkpoint(folder: Path) -> Path | None:
    """Returns the folder of a run's newest checkpoint, or `None`."""
    run = existing_run(folder)
    return folder / "checkpoints" / run.checkpoints[-1] if run is not None and run.checkpoints else None


def _keys(name: str, keys: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Checks that the argument ``name`` is a dict of keys and returns it; `None` counts as empty. Raises `ConfigError`."""
    if not isinstance(keys or {}, Mapping):
        raise ConfigError(f'{name} is of type {type(keys).__name__}; give a dict, as {{"actor.optimizer.lr": 2e-5}}')
    return keys or {}


class Trainer:
    """A training run with rows, functions and a model from memory."""

    command = "train"

    def __init__(
        self,
        model: Any = None,
        *,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        options: Mapping[str, Any] | None = None,
        **keys: Any,
    ):
        """Checks the configuration, and loads nothing yet.

        Args:
            model: a folder, a name, or a model object of transformers; None takes `actor.path` of the configuration.
            train_dataset: rows as a list of dicts or a `datasets.Dataset`, or a value of the key ``train_dataset.path``.
            eval_dataset: rows for validation, in the same forms.
            processing_class: the tokenizer of a model object; None loads the tokenizer from the name in the model's config.
            options: any keys of the configuration, with dots or nested, as ``{"actor.optimizer.lr": 2e-5}``.
            keys: keys of the first level: ``total_train_steps=20``, ``gconfig={"n_samples": 4}``.

        Raises:
            ConfigError: a key, a value, the rows or a function is invalid; the message says what to do.
        """
        self.options: dict[str, Any] = {**dict(flat(_keys("options", options))), **dict(flat(keys))}
        usual = TRAINING[self.command].config()
        place = {"run.root": usual.run.root, "experiment_name": usual.experiment_name, "trial_name": usual.trial_name}
        root, experiment, trial = (str(self.options.get(name, default)) for name, default in place.items())
        self._folder = run_path(root, experiment, trial)
        self._inputs = self._folder.with_name(trial + INPUTS).absolute()
        self._files: dict[Path, str] = {}
        self._saved: tuple[Any, Any] | None = None
        if processing_class is not None and (model is None or isinstance(model, str | Path)):
            raise ConfigError(
                "processing_class is only for a model object. For a folder or a name, the tokenizer is loaded from there: "
                "leave processing_class out"
            )
        if isinstance(model, str | Path):
            self.options["actor.path"] = model
        elif model is not None:
            if not hasattr(model, "save_pretrained"):
                raise ConfigError(
                    f"model is of type {type(model).__name__}; give a folder, a name, or a model of transformers"
                )
            self._saved = model, processing_class or _tokenizer_of(model)
            self.options["actor.path"] = self._inputs / "model"
        for name, rows in (("train_dataset", train_dataset), ("valid_dataset", eval_dataset)):
            if rows is not None:
                self.options[f"{name}.path"] = rows if isinstance(rows, str | Path) else self._rows(name, rows)
        self._rewards()
        load_config(TRAINING[self.command].config, None, items_of(self.options))

    def _rewards(self) -> None:
        """Sets the option ``reward`` in trainers that have reward functions."""

    def train(self, *, override: bool = False, until: int | None = None) -> Summary:
        """Trains, or continues the run of this name. For arguments and errors see `tandem.train`."""
        if not is_held(self._folder):  # otherwise the running process may read these files, and `train` refuses this run
            for path, text in self._files.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, "utf-8")
            if self._saved is not None:
                for part in self._saved:
                    part.save_pretrained(self._inputs / "model")
            for path in (path for path in self._files if path.suffix == ".py"):
                forget(path)
                _check_loads(path)
        return train(None, self.options, command=self.command, override=override, until=until)

    @property
    def model(self) -> Any:
        """Loads the newest checkpoint as a model of transformers, anew at each access.

        Raises:
            ConfigError: there is no checkpoint.
        """
        import transformers  # noqa: PLC0415 — takes seconds to import

        checkpoint = _checkpoint(self._folder)
        if checkpoint is None:
            raise ConfigError("there is no checkpoint: call train() first, and leave checkpoint.at_end as it is")
        architecture = transformers.AutoConfig.from_pretrained(checkpoint).architectures[0]
        kind = getattr(transformers, architecture, transformers.AutoModelForCausalLM)  # if it is a user's own
        return kind.from_pretrained(checkpoint)

    def _rows(self, name: str, rows: Any) -> Path:
        if hasattr(rows, "iterrows"):
            raise ConfigError(f"{name} is a DataFrame; give a list of dicts, one for each row: df.to_dict('records')")
        if not isinstance(rows, Iterable):
            raise ConfigError(f"{name} is of type {type(rows).__name__}; give a list of dicts, one for each row")
        lines = []
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise ConfigError(
                    f"{name}: row {number} is of type {type(row).__name__}; give a list of dicts, one for each row"
                )
            try:
                lines.append(json.dumps(dict(row)) + "\n")
            except (TypeError, ValueError) as error:
                column = next(column for column, value in row.items() if not _is_plain(value))
                raise ConfigError(f"{name}: {column!r} of row {number} cannot be written as JSON: {error}") from error
        if not lines:
            raise ConfigError(f"{name} has no rows; give a list of dicts, one for each row")
        return self._file(f"{name}.jsonl", "".join(lines))

    def _file(self, name: str, text: str) -> Path:
        self._files[self._inputs / name] = text
        return self._inputs / name

    def _function(self, function: Any, names: set[str]) -> str:
        """Prepares a file that holds the pickled function with its closures, and returns the reward spec `file.py:name`."""
        base = getattr(function, "__name__", type(function).__name__).replace("<lambda>", "reward")
        numbered = (f"{base}_{number}" for number in itertools.count(2))
        name = next(candidate for candidate in itertools.chain([base], numbered) if candidate not in names)
        names.add(name)
        try:
            pickled = base64.b64encode(cloudpickle.dumps(function)).decode()
        except Exception as error:  # boundary: pickling calls code of the objects that the user's function refers to
            raise ConfigError(
                f"reward_funcs: {name} cannot be sent to the processes that rewards run in: {error}; create the objects "
                "that it uses inside the function, or put it into a file and give 'my_file.py:name'"
            ) from error
        text = f"""# {name}, as it was given to {type(self).__name__}; written anew by each start.
import base64, pickle, sys

sys.path += [folder for folder in {sys.path!r} if folder not in sys.path]
{name} = pickle.loads(base64.b64decode({pickled!r}))
"""
        return f"{self._file(f'{name}.py', text)}:{name}"


class GRPOTrainer(Trainer):
    """Reinforcement learning with GRPO, or another algorithm: ``algorithm="dapo"``.

    Example::

        from tandem import GRPOTrainer


        def brief(completion, answer):
            return float(answer in completion) - 0.01 * len(completion)


        trainer = GRPOTrainer("smollm2-135m", brief, train_dataset=rows, total_train_steps=20)
        trainer.train()
        trainer.model.save_pretrained("trained")
    """

    def __init__(
        self,
        model: Any = None,
        reward_funcs: Any = None,
        *,
        reward_weights: Sequence[float] | None = None,
        **more: Any,
    ):
        """Checks the configuration, and loads nothing yet.

        Args:
            model: see `Trainer`, also for ``more``.
            reward_funcs: a function with Tandem's, TRL's or verl's signature, or a value of the key ``reward``. Several, in
                a list, are added up.
            reward_weights: one weight for each of ``reward_funcs``; None: 1 each.
        """
        is_single = isinstance(reward_funcs, str) or not isinstance(reward_funcs, list | tuple)
        self._functions = [] if reward_funcs is None else [reward_funcs] if is_single else list(reward_funcs)
        if not is_single and not self._functions:
            raise ConfigError("reward_funcs is empty; give a function, or leave it out for the configuration's reward")
        try:
            self._weights = [1.0] * len(self._functions) if reward_weights is None else [float(x) for x in reward_weights]
        except (TypeError, ValueError) as error:
            raise ConfigError(f"reward_weights={reward_weights!r} must be a list of numbers: {error}") from None
        if len(self._weights) != len(self._functions):
            raise ConfigError(f"there are {len(self._functions)} reward_funcs and {len(self._weights)} reward_weights")
        super().__init__(model, **more)

    def _rewards(self) -> None:
        names: set[str] = set()
        for function in self._functions:
            if not isinstance(function, str) and not callable(function):
                raise ConfigError(f"reward_funcs: {function!r:.80} is neither a function nor a text such as 'math'")
        texts = [function if isinstance(function, str) else self._function(function, names) for function in self._functions]
        terms = [text if weight == 1 else f"{weight!r}*{text}" for text, weight in zip(texts, self._weights, strict=True)]
        if terms:
            self.options["reward"] = " + ".join(terms)
            read_terms(self.options["reward"])
        elif not any(key.partition(".")[0] == "reward" for key in self.options):
            print(f"No reward_funcs: the reward is {TrainConfig().reward!r}, the default, unless a data set brings its own.")


class SFTTrainer(Trainer):
    """Supervised fine-tuning: ``SFTTrainer("smollm2-135m", train_dataset=rows).train()``."""

    command = "sft"


class DPOTrainer(Trainer):
    """Learning from pairs of answers, with DPO or another ``loss``. Rows have ``prompt``, ``chosen`` and ``rejected``."""

    command = "preference"


class RewardTrainer(Trainer):
    """Trains a reward model on pairs of answers."""

    command = "reward"


def items_of(options: Mapping[str, Any]) -> list[str]:
    """Writes options as ``key=value`` arguments of a command line."""
    return [f"{key}={_text(key, value)}" for key, value in options.items()]


def _text(key: str, value: Any) -> str:
    """Writes a value as YAML. A text is quoted if YAML would read it as another type, such as ``null``.

    Raises:
        ConfigError: the value cannot be written as YAML.
    """
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, str):
        with contextlib.suppress(yaml.YAMLError):
            if yaml.safe_load(value) == value:
                return value
        return json.dumps(value)
    try:
        return json.dumps(value, default=lambda number: number.item())  # numbers of numpy
    except (TypeError, ValueError, AttributeError):
        raise ConfigError(f"{key}: a {type(value).__name__} cannot be a configuration value: {value!r:.80}") from None


def _tokenizer_of(model: Any) -> Any:
    from transformers import AutoTokenizer  # noqa: PLC0415 — takes seconds to import

    name = getattr(getattr(model, "config", None), "_name_or_path", "")
    if not name:
        raise ConfigError("the model's config does not name its source: give its tokenizer as processing_class=…")
    return AutoTokenizer.from_pretrained(name)


def _is_plain(value: Any) -> bool:
    """True if a value can be written as JSON."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _check_loads(path: Path) -> None:
    """Raises `ConfigError` if a new process cannot load the function, because the processes that rewards run in must."""
    try:
        process = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False, timeout=LOAD_S)
        message = process.stderr.strip().rpartition("\n")[2] or f"the process ended with exit status {process.returncode}"
        why = message if process.returncode else ""
    except subprocess.TimeoutExpired:
        why = f"it took longer than {LOAD_S:g} s"
    if why:
        raise ConfigError(
            f"reward_funcs: {path.stem} cannot be loaded in the processes that rewards run in: {why}; put it into a file "
            "and give 'my_file.py:name'"
        )
