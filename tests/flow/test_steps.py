"""Rewards of steps: read behind each step by the model, and earned by the actor's token that ends it."""

import json
import random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForTokenClassification, PreTrainedTokenizerFast

from tandem.api.batch import pack
from tandem.api.failures import DataFailure
from tandem.api.workflow import Sample, Trajectory
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.config.train_engine import TrainEngineConfig
from tandem.engines.train.engine import SpreadEngine
from tandem.flow.residents import open_reader
from tandem.flow.scoring import last_tokens, step_spans
from tandem.models.load import load_causal_lm, load_scalar_model
from tandem.models.tokenizer import load_tokenizer
from tandem.rewards.model import ModelReward, aggregated
from tandem.trainers.loop import train
from tests.tiny import CHATML, SPECIAL_TOKENS, tiny_config, tiny_model_folder, tiny_tokenizer

QUESTION = [{"role": "user", "content": "3 + 4?"}]


def trajectory(prompt, made, after=()):
    ids = [*prompt, *made, *after]
    own = torch.tensor([False] * len(prompt) + [True] * len(made) + [False] * len(after))
    return Trajectory(torch.tensor(ids), own, torch.zeros(len(ids)), torch.where(own, 0, -1))


@pytest.mark.parametrize("seed", range(60))
def test_every_step_ends_on_the_token_that_brings_its_last_character(seed):
    """Random texts, cut into tokens as no tokenizer would cut them: in single bytes here and there."""
    draw, tokenizer = random.Random(seed), tiny_tokenizer()
    words = ["three ", "é", "日本", "the sum", "\n\n", "\n\n", " 7", "😀", ".", " total", "\n"]
    pieces = ["".join(draw.choices(words, k=draw.randint(1, 4))) for _ in range(draw.randint(1, 9))]
    ids = []
    for piece in pieces:
        cut = [piece] if draw.random() < 0.5 else list(piece)
        for text in cut:
            ids += tokenizer(text, add_special_tokens=False)["input_ids"]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert text == "".join(pieces)
    spans = step_spans(text, "\n\n")
    assert [text[a:b] for a, b in spans] == [step.strip() for step in text.split("\n\n") if step.strip()]
    prompt = tokenizer("user 7", add_special_tokens=False)["input_ids"]
    found = last_tokens(tokenizer, trajectory(prompt, [*ids, 2], [1, 9]), text, [end for _, end in spans])
    for token, (_, end) in zip(found, spans, strict=True):
        before, with_it = (tokenizer.decode(ids[: token - len(prompt) + more]) for more in (0, 1))
        assert with_it.startswith(text[:end]) and not before.startswith(text[:end])


def test_a_token_that_the_policy_made_and_does_not_train_is_of_its_reply():
    """The first token of a reply is such a token, if it is drawn at a temperature of its own."""
    tokenizer = tiny_tokenizer()
    ids = [i for letter in "three" for i in tokenizer(letter, add_special_tokens=False)["input_ids"]]
    made = trajectory([1, 9], ids)
    made.loss_mask[2] = False
    assert last_tokens(tokenizer, made, "three", [1, 5]) == [2, 6]


def test_a_reply_that_the_tokens_do_not_say_is_a_failure_of_its_sample():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("three", add_special_tokens=False)["input_ids"]
    with pytest.raises(DataFailure, match="not the text of the last tokens"):
        last_tokens(tokenizer, trajectory([1], ids), "four", [4])


@pytest.mark.parametrize(("how", "numbers"), [("min", [0.2, 0.9]), ("last", [0.5, 0.9]), ("mean", [0.5, 0.9])])
def test_values_of_steps_become_one_number(how, numbers):
    values, sequence = torch.tensor([0.8, 0.2, 0.5, 0.9]), torch.tensor([0, 0, 0, 1])
    assert aggregated(values, sequence, how).tolist() == pytest.approx(numbers)
    assert aggregated(values, sequence, "product").tolist() == pytest.approx([0.08, 0.9])
    assert torch.equal(aggregated(values, sequence, "none"), values)


