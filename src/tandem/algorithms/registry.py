"""Functions by name, each with its record, and what each kind of function may ask for.

A function names its tensors as positional parameters, any subset of its registry's ``inputs``, and its knobs as keyword-only
parameters. Whoever calls it reads the signature, gives the tensors by name and the knobs from the configuration; so a later
algorithm that needs one more tensor is one more function.
"""

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
    """A function asks for a tensor that its kind is not given, or has another knob than its record."""


class Registry(Generic[F]):
    """Functions of one kind.

    Example::

        @POLICY_LOSSES.register("mine", knobs={"strength": KnobRule(low=0.0, meaning="Factor.")}, proportional=True)
        def mine(policy, advantages, mask, *, strength=1.0):
            "L_t = −strength·A·policy."

    A function in a file of the user's, ``my_file.py:mine``, gets its record from ``describe``, with the same arguments but
    for the name.
    """

    def __init__(self, kind: str, inputs: Mapping[str, str], key: str = ""):
        """``kind``: for messages. ``inputs``: tensors that a function may ask for, with their shape and meaning. ``key``:
        where records go, one of `PARTS`; empty if the configuration names no function of this kind."""
        self.kind, self.inputs, self.key = kind, inputs, key
        self._parts = PARTS[key] if key else {}
        self._functions: dict[str, F] = {}

    def register(self, name: str, *sources: str, **facts: Any) -> Callable[[F], F]:
        """Registers the decorated function with its record: see `describe`.

        Raises:
            ValueError: the name is taken.
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
        """Gives the decorated function its record, and no name. ``sources``: arXiv numbers. ``facts``: further fields of
        `PartRecord`; its signature gives the others, and the first paragraph of its docstring is the formula.

        Raises:
            WrongSignature: it asks for an input that this kind is not given, or has not the knobs that the record says.
        """
        part = PartRecord(sources=sources, **facts)

        def attach(function: F) -> F:
            own = {name: None if default is REQUIRED else default for name, default in knobs_of(function).items()}
            for name in sorted(own.keys() ^ part.knobs.keys()):
                has, lacks = ("record", "signature") if name in part.knobs else ("signature", "record")
                raise WrongSignature(f"{self.kind} {function.__name__}: its {has} has a knob {name!r}, its {lacks} has none")
            knobs = {name: replace(rule, default=own[name]) for name, rule in part.knobs.items()}
            formula = " ".join((function.__doc__ or "").partition("\n\n")[0].split()).removesuffix(".")
            full = replace(part, formula=formula, knobs=knobs, asks=self.asked(function))
            function.part = full  # type: ignore[attr-defined]
            return function

        return attach

    def part_of(self, function: Callable[..., Any]) -> PartRecord:
        """The record of a function; of one without a record, what its signature says."""
        return getattr(function, "part", None) or PartRecord(asks=self.asked(function))

    def get(self, name: str) -> F:
        """The function of that name.

        Raises:
            UnknownName: names the nearest one and those that there are.
        """
        if name not in self._functions:
            raise UnknownName(f"no {self.kind} is called {name!r}; {nearest_names(name, self)}")
        return self._functions[name]

    def asked(self, function: Callable[..., Any]) -> tuple[str, ...]:
        """Names of the inputs that a function asks for.

        Raises:
            WrongSignature: one of them is none of this kind's, and has no default.
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
                    "and has its knobs behind a *"
                )
        return tuple(names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)


REQUIRED = object()


def own_knobs(function: Callable[..., Any]) -> dict[str, Any]:
    """Keyword-only parameters of a function and their defaults; `REQUIRED` where it has none."""
    return {
        name: REQUIRED if parameter.default is parameter.empty else parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }


