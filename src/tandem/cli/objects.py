"""Training as an object or a function, for a script or a notebook: what the commands do, on what is in memory.

Rows, functions and models are written beside the run, and the run reads these files: so it is the run that a command would
make, it resumes, and its workers load the same functions under the same deadlines.
"""

import base64
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from tandem.cli.training import TRAINING
from tandem.config.backend import parse_layout
from tandem.config.errors import ConfigError
from tandem.config.load import load_config
from tandem.lifecycle.summary import Summary
from tandem.state.existing import existing_run
from tandem.state.run_folder import run_path

Reward = str | Callable[..., Any]

INPUTS = ".inputs"
"""The end of the folder's name beside the run, with what was in memory."""


def train(
    file: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    command: str = "train",
    override: bool = False,
    until: int | None = None,
) -> Summary:
    """``tandem train FILE key=value…`` as a function. A run that was cut off in the same folder goes on.

    Args:
        file: the YAML file; None takes the defaults.
        overrides: keys and values, as ``{"actor.optimizer.lr": 2e-5}`` or nested.
        command: `train`, `sft`, `preference`, `reward` or `distill`.
        override: go on also where the learning rate, lengths or counts have changed.
        until: the step after which it stops, to go on some other time.

    Raises:
        ConfigError: anything about the configuration or the rows, before the model is loaded.
        TandemError: what ended the run.
    """
    kind = TRAINING[command]
    items = _items(dict(flat(overrides or {})))
    resolved = load_config(kind.config, file, items)
    config = resolved.config
    if parse_layout(config.actor.backend).ranks == 1 and not config.recover.max_restarts:
        how: dict[str, Any] = {"override": True} if override else {}
        done: Summary = importlib.import_module(kind.loop).train(resolved, until=until, **how)
        return done
    words = [*([str(file)] if file else []), *items, *(["--override"] if override else [])]
    words += [f"--until={until}"] if until else []
    code = subprocess.run([sys.executable, "-P", "-m", "tandem", command, *words], check=False).returncode
    folder = run_path(config.run.root, config.experiment_name, config.trial_name)
    found = existing_run(folder)
    if code or found is None:
        raise ConfigError(f"tandem {command} ended with exit status {code}; its words are above, and in {folder}/log.txt")
    checkpoint = folder / "checkpoints" / found.checkpoints[-1] if found.checkpoints else None
    return Summary(folder, found.steps, found.metrics, checkpoint)


def flat(keys: Mapping[str, Any], before: str = "") -> Iterable[tuple[str, Any]]:
    """Keys with dots and their values."""
    for name, value in keys.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


