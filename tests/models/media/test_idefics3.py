"""Idefics3: our table = the official processor, packed = one by one = transformers, for values and gradients."""

import json
import shutil

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from tandem.api.media import encode
from tandem.config.errors import ConfigError
from tandem.media import store
from tandem.models.load import load_causal_lm
from tandem.models.media.families import family_of, open_tower
from tandem.models.tokenizer import load_tokenizer
from tests.tiny_media import picture, tiny_idefics3

SIZES = [(20, 16), (10, 30), (16, 16), (64, 64), (5, 64), (33, 9)]


@pytest.fixture(autouse=True)
def media_store(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_MEDIA", str(tmp_path / "media"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_idefics3(tmp_path_factory.mktemp("models"))


def processed(folder, text, media):
    """The official processor's inputs."""
    pictures = [[Image.fromarray(store.image(one.number)) for one in media]] if media else None
    return AutoProcessor.from_pretrained(folder)(text=[text], images=pictures, return_tensors="pt")


def packed(tokenizer, prompts):
    """A batch of (text, media), of which `predicted` is."""
    encoded = [encode(tokenizer, text, media) for text, media in prompts]
    lengths = torch.tensor([0, *(len(one.ids) for one in encoded)])
    mask = torch.cat([predicted(len(one.ids), media) for one, (_, media) in zip(encoded, prompts, strict=True)])
    ids, media = (torch.cat([torch.tensor(part) for part in parts]) for parts in zip(*encoded, strict=True))
    return {
        "input_ids": ids,
        "cu_seqlens": lengths.cumsum(0),
        "loss_mask": mask,
        "temperature": torch.ones(len(prompts)),
        "media": media,
    }


def predicted(length, media):
    """The last 3 tokens, and of several pictures the second token too: then all of them come in later turns."""
    at = torch.arange(length)
    return (at >= length - 3) | ((at == 1) & (len(media) > 1))


def by_transformers(model, folder, prompts):
    """Log-probabilities, ``[T]``, one forward pass each."""
    found = []
    for text, media in prompts:
        given = processed(folder, text, media)
        logits = torch.log_softmax(model(**given).logits[0].float(), -1)
        ids = given["input_ids"][0]
        own = torch.cat([torch.zeros(1), logits[:-1].gather(1, ids[1:, None])[:, 0]])
        found.append(own * predicted(len(ids), media))
    return torch.cat(found)


@pytest.mark.parametrize("splits", [True, False])
def test_placeholders_are_those_of_the_official_processor(tmp_path, splits):
    folder = tiny_idefics3(tmp_path, splits=splits)
    tokenizer = load_tokenizer(folder)
    generator = torch.Generator().manual_seed(0)
    sizes = SIZES + torch.randint(1, 400, (20, 2), generator=generator).tolist()
    for number, (width, height) in enumerate(sizes):
        one = picture(number, width, height)
        text = "One <image> picture"
        assert encode(tokenizer, text, [one]).ids == processed(folder, text, [one])["input_ids"][0].tolist(), one


def mixed_prompts():
    """Several pictures in a prompt, in later turns, the same twice, shared prompts, none."""
    a, b, c = picture(0, 20, 16), picture(1, 10, 30), picture(2, 16, 16)
    return [
        ("What is <image> this? A cat", [a]),
        ("What is <image> this? A dog", [a]),
        ("What is <image> this? A cat", [b]),
        ("Look: <image> and <image>? No, <image> is it", [c, a, c]),
        ("no picture at all, but the answer is seven", []),
        ("user <image> yes. user <image> no", [b, c]),
    ]


def test_packed_equals_transformers_one_by_one_in_values_and_gradients(folder):
    tokenizer, ours, prompts = load_tokenizer(folder), load_causal_lm(folder), mixed_prompts()
    theirs = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    batch = packed(tokenizer, prompts)
    layout = ours.lay_out(**batch)

    assert len(layout.ids) < layout.total, "shared prompts are computed once"
    found, wanted = ours(layout).logprobs, by_transformers(theirs, folder, prompts)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    alone = [ours(ours.lay_out(**packed(tokenizer, [one]))).logprobs for one in prompts]
    torch.testing.assert_close(found, torch.cat(alone), atol=1e-5, rtol=1e-5)

    direction = torch.randn(len(found), generator=torch.Generator().manual_seed(1))
    (found * direction).sum().backward()
    (wanted * direction).sum().backward()
    for (name, one), other in zip(ours.model.named_parameters(), theirs.parameters(), strict=True):
        assert (one.grad - other.grad).abs().max() <= 2e-5 * max(1.0, float(other.grad.abs().max())), name


def test_equal_tokens_with_other_pictures_never_share(folder):
    tokenizer, model = load_tokenizer(folder), load_causal_lm(folder)
    a, b = picture(0), picture(1)
    prompts = [("What is <image> this? yes", [one]) for one in (a, b, a)]
    batch = packed(tokenizer, prompts)
    layout = model.lay_out(**batch)
    one, other, again = model(layout).logprobs.detach().chunk(3)

    assert batch["input_ids"].chunk(3)[0].equal(batch["input_ids"].chunk(3)[1])
    assert len(layout.ids) == layout.total - len(one) + 3, "the same picture is shared, the other one is not"
    assert torch.equal(one, again) and (one - other).abs().max() > 1e-3
    for prompt, whole in zip(prompts, (one, other), strict=False):
        alone = model(model.lay_out(**packed(tokenizer, [prompt]))).logprobs
        torch.testing.assert_close(whole, alone, atol=1e-5, rtol=1e-5)


def test_features_of_a_frozen_tower_are_computed_once_and_of_a_trained_one_in_each_pass(folder):
    tokenizer, model = load_tokenizer(folder), load_causal_lm(folder)
    layout = model.lay_out(**packed(tokenizer, mixed_prompts()))
    for _ in range(2):
        model(layout)
    assert model.media.computed == 2 * 3
    trained = model(layout).logprobs.detach()

    model.requires_grad_(False)
    model.media.computed = 0
    frozen = [model(layout).logprobs for _ in range(2)]
    assert model.media.computed == 3
    torch.testing.assert_close(frozen[0], trained, atol=1e-5, rtol=1e-5)
    assert torch.equal(*frozen)


def test_the_tower_alone_gives_the_features_of_the_whole_model(folder):
    family, whole = family_of(folder), load_causal_lm(folder)
    inputs = [family.inputs(picture(seed, *size)) for seed, size in enumerate(SIZES)]
    tower = open_tower(folder, torch.float32, torch.device("cpu"))
    assert sum(p.numel() for p in tower.parameters()) < 0.5 * sum(p.numel() for p in whole.parameters())
    for one, other in zip(family.features(tower, inputs), family.features(whole.model, inputs), strict=True):
        assert torch.equal(one, other)


def test_gradient_checkpointing_changes_nothing(folder):
    batch, gradients = packed(load_tokenizer(folder), mixed_prompts()), []
    for checkpointing in (False, True):
        model = load_causal_lm(folder, gradient_checkpointing=checkpointing)
        model(model.lay_out(**batch)).logprobs.sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_folders_whose_parts_do_not_fit_are_refused(folder, tmp_path):
    def changed(name, **settings):
        other = tmp_path / "changed"
        shutil.rmtree(other, ignore_errors=True)
        shutil.copytree(folder, other)
        file = other / name
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))
        return other

    with pytest.raises(ConfigError, match="writes 9 placeholders for each"):
        load_causal_lm(changed("processor_config.json", image_seq_len=9))
    with pytest.raises(ConfigError, match="are of different models"):
        load_tokenizer(changed("config.json", image_token_id=7))
    with pytest.raises(ConfigError, match="reads images or sounds.*idefics3"):
        load_causal_lm(changed("config.json", model_type="llava"))
