"""Registries of functions: name → function with its record, and the inputs that each kind of function may have.

A function's positional parameters name its tensors, any subset of the ``inputs`` of its registry; its keyword-only
parameters are its knobs. The caller reads the signature and passes the tensors by name and the knobs from the configuration.
An algorithm that needs another subset of tensors therefore needs no change of the caller.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar

from tandem.config.errors import nearest_names
from tandem.config.parts import PARTS, PartRecord

F = TypeVar("F", bound=Callable[..., Any])


class UnknownName(ValueError):
    """No function of that name is registered."""


class WrongSignature(ValueError):
    """A function has a parameter that its kind has no tensor for, or its knobs differ from its record."""


class Registry(Generic[F]):
    """The functions of one kind, by name.

    Example::

        @POLICY_LOSSES.register("mine", knobs={"strength": KnobRule(low=0.0, meaning="Factor.")}, proportional=True)
        def mine(policy, advantages, mask, *, strength=1.0):
            "L_t = −strength·A·policy."

    A function in a user's file, ``my_file.py:mine``, is not registered, but may be decorated with `describe`, which takes
    the same arguments without the name.
    """

    def __init__(self, kind: str, inputs: Mapping[str, str], key: str = ""):
        """``kind``: name of the kind, for messages. ``inputs``: name of a tensor that functions may take → its shape and
        meaning. ``key``: the entry of `PARTS` that gets the records; empty if the configuration names no such function."""
        self.kind, self.inputs, self.key = kind, inputs, key
        self._parts = PARTS[key] if key else {}
        self._functions: dict[str, F] = {}

    def register(self, name: str, *sources: str, **facts: Any) -> Callable[[F], F]:
        """Registers the decorated function under ``name``, with its record: see `describe`.

        Raises:
            ValueError: the name is registered already.
            WrongSignature: see `describe`.
        """

        def put(function: F) -> F:
            if name in self._functions:
                raise ValueError(f"a {self.kind} called {name!r} is registered already")
            self._functions[name] = self.describe(*sources, **facts)(function)
            self._parts[name] = self.part_of(function)
            return function

        return put

    def describe(self, *sources: str, **facts: Any) -> Callable[[F], F]:
        """Attaches a record to the decorated function. ``sources``: arXiv numbers. ``facts``: further fields of
        `PartRecord`. The function's signature and docstring give the others; the first paragraph of the docstring is the
        formula.

        Raises:
            WrongSignature: a parameter is not an input of this kind, or the knobs differ from those of the record.
        """
        part = PartRecord(sources=sources, **facts)

        def attach(function: F) -> F:
            defaults = {name: None if default is REQUIRED else default for name, default in knobs_of(function).items()}
            for name in sorted(defaults.keys() ^ part.knobs.keys()):
                has, lacks = ("record", "signature") if name in part.knobs else ("signature", "record")
                raise WrongSignature(f"{self.kind} {function.__name__}: its {has} has a knob {name!r}, its {lacks} does not")
            knobs = {name: replace(rule, default=defaults[name]) for name, rule in part.knobs.items()}
            formula = " ".join((function.__doc__ or "").partition("\n\n")[0].split()).removesuffix(".")
            full = replace(part, formula=formula, knobs=knobs, asks=self.inputs_of(function))
            function.part = full  # type: ignore[attr-defined]
            return function

        return attach

    def part_of(self, function: Callable[..., Any]) -> PartRecord:
        """Returns the record of a function; if it has none, a record with only the tensors of its signature."""
        return getattr(function, "part", None) or PartRecord(asks=self.inputs_of(function))

    def get(self, name: str) -> F:
        """Returns the function of that name.

        Raises:
            UnknownName: there is none; the message has the nearest name and all names.
        """
        if name not in self._functions:
            raise UnknownName(f"no {self.kind} is called {name!r}; {nearest_names(name, self)}")
        return self._functions[name]

    def inputs_of(self, function: Callable[..., Any]) -> tuple[str, ...]:
        """Returns the names of the inputs that a function takes.

        Raises:
            WrongSignature: a positional parameter is not an input of this kind, and has no default.
        """
        names = []
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
                continue
            if name in self.inputs:
                names.append(name)
            elif parameter.default is parameter.empty:
                raise WrongSignature(
                    f"{self.kind} {function.__name__} asks for {name!r}; it may ask for {', '.join(self.inputs)}, "
                    "and its knobs must come after a *"
                )
        return tuple(names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)


REQUIRED = object()


def own_knobs(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the keyword-only parameters of a function and their defaults; `REQUIRED` if a parameter has none."""
    return {
        name: REQUIRED if parameter.default is parameter.empty else parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }


