"""Equal contents are one medium, whatever they came in; what is changed on the way is said here."""

import base64
import multiprocessing

import numpy as np
import pytest
from PIL import Image, ImageCms

from tandem.api.failures import DataFailure
from tandem.api.media import Medium
from tandem.media import store as media_store
from tandem.media.decoding import read_image, read_sound
from tandem.media.parts import Source, read_media
from tandem.media.store import MediaMissing, is_whole, keep
from tests.media.files import PIXELS, TONE, recorded, saved, wav


def part_of(part):
    (message,) = read_media([{"role": "user", "content": [{"type": "text", "text": "?"}, part]}])
    assert message["content"][0] == {"type": "text", "text": "?"}
    return message["content"][1]


def test_one_picture_in_every_container_and_spelling_is_one_medium(tmp_path):
    data, file = saved(PIXELS), tmp_path / "x.png"
    file.write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    parts = [
        *({"type": "image", "image": saved(PIXELS, form, **how)} for form, how in FORMS),
        *({"type": "image", "image": one} for one in (PIXELS, Image.fromarray(PIXELS), np.asfortranarray(PIXELS), url)),
        *({"type": "image", "image": one} for one in ({"bytes": data, "path": None}, {"bytes": data, "path": "no.jpg"})),
        {"type": "image", "image": Image.open(file)},
        {"type": "image", "url": url},
        {"type": "image", "base64": url.partition(",")[2]},
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "image_url", "image_url": url},
        {"type": "input_image", "image_url": url},
    ]
    wanted = {"type": "image", "medium": keep("image", PIXELS)}
    assert [part_of(part) for part in parts] == [wanted] * len(parts)
    assert part_of(wanted) == wanted


FORMS = [("PNG", {}), ("BMP", {}), ("TIFF", {"compression": "tiff_lzw"}), ("PPM", {}), ("WEBP", {"lossless": True})]


def test_one_sound_in_every_container_and_spelling_is_one_medium():
    data = base64.b64encode(recorded(TONE)).decode()
    stereo = np.stack([TONE, TONE], axis=1)
    parts = [
        *({"type": "audio", "audio": recorded(TONE, form=form)} for form in ("WAV", "WAVEX", "FLAC", "AIFF")),
        *({"type": "audio", "audio": recorded(TONE, subtype=kind)} for kind in ("PCM_24", "PCM_32")),
        *({"type": "audio", "audio": recorded(TONE / 2**15, subtype=kind)} for kind in ("FLOAT", "DOUBLE")),
        *({"type": "audio", "audio": {"array": one, "sampling_rate": 16_000}} for one in (TONE, TONE / 2**15, stereo.T)),
        {"type": "audio", "array": (TONE / 2**15).tolist(), "sampling_rate": 16_000},
        {"type": "audio", "audio": recorded(stereo)},
        {"type": "audio", "audio": wav(len(TONE), data=TONE.tobytes())},  # piped: it does not know its size
        {"type": "input_audio", "input_audio": {"data": data, "format": "mp3"}},
        {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64," + data}},
        {"type": "audio", "base64": data},
    ]
    wanted = {"type": "audio", "medium": keep("audio", TONE)}
    assert [part_of(part) for part in parts] == [wanted] * len(parts)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_is_turned_upright(orientation):
    turns = [None, None, "fliplr", "rot180", "flipud", "transpose", "left", "transverse", "right"]
    lies = {
        None: PIXELS,
        "fliplr": PIXELS[:, ::-1],
        "rot180": PIXELS[::-1, ::-1],
        "flipud": PIXELS[::-1],
        "transpose": PIXELS.swapaxes(0, 1),
        "left": np.rot90(PIXELS, 1),
        "transverse": PIXELS[::-1, ::-1].swapaxes(0, 1),
        "right": np.rot90(PIXELS, -1),
    }[turns[orientation]]
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert np.array_equal(read_image(saved(np.ascontiguousarray(lies), exif=exif)), PIXELS)


def test_notes_of_a_camera_that_are_damaged_do_not_matter():
    assert np.array_equal(read_image(saved(PIXELS, exif=b"Exif\x00\x00nonsense")), PIXELS)


def test_other_colours_become_rgb_and_what_is_transparent_is_white():
    grey = PIXELS[:, :, 0]
    as_rgb = np.repeat(grey[:, :, None], 3, axis=2)
    deep = (grey.astype(np.uint16) << 8) + 77
    half = np.dstack([PIXELS, np.full(grey.shape, 128, np.uint8)])
    clear = np.dstack([PIXELS, np.zeros(grey.shape, np.uint8)])
    palette = Image.fromarray(grey).convert("P")
    for data in (saved(grey), saved(deep), saved(deep, "TIFF"), saved(deep, "PPM"), saved(palette), grey, grey[:, :, None]):
        assert np.array_equal(read_image(data), as_rgb)
    assert (read_image(saved(clear)) == 255).all() and (read_image(saved(clear, "WEBP", lossless=True)) == 255).all()
    assert np.abs(read_image(half).astype(int) - (PIXELS.astype(int) + 255) / 2).max() <= 1
    assert np.array_equal(read_image(saved(Image.fromarray(grey > 100))), np.where(as_rgb > 100, 255, 0))
    cmyk = Image.fromarray(PIXELS).convert("CMYK")
    assert np.abs(read_image(saved(cmyk, "TIFF")).astype(int) - PIXELS).max() <= 1
    assert read_image(saved(cmyk, "JPEG", quality=95)).shape == PIXELS.shape


def test_a_transparent_colour_of_a_palette_is_white():
    image = Image.fromarray(np.array([[0, 1]], np.uint8)).convert("P")
    image.putpalette([10, 20, 30, 200, 100, 50])
    assert read_image(saved(image, transparency=0)).tolist() == [[[255, 255, 255], [200, 100, 50]]]
    assert read_image(saved(image, "GIF", transparency=1)).tolist() == [[[10, 20, 30], [255, 255, 255]]]


def test_a_colour_profile_is_not_applied():
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    assert np.array_equal(read_image(saved(PIXELS, icc_profile=profile)), PIXELS)


@pytest.mark.parametrize("rate", [8000, 11_025, 22_254, 44_100, 48_000, 96_000])
def test_a_tone_of_any_rate_is_the_same_tone(rate):
    tone = np.sin(2 * np.pi * 440 * np.arange(rate) / rate) / 2
    read = read_sound(recorded(tone, rate, subtype="FLOAT"))
    wanted = np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000) * 2**14
    assert abs(len(read) - 16_000) <= 1
    assert np.abs(read[1000:15_000] - wanted[1000:15_000]).max() < 8  # of 32,768


