"""The terms of a reward as objects: weight, options, name in metrics, and the score of a term that needs a model.

Text becomes terms here, once: `tandem.flow.plan` keeps them, and whoever judges or adds up is given them.
"""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tandem.api.scoring import FrozenModel, Score
from tandem.api.services import Services, factory_of
from tandem.config.errors import ConfigError
from tandem.config.services import SERVICES, service_of
from tandem.config.terms import Options, Term, read_terms
from tandem.rewards.engine_judge import WritingReward


@dataclass(frozen=True)
class RewardTerm:
    """One term of a sum."""

    term: Term
    """The term as it is spelt."""

    label: str
    """Its name in metrics."""

    options: Options
    """Its options; the gate is a name in metrics too."""

    score: Score | None = field(default=None, compare=False)
    """Judges with a model that the run holds; None: the term judges a sample by itself, or the samples of a prompt."""

    awaited: bool = False
    """True: the workflow awaits its model in the middle of an episode, so that its value is there at once."""

    @property
    def weight(self) -> float:
        """The factor of its value."""
        return self.term.weight

    @property
    def is_late(self) -> bool:
        """True if a run adds it when the batch is there: its model scores behind the episodes, or it has options."""
        return self.options != Options() or (self.score is not None and not self.awaited)


def read_sum(spec: str) -> tuple[RewardTerm, ...]:
    """The terms of a sum such as ``math + 0.2*model(path=FOLDER)``; the models of scores are not opened.

    Raises:
        ConfigError: it cannot be read, or names what is not there; or a score does not say which model it wants.
    """
    terms = read_terms(spec)
    scores = {term.label: _score_of(term) for term in terms if needs_model(term)}
    names = {term.label: str(scores[term.label].name) or term.short_name for term in terms if term.label in scores}
    return tuple(
        RewardTerm(term, names.get(term.label, term.label), _renamed(term.options, names), scores.get(term.label))
        for term in terms
    )


def _renamed(options: Options, names: dict[str, str]) -> Options:
    """The options with the gate under the name that its score has in metrics."""
    gate = options.gate_name
    return replace(options, gate=f"{names[gate]} > {options.gate_above!r}") if gate in names else options


def raw_names(terms: Sequence[RewardTerm]) -> frozenset[str]:
    """The terms of a sum whose value before the weight is recorded: it is another number, or opens the gate of a term."""
    gates = {term.options.gate_name for term in terms}
    return frozenset(t.label for t in terms if t.weight != 1 or t.options != Options() or t.label in gates)


def needs_model(term: Term) -> bool:
    """True if a term is scored by a model that the run holds, and not inside its episode."""
    if term.is_file:
        found = factory_of("reward", term.name)
        return inspect.isclass(found) and issubclass(found, Score)
    service = service_of("reward", term.registered, "reward")
    return service.needs_model or bool(service.writes_without and term.knobs.get(service.writes_without) is None)


def _score_of(term: Term) -> Score:
    make, key = factory_of("reward", term.name, "reward"), f"reward={term.name}"
    writes = not term.is_file and bool(SERVICES["reward"][term.registered].writes_without)
    score = Services().make(key, make, term.arguments, {"timeout_s": math.inf} if writes else {})
    if writes:
        score = WritingReward(score, str(term.knobs.get("model")))
    assert isinstance(score, Score), "needs_model has seen to it"
    _check_score(term, score)
    return score


DTYPES = ("auto", "bfloat16", "float32")


def _check_score(term: Term, score: Score) -> None:
    model = getattr(score, "model", None)
    if not isinstance(model, FrozenModel):
        given = "is missing" if model is None else f"is a {type(model).__name__}"
        raise ConfigError(f"reward {term.name!r}: its attribute `model` {given}; set self.model = FrozenModel(path, head=…)")
    if not isinstance(model.path, str) or not model.path:
        raise ConfigError(f"reward {term.name!r}: FrozenModel.path must be a folder or a name, got {model.path!r}")
    heads = ("text",) if isinstance(score, WritingReward) else ("lm", "scalar")
    for name, value, allowed in (("head", model.head, heads), ("dtype", model.dtype, (None, *DTYPES))):
        if value not in allowed:
            raise ConfigError(f"reward {term.name!r}: FrozenModel.{name} must be one of {allowed}, got {value!r}")
    if isinstance(model.class_label, bool) or not isinstance(model.class_label, str | int | None):
        raise ConfigError(f"reward {term.name!r}: class_label must be a class's name or number, got {model.class_label!r}")
    if model.class_label is not None and model.head != "scalar":
        raise ConfigError(f"reward {term.name!r}: class_label is for head='scalar', got head={model.head!r}; leave it out")
    if not isinstance(model.backend, str | None):
        raise ConfigError(f"reward {term.name!r}: FrozenModel.backend must be a text such as fsdp:d1, got {model.backend!r}")
    if not isinstance(score.name, str):
        raise ConfigError(f"reward {term.name!r}: its attribute `name` must be a text, got {score.name!r}")
