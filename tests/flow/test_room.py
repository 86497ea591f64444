"""The context that servers, and the engine on a GPU, are started with: what the run can need."""

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.engines.inference.remote.foreign.server import StartTerms
from tandem.engines.inference.remote.foreign.sglang import SGLangServer
from tandem.engines.inference.remote.foreign.vllm import VllmServer
from tandem.flow.opening import Rows, longest_prompt, with_room
from tandem.rollout.workflows import chat_of
from tests.tiny import tiny_model_folder, tiny_tokenizer


class Counting:
    """A tokenizer that counts its calls."""

    def __init__(self, tokenizer):
        self._tokenizer, self.calls = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __call__(self, *given, **how):
        self.calls += 1
        return self._tokenizer(*given, **how)


def row(text):
    return {"messages": [{"role": "user", "content": text}], "answer": "1"}


def rows_of(train, valid=()):
    return Rows(SimpleNamespace(rows=[row(text) for text in train]), [row(text) for text in valid])


def room(folder, rows, *items, device="cuda:0", asked=()):
    """`max_model_len` with which the engine is made."""
    config = load_config(TrainConfig, None, [f"actor.path={folder}", "train_dataset.path=addition", *items]).config
    return with_room(config, device, rows, tiny_tokenizer(), folder, asked).rollout.engine.max_model_len


def words_of(command, name):
    return command[command.index(name) + 1] if name in command else None


def test_the_longest_prompt_is_found_though_not_all_are_made_into_tokens():
    config, tokenizer, chance = TrainConfig(), tiny_tokenizer(), random.Random(3)
    for _ in range(20):
        texts = ["".join(chance.choices("ab 1é漢🙂", k=chance.randrange(60))) for _ in range(30)]
        every = [len(chat_of(tokenizer, row(text), None, {}).prompt_ids) for text in texts]
        assert longest_prompt(config, rows_of(texts).train.rows, tokenizer) == max(every)
    counting = Counting(tokenizer)
    longest_prompt(config, rows_of(["x" * 2000] + ["short"] * 500).train.rows, counting)
    assert counting.calls < 5


def test_a_server_gets_the_longest_prompt_and_answer_at_most_the_models_context(tmp_path):
    folder = tiny_model_folder(tmp_path, max_position_embeddings=4096)
    rows, sampling = rows_of(["short", "x" * 600], ["y" * 100]), ["gconfig.max_new_tokens=300"]
    most = longest_prompt(TrainConfig(), rows.train.rows, tiny_tokenizer()) + 300
    assert room(folder, rows, *sampling) == -(-most // 256) * 256 < 4096
    assert room(folder, rows, "gconfig.max_new_tokens=4000") == 4096
    longer = room(folder, rows, *sampling, "evaluate.max_new_tokens=2000", "evaluate.every_steps=1")
    assert longer == 2304, "an answer of an evaluation may be longer"
    assert room(folder, rows, *sampling, "rollout.engine.max_model_len=900") == 900
    assert room(folder, rows, *sampling, "workflow=multi_turn") is None
    assert room(folder, rows, *sampling, asked={"tokenizer"}) is not None
    assert room(folder, rows, *sampling, asked={"tokenizer", "engine"}) is None, "a judge may ask it about longer texts"
    assert room(folder, rows_of(["short"] * 20_001), *sampling) is None, "nobody waits for so many to be made into tokens"
    assert room(folder, rows, *sampling, device="cpu") is None
    assert room(folder, rows, *sampling, "rollout.backend=tandem:d1", device="cpu") is not None


def test_llama_8b_of_128k_starts_beside_training_for_answers_of_4k(tmp_path):
    """vLLM wants room for one sequence of `--max-model-len` in its cache, which has 14 GiB there."""
    folder = tiny_model_folder(tmp_path, max_position_embeddings=131072)
    engine = TrainConfig().rollout.engine
    needed = room(folder, rows_of(["x" * 1000]), "gconfig.max_new_tokens=4096")
    command, _ = VllmServer.command(terms(replace(engine, max_model_len=needed)), 8000)
    gib_a_token = 32 * 2 * 8 * 128 * 2 / 2**30
    assert int(words_of(command, "--max-model-len")) * gib_a_token < 1 < 14 < 131072 * gib_a_token


def terms(engine):
    return StartTerms("python", Path("/model"), "bfloat16", "cuda", engine, ())


@pytest.mark.parametrize(
    ("server", "running", "length", "unknown"),
    [
        (VllmServer, "--max-num-seqs", "--max-model-len", "auto"),
        (SGLangServer, "--max-running-requests", "--context-length", None),
    ],
)
def test_a_server_keeps_its_own_limit_of_requests_unless_the_user_names_one(server, running, length, unknown):
    engine = TrainConfig().rollout.engine
    command, _ = server.command(terms(engine), 8000)
    assert words_of(command, running) is None and words_of(command, length) == unknown
    command, _ = server.command(terms(replace(engine, max_running=24, max_model_len=512)), 8000)
    assert (words_of(command, running), words_of(command, length)) == ("24", "512")
