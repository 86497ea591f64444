"""Grammars, the most probable tokens, log-probabilities of prompts: against the model itself, and beside plain requests."""

import json

import jsonschema
import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.api.failures import DataFailure
from tandem.api.requests import LLMRequest, NoiseKey, StopReason
from tandem.api.weights import FolderSource, WeightVersion
from tandem.config.rollout import EmbeddedEngineConfig, GenerationConfig
from tandem.engines.inference.core import EngineCore
from tandem.engines.inference.watched import json_grammar
from tandem.models.tokenizer import load_tokenizer
from tests.tiny import tiny_model_folder

SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "blue"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 1, "maxItems": 3},
    },
    "required": ["colour", "sizes"],
    "additionalProperties": False,
}
PROMPT = (1, 5, 60, 71, 88, 140, 141, 142, 7, 9, 33, 250)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("model"))


def make(folder, *, late=False, device="cpu", **settings):
    config = EmbeddedEngineConfig(**{"kv_cache_gib": 0.02, "prefill_chunk_tokens": 8} | settings)
    return EngineCore(folder, config, torch.float32, device, WeightVersion(0), reads_late=late)


def run(core, *requests):
    for number, request in enumerate(requests):
        core.add(number, request)
    responses = {}
    while core.has_work:
        responses.update(core.step())
    return [responses[number] for number in range(len(requests))]


def request(sample=0, prompt=PROMPT, grammar="", top=0, scores=False, **sampling):
    gconfig = GenerationConfig(**{"max_new_tokens": 300} | sampling)
    return LLMRequest(prompt, gconfig, NoiseKey(3, sample=sample), grammar=grammar, top_logprobs=top, scores_prompt=scores)


def logprobs_of_model(folder, ids, temperature=1.0):
    """[T, V]: of what follows each token."""
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([ids])).logits[0]
    return torch.log_softmax(logits.float() / temperature, -1)


@pytest.mark.parametrize("late", [False, True], ids=["at_once", "late"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.5, "top_p": 0.9}, {"greedy": True}], ids=str)
def test_what_is_drawn_fits_the_schema_and_is_as_probable_as_the_model_says(folder, late, sampling):
    grammar, plain = json_grammar(SCHEMA), request(99, max_new_tokens=30)
    asked = [request(i, grammar=grammar, **sampling) for i in range(6)]
    *constrained, free = run(make(folder, late=late), *asked, plain)
    tokenizer = load_tokenizer(folder)
    for response in constrained:
        assert response.stop_reason == StopReason.STOP
        jsonschema.validate(json.loads(tokenizer.decode(response.output_ids, skip_special_tokens=True)), SCHEMA)
        expected = logprobs_of_model(folder, PROMPT + response.output_ids, response.temperature)[len(PROMPT) - 1 : -1]
        expected = expected.gather(-1, torch.tensor(response.output_ids)[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(response.logprobs), expected, atol=2e-5, rtol=1e-5)
    assert free.output_ids == run(make(folder, late=late), plain)[0].output_ids, "who has no grammar is not touched"


def test_a_draw_under_a_grammar_is_that_of_the_model_without_the_forbidden_tokens(folder):
    grammar = json_grammar({"enum": ["a", "b"]})
    quote = load_tokenizer(folder)('"', add_special_tokens=False)["input_ids"]
    letters = [load_tokenizer(folder)(letter, add_special_tokens=False)["input_ids"][0] for letter in "ab"]
    responses = run(make(folder, max_running=64), *[request(i, grammar=grammar) for i in range(400)])
    share = sum(response.output_ids[1] == letters[0] for response in responses) / len(responses)
    odds = logprobs_of_model(folder, (*PROMPT, *quote))[-1][letters].softmax(0)[0].item()
    assert all(response.output_ids[1] in letters for response in responses) and 0.02 < odds < 0.98
    assert abs(share - odds) < 4 * (odds * (1 - odds) / len(responses)) ** 0.5


@pytest.mark.parametrize("late", [False, True], ids=["at_once", "late"])
def test_the_most_probable_tokens_are_those_of_the_model(folder, late):
    wanted, other = run(make(folder, late=late), request(1, top=20, max_new_tokens=9), request(2, top=2, max_new_tokens=4))
    expected = logprobs_of_model(folder, PROMPT + wanted.output_ids)[len(PROMPT) - 1 : -1].topk(20)
    assert [[token for token, _ in top] for top in wanted.top] == expected.indices.tolist()
    found = torch.tensor([[logprob for _, logprob in top] for top in wanted.top])
    torch.testing.assert_close(found, expected.values, atol=2e-5, rtol=1e-5)
    assert [len(top) for top in other.top] == [2] * 4
    for token, logprob, top in zip(wanted.output_ids, wanted.logprobs, wanted.top, strict=True):
        assert dict(top).get(token, logprob) == logprob, "to the bit: who compares them asks whether the best was drawn"


@pytest.mark.parametrize("max_new_tokens", [0, 5])
def test_a_prompt_has_the_log_probabilities_that_the_model_gives_it(folder, max_new_tokens):
    asked = [request(i, top=3, scores=True, max_new_tokens=max_new_tokens) for i in range(2)]
    *scored, plain = run(make(folder), *asked, request(0, max_new_tokens=5))  # the same prompt: nothing is shared
    expected = logprobs_of_model(folder, PROMPT)[:-1]
    for response in scored:
        chosen = expected.gather(-1, torch.tensor(PROMPT[1:])[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(response.prompt_logprobs), chosen, atol=2e-5, rtol=1e-5)
        assert [[token for token, _ in top] for top in response.prompt_top] == expected.topk(3).indices.tolist()
    assert scored[0].output_ids == plain.output_ids[:max_new_tokens]
    assert max_new_tokens or scored[0].stop_reason == StopReason.LENGTH


def test_a_prompt_may_fill_the_whole_context_where_nothing_is_drawn(folder):
    whole = tuple(5 + i % 200 for i in range(512))
    (response,) = run(make(folder), request(prompt=whole, scores=True, max_new_tokens=0))
    assert len(response.prompt_logprobs) == 511 and response.output_ids == ()


def test_weights_that_change_within_a_prompt_score_all_of_it(folder, tmp_path):
    other = tiny_model_folder(tmp_path, seed=1)
    core = make(folder)
    core.add(0, request(scores=True, max_new_tokens=0))
    core.step()
    core.swap(core.stage(FolderSource(other).tensors()), WeightVersion(1))
    responses = dict(pair for _ in range(5) for pair in core.step())
    expected = logprobs_of_model(other, PROMPT)[:-1].gather(-1, torch.tensor(PROMPT[1:])[:, None]).squeeze(-1)
    torch.testing.assert_close(torch.tensor(responses[0].prompt_logprobs), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"grammar": json_grammar({"type": "object"}), "min_new_tokens": 3}, "min_new_tokens"),
        ({"grammar": "start: nothing"}, "cannot be enforced"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ],
    ids=["min_new_tokens", "no_grammar", "nothing_to_do"],
)
def test_what_cannot_be_done_is_refused_by_name(folder, more, why):
    with pytest.raises(DataFailure, match=why):
        make(folder).add(0, request(**more))


@pytest.mark.parametrize("part", ["uniqueItems", "not", "dependentRequired"])
def test_a_schema_that_cannot_be_enforced_names_the_part(part):
    with pytest.raises(DataFailure, match=part):
        json_grammar({"type": "object", "properties": {"a": {part: {}}}})
