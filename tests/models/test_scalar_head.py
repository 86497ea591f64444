"""One number a token: what transformers' sequence classifier says of the text up to that token."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification

from tandem.config.errors import ConfigError
from tandem.models.load import load_scalar_model
from tandem.models.packed import PackedScalarModel
from tests.models.test_packed import LENGTHS, random_pack
from tests.models.test_prefixes import grouped_batch
from tests.tiny import KINDS, tiny_config, tiny_model_folder

PADDING = 1  # the tiny models' beginning of a text; their own padding token is also their end


def scored(model: PackedScalarModel, seed: int = 5) -> PackedScalarModel:
    """The same with a head that is not 0."""
    torch.nn.init.normal_(model.model.score.weight, generator=torch.Generator().manual_seed(seed))
    return model


def classifier_folder(tmp_path, kind="llama"):
    model = scored(load_scalar_model(tiny_model_folder(tmp_path, kind)))
    folder = tmp_path / f"classifier-{kind}"
    model.model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_scores_the_saved_classifier_the_same_at_every_prefix(tmp_path, kind):
    folder = classifier_folder(tmp_path, kind)
    ours = load_scalar_model(folder)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager")
    pack = random_pack(LENGTHS)
    ids = pack["input_ids"] = pack["input_ids"].masked_fill(pack["input_ids"] == PADDING, 7)
    ids[pack["cu_seqlens"][1:] - 1] = 2  # every text ends as the chat template ends it

    scores = ours(ours.lay_out(ids, pack["cu_seqlens"], pack["loss_mask"])).scores
    bounds = pack["cu_seqlens"].tolist()
    prefixes = [ids[a : t + 1] for a, b in zip(bounds, bounds[1:], strict=False) for t in range(a, b)]
    padded = torch.nn.utils.rnn.pad_sequence(prefixes, batch_first=True, padding_value=theirs.config.pad_token_id)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(p)) for p in prefixes], batch_first=True)
    expected = theirs(input_ids=padded, attention_mask=mask).logits

    assert theirs.num_labels == 1
    assert expected.shape == (sum(LENGTHS), 1)
    torch.testing.assert_close(scores, expected[:, 0], atol=1e-5, rtol=1e-5)


def test_gradients_are_those_of_transformers(tmp_path):
    folder = classifier_folder(tmp_path)
    ours = load_scalar_model(folder)
    reference = copy.deepcopy(ours.model)
    reference.set_attn_implementation("eager")
    ids = random_pack((9,))["input_ids"]
    ours(ours.lay_out(ids, torch.tensor([0, 9]), torch.ones(9, dtype=torch.bool))).scores.square().sum().backward()
    states = reference.model(input_ids=ids[None]).last_hidden_state[0]
    reference.score(states).square().sum().backward()
    for (name, mine), theirs in zip(ours.model.named_parameters(), reference.parameters(), strict=True):
        assert (mine.grad - theirs.grad).abs().max() <= 2e-5 * theirs.grad.abs().max(), name
    assert ours.model.get_input_embeddings().weight.grad[ids].any(1).all()


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3"])
def test_shared_prompts_give_the_scores_and_gradients_of_separate_sequences(tmp_path, kind):
    model = scored(load_scalar_model(tiny_model_folder(tmp_path, kind)))
    ids, cu_seqlens, mask = grouped_batch()
    weights = torch.linspace(-1, 1, len(ids))
    together = model(model.lay_out(ids, cu_seqlens, mask)).scores
    (together * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    alone = model(model.lay_out(ids, cu_seqlens, torch.ones_like(mask))).scores  # no prompts: nothing is shared
    (alone * weights).sum().backward()
    assert model.lay_out(ids, cu_seqlens, mask).place is not None
    assert model.lay_out(ids, cu_seqlens, torch.ones_like(mask)).place is None
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, gradients[name], atol=2e-4 * float(gradients[name].abs().max()) + 1e-6), name


def test_a_language_model_begins_with_a_head_of_zeros_and_a_classifier_keeps_its_own(tmp_path):
    fresh = load_scalar_model(tiny_model_folder(tmp_path))
    assert not fresh.model.score.weight.any()
    folder = classifier_folder(tmp_path)
    assert torch.equal(load_scalar_model(folder).model.score.weight, scored(fresh).model.score.weight)


def test_more_than_one_label_is_refused_by_name(tmp_path):
    config = tiny_config()
    config.num_labels = 3
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "three")
    with pytest.raises(ConfigError, match=r"classifier with 3 labels \(LABEL_0, LABEL_1, LABEL_2\).*num_labels=1"):
        load_scalar_model(tmp_path / "three")


@pytest.mark.parametrize("kind", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_a_chosen_class_is_scored_by_its_log_odds(tmp_path, kind):
    config = tiny_config(
        pad_token_id=0, id2label={0: "calm", 1: "rude", 2: "kind"}, label2id={"calm": 0, "rude": 1, "kind": 2}
    )
    torch.manual_seed(3)
    theirs = kind.from_config(config).eval()
    torch.nn.init.normal_(theirs.score.weight)
    theirs.save_pretrained(tmp_path / "three")
    ids = random_pack((9,))["input_ids"]
    with torch.no_grad():
        states = theirs.model(input_ids=ids[None]).last_hidden_state[0]
        expected = theirs.score(states).softmax(-1)[:, 1].logit()
        for label in ("rude", 1):
            ours = load_scalar_model(tmp_path / "three", class_label=label)
            scores = ours(ours.lay_out(ids, torch.tensor([0, 9]), torch.ones(9, dtype=torch.bool))).scores
            torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)
    for wrong in ("rud", 3, -1, True):
        with pytest.raises(
            ConfigError, match=rf"has no class_label={wrong}; its classes are 0 \(calm\), 1 \(rude\), 2 \(kind\)"
        ):
            load_scalar_model(tmp_path / "three", class_label=wrong)
    with pytest.raises(ConfigError, match="gives one number, so class_label=rude chooses nothing"):
        load_scalar_model(classifier_folder(tmp_path), class_label="rude")


def test_a_number_that_is_the_name_of_another_class_is_refused(tmp_path):
    config = tiny_config(pad_token_id=0, id2label={0: "1", 1: "2", 2: "3"}, label2id={"1": 0, "2": 1, "3": 2})
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "stars")
    assert load_scalar_model(tmp_path / "stars", class_label="2").chosen == 1
    with pytest.raises(ConfigError, match=r"has a class 2 \(3\), and another class is called 2: .* class_label='3'"):
        load_scalar_model(tmp_path / "stars", class_label=2)


def test_a_folder_that_lacks_a_layer_is_refused(tmp_path):
    folder = tiny_model_folder(tmp_path)
    config = AutoConfig.from_pretrained(folder)
    config.num_hidden_layers = 3
    config.save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"are missing, first 'model\.layers\.2"):
        load_scalar_model(folder)


def test_padding_is_never_the_end_of_a_text(tmp_path):
    assert load_scalar_model(tiny_model_folder(tmp_path, "llama")).config.pad_token_id == PADDING
    other = tiny_model_folder(tmp_path, "qwen3", pad_token_id=0)
    assert load_scalar_model(other).config.pad_token_id == 0
    qwen = tiny_model_folder(tmp_path, "mistral", bos_token_id=2)  # begins texts as it ends them
    assert load_scalar_model(qwen).config.pad_token_id == 0  # <|endoftext|>, special and no end here
    (qwen / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="set pad_token_id there to a token that no text ends with"):
        load_scalar_model(qwen)
