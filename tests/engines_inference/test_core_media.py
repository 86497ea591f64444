"""Pictures in the engine: its log-probabilities are transformers', equal tokens with other pictures share nothing."""

import shutil
from dataclasses import replace
from functools import lru_cache, partial
from itertools import takewhile

import pytest
import torch
from transformers import AutoModelForMultimodalLM

from tandem.api.failures import DataFailure, WeightUpdateFailed, WrongWorkflow
from tandem.api.media import encode
from tandem.api.requests import LLMRequest, NoiseKey
from tandem.api.weights import FolderSource, WeightVersion
from tandem.config.rollout import EmbeddedEngineConfig, GenerationConfig
from tandem.engines.inference.embedded import EmbeddedProcess
from tandem.media import store
from tandem.models.load import load_causal_lm
from tandem.models.tokenizer import load_tokenizer
from tests.engines_inference.test_core_equal import drain, make_core, run
from tests.engines_inference.test_core_memory import GIB_OF_512
from tests.engines_inference.test_front import generate
from tests.models.media.test_media_models import marker, reference_inputs, some_media
from tests.tiny import tiny_model_folder
from tests.tiny_media import picture, sound, tiny_idefics3, tiny_llava, tiny_qwen_audio, tiny_qwen_vl

QUESTION = "@What is it?"
MAKERS = {
    "idefics3": tiny_idefics3,
    "llava": tiny_llava,
    "qwen2_vl": partial(tiny_qwen_vl, kind="qwen2_vl"),
    "qwen2_5_vl": tiny_qwen_vl,
    "qwen2_5_vl with compiled kernels": partial(tiny_qwen_vl, wide=True),
    "qwen3_vl": partial(tiny_qwen_vl, kind="qwen3_vl"),
    "qwen3_vl with compiled kernels": partial(tiny_qwen_vl, kind="qwen3_vl", wide=True),
    "qwen2_audio": tiny_qwen_audio,
}


