"""Preference learning and reward models on a tiny model: as computed by hand, however the batch is cut."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tandem.algorithms.preference import PREFERENCE_LOSSES
from tandem.api.batch import pack, unpack
from tandem.api.failures import BatchError, UserCodeFailed
from tandem.config.algorithm import Component
from tandem.config.errors import ConfigError
from tandem.config.train_engine import OptimizerConfig, TrainEngineConfig
from tandem.engines.train.engine import SpreadEngine
from tandem.models.attention import compact
from tandem.roles.learners import PreferenceLearner, RewardModel, mismatched, pairs_of
from tandem.roles.reference import Reference
from tests.tiny import tiny_model_folder

LENGTHS = [(3, 4, 2), (5, 1, 6), (2, 7, 3), (3, 2, 2)]
"""Tokens of each pair's prompt, better and worse side."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("models")
    return tiny_model_folder(tmp, seed=0), tiny_model_folder(tmp, seed=1)


def pair_batch(lengths=LENGTHS, *, seed=0, **fields):
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number, (prompt, *sides) in enumerate(lengths):
        begin = torch.randint(3, 300, (prompt,), generator=generator)
        for side, size in enumerate(sides):
            ids = torch.cat([begin, torch.randint(3, 300, (size,), generator=generator)])
            mask = torch.arange(len(ids)) >= prompt
            rows.append({"input_ids": ids, "loss_mask": mask, "temperature": 1.0, "chosen": side == 0, "unit_id": number})
            rows[-1] |= fields
    return pack(rows)


def engine_on(folder, *, max_tokens=1000, lr=1e-2, eps=1e-8, head="lm"):
    optimizer = OptimizerConfig(lr=lr, eps=eps, max_grad_norm=None)
    config = TrainEngineConfig(path=str(folder), dtype="float32", optimizer=optimizer, max_tokens_per_micro_batch=max_tokens)
    return SpreadEngine(config, total_steps=10, head=head)


def learner_on(folders, loss="dpo", *, engine=None, **knobs):
    reference = Reference(engine_on(folders[1])) if loss in ("dpo", "ipo", "kto") else None
    return PreferenceLearner(engine_on(folders[0], **engine or {}), Component(loss, knobs), reference=reference)


def prepared(learner, batch):
    return learner.compute_baseline(learner.compute_reference(batch))