class Trainer:
    """A run from what is in memory."""

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
        """The configuration is checked here; nothing is loaded.

        Args:
            model: a folder, a name, or a model of transformers; None takes the configuration's.
            train_dataset: rows: a list of dicts, a `datasets.Dataset`, or what the key ``train_dataset.path`` takes.
            eval_dataset: rows to validate on, alike.
            processing_class: the tokenizer of a model that was given as an object; None loads the one of its name.
            options: any keys of the configuration, with dots or nested, as ``{"actor.optimizer.lr": 2e-5}``.
            keys: keys of the first level: ``total_train_steps=20``, ``gconfig={"n_samples": 4}``.

        Raises:
            ConfigError: a key, a value, rows or a function that cannot be taken, with the remedy.
        """
        self.options: dict[str, Any] = dict(flat({**(options or {}), **keys}))
        usual = TRAINING[self.command].config()
        place = (usual.run.root, usual.experiment_name, usual.trial_name)
        names = ("run.root", "experiment_name", "trial_name")
        root, experiment, trial = (str(self.options.get(name, own)) for name, own in zip(names, place, strict=True))
        self._inputs = run_path(root, experiment, trial + INPUTS)
        if model is not None:
            self.options["actor.path"] = model if isinstance(model, str | Path) else self._saved(model, processing_class)
        for name, rows in (("train_dataset", train_dataset), ("valid_dataset", eval_dataset)):
            if rows is not None:
                self.options[f"{name}.path"] = rows if isinstance(rows, str | Path) else self._rows(name, rows)
        self.summary: Summary | None = None

    def train(self, *, override: bool = False, until: int | None = None) -> Summary:
        """Trains, or goes on with the run of this name; see `tandem.train`."""
        self.summary = train(None, self.options, command=self.command, override=override, until=until)
        return self.summary

    @property
    def model(self) -> Any:
        """The trained model, loaded anew: a model of transformers. Raises `ConfigError` where none was saved."""
        import transformers  # noqa: PLC0415 — takes seconds to import

        if self.summary is None or self.summary.checkpoint is None:
            raise ConfigError("there is no checkpoint: call train() first, and leave checkpoint.at_end as it is")
        architecture = transformers.AutoConfig.from_pretrained(self.summary.checkpoint).architectures[0]
        return getattr(transformers, architecture).from_pretrained(self.summary.checkpoint)

    def _saved(self, model: Any, tokenizer: Any) -> str:
        from transformers import AutoTokenizer  # noqa: PLC0415

        folder = self._inputs / "model"
        model.save_pretrained(folder)
        (tokenizer or AutoTokenizer.from_pretrained(model.config._name_or_path)).save_pretrained(folder)
        return str(folder)

    def _rows(self, name: str, rows: Iterable[Mapping[str, Any]]) -> str:
        lines = []
        for number, row in enumerate(rows):
            try:
                lines.append(json.dumps(dict(row), ensure_ascii=False) + "\n")
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{name}: row {number} cannot be written as JSON: {error}") from error
        return str(_written(self._inputs / f"{name}.jsonl", "".join(lines)))

    def _function(self, function: Any, taken: set[str]) -> str:
        """The spelling of a function: a file that holds it as it is, closures and all."""
        name = getattr(function, "__name__", type(function).__name__).replace("<lambda>", "reward")
        if name in taken or not name.isidentifier():
            raise ConfigError(f"reward_funcs: two have the name {name}, or it is none; it names the metric")
        taken.add(name)
        try:
            pickled = base64.b64encode(cloudpickle.dumps(function)).decode()
        except Exception as error:  # boundary: whatever the user's function holds
            raise ConfigError(
                f"reward_funcs: {name} cannot be sent to the processes that rewards run in: {error}; create what it "
                "holds inside of it, or put it into a file and give 'my_file.py:name'"
            ) from error
        text = f"""# {name}, as it was given to {type(self).__name__}; written anew by each start.
import base64, pickle, sys

sys.path += [folder for folder in {sys.path!r} if folder not in sys.path]
{name} = pickle.loads(base64.b64decode({pickled!r}))
"""
        return f"{_written(self._inputs / f'{name}.py', text)}:{name}"


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
        reward_funcs: Reward | Sequence[Reward] = (),
        *,
        reward_weights: Sequence[float] | None = None,
        **more: Any,
    ):
        """``reward_funcs``: functions in Tandem's signature, TRL's or verl's, or what the key ``reward`` takes; several are
        added up, with ``reward_weights``. The rest: see `Trainer`."""
        super().__init__(model, **more)
        rewards = [reward_funcs] if isinstance(reward_funcs, str) or callable(reward_funcs) else list(reward_funcs)
        weights = [1.0] * len(rewards) if reward_weights is None else list(reward_weights)
        if len(weights) != len(rewards):
            raise ConfigError(f"there are {len(rewards)} reward_funcs and {len(weights)} reward_weights")
        taken: set[str] = set()
        texts = [one if isinstance(one, str) else self._function(one, taken) for one in rewards]
        if texts:
            terms = (text if weight == 1 else f"{weight!r}*{text}" for text, weight in zip(texts, weights, strict=True))
            self.options["reward"] = " + ".join(terms)
        load_config(TRAINING[self.command].config, None, _items(self.options))


class SFTTrainer(Trainer):
    """Supervised fine-tuning: ``SFTTrainer("smollm2-135m", train_dataset=rows).train()``."""

    command = "sft"


class DPOTrainer(Trainer):
    """Learning from pairs of answers, with DPO or another ``loss``: rows have ``prompt``, ``chosen`` and ``rejected``."""

    command = "preference"


class RewardTrainer(Trainer):
    """A reward model from pairs of answers."""

    command = "reward"


def _items(options: Mapping[str, Any]) -> list[str]:
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in options.items()]


def _written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return path.absolute()