@pytest.fixture(autouse=True)
def media_store(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_MEDIA", str(tmp_path / "media"))


@pytest.fixture(scope="module", params=MAKERS)
def family_folder(request, tmp_path_factory):
    """A tiny model of each family, as a folder."""
    return MAKERS[request.param](tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_idefics3(tmp_path_factory.mktemp("models"))


tokenizer_of = lru_cache(maxsize=4)(load_tokenizer)


@lru_cache(maxsize=4)
def reference_of(folder):
    """The model of transformers."""
    return AutoModelForMultimodalLM.from_pretrained(folder).eval()


def asking(folder, text, shown, sample=0, new=8):
    """A request with a medium for each ``@``."""
    tokenizer = tokenizer_of(folder)
    ids, media = encode(tokenizer, text.replace("@", marker(tokenizer)), shown)
    gconfig = GenerationConfig(max_new_tokens=new, min_new_tokens=new)
    return LLMRequest(ids, gconfig, NoiseKey(1, sample=sample), media=media)


def score(folder, text, shown, response):
    """Log-probabilities of a response's tokens by one forward pass of transformers, up to the first drawn placeholder, if
    there is one: transformers wants features for it, here it is text."""
    tokenizer, model = tokenizer_of(folder), reference_of(folder)
    given = dict(reference_inputs(folder, tokenizer, text.replace("@", marker(tokenizer)), shown))
    assert given["input_ids"][0].tolist() == list(response.input_ids)
    token = tokenizer.media.placeholder(tokenizer.media.kinds[0])
    output = torch.tensor([list(takewhile(lambda drawn: drawn != token, response.output_ids))])
    given["input_ids"] = ids = torch.cat((given["input_ids"], output), dim=1)
    given["attention_mask"] = torch.ones_like(ids)
    if "mm_token_type_ids" in given:
        given["mm_token_type_ids"] = torch.cat((given["mm_token_type_ids"], torch.zeros_like(output)), dim=1)
    with torch.no_grad():
        logits = model(**given).logits[0]
    start = len(response.input_ids)
    return logits.log_softmax(-1)[start - 1 : -1].gather(-1, ids[0, start:, None]).squeeze(-1)


def gap(folder, text, shown, response):
    expected = score(folder, text, shown, response)
    assert len(expected) >= 3
    return float((expected - torch.tensor(response.logprobs[: len(expected)])).abs().max())


def mixed(folder):
    """Prompts: without media, with one, with several, the same again in a later turn; each asked three times."""
    tokenizer = tokenizer_of(folder)
    one, two, three = (some_media(tokenizer, seed) for seed in range(3))
    prompts = [
        ("Nothing to see at all", []),
        (QUESTION, [one]),
        (QUESTION, [two]),
        ("See @ and @, then @ again", [one, three, one]),
        ("<|im_start|>user\nwhat?<|im_end|>\n<|im_start|>tool\n@<|im_end|>\n", [two]),
    ]
    return {10 * i + n: prompt for i, prompt in enumerate(prompts) for n in range(3)}


@pytest.mark.parametrize("chunk", [5, 24, 512])
def test_logprobs_are_those_of_transformers_in_groups_and_pieces_that_cut_media(family_folder, chunk):
    prompts = mixed(family_folder)
    requests = {i: asking(family_folder, *prompt, i) for i, prompt in prompts.items()}
    responses = run(make_core(family_folder, prefill_chunk_tokens=chunk), requests)

    for i, prompt in prompts.items():
        assert gap(family_folder, *prompt, responses[i]) <= 1e-4


def test_equal_tokens_with_other_media_never_share_and_the_same_medium_does(family_folder):
    one = some_media(tokenizer_of(family_folder), 0)
    two = picture(9, *one.size) if one.kind == "image" else sound(9, one.size[0] / one.size[1])
    requests = {i: asking(family_folder, QUESTION, [shown]) for i, shown in enumerate([one, two, one])}
    core = make_core(family_folder)
    responses = run(core, requests)

    length = len(requests[0].input_ids)
    assert requests[0].input_ids == requests[1].input_ids and requests[0].key != requests[1].key
    assert core.statistics()["prefill_tokens"] == 2 * length
    assert core.statistics()["shared_prompt_tokens"] == length
    assert core.statistics()["media_computed"] == 2
    for i, request in requests.items():
        alone = run(make_core(family_folder), {0: request})[0]
        assert responses[i].output_ids == alone.output_ids
        assert responses[i].logprobs == pytest.approx(alone.logprobs, abs=1e-5)
    assert responses[0].logprobs == responses[2].logprobs
    assert abs(responses[0].logprobs[0] - responses[1].logprobs[0]) > 1e-3


def test_what_is_shown_to_a_group_is_computed_once_by_the_engine_and_by_the_trainer(family_folder):
    """Counted: tokens that went through the layers, and media that went through the tower."""
    core, shown = make_core(family_folder), some_media(tokenizer_of(family_folder), 0)
    requests = {i: asking(family_folder, QUESTION, [shown], i) for i in range(8)}
    length, responses = len(requests[0].input_ids), run(core, requests)
    counted = core.statistics()
    assert (counted["prefill_tokens"], counted["shared_prompt_tokens"], counted["media_computed"]) == (length, 7 * length, 1)

    model, rows = load_causal_lm(family_folder), [[*requests[i].input_ids, *responses[i].output_ids] for i in range(8)]
    media = [number for row in rows for number in (*requests[0].media, *[0] * (len(row) - length))]
    layout = model.lay_out(
        torch.tensor([token for row in rows for token in row]),
        torch.tensor([0, *map(len, rows)]).cumsum(0),
        torch.tensor([place >= length for row in rows for place in range(len(row))]),
        torch.ones(8),
        media=torch.tensor(media),
    )
    model(layout)
    assert length <= len(layout.ids) < length + sum(len(row) - length for row in rows) + 8 < layout.total
    assert model.media.computed == 1


def test_a_common_beginning_ends_at_the_picture_that_differs_and_may_end_within_one(folder):
    """Chunks of 24 tokens end within pictures, and the second request copies what is there of the first."""
    first, other = picture(0), picture(1)
    text = "Compare these two pictures here: @ and @"
    requests = {0: asking(folder, text, [first, first]), 1: asking(folder, text, [first, other])}
    core = make_core(folder)
    core.add(0, requests[0])
    core.step()
    core.add(1, requests[1])
    responses = drain(core)

    assert 16 <= core.statistics()["shared_prompt_tokens"] < len(requests[1].input_ids)
    assert gap(folder, text, [first, first], responses[0]) <= 1e-4
    assert gap(folder, text, [first, other], responses[1]) <= 1e-4


def test_the_engine_computes_what_the_trainer_computes_in_its_packed_pass(family_folder):
    requests = {i: asking(family_folder, *prompt, i) for i, prompt in mixed(family_folder).items()}
    responses = run(make_core(family_folder), requests)
    model = load_causal_lm(family_folder)
    rows = [(request, responses[i]) for i, request in requests.items()]
    lengths = torch.tensor([0, *(len(r.input_ids) + len(a.output_ids) for r, a in rows)])
    pads = [[0] * len(a.output_ids) for _, a in rows]
    media = [n for (r, _), pad in zip(rows, pads, strict=True) for n in (*(r.media or [0] * len(r.input_ids)), *pad)]
    mask = torch.tensor([new for r, a in rows for new in [False] * len(r.input_ids) + [True] * len(a.output_ids)])
    with torch.no_grad():
        layout = model.lay_out(
            torch.tensor([token for r, a in rows for token in (*r.input_ids, *a.output_ids)]),
            lengths.cumsum(0),
            mask,
            torch.ones(len(rows)),
            media=torch.tensor(media),
        )
        trained = model(layout).logprobs
    drawn = torch.tensor([logprob for _, a in rows for logprob in a.logprobs])
    assert (trained[mask] - drawn).abs().max() <= 1e-4


def test_who_gives_way_computes_its_pictures_again(folder):
    requests = {i: asking(folder, QUESTION, [picture(i)], i, new=60) for i in range(12)}
    small = make_core(folder, kv_cache_gib=GIB_OF_512)
    run(small, {100 + i: asking(folder, "short", [], i, new=4) for i in range(8)})  # it expects short ones
    responses = run(small, requests)

    assert small.statistics()["preempted"] > 0
    roomy = run(make_core(folder), requests)
    for i in requests:
        assert responses[i].output_ids == roomy[i].output_ids
        assert responses[i].logprobs == pytest.approx(roomy[i].logprobs, abs=1e-4)


def test_features_are_computed_once_and_anew_when_an_update_brings_other_towers(folder, tmp_path):
    other, shown = tiny_idefics3(tmp_path, seed=1), picture(0)
    weights, others = (dict(FolderSource(one).tensors()) for one in (folder, other))
    frozen = others | {name: weights[name] for name in weights if "text_model" not in name and "lm_head" not in name}
    text_alone = {name: others[name] for name in others if "text_model" in name or "lm_head" in name}
    core = make_core(folder)
    for version, (update, computed) in enumerate([(frozen, 1), (text_alone, 1), (others, 2), (weights, 3)]):
        request = asking(folder, QUESTION, [shown])
        run(core, {0: request})
        core.add(1, request)
        core.step()
        core.swap(core.stage(update.items()), WeightVersion(version))
        response = drain(core)[1]
        assert core.statistics()["media_computed"] == computed
        if update is others:
            expected = score(other, QUESTION, [shown], response)
            assert (expected[1:] - torch.tensor(response.logprobs[1:])).abs().max() <= 1e-4  # the first came before
    name = next(name for name in weights if name.endswith("patch_embedding.weight"))
    with pytest.raises(WeightUpdateFailed, match=r"patch_embedding\.weight must be"):
        core.stage((weights | {name: weights[name][:1]}).items())


def test_towers_sleep_with_the_weights_and_must_come_back_with_them(folder):
    core, weights = make_core(folder), dict(FolderSource(folder).tensors())
    request = asking(folder, QUESTION, [picture(0)])
    before = run(core, {0: request})[0]
    core.sleep(("weights", "kv_cache"))
    with pytest.raises(WeightUpdateFailed, match=r"missing.*vision_model"):
        core.stage((name, tensor) for name, tensor in weights.items() if "vision_model" not in name)
    core.swap(core.stage(weights.items()), WeightVersion(1))
    assert run(core, {0: request})[0].logprobs == before.logprobs


def test_a_store_that_is_emptied_ends_no_request_that_was_taken(folder, media_store, tmp_path):
    other = dict(FolderSource(tiny_idefics3(tmp_path, seed=1)).tensors())
    core = make_core(folder, prefill_chunk_tokens=5)
    core.add(0, asking(folder, QUESTION, [picture(0)]))
    core.step()
    shutil.rmtree(tmp_path / "media")
    core.swap(core.stage(other.items()), WeightVersion(1))
    assert len(drain(core)[0].output_ids) == 8


def test_media_that_are_not_there_or_do_not_fit_their_tokens_are_refused(folder, tmp_path):
    core, request = make_core(folder), asking(folder, QUESTION, [picture(0)])
    ids, media = request.input_ids, request.media
    place = next(i for i, number in enumerate(media) if number)
    for reason, wrong in (
        ("media_missing", LLMRequest(ids, request.gconfig, media=[number and -77 for number in media])),
        ("media_mismatch", LLMRequest(ids[: place + 1], request.gconfig, media=media[: place + 1])),
        ("media_mismatch", LLMRequest([5] * len(ids), request.gconfig, media=media)),
        ("media_mismatch", LLMRequest(ids, request.gconfig, media=media[:-1])),
    ):
        with pytest.raises(DataFailure, match=reason):
            core.add(0, wrong)
    with pytest.raises(WrongWorkflow, match="reads text alone"):
        make_core(tiny_model_folder(tmp_path)).add(0, request)
    assert not core.has_work


def test_an_engine_of_its_own_process_takes_media_from_the_same_store(folder):
    shown = picture(0)
    request = asking(folder, QUESTION, [shown])
    config = EmbeddedEngineConfig(kv_cache_gib=0.01)
    engine = EmbeddedProcess.start(folder, config, torch.float32, "cpu", version=WeightVersion(0), threads=1)
    try:
        (response,) = generate(engine, [request])
    finally:
        engine.close()
    assert gap(folder, QUESTION, [shown], response) <= 1e-4
    assert store.medium(shown.number) == shown


def test_a_medium_whose_file_is_another_s_fails_its_own_request_and_no_other(folder, tmp_path):
    core, request = make_core(folder), asking(folder, QUESTION, [picture(1)])
    (file,) = (tmp_path / "media").iterdir()
    shutil.copy(file, file.with_name(f"{76:016x}.png"))
    with pytest.raises(DataFailure, match=r"media_unreadable.* was changed"):
        core.add(0, replace(request, media=[number and -77 for number in request.media]))
    assert len(run(core, {1: request})[1].output_ids) == 8
