"""Whatever a file holds: a reason and no crash, little memory, and nothing read that was not allowed."""

import base64
import contextlib
import io
import multiprocessing
import os
import random
import resource
import socket
import threading
import time
import tracemalloc
import zipfile
import zlib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin

from tandem.api.failures import DataFailure
from tandem.media.decoding import MAX_PIXELS, read_image, read_sound
from tandem.media.parts import MAX_BYTES, Allowed, Source, read_media
from tests.media.files import PIXELS, TONE, bmp, gif, png, recorded, saved, tiff, wav, webp

FRAMES = [Image.fromarray(PIXELS), Image.fromarray(PIXELS[::-1])]
DEEP = Image.fromarray(np.ones((4, 4), np.float32))
IMAGES = {
    "empty": (b"", "media_unreadable: the file is empty"),
    "text": (b"hello", "media_unreadable: not an image"),
    "svg": (b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "media_refused: an SVG"),
    "svg behind spaces": (b"  \n<SVG onload=x>", "media_refused: an SVG"),
    "eps, a program": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "media_unreadable: not an image"),
    "pdf": (b"%PDF-1.4\n1 0 obj", "media_unreadable: not an image"),
    "zip": (b"PK\x03\x04" + bytes(100), "media_unreadable: not an image"),
    "sound": (recorded(TONE), "media_unreadable: not an image"),
    "cut png": (saved(PIXELS)[:-80], "media_unreadable"),
    "cut jpeg": (saved(PIXELS, "JPEG")[:-80], "media_unreadable"),
    "cut webp": (saved(PIXELS, "WEBP")[:-40], "media_unreadable"),
    "cut tiff": (saved(PIXELS, "TIFF")[:200], "media_unreadable"),
    "header alone": (saved(PIXELS)[:33], "media_unreadable"),
    "png without pixels": (png(10, 10), "media_unreadable"),
    "png of no size": (png(0, 10), "media_unreadable"),
    "wrong sum": (saved(PIXELS).replace(b"IDAT", b"IDAU"), "media_unreadable"),
    "10^9 pixels, png": (png(40_000, 25_000), "media_too_large"),
    "10^9 pixels, bmp": (bmp(40_000, 25_000), "media_too_large"),
    "4·10^9 pixels, gif": (gif(65_535, 65_535), "media_too_large"),
    "10^9 pixels, tiff": (tiff(40_000, 25_000), "media_too_large"),
    "10^9 pixels, ppm": (b"P6 40000 25000 255\n", "media_too_large"),
    "10^14 pixels, webp": (webp(2**24, 2**24), "media_"),
    "2^62 pixels, png": (png(2**31 - 1, 2**31 - 1), "media_too_large"),
    "just too many": (png(MAX_PIXELS // 4096 + 1, 4096), "media_too_large"),
    "thin": (png(1, 201, zlib.compress(bytes(4 * 201))), "media_refused: 1 × 201 pixels"),
    "moving gif": (saved(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]), "media_refused: 2 frames"),
    "moving png": (saved(FRAMES[0], "PNG", save_all=True, append_images=FRAMES[1:]), "media_refused: 2 frames"),
    "moving webp": (saved(FRAMES[0], "WEBP", save_all=True, append_images=FRAMES[1:]), "media_refused: 2 frames"),
    "pages of a tiff": (saved(FRAMES[0], "TIFF", save_all=True, append_images=FRAMES[1:]), "media_refused: 2 frames"),
    "floats": (saved(DEEP, "TIFF"), "media_refused: pixels of 32 bits"),
}
SOUNDS = {
    "empty": (b"", "media_unreadable: the file is empty"),
    "image": (saved(PIXELS), "media_unreadable: not a sound"),
    "midi": (b"MThd" + bytes(20), "media_unreadable: not a sound"),
    "no samples": (recorded(TONE[:0]), "media_unreadable: the sound has no samples"),
    "cut wav": (recorded(TONE)[:-100], "media_unreadable: the file is cut off"),
    "cut flac": (recorded(TONE, form="FLAC")[:-1000], "media_unreadable"),
    "header alone": (recorded(TONE, form="FLAC")[:42], "media_unreadable"),
    "not finite": (recorded(np.array([0.1, np.nan]), subtype="FLOAT"), "media_unreadable: samples are not finite"),
    "no rate": (wav(10, rate=0, data=bytes(20)), "media_"),
    "slow": (wav(10, rate=8, data=bytes(20)), "media_refused: 8 samples a second"),
    "many channels": (wav(10, channels=60_000, data=bytes(2000)), "media_"),
    "eleven minutes": (recorded(np.zeros(8000 * 660, np.int16), 8000), "media_too_large: 660 s"),
    "another chunked file": (b"RIFF\x10\x00\x00\x00AVI LIST" + bytes(20), "media_unreadable"),
}


def reason(act, *args):
    with pytest.raises(DataFailure) as failure:
        act(*args)
    return str(failure.value)


