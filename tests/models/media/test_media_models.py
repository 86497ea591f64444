"""Every media family: our counts = the processor's, packed = one by one = transformers, for values and gradients."""

import json
import shutil

import pytest
import torch
from PIL import Image
from transformers import AutoModelForMultimodalLM, AutoProcessor, Qwen2AudioProcessor

from tandem.api.failures import DataFailure
from tandem.api.media import encode
from tandem.config.errors import ConfigError
from tandem.media import store
from tandem.models.load import load_causal_lm
from tandem.models.tokenizer import load_tokenizer
from tests.tiny_media import (
    FAMILIES,
    picture,
    sound,
    tiny_idefics3,
    tiny_llava,
    tiny_media_model,
    tiny_qwen_audio,
    tiny_qwen_vl,
)

SECONDS = (0.4, 1.0, 0.73)
SIZES = [(20, 16), (10, 30), (16, 16), (64, 64), (5, 64), (33, 9)]


@pytest.fixture(autouse=True)
def media_store(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_MEDIA", str(tmp_path / "media"))


@pytest.fixture(scope="module", params=[*FAMILIES, "llava of SigLIP"])
def folder(request, tmp_path_factory):
    tmp = tmp_path_factory.mktemp("models")
    if request.param not in FAMILIES:
        return tiny_llava(tmp, tower="siglip", layer=[-3, -1])
    return tiny_media_model(tmp, request.param)


def some_media(tokenizer, seed):
    if tokenizer.media.kinds == ("audio",):
        return sound(seed, SECONDS[seed % len(SECONDS)])
    return picture(seed, *SIZES[seed % len(SIZES)])


def marker(tokenizer):
    return tokenizer.media.marker(tokenizer.media.kinds[0])


def reference_inputs(folder, tokenizer, text, media):
    """The official processor's inputs, where it loads; else from the tokens that the family's counts give."""
    if tokenizer.media.kinds == ("audio",):
        sounds = [store.sound(one.number) for one in media] or None
        return Qwen2AudioProcessor.from_pretrained(folder)(text=[text], audio=sounds, return_tensors="pt")
    pictures = [Image.fromarray(store.image(one.number)) for one in media]
    if tokenizer.media.model_types[0] == "llava":
        return AutoProcessor.from_pretrained(folder)(text=[text], images=pictures or None, return_tensors="pt")
    if tokenizer.media.model_types[0] == "idefics3":
        return AutoProcessor.from_pretrained(folder)(
            text=[text], images=[pictures] if pictures else None, return_tensors="pt"
        )
    ids = torch.tensor([encode(tokenizer, text, media).ids])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if pictures:
        given |= tokenizer.media.processor(images=pictures, return_tensors="pt")
        given["mm_token_type_ids"] = (ids == tokenizer.media.placeholder("image")).int()
    return given


def packed(tokenizer, prompts):
    """A batch of (text, media), of which `predicted` is."""
    encoded = [encode(tokenizer, text.replace("@", marker(tokenizer)), media) for text, media in prompts]
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


def by_transformers(model, folder, tokenizer, prompts):
    """Log-probabilities, ``[T]``, one forward pass each."""
    found = []
    for text, media in prompts:
        given = reference_inputs(folder, tokenizer, text.replace("@", marker(tokenizer)), media)
        logits = torch.log_softmax(model(**given).logits[0].float(), -1)
        ids = given["input_ids"][0]
        own = torch.cat([torch.zeros(1), logits[:-1].gather(1, ids[1:, None])[:, 0]])
        found.append(own * predicted(len(ids), media))
    return torch.cat(found)


def mixed_prompts(tokenizer):
    """Several media in a prompt, in later turns, the same one twice, shared prompts, none."""
    a, b, c = (some_media(tokenizer, seed) for seed in range(3))
    return [
        ("What is @ this? A cat", [a]),
        ("What is @ this? A dog", [a]),
        ("What is @ this? A cat", [b]),
        ("Look: @ and @? No, @ is it", [c, a, c]),
        ("no picture at all, but the answer is seven", []),
        ("user @ yes. user @ no", [b, c]),
    ]


def test_packed_equals_transformers_one_by_one_in_values_and_gradients(folder):
    tokenizer, ours = load_tokenizer(folder), load_causal_lm(folder)
    prompts = mixed_prompts(tokenizer)
    theirs = AutoModelForMultimodalLM.from_pretrained(folder, attn_implementation="eager").eval()
    batch = packed(tokenizer, prompts)
    layout = ours.lay_out(**batch)

    assert len(layout.ids) < layout.total, "shared prompts are computed once"
    found, wanted = ours(layout).logprobs, by_transformers(theirs, folder, tokenizer, prompts)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    alone = [ours(ours.lay_out(**packed(tokenizer, [one]))).logprobs for one in prompts]
    torch.testing.assert_close(found, torch.cat(alone), atol=1e-5, rtol=1e-5)

    direction = torch.randn(len(found), generator=torch.Generator().manual_seed(1))
    (found * direction).sum().backward()
    (wanted * direction).sum().backward()
    for (name, one), other in zip(ours.model.named_parameters(), theirs.parameters(), strict=True):
        if one.requires_grad:
            assert (one.grad - other.grad).abs().max() <= 2e-5 * max(1.0, float(other.grad.abs().max())), name


def rows_are_alike():
    """A row of a matrix product is the same to the bit in every place and among any number of others."""
    row, matrix = torch.randn(1, 32), torch.randn(32, 64)
    found = [row.expand(n, -1) @ matrix for n in range(2, 40)]
    return all(torch.equal(one, found[0][:1].expand_as(one)) for one in found)


def test_equal_tokens_with_other_media_never_share(folder):
    tokenizer, model = load_tokenizer(folder), load_causal_lm(folder)
    a = some_media(tokenizer, 0)
    b = sound(9, SECONDS[0]) if a.kind == "audio" else picture(9, *a.size)
    prompts = [("What is @ this? yes", [one]) for one in (a, b, a)]
    batch = packed(tokenizer, prompts)
    layout = model.lay_out(**batch)
    one, other, again = model(layout).logprobs.detach().chunk(3)

    assert batch["input_ids"].chunk(3)[0].equal(batch["input_ids"].chunk(3)[1])
    assert len(layout.ids) == layout.total - len(one) + 3, "the same picture is shared, the other one is not"
    places = layout.place.chunk(3)
    assert torch.equal(places[0][:-3], places[2][:-3]), "of what comes before the answer both read the same states"
    # Their own tokens go through the same products in other rows. To the bit with MKL's kernels for AVX-512; with those for
    # AVX2 up to 4.8e-7 apart, one unit of the last place, and so they were before Qwen3-VL came.
    assert (one - again).abs().max() <= (0 if rows_are_alike() else 1e-6)
    assert (one - other).abs().max() > 1e-3
    for prompt, whole in zip(prompts, (one, other), strict=False):
        alone = model(model.lay_out(**packed(tokenizer, [prompt]))).logprobs
        torch.testing.assert_close(whole, alone, atol=1e-5, rtol=1e-5)


def test_a_frozen_tower_is_computed_once_and_a_trained_one_in_each_pass(folder):
    tokenizer, model = load_tokenizer(folder), load_causal_lm(folder)
    layout = model.lay_out(**packed(tokenizer, mixed_prompts(tokenizer)))
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


def test_gradient_checkpointing_changes_nothing(folder):
    tokenizer, gradients = load_tokenizer(folder), []
    batch = packed(tokenizer, mixed_prompts(tokenizer))
    for checkpointing in (False, True):
        model = load_causal_lm(folder, gradient_checkpointing=checkpointing)
        model(model.lay_out(**batch)).logprobs.sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def random_sizes():
    generator = torch.Generator().manual_seed(0)
    return SIZES + torch.randint(1, 400, (30, 2), generator=generator).tolist()


@pytest.mark.parametrize("splits", [True, False])
def test_placeholders_of_idefics3_are_those_of_the_official_processor(tmp_path, splits):
    folder = tiny_idefics3(tmp_path, splits=splits)
    tokenizer, processor = load_tokenizer(folder), AutoProcessor.from_pretrained(folder)
    for number, size in enumerate(random_sizes()):
        one, text = picture(number, *size), "One <image> picture"
        theirs = processor(text=[text], images=[[Image.fromarray(store.image(one.number))]])["input_ids"][0]
        assert encode(tokenizer, text, [one]).ids == theirs, size


@pytest.mark.parametrize("tower", ["clip", "siglip"])
def test_placeholders_of_llava_are_those_of_the_official_processor(tmp_path, tower):
    folder = tiny_llava(tmp_path, tower=tower)
    tokenizer, processor = load_tokenizer(folder), AutoProcessor.from_pretrained(folder)
    for number, size in enumerate(random_sizes()):
        one, text = picture(number, *size), "One <image> picture"
        theirs = processor(text=[text], images=[Image.fromarray(store.image(one.number))])
        assert encode(tokenizer, text, [one]).ids == theirs["input_ids"][0], size
        assert torch.equal(tokenizer.media.inputs(one)["pixel_values"][0], torch.tensor(theirs["pixel_values"][0])), size
    settings = json.loads((folder / "processor_config.json").read_text())
    (folder / "processor_config.json").write_text(json.dumps(settings | {"patch_size": 8}))
    with pytest.raises(ConfigError, match=r"with patches of 8, .* the model has 16 pixels with patches of 4"):
        load_tokenizer(folder)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_counts_and_positions_of_qwen_are_those_of_transformers_to_the_bit(tmp_path, kind):
    folder = tiny_qwen_vl(tmp_path, kind=kind)
    tokenizer, model = load_tokenizer(folder), load_causal_lm(folder).model.model
    family = tokenizer.media
    media = [picture(number, *size) for number, size in enumerate(random_sizes()) if max(size) < 200 * min(size)]
    for one in media:
        assert int(family.inputs(one)["grid"].prod()) // 4 == family.count(one), one.size
    for some in (media[:1], media[1:4], [media[4], media[4]], media[5:30], []):
        text = "and ".join(["begin ", *(["<|vision_start|><|image_pad|><|vision_end|>"] * len(some)), " end"])
        ids, numbers = map(torch.tensor, encode(tokenizer, text, some))
        grids = torch.cat([family.inputs(one)["grid"] for one in some]) if some else None
        types = (ids == family.placeholder("image")).int()
        wanted, deltas = model.get_rope_index(ids[None], types[None], grids)
        found = family.positions(ids, numbers, list(dict.fromkeys(some)))
        assert torch.equal(found.T, wanted[:, 0])
        assert int(found.max()) + 1 - len(ids) == int(deltas)


def test_placeholders_of_qwen2_audio_are_those_of_the_official_processor(tmp_path):
    folder = tiny_qwen_audio(tmp_path)
    tokenizer, processor = load_tokenizer(folder), Qwen2AudioProcessor.from_pretrained(folder)
    for samples in (16_000, 700, 3_333, 160 * 50, 160 * 50 + 1, 12_345, 401):
        one, text = sound(samples, samples / store.RATE), "A <|AUDIO|> sound"
        theirs = processor(text=[text], audio=[store.sound(one.number)])["input_ids"][0]
        assert encode(tokenizer, text, [one]).ids == theirs, samples
    for seconds, reason in ((1.1, "media_too_large"), (0.001, "media_refused")):
        with pytest.raises(DataFailure) as refused:
            tokenizer.media.count(sound(1, seconds))
        assert refused.value.reason == reason


def test_folders_whose_parts_do_not_fit_are_refused(tmp_path):
    folder = tiny_idefics3(tmp_path)

    def changed(name, **settings):
        other = tmp_path / "changed"
        shutil.rmtree(other, ignore_errors=True)
        shutil.copytree(folder, other)
        file = other / name
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))
        return other

    with pytest.raises(ConfigError, match="writes 9 placeholders for each"):
        load_causal_lm(changed("processor_config.json", image_seq_len=9))
    with pytest.raises(ConfigError, match="belong to different models"):
        load_tokenizer(changed("config.json", image_token_id=7))
    for kind in ("llava_next", "qwen3_vl_moe"):
        with pytest.raises(ConfigError, match=rf"'{kind}' is not supported: it reads images.*work: idefics3"):
            load_causal_lm(changed("config.json", model_type=kind))
    vision = json.loads((folder / "config.json").read_text())["vision_config"]
    with pytest.raises(ConfigError, match="num_hidden_layers must be from 1 to 10000, got 1000000000000"):
        load_causal_lm(changed("config.json", vision_config=vision | {"num_hidden_layers": 10**12}))
    with pytest.raises(ConfigError, match="the model is quantised"):
        load_causal_lm(changed("config.json", quantization_config={"quant_method": "fp8"}))
    changed("config.json")
    (tmp_path / "changed/processor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no processor_config\.json or preprocessor_config.json"):
        load_causal_lm(tmp_path / "changed")
