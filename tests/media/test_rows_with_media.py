"""The published layouts of rows with images and sounds: what the model is shown, and what becomes of bad rows."""

import copy
import json
import logging
import pickle
import shutil

import numpy as np
import pytest
from PIL import Image

from tandem.api.failures import DataFailure
from tandem.config.data import DatasetConfig
from tandem.config.errors import ConfigError
from tandem.data.dataset import load_dataset
from tandem.data.examples import conversations, judged, pairs
from tandem.data.rows import normalise
from tandem.media.parts import Source, read_media
from tandem.media.store import keep
from tandem.models.tokenizer import check_messages
from tests.media.files import PIXELS, TONE, png, recorded, saved

RED, BLUE = np.zeros((8, 8, 3), np.uint8), np.zeros((8, 8, 3), np.uint8)
RED[..., 0] = BLUE[..., 2] = 255


@pytest.fixture
def folder(tmp_path):
    """A data folder with two images and a sound."""
    (tmp_path / "data/images").mkdir(parents=True)
    for name, pixels in (("red.png", RED), ("blue.png", BLUE)):
        (tmp_path / "data/images" / name).write_bytes(saved(pixels))
    (tmp_path / "data/tone.wav").write_bytes(recorded(TONE))
    return tmp_path / "data"


def load(folder, rows, reader=normalise, **config):
    """The data set of a JSONL file with these rows."""
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_dataset(DatasetConfig(path=str(file), **config), reader=reader)


def shown(messages):
    """(role, texts and names of media) of messages, the media read."""
    names = {keep("image", RED): "RED", keep("image", BLUE): "BLUE", keep("audio", TONE): "TONE"}
    contents = [(one["role"], one["content"]) for one in read_media(messages)]
    return [
        (role, content if isinstance(content, str) else [one.get("text") or names[one["medium"]] for one in content])
        for role, content in contents
    ]