def knobs_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Knobs of a function and of its preparation."""
    before = preparation_of(function)
    return own_knobs(function) | ({} if before is None else own_knobs(before))


Function = Callable[..., Any]


def prepared_by(before: Function) -> Callable[[F], F]:
    """Marks a policy loss: ``before`` is called once for the whole batch, and the loss may ask for its result, `prepared`.

    So a choice of tokens (the largest, the most certain) does not depend on how a batch is cut into micro-batches.

    Raises:
        WrongSignature: it asks for a tensor that is not known before the update.
    """
    PREPARATIONS.asked(before)

    def attach(loss: F) -> F:
        loss.preparation = before  # type: ignore[attr-defined]
        return loss

    return attach


def preparation_of(loss: Function) -> Function | None:
    """The preparation that `prepared_by` attached."""
    return getattr(loss, "preparation", None)


PER_SAMPLE = {
    "rewards": "[M] float, one for each sample, shaped",
    "group_id": "[M] int, the prompt's group",
    "in_statistics": "[M] bool, enters the statistics of the group and of the batch",
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
        "token_rewards": "[T] float, earned after the token; the sample's reward on its last trained one",
        "values": "[T] float, of the critic, before the token",
        "bootstrap_value": "[N] float, of the critic, after the trajectory's last token",
        "cut": "[N] bool, the trajectory was ended by its length, by its stop reason",
    },
    "advantage",
)
"""Sample level, → ``[M]``; or, where a tensor of `TOKEN_LEVEL` is asked for, token level, → ``[T]`` or
``(advantages, returns)``, ``[T]`` each; always both with `values`."""

TOKEN_LEVEL = ("token_rewards", "values")

POLICY_LOSSES: Registry[Function] = Registry(
    "policy loss",
    PER_TOKEN
    | {
        "policy": "[T] log-probabilities under the weights that are optimised; has the gradient",
        "proximal": "[T] log-probabilities just before this update, or `policy` detached where there is one step",
        "rollout": "[T] log-probabilities by the inference engine",
        "advantages": "[T]",
        "sample_lengths": "[T] int, trained tokens of the token's sample, all trajectories together",
        "prepared": "[T] what the function of `prepared_by` returned for the whole batch",
    },
    "policy_loss",
)
"""→ losses ``[T]`` and metrics ``{name: [T]}``, detached, both 0 outside the mask. A metric ``dropped`` is 1 at the tokens
that the loss itself leaves out."""

_BEFORE = {
    "mask": "[T] bool, trained tokens of samples in the loss",
    "sequence": "[T] int, the trajectory that the token belongs to, ascending",
    "proximal": "[T] log-probabilities just before this update",
    "rollout": "[T] log-probabilities by the inference engine",
    "advantages": "[T]",
    "entropy": "[T] of the proximal policy",
    "noise": "[T] float in [0, 1), follows from the ids of group, sample and token, and the step",
}
PREPARATIONS: Registry[Function] = Registry("preparation", _BEFORE)
"""→ ``[T]``, over the whole batch. Nothing is registered here: a policy loss brings its own, see `prepared_by`."""

TOKEN_FILTERS: Registry[Function] = Registry("token filter", _BEFORE, "token_filter")
"""→ kept ``[T]`` bool, over the whole batch; the other tokens get weight 0 and stay in the denominators."""

AGGREGATIONS: Registry[Function] = Registry(
    "aggregation",
    {
        "mask": "[T] bool, tokens that count in denominators",
        "sample": "[T] int, the sample that the token belongs to",
    },
    "aggregation",
)
"""→ weight of each token's loss ``[T]``, 0 outside the mask."""

SHAPING: Registry[Function] = Registry(
    "shaping",
    PER_SAMPLE | {"truncated": "[M] bool, the sample was cut by its length", "accuracy": "[M] float, NaN where unknown"},
    "shaping",
)
"""→ new rewards ``[M]``, or a pair of them and ``kept [M]`` bool: the other samples get weight 0."""

FILTERS: Registry[Function] = Registry(
    "filter",
    {
        "accuracies": "G floats, None where unknown",
        "rewards": "G floats, before shaping",
    },
    "filter",
)
"""→ whether the group is trained on, and if not a short reason to count it by."""

_LOG_PROBABILITIES = {
    "policy": "[T], detached",
    "proximal": "[T]",
    "rollout": "[T]",
    "advantages": "[T]",
}
IMPORTANCE_WEIGHTS: Registry[Function] = Registry(
    "correction weight", {"ratio": "[T], exp(proximal − rollout)"}, "correction.weight"
)
"""→ weights ``[T]``."""

REJECTIONS: Registry[Function] = Registry("rejection rule", PER_TOKEN | _LOG_PROBABILITIES, "correction.reject")
"""→ kept ``[T]`` bool."""

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
"""→ ``[T]``, 0 outside the mask."""
