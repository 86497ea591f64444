"""One optimizer step: the same however the batch is cut, and equal to one written by hand."""

import copy
import math

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from tandem.api.batch import select, unpack
from tandem.api.failures import BatchError, NonFinite
from tandem.config.errors import ConfigError
from tandem.config.train_engine import TrainEngineConfig
from tandem.engines.train.engine import SpreadEngine
from tandem.engines.train.spread import Totals
from tests.engines_train.steps import distance, engine_on, random_batch, weighted_nll, weights_of
from tests.tiny import tiny_model_folder

LENGTHS = (3, 14, 2, 5, 9, 9, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("models"), "smollm")


@pytest.fixture(scope="module")
def batch():
    return random_batch(LENGTHS)


@pytest.fixture(scope="module")
def whole(folder, batch):
    """(initial weights, weights after a step on the whole batch, its metrics)."""
    engine = engine_on(folder)
    initial = weights_of(engine)
    metrics = engine.train_batch(batch, weighted_nll, entropy=True)
    return initial, weights_of(engine), metrics


def assert_same_step(whole, engine, metrics):
    initial, after, expected = whole
    step = distance(initial, after)
    assert step > 0
    assert distance(weights_of(engine), after) <= 1e-3 * step
    assert metrics == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("max_tokens", [1, 15, 20, 30])
def test_a_step_does_not_depend_on_micro_batching(folder, batch, whole, max_tokens):
    engine = engine_on(folder, max_tokens=max_tokens, chunk_tokens=3)
    assert_same_step(whole, engine, engine.train_batch(batch, weighted_nll, entropy=True))


def test_images_are_refused_by_name(folder, batch):
    engine, text = engine_on(folder), torch.zeros_like(batch["input_ids"])
    wanted = engine.forward(batch).logprobs
    assert torch.equal(engine.forward(batch.clone().update({"media": text})).logprobs, wanted)
    for compute in (lambda b: engine.train_batch(b, weighted_nll), engine.forward):
        with pytest.raises(BatchError, match="images or sounds, and this model reads only text"):
            compute(batch.clone().update({"media": text - 1}))


def test_a_step_does_not_depend_on_packing_order(folder, batch, whole):
    engine = engine_on(folder, max_tokens=15)
    shuffled = select(batch, [4, 2, 6, 0, 5, 1, 3])
    assert_same_step(whole, engine, engine.train_batch(shuffled, weighted_nll, entropy=True))


def test_a_step_does_not_depend_on_gradient_checkpointing(folder, batch, whole):
    engine = engine_on(folder, checkpointing=True)
    assert_same_step(whole, engine, engine.train_batch(batch, weighted_nll, entropy=True))


def test_units_stay_together(folder, batch):
    together = batch.clone()
    together["unit_id"] = torch.tensor([0, 1, 0, 2, 1, 3, 3])
    seen = []

    def record(outputs, view):
        seen.append(view["unit_id"].tolist())
        return weighted_nll(outputs, view)

    engine_on(folder, max_tokens=12).eval_batch(together, record)
    assert len(seen) > 1
    assert all(sum(unit in units for units in seen) == 1 for unit in range(4))