@pytest.mark.parametrize("name", IMAGES)
def test_a_bad_image_has_a_reason(name):
    data, told = IMAGES[name]
    assert reason(read_image, data).startswith(told)


@pytest.mark.parametrize("name", SOUNDS)
def test_a_bad_sound_has_a_reason(name):
    data, told = SOUNDS[name]
    assert reason(read_sound, data).startswith(told)


def test_a_header_of_a_thousand_million_pixels_costs_no_memory():
    tracemalloc.start()
    try:
        for name in IMAGES:
            if "^" in name:
                reason(read_image, IMAGES[name][0])
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def limited(data, said):
    """In a process of its own, which may take 700 MiB more than it has."""
    read_image(saved(PIXELS))
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + 700 * 2**20,) * 2)
    for one in data:
        with contextlib.suppress(DataFailure):
            read_image(one)
    said.put(read_image(png(4096, 8192, zlib.compress(bytes(8192 * (4096 * 3 + 1)), 1))).shape)


def test_a_process_with_little_memory_lives_through_all_of_them():
    context = multiprocessing.get_context("fork")
    said = context.Queue()
    process = context.Process(target=limited, args=([data for data, _ in IMAGES.values()], said))
    process.start()
    process.join(60)
    assert process.exitcode == 0 and said.get(timeout=5) == (8192, 4096, 3)  # the largest that is read


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "FLAC", "WAV", "OGG"])
def test_files_with_damaged_bytes_are_read_or_have_a_reason(form):
    is_sound = form in ("FLAC", "WAV", "OGG")
    whole = recorded(TONE, form=form) if is_sound else saved(Image.fromarray(PIXELS), form, exif=turned(6))
    chance = random.Random(form)
    for _ in range(150):
        data = bytearray(whole[: chance.choice([len(whole), chance.randrange(len(whole))])])
        for _ in range(chance.randrange(1, 8) if data else 0):
            data[chance.randrange(min(len(data), 200))] = chance.randrange(256)
        with contextlib.suppress(DataFailure):
            read = (read_sound if is_sound else read_image)(bytes(data))
            assert read.dtype == (np.int16 if is_sound else np.uint8) and read.size


def turned(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def test_a_polyglot_is_the_image_that_it_begins_as_and_its_rest_is_gone():
    rest = io.BytesIO()
    with zipfile.ZipFile(rest, "w") as archive:
        archive.writestr("run.sh", "touch /tmp/owned")
    (kept,) = read_media([{"role": "user", "content": [{"type": "image", "image": saved(PIXELS) + rest.getvalue()}]}])
    folder = Path(os.environ["TANDEM_MEDIA"])
    assert kept["content"][0]["medium"].size == (20, 12)
    assert [b"run.sh" in file.read_bytes() for file in folder.iterdir()] == [False]


def test_a_wrong_name_or_type_does_no_harm():
    url = "data:image/svg+xml;base64," + base64.b64encode(saved(PIXELS, "BMP")).decode()
    (message,) = read_media([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])
    assert message["content"][0]["medium"] == Source("image", saved(PIXELS)).read()


@pytest.fixture
def places(tmp_path):
    """A data folder beside a secret, with links out of it and into it."""
    folder = tmp_path / "data"
    (folder / "images").mkdir(parents=True)
    for file in (tmp_path / "secret.png", folder / "images/one.png"):
        file.write_bytes(saved(PIXELS))
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "up").symlink_to(tmp_path)
    (folder / "inside.png").symlink_to(folder / "images/one.png")
    (folder / "round").symlink_to(folder / "round")
    os.mkfifo(folder / "pipe.png")
    return folder


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("../secret.png", "media_refused"),
        ("images/../../secret.png", "media_refused"),
        ("{outside}", "media_refused"),
        ("link.png", "media_refused"),
        ("up/secret.png", "media_refused"),
        ("/etc/passwd", "media_refused"),
        ("/proc/self/environ", "media_refused"),
        ("/dev/zero", "media_refused"),
        ("pipe.png", "media_missing"),
        ("images", "media_missing"),
        ("", "media_missing"),
        ("round", "media_missing"),
        ("none.png", "media_missing"),
        ("nul\0.png", "media_missing"),
        ("a" * 5000, "media_missing"),
        ("~/secret.png", "media_missing"),
        ("file:///etc/passwd", "media_refused"),
        ("FILE:/etc/passwd", "media_refused"),
        ("ftp://host/x.png", "media_refused"),
        ("gopher://host/x.png", "media_refused"),
        ("http://169.254.169.254/latest", "media_refused"),
        ("https://host@evil.example/x.png", "media_refused"),
        ("http://[::1/x.png", "media_refused"),
        ("data:image/png,raw", "media_unreadable"),
        ("data:image/png;base64,!!!", "media_unreadable"),
    ],
)
def test_no_name_leads_out_of_the_folders_and_hosts_that_are_allowed(places, name, told):
    name = name.format(outside=places.parent / "secret.png")
    source = Source("image", name, Allowed((places,), ("host",)))
    assert reason(source.check) == reason(source.read)
    assert reason(source.read).startswith(told)


