"""Requests that no engine could serve."""

from tandem.api.failures import DataFailure, WrongWorkflow
from tandem.api.requests import LLMRequest


def refuse_unsupported(request: LLMRequest, takes_media: bool = False, embedded: bool = False) -> None:
    """Passes a request that asks for nothing which its engine cannot do. ``takes_media``: its model sees or hears.

    Raises:
        WrongWorkflow: it has ``media`` for a model of text, names a ``model``, or asks another engine for what the
            ``embedded`` one alone does.
    """
    for name in () if embedded else ("grammar", "top_logprobs", "scores_prompt"):
        if getattr(request, name):
            raise WrongWorkflow(
                f"LLMRequest.{name} is set, and only the embedded engine (rollout.backend=embedded) does that"
            )
    if request.media and not takes_media:
        raise WrongWorkflow("LLMRequest.media is set, and this engine, or its model, reads text alone: send tokens alone")
    if request.model:
        raise WrongWorkflow(
            "LLMRequest.model is set, and no inference engine here serves several models: leave it out, or ask another "
            "engine for the other model"
        )


def check_request(
    request: LLMRequest, vocab_size: int | None, max_model_len: int, takes_media: bool = False, embedded: bool = False
) -> None:
    """Passes if the request can be sampled; ``vocab_size`` is None where it is not known.

    Raises:
        DataFailure: ``prompt_too_long`` where no token fits behind it in the context, ``bad_request`` where it has tokens
            that the model has not, or cannot be sampled.
        WrongWorkflow: see `refuse_unsupported`.
    """
    refuse_unsupported(request, takes_media, embedded)
    ids, gconfig = request.input_ids, request.gconfig
    fewest = 0 if request.scores_prompt else 1
    if len(ids) + fewest > max_model_len:
        raise DataFailure("prompt_too_long", f"{len(ids)} tokens leave no room in the context of {max_model_len}")
    if not ids or min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size):
        below = "" if vocab_size is None else f", each in [0, {vocab_size}): the largest is {max(ids, default=None)}"
        raise DataFailure("bad_request", f"a prompt has at least one token{below}")
    hot = gconfig.first_token_temperature
    cold = gconfig.temperature <= 0 or (hot is not None and hot <= 0)
    if cold or gconfig.max_new_tokens < fewest or gconfig.top_p <= 0 or gconfig.top_k < 0:
        raise DataFailure(
            "bad_request", f"temperatures, top_p and max_new_tokens must be above 0 and top_k not below, got {gconfig}"
        )
    if request.scores_prompt and request.media:
        raise DataFailure("bad_request", "the tokens of a prompt with images or sounds have no log-probabilities")
    if request.grammar and gconfig.min_new_tokens:
        raise DataFailure("bad_request", "min_new_tokens must be 0 beside a grammar, which may demand the end before")