QUESTION = {"answer": "3"}
LAYOUTS = {
    "LLaVA": (
        {"id": "1", "image": "images/red.png", "conversations": [
            {"from": "human", "value": "<image>\nWhat colour?"}, {"from": "gpt", "value": "3"}]},
        [("user", ["RED", "\nWhat colour?"])],
    ),
    "ShareGPT with images": (
        {"images": ["images/red.png", "images/blue.png"], "conversations": [
            {"from": "human", "value": "<image>and <image>?"}, {"from": "gpt", "value": "3"}]},
        [("user", ["RED", "and ", "BLUE", "?"])],
    ),
    "messages with marks": (
        {"images": ["images/red.png"], "messages": [
            {"role": "user", "content": "Look: <image>"}, {"role": "assistant", "content": "3"}]},
        [("user", ["Look: ", "RED"])],
    ),
    "CLEVR-count": (
        {"images": ["images/blue.png"], "problem": "<image>How many?", **QUESTION},
        [("user", ["BLUE", "How many?"])],
    ),
    "R1-V's CLEVR": (
        {"image": "images/blue.png", "problem": "How many?", "solution": "3"},
        [("user", ["BLUE", "How many?"])],
    ),
    "verl's Geometry3K": (
        {"data_source": "hiyouga/geometry3k", "images": ["images/red.png"], "ability": "math",
         "prompt": [{"role": "user", "content": "<image>Find x."}],
         "reward_model": {"style": "rule", "ground_truth": "3"}, "extra_info": {"index": 0}},
        [("user", ["RED", "Find x."])],
    ),
    "Hugging Face's parts beside a column": (
        {"images": ["images/red.png"], "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": [{"type": "image", "index": 0, "text": None}, {"type": "text", "text": "?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "3"}]}]},
        [("system", ["Be brief."]), ("user", ["RED", "?"])],
    ),
    "Hugging Face's parts with paths": (
        {"prompt": [{"role": "user", "content": [{"type": "image", "path": "images/red.png"},
                                                 {"type": "audio", "audio": "tone.wav"}]}], **QUESTION},
        [("user", ["RED", "TONE"])],
    ),
    "OpenAI's parts": (
        {"messages": [{"role": "user", "content": [
            {"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": "images/red.png"}}]}], **QUESTION},
        [("user", ["What?", "RED"])],
    ),
    "sounds": (
        {"audio": {"path": "tone.wav", "bytes": None}, "question": "Which digit?", **QUESTION},
        [("user", ["TONE", "Which digit?"])],
    ),
    "images and sounds without marks": (
        {"images": ["images/red.png", "images/blue.png"], "audios": ["tone.wav"], "question": "?", **QUESTION},
        [("user", ["RED", "BLUE", "TONE", "?"])],
    ),
    "the image in a later turn": (
        {"image": "images/red.png", "messages": [
            {"role": "user", "content": "Ready?"}, {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "3"}]},
        [("user", "Ready?"), ("assistant", "Yes."), ("user", ["RED", "?"])],
    ),
    "no image in this row": ({"image": None, "question": "What is <image>?", **QUESTION}, [("user", "What is <image>?")]),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_read_as_it_is(folder, name):
    row, wanted = LAYOUTS[name]
    (read,) = load(folder, [row]).rows
    assert shown(read["messages"]) == wanted
    assert read["answer"] == "3"


def test_rows_from_python_have_bytes_images_and_arrays(folder):
    (folder / "rows.py").write_text(
        "import io\nimport numpy as np\nfrom PIL import Image\nfrom tests.media.files import saved\n"
        "RED = np.zeros((8, 8, 3), np.uint8)\nRED[..., 0] = 255\n"
        "forms = [RED, Image.fromarray(RED), saved(RED), {'bytes': saved(RED), 'path': 'x'}, 'images/red.png']\n"
        "rows = [{'image': form, 'question': '?', 'answer': '3'} for form in forms]\n"
    )
    dataset = load_dataset(DatasetConfig(path=f"{folder / 'rows.py'}:rows"))
    assert [shown(row["messages"]) for row in dataset.rows] == [[("user", ["RED", "?"])]] * 5


def test_a_whole_conversation_to_learn_has_its_images_in_every_turn(folder):
    turns = ["<image>?", "Red.", "And <image>?", "Blue."]
    row = {
        "images": ["images/red.png", "images/blue.png"],
        "conversations": [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(turns)],
    }
    (read,) = load(folder, [row], conversations).rows
    assert shown(read["messages"]) == [
        ("user", ["RED", "?"]), ("assistant", "Red."), ("user", ["And ", "BLUE", "?"]), ("assistant", "Blue."),
    ]  # fmt: skip


def test_both_sides_of_a_pair_follow_the_same_image(folder):
    row = {"image": "images/red.png", "prompt": "<image>?", "chosen": "Red.", "rejected": "Blue."}
    (read,) = load(folder, [row], pairs).rows
    assert shown(read["messages"]) == [("user", ["RED", "?"])]
    assert [len(load(folder, [row], judged).rows), read["chosen"][0]["content"]] == [2, "Red."]
    later = {"images": ["images/red.png"], "prompt": "?", "chosen": "See <image>", "rejected": "Not <image>"}
    (read,) = load(folder, [later], pairs).rows
    assert shown(read["chosen"]) == [("assistant", ["See ", "RED"])]
    assert shown(read["rejected"]) == [("assistant", ["Not ", "RED"])]


BAD = {
    "media_missing": {"image": "images/green.png"},
    "media_unreadable": {"image": "notes.png"},
    "media_refused": {"image": "../secret.png"},
    "media_too_large": {"image": "bomb.png"},
    "media_mismatch": {"image": "images/red.png", "question": "<image><image>?"},
}


def test_bad_rows_are_left_out_counted_and_named_before_the_start(folder, caplog):
    (folder / "notes.png").write_text("notes")
    (folder / "bomb.png").write_bytes(png(40_000, 25_000))
    (folder.parent / "secret.png").write_bytes(saved(RED))
    good = {"image": "images/red.png", "question": "?", **QUESTION}
    with caplog.at_level(logging.WARNING):
        dataset = load(
            folder,
            [good, *({"question": "?", **QUESTION, **bad} for bad in BAD.values()), good, good | BAD["media_missing"]],
        )
    assert len(dataset.rows) == 2 and [row["tandem.where"][-2:] for row in dataset.rows] == [":1", ":7"]
    (reading,) = dataset.readings
    assert reading.left_out == dict.fromkeys(BAD, 1) | {"media_missing": 2}
    assert (
        "image (shown to the model)" in reading.describe()
        and "rows left out: 2 media_missing, 1 media_un" in reading.describe()
    )
    assert (
        "2 of 8 rows left out, media_missing; the first: " in caplog.text
        and "train.jsonl:2: there is no file" in caplog.text
    )


def test_rows_of_which_none_can_be_used_are_refused_with_what_to_do(folder):
    rows = [{"image": "https://example.org/x.png", "question": "?", **QUESTION}]
    with pytest.raises(ConfigError, match=r"train.jsonl:1: https://example.org/x.png: the host .* media=false"):
        load(folder, rows)
    (row,) = load(folder, rows, media=False).rows
    assert row["messages"] == [{"role": "user", "content": "?"}] and row["image"] == rows[0]["image"]
    with pytest.raises(ConfigError, match="the row has a video, which no model supports yet"):
        load(folder, [{"videos": ["x.mp4"], "question": "?", **QUESTION}])


def test_more_folders_and_other_names_of_columns_can_be_given(folder):
    shutil.move(folder / "images", folder.parent / "elsewhere")
    rows = [{"picture": "red.png", "question": "?", **QUESTION}]
    more = {"columns": {"image": "picture"}}
    (row,) = load(folder, rows, media_folders=(str(folder.parent / "elsewhere"),), **more).rows
    assert shown(row["messages"]) == [("user", ["RED", "?"])]
    for others in ((), ("~nobody-has-this-home/x",)):
        with pytest.raises(ConfigError, match=r"there is no file 'red\.png' in"):
            load(folder, rows, media_folders=others, **more)


def test_no_pixel_is_decoded_before_a_row_is_read_and_then_once(folder, store):
    cut = saved(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))[:-2000]
    (folder / "cut.png").write_bytes(cut)
    names = ["images/red.png", "cut.png"]
    good, bad = load(folder, [{"image": name, "question": "?", **QUESTION} for name in names]).rows
    assert not store.exists()
    first = read_media(good["messages"])
    assert read_media(good["messages"]) == first and len(list(store.iterdir())) == 1
    with pytest.raises(DataFailure, match="media_unreadable: a damaged image"):
        read_media(bad["messages"])


def test_rows_with_media_travel_and_keep_the_fingerprint_that_a_resumed_run_needs(folder):
    rows = [{"image": f"images/{name}.png", "question": "?", **QUESTION} for name in ("red", "blue")]
    dataset, again = load(folder, rows), load(folder, rows)
    shown(dataset.rows[0]["messages"])
    moved = shutil.copytree(folder, folder.parent / "moved")
    assert dataset.fingerprint == again.fingerprint == load(moved, rows).fingerprint != load(folder, rows[::-1]).fingerprint
    travelled = pickle.loads(pickle.dumps(copy.deepcopy(again.rows[1])))
    assert shown(travelled["messages"]) == [("user", ["BLUE", "?"])]
    assert "images/blue.png" in json.dumps(travelled, default=str)


class Reader:
    kinds = ("image",)


class Tokenizer:
    def __init__(self, media=None):
        self.media, self.chat_template = media, "{{ messages }}"


def test_a_model_that_does_not_read_the_rows_media_is_refused_with_what_to_do(folder):
    image, sound = load(
        folder,
        [{"image": "images/red.png", "question": "?", **QUESTION}, {"audio": "tone.wav", "question": "?", **QUESTION}],
    ).rows
    check_messages(Tokenizer(Reader()), [image])
    with pytest.raises(
        ConfigError, match=r"train.jsonl:1: the row has media of the kind 'image', and the model reads only text"
    ):
        check_messages(Tokenizer(), [image])
    with pytest.raises(ConfigError, match=r"train.jsonl:2: .* 'audio', and the model reads text and image: .*media=false"):
        check_messages(Tokenizer(Reader()), [image, sound])


def test_parquet_with_bytes_is_read(folder):
    parquet = pytest.importorskip("pyarrow.parquet", reason="parquet needs the optional library")
    rows = [{"images": [{"bytes": saved(one), "path": "x"}], "problem": "<image>?", **QUESTION} for one in (RED, BLUE)]
    parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(rows), folder / "train.parquet")
    dataset = load_dataset(DatasetConfig(path=str(folder)))
    assert [shown(row["messages"]) for row in dataset.rows] == [[("user", ["RED", "?"])], [("user", ["BLUE", "?"])]]
    assert len(dataset.fingerprint) == 64 and isinstance(dataset.rows[0]["images"][0], Source)


def test_an_image_that_lies_in_memory_only_is_read_like_its_file():
    assert Source("image", Image.fromarray(PIXELS)).read() == Source("image", saved(PIXELS)).read()
