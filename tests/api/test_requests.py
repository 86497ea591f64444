"""A request for a completion."""

from tandem.api.requests import LLMRequest
from tandem.config.rollout import GenerationConfig


def test_a_prompt_may_be_a_list_of_tokens():
    gconfig = GenerationConfig()
    assert LLMRequest([1, 2], gconfig) == LLMRequest((1, 2), gconfig)
    assert hash(LLMRequest([1, 2], gconfig).input_ids) == hash((1, 2))  # an engine finds shared prompts by their tokens