def letters(folder):
    """Another tokenizer than the policy's: each byte is a token, but for a marker."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [*SPECIAL_TOKENS, "<step>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=260, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["a"], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        bos_token="<|im_start|>",
        additional_special_tokens=special,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHATML
    fast.save_pretrained(folder)


@pytest.fixture(scope="module")
def judges(tmp_path_factory):
    """A policy, and two judges of steps: a classifier of tokens with a marker, and one of sequences."""
    folder = tmp_path_factory.mktemp("judges")
    policy = tiny_model_folder(folder)
    torch.manual_seed(4)
    model = AutoModelForTokenClassification.from_config(tiny_config(pad_token_id=0, num_labels=2))
    torch.nn.init.normal_(model.score.bias)
    model.save_pretrained(folder / "tokens")
    letters(folder / "tokens")
    sequences = load_scalar_model(policy)
    torch.nn.init.normal_(sequences.model.score.weight)
    sequences.model.save_pretrained(folder / "sequences")
    load_tokenizer(policy).save_pretrained(folder / "sequences")
    return folder


def test_a_classifier_of_tokens_gives_what_transformers_gives_at_each_marker(judges):
    reward = ModelReward(str(judges / "tokens"), steps="\n\n", marker="<step>", aggregate="none")
    config = TrainEngineConfig(path=str(judges / "tokens"), dtype="float32")
    engine = SpreadEngine(config, 1, head="scalar", trained=False)
    policy = load_tokenizer(judges / "tiny-llama-0")
    reader = open_reader(str(judges / "tokens"), policy)
    text = "three trees\n\nso the answer\n\n7"
    made = policy(text, add_special_tokens=False)["input_ids"]
    read = dict(reward.read(Sample((trajectory([1], made),), 0.0, completion_text=text), {"messages": QUESTION}, reader))
    tokens = read.pop("step_tokens")
    assert policy.decode(made[: tokens[0]]) == "three trees" and tokens[-1] == len(made)
    rendered = reader.tokenizer.decode(read["input_ids"])
    assert "three trees<step>so the answer<step>7<step>" in rendered
    marks = [i for i, end in enumerate(read["step_end"]) if end]
    assert [reader.tokenizer.decode([read["input_ids"][i]]) for i in marks] == ["<step>"] * 3

    theirs = AutoModelForTokenClassification.from_pretrained(judges / "tokens", attn_implementation="eager")
    right = theirs(input_ids=torch.tensor([read["input_ids"]])).logits.softmax(-1)[0, marks, 1]
    torch.testing.assert_close(reward.score(pack([read, read]), engine), torch.cat([right, right]), atol=1e-5, rtol=1e-5)


def test_a_classifier_of_tokens_cannot_write_or_be_trained_on(judges):
    with pytest.raises(ConfigError, match="scores texts and cannot write any"):
        load_causal_lm(judges / "tokens")
    with pytest.raises(ConfigError, match="is a token classifier: it can judge steps, but cannot be trained here"):
        SpreadEngine(TrainEngineConfig(path=str(judges / "tokens")), 1, head="scalar")


def run(tmp_path, judges, *keys):
    items = [f"run.root={tmp_path}", f"actor.path={judges}/tiny-llama-0", "actor.dtype=float32", "rollout.dtype=float32"]
    items += ["rollout.batch_size=4", "rollout.engine.kv_cache_gib=0.05", "gconfig.n_samples=4", "gconfig.max_new_tokens=12"]
    items += ["train_dataset.path=addition", "evaluate.every_steps=null", "total_train_steps=1", "threads=1"]
    items += ["tracking.trajectories_per_step=99", "tracking.plot_every_steps=null", *keys]
    summary = train(load_config(TrainConfig, None, items))
    (row,) = map(json.loads, (summary.folder / "metrics.jsonl").read_text().splitlines())
    return row, [json.loads(line) for line in (summary.folder / "trajectories/step_1.jsonl").read_text().splitlines()]


def test_a_run_learns_from_rewards_at_the_ends_of_steps(tmp_path, judges):
    """The steps of a random model: the letter e ends one."""
    term = f"model(path={judges}/tokens, steps='e', marker='<step>', aggregate=none, normalise=group, clip=[-1, 1])"
    row, samples = run(tmp_path, judges, "algorithm=ppo", f"reward=0*format + 0.5*{term}")
    assert all(sample["reward"] == pytest.approx(sample["rewards"]["model"]) for sample in samples)
    assert any(abs(sample["reward"]) > 0.01 for sample in samples)
    assert all(0 <= sample["raw_rewards"]["model"] <= 1 for sample in samples) and row["loss"] == row["loss"]


def test_a_run_learns_from_the_worst_step(tmp_path, judges):
    _, samples = run(tmp_path, judges, f"reward=model(path={judges}/sequences, steps='e', aggregate=min)")
    assert all(0 < sample["reward"] < 1 for sample in samples) and len({sample["reward"] for sample in samples}) > 2


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ("steps='e', aggregate=none", "algorithm.advantage=grpo uses one reward per sample"),
        ("marker='x'", "marker is not used without steps"),
        ("aggregate=last", "aggregate is not used without steps"),
        ("steps=''", "must not be empty"),
        ("steps='e', aggregate=median", "aggregate must be one of min, last, mean, product, none"),
    ],
)
def test_what_cannot_be_read_at_steps_is_refused_at_start(tmp_path, judges, knobs, words):
    with pytest.raises(ConfigError, match=words):
        run(tmp_path, judges, f"reward=model(path={judges}/sequences, {knobs})")
