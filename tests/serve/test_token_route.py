"""vLLM's token route in `tandem serve`: token ids in, token ids out, in the words that training clients check."""

import asyncio

import pytest

from tandem.api.requests import NoiseKey
from tandem.engines.inference.remote.foreign.vllm import VllmProtocol
from tandem.protocol.client import HttpClient
from tests.serve.served import CONTEXT, one_by_one, request_of

PATH = "/inference/v1/generate"
IDS = [5, 6, 7, 8]
VERIFIERS = {  # what the training client of verifiers 0.4 sends in its second turn
    "model": "tiny",
    "token_ids": IDS,
    "sampling_params": {
        "temperature": 0.7,
        "max_tokens": 12,
        "seed": 5,
        "stop_token_ids": [2],
        "logprobs": 1,
        "skip_special_tokens": False,
        "routed_experts_prompt_start": 3,
    },
    "cache_salt": "4",
}


def test_a_training_client_gets_the_tokens_of_the_engine(served, local):
    answer = served.json("POST", PATH, VERIFIERS, headers={"X-Session-ID": "rollout-1"})

    (response,) = one_by_one(local, [request_of(IDS, NoiseKey(5), temperature=0.7, stop_token_ids=(2,))])
    (choice,) = answer["choices"]
    content = choice["logprobs"]["content"]
    assert choice["token_ids"] == list(response.output_ids)
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in response.output_ids]
    assert [entry["logprob"] for entry in content] == pytest.approx(response.logprobs, abs=1e-5)
    assert choice["finish_reason"] == ("length" if response.truncated else "stop")
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": len(response.output_ids)}]
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": len(content), "total_tokens": 4 + len(content)}
    assert answer["request_id"]


def test_our_own_client_of_vllm_reads_the_answer(served):
    async def ask():
        client = HttpClient(served.url)
        try:
            return await client.post(PATH, {"token_ids": IDS, "request_id": "mine"}, deadline_s=30)
        finally:
            client.close()

    answer = asyncio.run(ask())
    piece = VllmProtocol.piece(None, answer)
    assert answer["request_id"] == "mine"
    assert len(piece.tokens) == len(piece.logprobs) == len(piece.labels) > 0 and set(piece.labels) == {"0"}


def test_the_model_says_how_long_a_context_may_be(served):
    (model,) = served.json("GET", "/v1/models")["data"]
    assert model["max_model_len"] == CONTEXT


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"sampling_params": {"n": 2}}, "sampling_params.n"),
        ({"sampling_params": {"repetition_penalty": 1.1}}, "sampling_params.repetition_penalty"),
        ({"sampling_params": {"prompt_logprobs": 1}}, "sampling_params.prompt_logprobs"),
        ({"sampling_params": {"logprobs": 5}}, "sampling_params.logprobs"),
        ({"sampling_params": {"ignore_eos": True}}, "sampling_params.ignore_eos"),
        ({"sampling_params": {"skip_tokens": 1}}, "sampling_params.skip_tokens"),
        ({"features": {}}, "features"),
        ({"stream": True}, "stream"),
        ({"model": "another"}, "model"),
        ({"token_ids": []}, "token_ids"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_its_place(served, change, place):
    assert served.json("POST", PATH, {"token_ids": IDS} | change, status=400)["error"]["param"] == place


def test_temperature_0_takes_the_most_probable_token(served, local):
    body = {"token_ids": IDS, "sampling_params": {"temperature": 0, "max_tokens": 6, "top_k": -1, "min_p": 0.0}}
    (response,) = one_by_one(local, [request_of(IDS, greedy=True, max_new_tokens=6)])
    assert served.json("POST", PATH, body)["choices"][0]["token_ids"] == list(response.output_ids)