def knobs_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the knobs of a function and of its preparation, with their defaults."""
    before = preparation_of(function)
    return own_knobs(function) | ({} if before is None else own_knobs(before))


Function = Callable[..., Any]


def prepared_by(before: Function) -> Callable[[F], F]:
    """Decorates a policy loss: ``before`` is called once per batch, and the loss may take its result as `prepared`.

    A choice of tokens (the largest, the most certain) made by ``before`` does not depend on the cut into micro-batches.

    Raises:
        WrongSignature: ``before`` takes a tensor that is not known before the update.
    """
    PREPARATIONS.inputs_of(before)

    def attach(loss: F) -> F:
        loss.preparation = before  # type: ignore[attr-defined]
        return loss

    return attach


def preparation_of(loss: Function) -> Function | None:
    """Returns the preparation that `prepared_by` attached, or None."""
    return getattr(loss, "preparation", None)


PER_SAMPLE = {
    "rewards": "[M] float, one for each sample, shaped",
    "group_id": "[M] int, the prompt's group",
    "in_statistics": "[M] bool, the sample enters the statistics of the group and of the batch",
    "lengths": "[M] int, trained tokens of the sample, all trajectories together",
}

PER_TOKEN = {
    "mask": "[T] bool, trained tokens",
    "sequence": "[T] int, the trajectory that the token belongs to, ascending",
}

ADVANTAGES: Registry[Function] = Registry(
    "advantage",
    PER_SAMPLE
    | PER_TOKEN
    | {
        "named_rewards": "name → [M] float, the parts of the reward, before shaping; NaN where a sample has none",
        "greedy": "[M] bool, the group's greedy sample, a baseline that is not trained on",
        "sample": "[T] int, the row in [M] of the token's sample",
        "token_rewards": "[T] float, reward earned after the token; the sample's reward is at its last trained token",
        "values": "[T] float, value by the critic before the token",
        "bootstrap_value": "[N] float, value by the critic after the trajectory's last token",
        "cut": "[N] bool, the length limit cut the trajectory off, according to its stop reason",
    },
    "advantage",
)
"""Advantages per sample, → ``[M]``. If the function takes a tensor of `TOKEN_LEVEL`, advantages per token: → ``[T]`` or
``(advantages, returns)``, ``[T]`` each. A function that takes `values` must return both."""

TOKEN_LEVEL = ("token_rewards", "values")

POLICY_LOSSES: Registry[Function] = Registry(
    "policy loss",
    PER_TOKEN
    | {
        "policy": "[T] log-probabilities under the weights that are optimised; has the gradient",
        "proximal": "[T] log-probabilities just before this update; the detached `policy` if a batch has one optimizer step",
        "rollout": "[T] log-probabilities by the inference engine",
        "advantages": "[T]",
        "sample_lengths": "[T] int, trained tokens of the token's sample, all trajectories together",
        "prepared": "[T] what the function of `prepared_by` returned for the whole batch",
    },
    "policy_loss",
)
"""Policy losses, → losses ``[T]`` and detached metrics ``{name: [T]}``, both 0 outside the mask. A metric ``dropped`` is 1
at the tokens that the loss itself leaves out."""

_BEFORE = {
    "mask": "[T] bool, trained tokens of samples in the loss",
    "sequence": "[T] int, the trajectory that the token belongs to, ascending",
    "proximal": "[T] log-probabilities just before this update",
    "rollout": "[T] log-probabilities by the inference engine",
    "advantages": "[T]",
    "entropy": "[T] of the proximal policy",
    "noise": "[T] float in [0, 1), pseudorandom numbers that depend on the step and on the ids of group, sample and tokens",
}

PREPARATIONS: Registry[Function] = Registry("preparation", _BEFORE)
"""Preparations of policy losses, → ``[T]`` for the whole batch. They are not registered by name: `prepared_by` attaches one
to a loss."""

TOKEN_FILTERS: Registry[Function] = Registry("token filter", _BEFORE, "token_filter")
"""Token filters, → a mask ``[T]`` bool of the tokens to train on, for the whole batch. All other tokens get weight 0 and
stay in the denominators."""

AGGREGATIONS: Registry[Function] = Registry(
    "aggregation",
    {
        "mask": "[T] bool, tokens that count in denominators",
        "sample": "[T] int, the sample that the token belongs to",
    },
    "aggregation",
)
"""Aggregations, → weight of each token's loss ``[T]``, 0 outside the mask."""

SHAPING: Registry[Function] = Registry(
    "shaping",
    PER_SAMPLE | {"truncated": "[M] bool, the length limit cut the sample off", "accuracy": "[M] float, NaN where unknown"},
    "shaping",
)
"""Reward shaping, → new rewards ``[M]``, or a pair of new rewards and a mask ``[M]`` bool. Samples outside the mask get
weight 0."""

FILTERS: Registry[Function] = Registry(
    "filter",
    {
        "accuracies": "G floats, None where unknown",
        "rewards": "G floats, before shaping",
    },
    "filter",
)
"""Filters, → a pair: True if the group is trained on, and otherwise the reason, under which metrics count the group."""

_LOG_PROBABILITIES = {
    "policy": "[T], detached",
    "proximal": "[T]",
    "rollout": "[T]",
    "advantages": "[T]",
}

IMPORTANCE_WEIGHTS: Registry[Function] = Registry(
    "correction weight", {"ratio": "[T], exp(proximal − rollout)"}, "correction.weight"
)
"""Importance weights of behaviour correction, → ``[T]``."""

REJECTIONS: Registry[Function] = Registry("rejection rule", PER_TOKEN | _LOG_PROBABILITIES, "correction.reject")
"""Rules that drop tokens, → a mask ``[T]`` bool of the tokens that are kept."""

KL: Registry[Function] = Registry(
    "KL estimator",
    {
        "policy": "[T]",
        "reference": "[T] log-probabilities by the frozen reference",
        "mask": "[T] bool",
        "ratio": "[T] exp(policy − rollout), has a gradient; 1 where tokens are not reweighted",
    },
    "kl.estimator",
)
"""KL estimators, → ``[T]``, 0 outside the mask."""
