"""A scalar head on a media model: transformers' backbone and one product, for every family."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMultimodalLM

from tandem.config.train_engine import TrainEngineConfig
from tandem.engines.train.engine import SpreadEngine
from tandem.flow.scoring import ModelReader
from tandem.models.load import load_scalar_model
from tandem.models.tokenizer import load_tokenizer, save_tokenizer
from tests.models.media.test_media_models import marker, mixed_prompts, packed, reference_inputs
from tests.tiny_media import FAMILIES, picture, tiny_media_model


@pytest.fixture(autouse=True)
def media_store(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_MEDIA", str(tmp_path / "media"))


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_a_head_on_the_states_of_transformers_in_saved_folders(tmp_path, family):
    folder, saved = tiny_media_model(tmp_path, family), tmp_path / "saved"
    engine = SpreadEngine(TrainEngineConfig(path=str(folder), dtype="float32"), 1, head="scalar")
    torch.manual_seed(1)
    engine.load_weights((name, torch.randn_like(x) if name == "score.weight" else x) for name, x in engine.weights())
    tokenizer = load_tokenizer(folder)
    prompts = mixed_prompts(tokenizer)
    batch = packed(tokenizer, prompts)

    engine.save(saved)
    save_tokenizer(tokenizer, saved)
    theirs, head = (
        AutoModelForMultimodalLM.from_pretrained(saved).model.eval(),
        load_file(saved / "model.safetensors")["score.weight"],
    )
    wanted = []
    for text, media in prompts:
        given = reference_inputs(folder, tokenizer, text.replace("@", marker(tokenizer)), media)
        wanted.append(theirs(**given).last_hidden_state[0] @ head[0])
    ours = load_scalar_model(saved)
    found = ours(ours.lay_out(**batch | {"temperature": None})).scores
    torch.testing.assert_close(found, torch.cat(wanted), atol=1e-4, rtol=1e-5)

    direction = torch.randn(len(found), generator=torch.Generator().manual_seed(1))
    (found * direction).sum().backward()
    (torch.cat(wanted) * direction).sum().backward()
    own = dict(ours.model.model.named_parameters())
    for name, other in theirs.named_parameters():
        if own[name].requires_grad:
            assert (own[name].grad - other.grad).abs().max() <= 1e-4 * max(1.0, float(other.grad.abs().max())), name


def test_an_empty_reply_is_read_with_what_was_shown(tmp_path):
    tokenizer = load_tokenizer(tiny_media_model(tmp_path, "qwen3_vl"))
    reader, shown = ModelReader(tokenizer, same_tokens=False, max_length=512), picture(0)
    asked = [{"role": "user", "content": [{"type": "image", "medium": shown}, {"type": "text", "text": "which?"}]}]
    silent, spoken = (reader.chat([*asked, {"role": "assistant", "content": said}]) for said in ("", "it"))
    for fields in (silent, spoken):
        there = [token for token, number in zip(fields["input_ids"], fields["media"], strict=True) if number]
        assert there == [tokenizer.media.placeholder("image")] * tokenizer.media.count(shown)
    assert set(silent["media"]) == {0, shown.number}
