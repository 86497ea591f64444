"""Scenes, easy-VQA and spoken digits as rows with pictures and sounds."""

import json
import math
import random
from collections import Counter

import numpy as np
import pytest

from tandem.config.data import PROCEDURAL, DatasetConfig
from tandem.config.errors import ConfigError
from tandem.data import procedural
from tandem.data.dataset import load_dataset
from tandem.data.procedural import MEDIA, clevr_count, easy_vqa, shuffled, spoken_digits, spoken_sums
from tandem.media.scenes import LIGHT, RAY, Thing, draw_scenes, render, things_by_patch, visible


def thing(shape="sphere", colour="red", x=0.0, y=0.0, angle=0.0):
    return Thing(colour, shape, x, y, size=0.5, angle=angle)


def shown(rows):
    return [np.asarray(row["messages"][0]["content"][0]["image"]) for row in rows]


def test_a_ray_meets_each_shape_where_geometry_says():
    straight, origin = np.array([0.0, 1.0, 0.0]), np.array([[0.3, -5.0, 0.5], [0.9, -5.0, 0.5]])
    for shape, angle, expected in [
        ("sphere", 0.0, 5 - math.sqrt(0.25 - 0.09)),
        ("cylinder", 0.0, 5 - math.sqrt(0.25 - 0.09)),
        ("cube", 0.0, 4.5),
        ("cube", math.pi / 4, 5 - (math.sqrt(0.5) - 0.3)),
    ]:
        distance, normals = thing(shape, angle=angle).strike(origin, straight)
        assert distance == pytest.approx([expected, math.inf])
        assert np.linalg.norm(normals[0]) == pytest.approx(1) and normals[0] @ straight < 0


def test_what_stands_behind_is_hidden_and_throws_a_shadow_away_from_the_light():
    front, behind, aside = thing(y=-0.6), thing(y=0.6), thing(x=1.5)
    assert visible([front, aside]) == 1
    assert 0 < visible([front, behind]) < 1
    lit, dark = np.asarray(render([])).astype(int), np.asarray(render([front])).astype(int)
    red = (dark[..., 0] - dark[..., 2]) > 60
    shadow = ((lit - dark).min(2) > 20) & ~red
    assert red.sum() > 40 and shadow.sum() > 20
    assert np.sign(np.argwhere(shadow)[:, 1].mean() - np.argwhere(red)[:, 1].mean()) == -np.sign(LIGHT[0])
    assert RAY @ LIGHT < 0


def test_a_patch_names_the_thing_that_it_shows_and_the_one_whose_middle_is_there():
    near, far = thing("sphere", "red", -1.2, -1.5), thing("cube", "blue", 1.2, 1.5)
    seen, middles = (found.reshape(8, 8) for found in things_by_patch([near, far], patch=8))
    assert [tuple(np.argwhere(middles == number)[0]) for number in (0, 1)] == [(5, 2), (2, 5)]
    assert seen[5, 2] == 0 and seen[2, 5] == 1 and (seen[:, [0, 7]] == -1).all() and (middles >= 0).sum() == 2
    picture = np.asarray(render([near, far])).reshape(8, 8, 8, 8, 3).mean((1, 3))
    for number, channel in ((0, 0), (1, 2)):  # where a patch is said to show it, the picture has its colour
        assert (picture[seen == number].argmax(-1) == channel).mean() > 0.9


def test_scenes_to_learn_from_have_one_to_five_things_and_come_from_their_seed():
    scenes = list(draw_scenes(40, seed=1))
    assert {len(things) for things in scenes} == {1, 2, 3, 4, 5} and scenes == list(draw_scenes(40, seed=1))