def reference_steps(folder, batch, steps=1, **adamw):
    """Steps by torch and transformers alone: padded rows, whole logits, plain AdamW. Returns the first one's loss and norm,
    and the model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    rows = unpack(batch)
    names = ("input_ids", "loss_mask", "loss_weights", "advantages")
    padded = {name: pad_sequence([row[name] for row in rows], batch_first=True) for name in names}
    mask = pad_sequence([torch.ones(len(row["input_ids"]), dtype=torch.long) for row in rows], batch_first=True)
    later = {name: padded[name][:, 1:] for name in ("loss_mask", "loss_weights", "advantages")}
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer, found = torch.optim.AdamW(groups, lr=1e-2, **adamw), []
    for _ in range(steps):
        optimizer.zero_grad()
        logits = model(input_ids=padded["input_ids"], attention_mask=mask).logits
        logprobs = torch.log_softmax(logits[:, :-1] / batch["temperature"][:, None, None], -1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        chosen = logprobs.gather(2, padded["input_ids"][:, 1:, None])[..., 0]
        loss = (later["loss_weights"] * (-chosen * later["advantages"] - 0.1 * entropy) * later["loss_mask"]).sum()
        loss.backward()
        found.append((loss.item(), math.sqrt(sum(float(p.grad.pow(2).sum()) for p in model.parameters()))))
        optimizer.step()
    return *found[0], model


def test_a_step_equals_a_padded_reference_without_our_code(folder, batch, whole):
    loss, norm, model = reference_steps(folder, batch)
    initial, after, metrics = whole
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert distance(after, dict(model.named_parameters())) <= 1e-3 * distance(initial, after)


def test_moments_decay_as_the_optimizers_options_say(folder, batch, whole):
    """The first step does not show it: there the moments are the gradient's own."""
    engine = engine_on(folder, beta1=0.3, beta2=0.5, eps=1e-3)
    for _ in range(2):
        engine.train_batch(batch, weighted_nll, entropy=True)
    *_, model = reference_steps(folder, batch, 2, betas=(0.3, 0.5), eps=1e-3)
    after = weights_of(engine)
    assert distance(after, dict(model.named_parameters())) <= 1e-3 * distance(whole[0], after)


def test_metrics_are_means_over_trained_tokens_and_over_sequences(folder, batch, whole):
    _, _, metrics = whole
    logprobs = engine_on(folder).forward(batch).logprobs
    assert metrics["logprob"] == pytest.approx(logprobs[batch["loss_mask"]].mean().item(), rel=1e-5)
    assert metrics["length"] == pytest.approx(sum(LENGTHS) / len(LENGTHS))
    assert metrics["skipped"] == 0
    assert metrics["lr"] == 1e-2
    assert metrics["length/max"] == max(LENGTHS)


def test_of_a_maximum_what_is_not_a_number_counts_for_nothing():
    totals, loss, token = Totals(), torch.zeros(()), torch.tensor([0])
    for value in (5.0, math.nan, 3.0):
        totals.add(loss, {"gap/max": torch.tensor([value])}, token, 1, 2)
    totals.add(loss, {"gap/max": torch.tensor([9.0])}, token[:0], 1, 2)  # nothing of it is trained
    assert totals.gather(None) == {"loss": 0.0, "gap/max": 5.0}


