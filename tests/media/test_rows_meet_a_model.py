"""From a row with an image to tokens and media numbers, for answers that are drawn and for those that are learnt."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from tandem.api.failures import DataFailure
from tandem.config.data import DatasetConfig
from tandem.config.rollout import GenerationConfig
from tandem.data.dataset import load_dataset
from tandem.data.encoding import ChatEncoder, sequence
from tandem.data.examples import conversations
from tandem.data.loader import Loader
from tandem.media.parts import Source
from tandem.models.tokenizer import check_template_options, load_tokenizer
from tandem.rollout.workflows import chat_of
from tandem.trainers.supervised import BatchMaker
from tests.media.files import PIXELS, saved
from tests.tiny_media import tiny_idefics3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(tiny_idefics3(tmp_path_factory.mktemp("models")), chats=True)


@pytest.fixture
def file(tmp_path):
    """Three rows, of which the image of the second breaks off in the middle."""
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    images = {"one.png": saved(PIXELS), "cut.png": saved(noise)[:-2000], "two.png": saved(noise)}
    for name, data in images.items():
        (tmp_path / name).write_bytes(data)
    turns = [{"from": "human", "value": "<image>Colour?"}, {"from": "gpt", "value": "Red."}]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"image": one, "conversations": turns}) + "\n" for one in images)
    )
    return tmp_path / "rows.jsonl"


def test_a_question_with_an_image_is_a_request_with_its_number(tokenizer, file):
    first, cut, _ = load_dataset(DatasetConfig(path=str(file))).rows
    check_template_options(tokenizer, [first, cut], "Be brief.", {})
    request = chat_of(tokenizer, first, None, None).request(GenerationConfig())
    number, image = Source("image", PIXELS).read().number, tokenizer.media.placeholder("image")
    assert [id for id, medium in zip(request.input_ids, request.media, strict=True) if medium == number] == [image] * len(
        [id for id in request.input_ids if id == image]
    )
    assert set(request.media) == {0, number}
    with pytest.raises(DataFailure, match="media_unreadable: a damaged image"):
        chat_of(tokenizer, cut, None, None)


def test_learning_skips_and_counts_a_row_whose_image_turns_out_to_be_damaged(tokenizer, file, caplog):
    rows = load_dataset(DatasetConfig(path=str(file)), reader=conversations)
    chats = ChatEncoder(tokenizer, max_length=512)
    encoder = SimpleNamespace(
        keeps_rows_together=False,
        encode=lambda row: [sequence(one) for one in chats.conversation(row["messages"], row["train_from"])],
    )
    batches = BatchMaker(Loader(rows, shuffle=False), encoder, 2)
    batch = batches.next_batch()
    assert batches.dropped == {"media_unreadable": 1} and "rows.jsonl:2: media_unreadable: a damaged image" in caplog.text
    assert len(set(batch["media"].tolist()) - {0}) == 2
    assert not (batch["loss_mask"] & (batch["media"] != 0)).any()