def sums_by_hand(folder, batch):
    """Summed log-probabilities of the completions, from transformers' own forward pass."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    with torch.no_grad():
        for row in unpack(batch):
            logprobs = model(row["input_ids"][None]).logits[0].log_softmax(-1)
            found.append(sum(logprobs[t - 1, row["input_ids"][t]] for t in row["loss_mask"].nonzero().flatten().tolist()))
    return torch.stack(found)


@pytest.mark.parametrize("loss", ["dpo", "ipo", "simpo", "orpo"])
def test_the_loss_of_pairs_is_that_of_transformers_log_probabilities(folders, loss):
    batch, learner = pair_batch(), learner_on(folders, loss)
    policy, reference = (sums_by_hand(folder, batch) for folder in folders)
    length = torch.tensor([float(size) for _, *sides in LENGTHS for size in sides])
    given = {
        "chosen": policy[::2],
        "rejected": policy[1::2],
        "chosen_reference": reference[::2],
        "rejected_reference": reference[1::2],
        "chosen_length": length[::2],
        "rejected_length": length[1::2],
    }
    function = PREFERENCE_LOSSES.get(loss)
    losses, better, worse = function(**{name: given[name] for name in PREFERENCE_LOSSES.inputs_of(function)})
    found = learner.evaluate_preference(prepared(learner, batch))
    assert found["loss"] == pytest.approx(float(losses.mean()), rel=1e-4)
    assert found["margin"] == pytest.approx(float((better - worse).mean()), rel=1e-3, abs=1e-5)
    assert found["accuracy"] == pytest.approx(float((better > worse).float().mean()))
    assert found["score/chosen"] - found["score/rejected"] == pytest.approx(found["margin"], abs=1e-5)


def test_kto_compares_with_the_mean_of_mismatched_pairs_of_the_whole_batch(folders):
    batch, learner = pair_batch(), learner_on(folders, "kto", engine={"max_tokens": 16})
    others = mismatched(batch)
    z = (sums_by_hand(folders[0], others) - sums_by_hand(folders[1], others)).mean().clamp(min=0)
    ready = prepared(learner, batch)
    assert ready["baseline"].tolist() == pytest.approx([float(z)] * 8, abs=1e-4)
    delta = sums_by_hand(folders[0], batch) - sums_by_hand(folders[1], batch)
    gain = torch.where(batch["chosen"], delta - z, z - delta)
    found = learner.evaluate_preference(ready)
    assert found["loss"] == pytest.approx(float((1 - torch.sigmoid(0.1 * gain)).mean()), rel=1e-4)
    assert found["score/chosen"] == pytest.approx(0.1 * float(delta[::2].mean()), rel=1e-3, abs=1e-5)
    assert found["margin"] == pytest.approx(0.1 * float(delta[::2].mean() - delta[1::2].mean()), rel=1e-3, abs=1e-4)


def test_mismatched_pairs_take_the_completion_of_another_prompt():
    batch = pair_batch([(2, 1, 2), (3, 2, 1)])
    rows, others = unpack(batch), unpack(mismatched(batch))
    ids = [row["input_ids"].tolist() for row in rows]
    # rows 0 and 1 share a prompt, as do 2 and 3: the nearest before with another prompt, around the end
    expected = [ids[0][:2] + ids[3][3:], ids[1][:2] + ids[3][3:], ids[2][:3] + ids[1][2:], ids[3][:3] + ids[1][2:]]
    assert [row["input_ids"].tolist() for row in others] == expected
    assert [int(row["loss_mask"].sum()) for row in others] == [1, 1, 2, 2]
    assert mismatched(pair_batch([(2, 1, 2)])) is None


def test_the_prompt_of_a_pair_is_computed_once():
    batch = pair_batch([(20, 3, 4), (15, 1, 2)])
    shared = compact(batch["input_ids"], batch["cu_seqlens"].tolist(), batch["loss_mask"])
    assert len(shared.tokens) == 20 + 3 + 4 + 15 + 1 + 2


def test_without_another_prompt_the_baseline_is_0_and_a_warning_says_so_once(folders, caplog):
    learner = learner_on(folders, "kto")
    for _ in range(2):
        assert learner.compute_baseline(pair_batch([(2, 1, 2)]))["baseline"].tolist() == [0.0, 0.0]
    assert caplog.text.count("all rows of a batch have the same prompt") == 1


@pytest.mark.parametrize("loss", list(PREFERENCE_LOSSES))
def test_a_step_does_not_depend_on_micro_batches(folders, loss):
    # a large eps makes Adam's first step smooth in the gradient: else rounding noise would become a sign
    smooth = {"lr": 0.1, "eps": 0.1}
    whole, split = (learner_on(folders, loss, engine=smooth | {"max_tokens": size}) for size in (1000, 14))
    before = dict(whole.engine.weights())
    before = {name: tensor.clone() for name, tensor in before.items()}
    found = [learner.train_preference(prepared(learner, pair_batch())) for learner in (whole, split)]
    assert found[0] == pytest.approx(found[1], rel=1e-4, abs=1e-6)
    moved = max(float((tensor - before[name]).abs().max()) for name, tensor in whole.engine.weights())
    apart = max(
        float((a - b).abs().max()) for (_, a), (_, b) in zip(whole.engine.weights(), split.engine.weights(), strict=True)
    )
    assert moved > 1e-3
    assert apart <= 1e-3 * moved


@pytest.mark.parametrize("loss", list(PREFERENCE_LOSSES))
def test_learning_raises_the_margin(folders, loss):
    learner, batch = learner_on(folders, loss), pair_batch()
    batch = prepared(learner, batch)
    first = learner.evaluate_preference(batch)
    for _ in range(5):
        learner.train_preference(learner.compute_baseline(batch))
    assert learner.evaluate_preference(batch)["margin"] > first["margin"]


def test_a_loss_that_needs_a_reference_is_refused_without_one(folders):
    with pytest.raises(ConfigError, match="loss=dpo compares with a reference policy"):
        PreferenceLearner(engine_on(folders[0]), Component("dpo"))
    with pytest.raises(BatchError, match=r"no reference_logprobs, which loss=dpo needs; call compute_reference"):
        learner_on(folders).train_preference(pair_batch())


def test_sequences_that_are_no_pairs_are_refused():
    batch = pair_batch()
    batch["chosen"] = torch.ones_like(batch["chosen"])
    with pytest.raises(BatchError, match="two sequences, of which one is chosen"):
        pairs_of(batch)


def test_a_completion_without_a_trained_token_is_refused(folders):
    batch = pair_batch()
    batch["loss_mask"][:7] = False
    with pytest.raises(BatchError, match="no trained token"):
        learner_on(folders, "simpo").train_preference(batch)


@pytest.fixture(scope="module")
def scorer(folders, tmp_path_factory):
    """A reward model with a head of its own, after five steps."""
    model, batch = RewardModel(engine_on(folders[0], head="scalar")), pair_batch(margin=0.5)
    first = model.evaluate_pairs(batch)
    for _ in range(5):
        model.train_pairs(batch)
    folder = tmp_path_factory.mktemp("reward")
    model.engine.save(folder)
    return model, first, folder


def test_a_reward_model_begins_indifferent_and_learns_to_rank(scorer):
    model, first, _ = scorer
    batch = pair_batch(margin=0.5)
    assert first["loss"] == pytest.approx(torch.nn.functional.softplus(torch.tensor(0.5)).item())
    assert (first["margin"], first["accuracy"]) == (0.0, 0.0)
    found = model.evaluate_pairs(batch)
    assert found["margin"] > 0.1
    assert found["accuracy"] == 1.0
    scores = model.score(batch)
    assert found["margin"] == pytest.approx(float((scores[::2] - scores[1::2]).mean()), rel=1e-4)
    expected = torch.nn.functional.softplus(0.5 - scores[::2] + scores[1::2]).mean()
    assert found["loss"] == pytest.approx(float(expected), rel=1e-4)


def test_transformers_loads_the_reward_model_and_scores_the_same(scorer):
    model, _, folder = scorer
    theirs = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    batch = pair_batch(margin=0.0)
    with torch.no_grad():
        found = torch.stack([theirs(row["input_ids"][None]).logits[0, 0] for row in unpack(batch)])
    assert theirs.config.num_labels == 1
    assert torch.allclose(found, model.score(batch), atol=1e-5)


def test_a_reward_models_step_does_not_depend_on_micro_batches(folders):
    whole, split = (RewardModel(engine_on(folders[0], head="scalar", max_tokens=size)) for size in (1000, 14))
    for _ in range(2):
        found = [model.train_pairs(pair_batch(margin=0.0)) for model in (whole, split)]
        assert found[0] == pytest.approx(found[1], rel=1e-3, abs=1e-6)


def safety_batch():
    """Pairs of a safer side and another one: both safe, neither, and two mixed ones."""
    labels = [(True, False), (True, True), (False, False), (True, False)]
    rows = unpack(pair_batch())
    return pack([row | {"safe": labels[i // 2][i % 2]} for i, row in enumerate(rows)])


def test_the_cost_of_an_answer_is_learnt_from_its_rank_and_its_label(folders):
    """The formula of Safe RLHF (arXiv:2310.12773), spelt out: s is 1 where an answer is harmful, −1 where it is not."""
    batch, whole = safety_batch(), RewardModel(engine_on(folders[0], head="scalar"))
    split = RewardModel(engine_on(folders[0], head="scalar", max_tokens=14))
    first = whole.evaluate_safety(batch)
    assert first["loss"] == pytest.approx(3 * math.log(2)) and first["accuracy"] == 0.0
    for _ in range(8):
        found = [model.train_safety(batch) for model in (whole, split)]
        assert found[0] == pytest.approx(found[1], rel=1e-3, abs=1e-6)
    costs, found = whole.score(batch), whole.evaluate_safety(batch)
    sign = torch.where(batch["safe"], -1.0, 1.0)
    ranked, labelled = costs[1::2] - costs[::2], sign * costs
    expected = -(ranked.sigmoid().log() + labelled[::2].sigmoid().log() + labelled[1::2].sigmoid().log()).mean()
    assert found["loss"] == pytest.approx(float(expected), rel=1e-4)
    assert found["margin"] == pytest.approx(float(ranked.mean()), rel=1e-4)
    assert found["score/rejected"] == pytest.approx(float(costs[1::2].mean()), rel=1e-4)
    assert found["accuracy"] == pytest.approx(float((ranked > 0).float().mean())) == 1.0
    assert found["accuracy/safety"] == pytest.approx(float((labelled > 0).float().mean())) and found["accuracy/safety"] > 0.6


def step_batch():
    rows = []
    for row in unpack(pair_batch()):
        end = torch.zeros_like(row["loss_mask"])
        end[-1] = True
        end[int(row["loss_mask"].nonzero()[0])] = True
        right = end & (torch.arange(len(end)) % 2 == 0)
        rows.append({"input_ids": row["input_ids"], "loss_mask": row["loss_mask"], "step_end": end, "step_right": right})
    return pack(rows)


def test_judged_steps_are_learnt_each_with_the_same_weight(folders):
    model, batch = RewardModel(engine_on(folders[0], head="scalar", max_tokens=14)), step_batch()
    ends, right = batch["step_end"], batch["step_right"]
    first = model.evaluate_steps(batch)
    assert first["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert first["accuracy"] == pytest.approx(float((~right[ends]).float().mean()))  # a score of 0 calls nothing right
    for _ in range(8):
        model.train_steps(batch)
    found, scores = model.evaluate_steps(batch), model.engine.forward(batch).scores
    losses = torch.nn.functional.binary_cross_entropy_with_logits(scores[ends], right[ends].float())
    assert found["loss"] == pytest.approx(float(losses), rel=1e-4)
    assert found["loss"] < first["loss"]
    assert found["accuracy"] == pytest.approx(float(((scores > 0) == right)[ends].float().mean()))
    with pytest.raises(BatchError, match="no judged step"):
        model.train_steps(without_steps(batch))


def without_steps(batch):
    empty = batch.clone()
    empty["step_end"] = torch.zeros_like(empty["step_end"])
    return empty


@pytest.mark.parametrize(
    "returned", ["chosen", "(chosen, rejected)", "(chosen, rejected, 1.0)", "(chosen[:1], chosen, chosen)"]
)
def test_a_loss_of_ones_own_must_return_losses_and_two_scores(folders, tmp_path, returned):
    (tmp_path / "own.py").write_text(f"def own(chosen, rejected):\n    return {returned}\n")
    learner = learner_on(folders, f"{tmp_path}/own.py:own")
    with pytest.raises(UserCodeFailed, match=r"must return three tensors of shape \[4\], losses and two scores"):
        learner.evaluate_preference(pair_batch())