def test_forward_gives_the_callers_order_and_evaluation_changes_nothing(folder, batch):
    engine = engine_on(folder, max_tokens=12)
    before = weights_of(engine)
    outputs = engine.forward(batch, entropy=True)
    whole = engine_on(folder).forward(batch, entropy=True)
    torch.testing.assert_close(outputs.logprobs, whole.logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(outputs.entropy, whole.entropy, atol=1e-5, rtol=1e-5)
    assert engine.forward(batch).entropy is None
    loss = engine.eval_batch(batch, weighted_nll)["loss"]
    assert loss == pytest.approx(
        (weighted_nll(whole._replace(entropy=None), batch)[0] * batch["loss_weights"]).sum().item(), rel=1e-5
    )
    assert distance(before, weights_of(engine)) == 0


def test_a_gradient_above_the_limit_is_scaled_to_it(folder, batch, whole):
    # plain AdamW forgets the scale of a gradient; a large eps keeps it
    free = engine_on(folder, eps=1.0, weight_decay=0.0)
    clipped = engine_on(folder, eps=1.0, weight_decay=0.0, max_grad_norm=1e-4)
    steps = []
    for engine in (free, clipped):
        before = weights_of(engine)
        norm = engine.train_batch(batch, weighted_nll, entropy=True)["grad_norm"]
        steps.append(distance(before, weights_of(engine)))
    assert norm == pytest.approx(whole[2]["grad_norm"])
    assert steps[1] / steps[0] == pytest.approx(1e-4 / norm, rel=0.1)


def test_a_step_that_is_not_finite_is_skipped_and_counted_until_the_run_stops(folder, batch):
    engine = engine_on(folder, schedule="linear")
    before = weights_of(engine)

    def poisoned(outputs, view):
        losses, metrics = weighted_nll(outputs, view)
        return losses * float("nan"), metrics

    assert [engine.train_batch(batch, poisoned)["skipped"] for _ in range(2)] == [1, 1]
    assert distance(before, weights_of(engine)) == 0
    good = engine.train_batch(batch, weighted_nll)  # a good step begins the count anew
    assert (good["skipped"], good["lr"]) == (0, pytest.approx(0.8e-2))  # a skipped one is one of the schedule
    assert distance(before, weights_of(engine)) > 0
    for _ in range(2):
        engine.train_batch(batch, poisoned)
    resumed = engine_on(folder, schedule="linear")
    resumed.load_state_dict(engine.state_dict())
    for one in (engine, resumed):
        with pytest.raises(NonFinite, match="3 optimizer steps in a row"):
            one.train_batch(batch, poisoned)


def test_a_finite_loss_with_an_infinite_gradient_is_skipped(folder, batch):
    engine = engine_on(folder)
    before = weights_of(engine)

    def infinite_slope(outputs, view):
        return (outputs.logprobs - outputs.logprobs.detach()).abs().sqrt(), {}

    metrics = engine.train_batch(batch, infinite_slope)
    assert metrics["loss"] == 0
    assert metrics["skipped"] == 1
    assert distance(before, weights_of(engine)) == 0


def test_a_finite_gradient_of_an_infinite_loss_is_skipped(folder, batch):
    engine = engine_on(folder)
    before = weights_of(engine)
    metrics = engine.train_batch(batch, lambda outputs, view: (outputs.logprobs + math.inf, {}))
    assert not math.isfinite(metrics["loss"]) and 0 < metrics["grad_norm"] < math.inf and metrics["skipped"] == 1
    assert distance(before, weights_of(engine)) == 0


def test_a_batch_without_information_changes_nothing_even_with_momentum(folder, batch):
    engine = engine_on(folder)
    engine.train_batch(batch, weighted_nll)
    before = weights_of(engine)
    metrics = engine.train_batch(batch, lambda outputs, view: (outputs.logprobs * 0, {}))
    assert (metrics["grad_norm"], metrics["skipped"]) == (0, 0)
    assert distance(before, weights_of(engine)) == 0


def test_bfloat16_steps_are_kept_in_float32(folder, batch):
    """A learning rate that bfloat16 weights would round away still moves the masters."""
    engine = engine_on(folder, dtype="bfloat16", lr=1e-5, weight_decay=0.0)
    before = weights_of(engine)
    rounded = {name: tensor.clone() for name, tensor in engine.weights(torch.bfloat16)}
    metrics = engine.train_batch(batch, weighted_nll)
    moved = weights_of(engine)
    assert metrics["skipped"] == 0
    assert all(tensor.dtype == torch.float32 for tensor in moved.values())
    assert distance(before, moved) > 0
    assert sum(int((rounded[n] != t.to(torch.bfloat16)).sum()) for n, t in moved.items()) < 0.05 * sum(
        t.numel() for t in moved.values()
    )
    exact = engine_on(folder, lr=1e-5, weight_decay=0.0).train_batch(batch, weighted_nll)
    assert metrics["loss"] == pytest.approx(exact["loss"], rel=0.1, abs=1e-2)
    assert metrics["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.1)


def test_bfloat16_micro_batches_add_up_in_float32(folder, batch):
    norms = [
        engine_on(folder, dtype="bfloat16", max_tokens=n).train_batch(batch, weighted_nll)["grad_norm"] for n in (15, 1000)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=0.02)


def test_a_loss_of_the_wrong_shape_is_refused(folder, batch):
    with pytest.raises(BatchError, match=r"gave losses \[46, 1\], loss_weights are \[46\]"):
        engine_on(folder).train_batch(batch, lambda outputs, view: (outputs.logprobs[:, None], {}))


def test_what_is_offloaded_must_be_brought_back(folder, batch):
    engine = engine_on(folder)
    before = engine.forward(batch).logprobs
    engine.offload(("parameters", "optimizer"))
    with pytest.raises(RuntimeError, match=r"parameters.*are offloaded; call onload"):
        engine.forward(batch)
    engine.onload(("parameters",))
    assert torch.equal(engine.forward(batch).logprobs, before)
    with pytest.raises(RuntimeError, match=r"optimizer .*are offloaded; call onload"):
        engine.train_batch(batch, weighted_nll)
    engine.onload(("optimizer",))
    assert engine.train_batch(batch, weighted_nll)["skipped"] == 0


def test_a_saved_model_is_opened_by_transformers_and_by_us(folder, batch, tmp_path):
    engine = engine_on(folder)
    engine.train_batch(batch, weighted_nll)
    engine.save(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation="eager")
    assert loaded.dtype == torch.float32
    assert distance(weights_of(engine), dict(loaded.named_parameters())) == 0
    assert loaded.generation_config.eos_token_id == 2
    ids = batch["input_ids"][3:17]
    logprobs = torch.log_softmax(loaded(input_ids=ids[None]).logits[0, :-1] / batch["temperature"][1], -1)
    theirs = logprobs.gather(1, ids[1:, None])[:, 0] * batch["loss_mask"][4:17]
    torch.testing.assert_close(engine.forward(batch).logprobs[4:17], theirs, atol=2e-5, rtol=1e-5)

    fresh = engine_on(folder)
    fresh.load(tmp_path / "saved")
    assert torch.equal(fresh.forward(batch).logprobs, engine.forward(batch).logprobs)


def test_weights_of_another_model_are_refused_and_nothing_changes(folder, tmp_path):
    engine = engine_on(folder)
    before = copy.deepcopy(weights_of(engine))
    other = tiny_model_folder(tmp_path, "smollm", intermediate_size=32)
    with pytest.raises(ConfigError, match=r"is \[32, 48\], this model has \[64, 48\]"):
        engine.load(other)
    assert distance(before, weights_of(engine)) == 0


def test_tied_tensors_come_once_under_their_hugging_face_names(folder):
    names = [name for name, _ in engine_on(folder).weights()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("backend", "message"),
    [("fsdp:d2", "but 1 process"), ("fsdp:d1t2", "but 1 process"), ("deepspeed:zero2:d2", "zero2:d1"), ("fsdp", "fsdp:dN")],
)
def test_a_backend_that_does_not_fit_is_refused(folder, backend, message):
    with pytest.raises(ConfigError, match=message):
        SpreadEngine(TrainEngineConfig(path=str(folder), backend=backend), 1)


def test_sequences_without_weight_change_no_gradient_and_stay_in_the_metrics(folder, batch):
    def counted(outputs, view):
        return -outputs.logprobs, {"logprob": outputs.logprobs.detach()}

    some = batch.clone()
    bounds = batch["cu_seqlens"].tolist()
    some["loss_weights"][bounds[0] : bounds[1]] = 0
    rest = select(some, list(range(1, len(bounds) - 1)))
    with_all, without = engine_on(folder), engine_on(folder)
    whole, part = with_all.train_batch(some, counted), without.train_batch(rest, counted)

    assert whole["grad_norm"] == pytest.approx(part["grad_norm"], rel=1e-5)
    assert whole["loss"] == pytest.approx(part["loss"], rel=1e-5)
    assert whole["logprob"] == pytest.approx(engine_on(folder).eval_batch(batch, counted)["logprob"], rel=1e-5)
    assert whole["logprob"] != pytest.approx(part["logprob"], rel=1e-5)


def test_compiling_without_a_compiler_is_refused_at_once(folder, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"actor.compile=true needs a C\+\+ compiler"):
        SpreadEngine(TrainEngineConfig(path=str(folder), compile=True), 1)


def test_offloading_without_a_gpu_is_refused(folder):
    with pytest.raises(ConfigError, match="which has no use without a GPU"):
        SpreadEngine(TrainEngineConfig(path=str(folder), offload=True), 1)