def test_louder_than_loudest_is_clipped_and_eight_bits_are_read():
    assert read_sound((np.array([2.0, -2.0]), 16_000)).tolist() == [32_767, -32_768]
    assert read_sound((np.array([0, 128, 255], np.uint8), 16_000)).tolist() == [-32_768, 0, 127 << 8]
    assert np.abs(read_sound(recorded(TONE, subtype="PCM_U8")).astype(int) - TONE).max() <= 256


def test_a_lossy_sound_is_read():
    for form in ("OGG", "MP3"):
        read = read_sound(recorded(np.tile(TONE, 4), form=form))
        assert len(read) >= 4 * len(TONE) and np.abs(read).max() > 6000


def test_the_store_gives_back_what_it_was_given_in_any_process(store):
    image, sound = keep("image", PIXELS), keep("audio", TONE)
    assert image == Medium("image", image.number, (20, 12)) and sound == Medium("audio", sound.number, (1600, 16_000))
    assert image.number < 0 and sound.number < 0 and image.number != sound.number
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        media = pool.map(media_store.medium, [image.number, sound.number])
        pixels, samples = pool.apply(media_store.image, [image.number]), pool.apply(media_store.sound, [sound.number])
    assert media == [image, sound]
    assert np.array_equal(pixels, PIXELS) and np.array_equal(samples, TONE.astype(np.float32) / 2**15)
    assert sorted(file.suffix for file in store.iterdir()) == [".png", ".wav"]


def test_another_shape_or_kind_has_another_number():
    wide = PIXELS.reshape(6, 40, 3)
    assert len({keep("image", PIXELS).number, keep("image", wide).number, keep("image", PIXELS[::-1]).number}) == 3


def keep_often(_):
    rng = np.random.default_rng(0)
    return [keep("image", rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).number for _ in range(40)]


@pytest.mark.parametrize("left", [0, 8, -1])
def test_a_file_of_the_store_that_was_cut_off_is_written_again(store, left):
    for kind, data in ("image", np.zeros((4, 5, 3), np.uint8)), ("audio", np.zeros(9, np.int16)):
        keep(kind, data)
        (file,) = store.glob("*.png" if kind == "image" else "*.wav")
        whole = file.read_bytes()
        number = keep(kind, data).number
        file.write_bytes(whole[:left])
        assert not is_whole(number)
        keep(kind, data)
        assert file.read_bytes() == whole and is_whole(number)


def test_processes_that_keep_the_same_media_at_once_agree(store):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        found = pool.map(keep_often, range(4))
    assert found[0] == found[1] == found[2] == found[3] and len(set(found[0])) == 40
    assert len(list(store.iterdir())) == 40  # no partial file is left
    for number in found[0]:
        assert media_store.image(number).shape == (64, 64, 3)


def test_a_number_that_is_not_there_names_the_variable():
    with pytest.raises(MediaMissing, match="set TANDEM_MEDIA to one on a shared file system"):
        media_store.medium(-5)


def test_a_file_that_was_changed_is_not_taken_for_the_medium(store):
    number = keep("image", PIXELS).number
    (file,) = store.iterdir()
    other = store.with_name("other")
    other.mkdir()
    (other / file.name).write_bytes(saved(PIXELS[::-1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_MEDIA", str(other))
        with pytest.raises(MediaMissing, match="was changed after it was written"):
            media_store.image(number)
        (other / file.name).write_bytes(b"half")
        with pytest.raises(MediaMissing, match="cannot be read"):
            media_store.medium(number)


def test_what_was_read_cannot_be_written_to():
    number = keep("image", PIXELS.copy()).number
    with pytest.raises(ValueError, match="read-only"):
        media_store.image(number)[0] = 0


def test_a_source_is_read_once_and_travels(store):
    source = Source("image", saved(PIXELS))
    first = source.read()
    (file,) = store.iterdir()
    file.unlink()
    assert source.read() is first and not list(store.iterdir())
    with pytest.raises(DataFailure, match="media_unreadable"):
        Source("image", b"nothing").read()
