"""A chat's tokens are exactly those the engine saw and made, also where a template rewrites history."""

import asyncio

import pytest
import torch

from tandem.api.requests import LLMResponse, StopReason
from tandem.api.workflow import RewardFn, RewardResult
from tandem.config.rollout import GenerationConfig
from tandem.rollout.multi_turn import MultiTurnWorkflow
from tandem.rollout.workflows import Chat
from tests.rollout.clockwork import Constant
from tests.tiny import tiny_tokenizer

QUESTION = [{"role": "user", "content": "3 + 4 ="}]
GCONFIG = GenerationConfig(temperature=0.7)

# Like ChatML, but the thinking of earlier turns is left out.
FORGETFUL = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'].split('</think>')[-1] if message['role'] == 'assistant' else message['content'] }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMMING = FORGETFUL.replace("message['content'].split('</think>')[-1]", "message['content'] | trim")


def answer(chat, text, *, end=True, version=0):
    """A response to the chat's request whose text is ``text``."""
    tokenizer = chat.tokenizer
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] + ([tokenizer.eos_token_id] if end else [])
    reason = StopReason.STOP if end else StopReason.LENGTH
    request = chat.request(GCONFIG)
    logprobs = tuple(-0.1 * i for i in range(len(ids)))
    return LLMResponse(request.input_ids, tuple(ids), logprobs, (version,) * len(ids), reason, GCONFIG.temperature)


@pytest.mark.parametrize("end", [True, False])
def test_an_appending_template_gives_one_trajectory_equal_to_its_rendering(end):
    tokenizer = tiny_tokenizer()
    chat = Chat(tokenizer, QUESTION, system_prompt="Be brief.")
    first = answer(chat, "8", end=end, version=1)
    chat.add(first)
    chat.say("Try again.")
    second = answer(chat, "7", version=2)
    chat.add(second)
    sample = chat.sample(0.5, accuracy=1.0)

    (trajectory,) = sample.trajectories
    text = tokenizer.decode(trajectory.input_ids.tolist(), skip_special_tokens=False)
    whole = tokenizer.apply_chat_template(chat.messages, tokenize=False)
    assert text == whole.removesuffix("\n")  # the model ends with its end-of-turn token
    assert tuple(trajectory.input_ids.tolist()) == second.input_ids + second.output_ids
    assert second.input_ids[: len(first.input_ids + first.output_ids)] == first.input_ids + first.output_ids
    assert tuple(trajectory.input_ids[trajectory.loss_mask].tolist()) == first.output_ids + second.output_ids
    assert trajectory.versions[trajectory.loss_mask].tolist() == [1] * len(first.output_ids) + [2] * len(second.output_ids)
    assert trajectory.rollout_logprobs[trajectory.loss_mask].tolist() == pytest.approx(first.logprobs + second.logprobs)
    assert trajectory.temperature == 0.7
    assert (trajectory.versions[~trajectory.loss_mask] == -1).all()


def test_a_template_that_rewrites_history_starts_a_new_trajectory_of_the_same_sample():
    chat = Chat(tiny_tokenizer(FORGETFUL), QUESTION)
    first = answer(chat, "<think>four and three</think>8")
    chat.add(first)
    chat.say("Try again.")
    second = answer(chat, "7")
    chat.add(second)

    one, two = chat.sample(1.0).trajectories
    for trajectory, response in ((one, first), (two, second)):
        assert tuple(trajectory.input_ids.tolist()) == response.input_ids + response.output_ids
        assert tuple(trajectory.input_ids[trajectory.loss_mask].tolist()) == response.output_ids
    assert "think" not in chat.tokenizer.decode(list(second.input_ids))


def test_without_thinking_the_same_template_only_appends():
    chat = Chat(tiny_tokenizer(FORGETFUL), QUESTION)
    chat.add(answer(chat, "8"))
    chat.say("Try again.")
    chat.add(answer(chat, "7"))
    assert len(chat.sample(1.0).trajectories) == 1


def test_white_space_that_a_template_trims_does_not_cost_a_trajectory():
    chat = Chat(tiny_tokenizer(TRIMMING), QUESTION)
    first = answer(chat, " 8 ")
    chat.add(first)
    chat.say("Try again.")
    assert chat.input_ids[: len(first.input_ids + first.output_ids)] == first.input_ids + first.output_ids


def test_a_turn_is_never_tokenised_again():
    tokenizer = tiny_tokenizer()
    chat = Chat(tokenizer, QUESTION)
    pieces = [i for letter in "answer" for i in tokenizer(letter, add_special_tokens=False)["input_ids"]]
    assert pieces != tokenizer("answer", add_special_tokens=False)["input_ids"]
    odd = LLMResponse(chat.input_ids, tuple(pieces), (0.0,) * len(pieces), (0,) * len(pieces), StopReason.LENGTH, 1.0)
    chat.add(odd)
    chat.say("More.")
    assert chat.input_ids[len(odd.input_ids) :][: len(pieces)] == tuple(pieces)


def test_an_answer_to_something_else_is_refused():
    chat = Chat(tiny_tokenizer(), QUESTION)
    with pytest.raises(ValueError, match="answers another request"):
        chat.add(LLMResponse((1, 2), (3,), (0.0,), (0,), StopReason.STOP))
    with pytest.raises(ValueError, match="follows the model's turn"):
        chat.say("hello")


class Scripted:
    """Says its lines, one a request."""

    def __init__(self, tokenizer, lines):
        self.tokenizer, self.lines, self.seen = tokenizer, iter(lines), []

    async def agenerate(self, request):
        self.seen.append(request)
        ids = (*self.tokenizer(next(self.lines), add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id)
        return LLMResponse(request.input_ids, ids, (-1.0,) * len(ids), (0,) * len(ids), StopReason.STOP, 0.7)


@pytest.mark.parametrize(("lines", "reward", "turns"), [(["7"], 1.0, 1), (["8", "7"], 0.5, 2), (["8", "9", "1"], 0.0, 3)])
def test_asking_again_until_right(lines, reward, turns):
    tokenizer = tiny_tokenizer()
    engine = Scripted(tokenizer, lines)
    workflow = MultiTurnWorkflow(Constant(), GCONFIG, tokenizer, max_turns=3, turn_discount=0.5)
    sample = asyncio.run(workflow.arun_episode(engine, {"messages": QUESTION, "answer": "7"}))
    assert (sample.reward, sample.metrics["turns"], len(engine.seen)) == (reward, turns, turns)
    (trajectory,) = sample.trajectories
    assert torch.equal(trajectory.input_ids[: len(engine.seen[-1].input_ids)], torch.tensor(engine.seen[-1].input_ids))


def test_named_parts_are_discounted_as_the_whole_is():
    class Parts(RewardFn):
        async def __call__(self, *, completion, **rest):
            right = float("7" in completion)
            return RewardResult(right + 0.5, {"right": right, "polite": 0.5}, right)

    tokenizer = tiny_tokenizer()
    workflow = MultiTurnWorkflow(Parts(), GCONFIG, tokenizer, max_turns=3, turn_discount=0.5)
    sample = asyncio.run(workflow.arun_episode(Scripted(tokenizer, ["8", "7"]), {"messages": QUESTION, "answer": "7"}))
    assert (sample.reward, sample.rewards) == (0.75, {"right": 0.5, "polite": 0.25})
