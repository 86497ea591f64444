"""Compilers that fail, folders that cannot be written, and files that cannot be loaded."""

import logging
import time
import tomllib
from pathlib import Path

import pytest
import torch

import tandem
from tandem.config.errors import ConfigError
from tandem.engines.inference.kernels import kernels
from tests.sandbox.machine import lives

AVX = pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="needs AVX2")
NEEDS = pytest.mark.skipif(kernels(torch.float32) is None, reason="needs AVX2 and a C++ compiler")


@pytest.fixture
def build(tmp_path, monkeypatch, caplog):
    """Builds with these variables, in an empty cache; returns the kernels and what the log says."""
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))

    def built(timeout_s=120, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        caplog.clear()
        with caplog.at_level(logging.WARNING, "tandem.engine"):
            return kernels.__wrapped__(torch.float32, timeout_s), caplog.text

    return built


def test_a_switch_that_is_neither_0_nor_1_is_refused(build):
    with pytest.raises(ConfigError, match=r"TANDEM_KERNELS must be 0, .* got 'false'"):
        build(TANDEM_KERNELS="false")
    assert build(TANDEM_KERNELS="0") == (None, "")


def test_every_source_of_a_kernel_is_installed_with_the_package():
    package = Path(tandem.__file__).parent
    settings = tomllib.loads((package.parents[1] / "pyproject.toml").read_text())
    installed = {path for form in settings["tool"]["setuptools"]["package-data"]["tandem"] for path in package.glob(form)}
    sources = {path for ending in ("*.cpp", "*.h") for path in package.rglob(ending)}
    assert len(sources) >= 5 and sources <= installed


@AVX
def test_a_compiler_that_fails_is_quoted_and_torch_computes(build, tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho no memory for $1 >&2\nexit 3\n")
    compiler.chmod(0o755)
    found, log = build(CXX=f"{compiler} for_all")

    assert found is None and "no memory for for_all" in log


@AVX
def test_a_compiler_that_hangs_is_announced_ended_and_named(build, tmp_path, capsys):
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\nsleep 60 & echo $! > {tmp_path}/started\nwait\n")
    compiler.chmod(0o755)
    found, log = build(0.3, CXX=compiler)

    assert found is None and "timed out after 0.3 seconds" in log
    assert capsys.readouterr().err.count("compiling") == 1
    started = int((tmp_path / "started").read_text())
    ended = time.monotonic() + 30  # it is killed by now; a busy machine takes a moment to end it
    while lives(started):
        assert time.monotonic() < ended, "what the compiler started still runs"
        time.sleep(0.01)


@NEEDS
@pytest.mark.slow
def test_a_broken_file_is_built_again_and_an_unwritable_folder_is_not_needed(build, tmp_path):
    assert build()[0] is not None
    (library,) = (tmp_path / "cache" / "kernels").glob("*.so")
    broken = tmp_path / "other" / "kernels" / library.name
    broken.parent.mkdir(parents=True)
    broken.write_text("junk")
    found, log = build(TANDEM_CACHE=tmp_path / "other")
    assert found is not None and "are built again" in log and broken.stat().st_size == library.stat().st_size
    found, log = build(TANDEM_CACHE=library)

    assert found is not None and "set TANDEM_CACHE to a folder that can be written" in log


@NEEDS
@pytest.mark.slow
@pytest.mark.invariant
def test_a_compiler_told_to_use_all_instructions_builds_for_the_numbers_asked_for(build):
    found, log = build(CXX="g++ -march=native")
    x = torch.randn(3, 50)

    torch.testing.assert_close(found.rms_norm(x, torch.ones(50), 1e-5), torch.nn.functional.rms_norm(x, (50,), eps=1e-5))
    assert not log
