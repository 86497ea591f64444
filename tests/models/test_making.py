"""The built-in models that see and hear: made from tiny parts, they are folders that transformers reads."""

import json
import struct
import wave

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, Idefics3ForConditionalGeneration, Qwen2AudioForConditionalGeneration

from tandem.models import smolhear, smolsee
from tandem.models.smolhear import read_encoder
from tests.tiny import tiny_model_folder


@pytest.fixture
def base(tmp_path):
    return tiny_model_folder(tmp_path, "smollm")


def test_the_seeing_model_reads_what_the_official_processor_writes(tmp_path, base):
    split = tmp_path / "data" / "train"
    (split / "images").mkdir(parents=True)
    for number, colour in enumerate(["red", "blue"]):
        picture = Image.new("RGB", (64, 64), "white")
        picture.paste(colour, (8, 8, 40, 40))
        picture.save(split / "images" / f"{number}.png")
    asked = [["what shape is present?", "circle"], ["is it red?", "yes"], ["is it blue?", "no"]]
    questions = [[text, answer, i % 2] for text, answer in asked for i in range(12)]
    questions += [["what color is the shape?", colour, number] for number, colour in enumerate(["red", "blue"])]
    (split / "questions.json").write_text(json.dumps(questions))
    (folder := tmp_path / "made").mkdir()

    smolsee.make(base, tmp_path / "data", folder, scenes=2, kind_steps=2, steps=2)

    model, info = Idefics3ForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    processor = AutoProcessor.from_pretrained(folder)
    chat = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "What?"}]}]
    inputs = processor.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    own = smolsee.question_tokens(processor.tokenizer, "image", smolsee.IMAGE, smolsee.EXPANSION, "What?")
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert inputs["input_ids"][0].tolist() == list(own)
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
    assert torch.equal(inputs["pixel_values"][0, 0], smolsee.normalised(pixels))
    assert model(**inputs).logits.isfinite().all()


def test_patches_show_an_object_where_it_covers_a_tenth_of_them():
    picture = torch.full((1, 3, 64, 64), 250, dtype=torch.uint8)
    picture[..., 16:25, 8:17] = 200  # one whole patch, and of three others a row, a column and a corner: 8, 8 and 1 of 64
    assert smolsee.shows_object(picture).nonzero().tolist() == [[0, 17], [0, 18], [0, 25]]


def test_pictures_have_the_kinds_that_answers_tell(tmp_path):
    asked = [["is it red?", "yes", 0], ["what shape?", "circle", 0], ["what color?", "red", 0], ["what shape?", "circle", 2]]
    (tmp_path / "questions.json").write_text(json.dumps(asked))
    kinds, words = smolsee.read_kinds(tmp_path, 3)
    assert words == {"circle": 0, "red": 1} and kinds.tolist() == [[1, 0], [smolsee.UNKNOWN] * 2, [smolsee.UNKNOWN, 0]]


def test_patches_have_the_kind_of_what_they_show_and_of_what_has_its_middle_there():
    picture = torch.full((1, 3, 64, 64), 250, dtype=torch.uint8)
    picture[..., 8:32, 24:48] = 20
    described = smolsee.describe(picture, torch.tensor([[1, 0]]), nothing=2)
    kinds = described.kinds.view(8, 8, 4)
    assert (kinds[1:4, 3:6, :2] == torch.tensor([1, 0])).all() and (kinds[..., 0] == 1).sum() == 9
    assert kinds[2, 4].tolist() == [1, 0, 1, 0] and (kinds[..., 2] == 1).sum() == 1
    pixels, mirrored = smolsee.mirrored(described.pixels, described.kinds)
    again = smolsee.describe(pixels, torch.tensor([[1, 0]]), nothing=2)
    assert torch.equal(mirrored, again.kinds) and not torch.equal(mirrored, described.kinds)