def test_names_that_stay_inside_are_read_and_a_second_folder_may_be_allowed(places):
    for name in ("images/one.png", "./images/../images/one.png", "inside.png", str(places / "images/one.png")):
        assert Source("image", name, Allowed((places,))).read().size == (20, 12)
    for name in ("secret.png", "link.png", "../secret.png"):
        assert Source("image", name, Allowed((places, places.parent))).read().size == (20, 12)
    assert reason(Source("image", "images/one.png").read).startswith(
        "media_refused: images/one.png: paths are not read here"
    )


class Server(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/garbage":
            self.wfile.write(b"no answer\r\n")
            return
        if self.path == "/cut":
            self.send_response(200)
            self.send_header("Content-Length", "100000")
            self.end_headers()
            self.wfile.write(saved(PIXELS))
            return
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/image")
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(saved(PIXELS))
            for _ in range(MAX_BYTES >> 20 if self.path == "/endless" else 0):
                self.wfile.write(bytes(2**20))

    def log_message(self, *_):
        pass


def test_a_host_that_is_allowed_is_asked_within_bounds_and_sends_nobody_elsewhere(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    allowed = Allowed(hosts=("127.0.0.1",))
    try:
        address = f"http://127.0.0.1:{server.server_port}"
        assert Source("image", f"{address}/image", allowed).read().size == (20, 12)
        assert reason(Source("image", f"{address}/moved", allowed).read).startswith("media_missing")
        for path in "/garbage", "/cut", "/a b", "/a\r\nX: y":
            assert reason(Source("image", address + path, allowed).read).startswith("media_missing"), path
        assert reason(Source("image", "http://127.0.0.1:port/x", allowed).read).startswith("media_missing")
        assert reason(Source("image", f"{address}/endless", allowed).read).startswith("media_too_large")
        assert reason(Source("image", f"{address}/image").read).startswith("media_refused")
    finally:
        server.shutdown()
        server.server_close()


def test_a_host_that_sends_drop_by_drop_is_given_up(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip():
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                for _ in range(100):
                    connection.sendall(b"x")
                    time.sleep(0.05)

        threading.Thread(target=drip, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        began = time.monotonic()
        assert "the answer takes more than 0.5 s" in reason(
            Source("image", url, Allowed(hosts=("127.0.0.1",), timeout_s=0.5)).read
        )
        assert time.monotonic() - began < 3


def test_a_data_url_of_hundreds_of_megabytes_is_refused_before_it_is_decoded():
    assert reason(Source("image", "data:;base64," + "A" * (MAX_BYTES * 3 // 2)).read).startswith("media_too_large")


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ({"type": "video", "video": "x.mp4"}, "media_refused: no model takes a video yet"),
        ({"type": "video_url", "video_url": {"url": "x"}}, "media_refused: no model takes a video yet"),
        ({"type": "image"}, "media_mismatch: a part of type 'image' has no image"),
        ({"type": "image", "image": 3}, "media_unreadable: cannot read an image from int"),
        ({"type": "audio", "audio": PIXELS}, "media_unreadable: cannot read an audio from ndarray"),
        ({"type": "image", "image": PIXELS.astype(np.float32)}, "media_refused: an image as an array"),
        ({"type": "image", "image": PIXELS[:0]}, "media_refused: an image as an array"),
        ({"type": "audio", "array": ["a"], "sampling_rate": 8000}, "media_refused: samples are [n] numbers"),
        ({"type": "audio", "array": [0.0], "sampling_rate": None}, "media_unreadable: samples must be numbers"),
        (
            {"type": "audio", "array": [[0.0], [0.0, 1.0]], "sampling_rate": 8000},
            "media_unreadable: samples must be numbers",
        ),
        ({"type": "audio", "array": [], "sampling_rate": 8000}, "media_unreadable: the sound has no samples"),
        ({"type": "audio", "array": [1e300, 2.0], "sampling_rate": 8000}, "media_unreadable: samples are not finite"),
        ({"type": "image", "image": {"bytes": None, "path": None}}, "media_unreadable: cannot read an image from NoneType"),
    ],
)
def test_a_part_that_names_no_medium_has_a_reason(part, told):
    assert reason(read_media, [{"role": "user", "content": [part]}]).startswith(told)


def test_notes_of_a_tiff_that_point_outside_of_it_are_harmless():
    notes = TiffImagePlugin.ImageFileDirectory_v2()
    notes[270] = "x" * 1000
    data = saved(Image.fromarray(PIXELS), "TIFF", tiffinfo=notes)
    with contextlib.suppress(DataFailure):
        read_image(data[:-900])