def test_scenes_come_from_their_seed_and_all_counts_are_equally_frequent():
    rows, again, other = (list(clevr_count(split, size=25, seed=3)) for split in ("train", "train", "test"))
    answers = [row["answer"] for row in rows]
    assert all(np.array_equal(a, b) for a, b in zip(shown(rows), shown(again), strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(shown(rows), shown(other), strict=True))
    assert set(answers) == set("01234") and max(map(answers.count, answers)) <= 12


def test_the_wording_of_a_question_about_a_scene_tells_nothing_of_its_answer(monkeypatch):
    monkeypatch.setattr(
        procedural, "render", lambda things: things
    )  # rays are slow, and 1,500 scenes are judged by their words
    luck = random.Random(0)  # the more things there are, the more often one of them is hidden
    monkeypatch.setattr(procedural, "visible", lambda things: float(luck.random() < 0.5 ** len(things)))
    answers = {"train": Counter(), "test": Counter()}
    for split, found in answers.items():
        for row in clevr_count(split, size=1500, seed=0):
            picture, question = row["messages"][0]["content"]
            *colour, shape = question["text"].removeprefix("How many ").partition(" are")[0].split()
            meant = [
                t for t in picture["image"] if t.colour in (colour or [t.colour]) and shape in (f"{t.shape}s", "things")
            ]
            assert row["answer"] == str(len(meant)) and len(picture["image"]) <= 5
            found[question["text"], row["answer"]] += 1
    assert all(sum(answers["train"][pair] for pair in answers["train"] if pair[1] == n) > 240 for n in "01234")
    wordings = {text for text, _ in answers["train"]}
    usual = {text: max("01234", key=lambda answer: answers["train"][text, answer]) for text in wordings}
    assert len(wordings) == 19 and sum(answers["test"][pair] for pair in usual.items()) / 1500 < 0.25


def test_a_shuffled_data_set_has_the_pictures_of_other_rows():
    rows, mixed = list(clevr_count("train", size=15, seed=0)), list(shuffled(clevr_count)("train", size=15, seed=0))
    asked = [[(row["messages"][0]["content"][-1], row["answer"]) for row in some] for some in (rows, mixed)]
    moved = [not np.array_equal(a, b) for a, b in zip(shown(rows), shown(mixed), strict=True)]
    assert asked[0] == asked[1]
    assert sum(moved) >= 11
    assert sorted(image.tobytes() for image in shown(rows)) == sorted(image.tobytes() for image in shown(mixed))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Stands for the files of the packages."""
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    monkeypatch.delenv("TANDEM_SPOKEN_DIGITS", raising=False)
    folder = tmp_path / "packages" / "easy-vqa==1.0" / "easy_vqa" / "data" / "test"
    (folder / "images").mkdir(parents=True)
    (folder / "images" / "4.png").write_bytes(b"four")
    questions = [["is it red?", "no", 4], ["what color is the shape?", "blue", 4]]
    questions += [["is it red?", "no", 4], ["is it red?", "yes", 4], ["is it blue?", "yes", 4]]
    (folder / "questions.json").write_text(json.dumps(questions))
    for name in ("3_theo_4", "8_theo_4", "1_theo_5", "9_jackson_49"):
        (tmp_path / "spoken_digits").mkdir(exist_ok=True)
        (tmp_path / "spoken_digits" / f"{name}.wav").write_bytes(name.encode())


@pytest.mark.usefixtures("cache")
def test_easy_vqa_has_the_bytes_of_its_pictures_and_can_be_parted():
    rows = list(easy_vqa("test", size=10, seed=0, wanted=lambda answer: answer == "blue"))
    shown = [{"type": "image", "image": b"four"}, {"type": "text", "text": "what color is the shape? Answer with one word."}]
    assert rows == [{"messages": [{"role": "user", "content": shown}], "answer": "blue"}]
    assert len(list(easy_vqa("test", size=10, seed=0))) == 5


@pytest.mark.usefixtures("cache")
def test_the_wording_of_a_yes_or_no_question_tells_nothing_of_its_answer():
    rows = list(MEDIA["easy_vqa_yes_no"]("test", size=10, seed=0))
    assert sorted((row["messages"][0]["content"][1]["text"], row["answer"]) for row in rows) == [
        ("is it red? Answer with one word.", "no"),
        ("is it red? Answer with one word.", "yes"),
    ]


@pytest.mark.usefixtures("cache")
def test_takes_0_to_4_are_the_test_split_and_sums_are_of_two_recordings():
    def heard(row):
        return [part["audio"].decode() for part in row["messages"][0]["content"][:-1]]

    digits = {split: sorted(heard(row)[0] for row in spoken_digits(split, size=9, seed=0)) for split in ("train", "test")}
    assert digits == {"train": ["1_theo_5", "9_jackson_49"], "test": ["3_theo_4", "8_theo_4"]}
    for row in spoken_sums("test", size=5, seed=0):
        assert row["answer"] == str(sum(int(name[0]) for name in heard(row))) and len(heard(row)) == 2


def test_recordings_that_are_not_there_are_named_with_the_way_to_get_them(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_SPOKEN_DIGITS", str(tmp_path))
    with pytest.raises(ConfigError, match=r"has no recordings such as 7_jackson_32\.wav; clone https://github"):
        list(spoken_digits("train", size=1, seed=0))
    with pytest.raises(ConfigError, match="has the splits train and test, got 'valid'"):
        load_dataset(DatasetConfig(path="spoken_sums", split="valid", size=1))


def test_generated_scenes_are_rows_with_media_and_every_name_is_known():
    rows = load_dataset(DatasetConfig(path="clevr_count", size=3)).rows
    assert [part["type"] for part in rows[0]["messages"][0]["content"]] == ["image", "text"]
    assert set(procedural.PROCEDURAL) == set(PROCEDURAL)