def test_scenes_have_the_words_of_their_things():
    words = {word: number for number, word in enumerate(("red", "green", "blue", "yellow", "sphere", "cylinder", "cube"))}
    pictures = smolsee.draw_pictures(3, words)
    assert pictures.pixels.shape == (3, 3, 64, 64) and pictures.pixels.dtype == torch.uint8
    colours, shapes = pictures.kinds[..., [0, 2]], pictures.kinds[..., [1, 3]]
    assert set(colours.flatten().tolist()) <= {0, 1, 2, 3, 7} and set(shapes.flatten().tolist()) <= {4, 5, 6, 7}
    for scene, things in enumerate(smolsee.draw_scenes(3, seed=0)):
        stand = [row for row in pictures.kinds[scene, :, 2:].tolist() if row != [7, 7]]
        assert sorted(stand) == sorted([words[thing.colour], words[thing.shape]] for thing in things)


def ctranslate2(file, variables):
    """Writes a model as CTranslate2 does."""

    def text(value):
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    parts = [struct.pack("<I", 6), text("WhisperSpec"), struct.pack("<II", 3, len(variables))]
    for name, value in variables.items():
        kind = {"float16": 4, "int16": 2}[str(value.dtype)]
        parts += [text(name), struct.pack("<B", value.ndim), struct.pack(f"<{value.ndim}I", *value.shape)]
        parts += [struct.pack("<BI", kind, value.nbytes), value.tobytes()]
    file.write_bytes(b"".join(parts))
    return file


def whisper(file):
    shapes = {"conv1/weight": (384, 80, 3), "conv1/bias": (384,), "conv2/weight": (384, 384, 3), "conv2/bias": (384,)}
    shapes |= {"layer_norm/gamma": (384,), "layer_norm/beta": (384,), "position_encodings/encodings": (1500, 384)}
    for layer in (f"layer_{i}" for i in range(4)):
        for part, (rows, columns) in {
            "self_attention/linear_0": (1152, 384),
            "self_attention/linear_1": (384, 384),
            "ffn/linear_0": (1536, 384),
            "ffn/linear_1": (384, 1536),
        }.items():
            shapes |= {f"{layer}/{part}/weight": (rows, columns), f"{layer}/{part}/bias": (rows,)}
        for part in ("self_attention", "ffn"):
            shapes |= {f"{layer}/{part}/layer_norm/gamma": (384,), f"{layer}/{part}/layer_norm/beta": (384,)}
    random = np.random.default_rng(0)
    values = {f"encoder/{name}": random.normal(0, 0.05, shape).astype(np.float16) for name, shape in shapes.items()}
    return values, ctranslate2(file, {**values, "encoder/num_heads": np.array(6, dtype=np.int16)})


def test_the_hearing_model_has_whispers_encoder(tmp_path, base):
    values, file = whisper(tmp_path / "model.bin")
    recordings = []
    for i in range(16):
        recordings.append(tmp_path / f"{i % 10}_somebody_{5 + i % 10}.wav")
        with wave.open(str(recordings[-1]), "wb") as sound:
            sound.setparams((1, 2, 8000, 0, "NONE", ""))
            sound.writeframes((3000 * np.sin(np.arange(4000) * (i + 1) / 50)).astype(np.int16).tobytes())
    (folder := tmp_path / "made").mkdir()

    smolhear.make(base, file, recordings, folder, steps=2)

    model, info = Qwen2AudioForConditionalGeneration.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(folder)
    sound = np.sin(np.arange(8000) / 20).astype(np.float32)
    text = f"<|im_start|>user\n{smolhear.BEGIN}{smolhear.SOUND}{smolhear.END}What?<|im_end|>\n<|im_start|>assistant\n"
    inputs = processor(text=text, audio=[sound], sampling_rate=16000, return_tensors="pt")
    own = smolhear.question_tokens(processor.tokenizer, "audio", smolhear.SOUND, smolhear.SOUND * 12, "What?")
    stacked = values["encoder/layer_2/self_attention/linear_0/weight"][384:768]
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert inputs["input_ids"][0].tolist() == list(own)
    assert torch.equal(read_encoder(file)["layers.2.self_attn.k_proj.weight"], torch.from_numpy(stacked).float())
    assert model(**inputs).logits.isfinite().all()
