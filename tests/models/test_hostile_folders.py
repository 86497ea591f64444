"""Model folders that somebody made to do harm: nothing of them runs, and what cannot be read is named, or does nothing."""

import io
import json
import os
import pickle
import runpy
import shutil
import struct
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.config.data import DatasetConfig
from tandem.config.errors import ConfigError, TandemError
from tandem.config.experiment import SFTConfig
from tandem.config.load import load_config
from tandem.config.rollout import EmbeddedEngineConfig, RolloutConfig
from tandem.data.dataset import load_dataset
from tandem.data.encoding import ChatEncoder
from tandem.engines.inference.build import build_inference_engine
from tandem.models.catalog import resolve
from tandem.models.foreign import read_hf_config
from tandem.models.load import load_causal_lm, load_scalar_model, open_unfilled
from tandem.models.lora import MergedWeights
from tandem.models.tokenizer import check_chat_template, load_tokenizer
from tandem.state.existing import existing_run
from tandem.state.resuming import may_go_on
from tests.tiny import tiny_model_folder

CANARY = "it-ran"
"""Made in the working directory by whatever code a folder gets to run."""

MESSAGES = [{"role": "user", "content": "{{ ''.__class__ }}"}, {"role": "assistant", "content": "no"}]
DEEP = "[" * 200_000
CODE = f"import os\nos.mkdir({CANARY!r})\nclass Config: pass\nclass Model: pass\nclass Slow: pass\nclass Fast: pass\n"


class Mine:
    def __reduce__(self):
        return (os.mkdir, (CANARY,))


PICKLE = pickle.dumps(Mine(), protocol=2)


def archive(kind: str) -> bytes:
    """A pickle in a file of weights as torch writes them now, or wrote them long ago."""
    file = io.BytesIO()
    if kind == "zip":
        torch.save({"w": Mine()}, file)
    else:
        with tarfile.open(fileobj=file, mode="w") as tar:
            for name in ("sys_info", "pickle", "tensors", "storages"):
                member = tarfile.TarInfo(name)
                member.size = len(PICKLE)
                tar.addfile(member, io.BytesIO(PICKLE))
    return file.getvalue()


def with_header(header: str | bytes, data: bytes = b"\0" * 64) -> bytes:
    header = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(header)) + header + data


def tensor(start: int, end: int, shape: str = "[2]") -> str:
    return f'{{"dtype":"F32","shape":{shape},"data_offsets":[{start},{end}]}}'


# ---------------------------------------------------------------------- what is done to a folder


def config(**changes):
    def harm(folder: Path) -> None:
        found = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(found))
        (folder / "evil.py").write_text(CODE)

    return harm


def text(name: str, content: str | bytes):
    def harm(folder: Path) -> None:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return harm


def swapped(old: str, new: str, content: bytes):
    """Another file in place of one."""

    def harm(folder: Path) -> None:
        (folder / old).unlink()
        (folder / new).write_bytes(content)

    return harm


def template(source: str):
    def harm(folder: Path) -> None:
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        found = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": source}
        (folder / "tokenizer_config.json").write_text(json.dumps(found))

    return harm


def tokenizer_config(**changes):
    def harm(folder: Path) -> None:
        found = json.loads((folder / "tokenizer_config.json").read_text()) | changes
        (folder / "tokenizer_config.json").write_text(json.dumps(found))
        (folder / "evil.py").write_text(CODE)

    return harm


def index(name: object):
    def harm(folder: Path) -> None:
        save_file({"w": torch.ones(2)}, folder.parent / "outside.safetensors")
        shown = name.format(folder=folder) if isinstance(name, str) else name
        names = dict.fromkeys(load_file(folder / "model.safetensors"), shown)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))

    return harm


def several(*harms):
    def harm(folder: Path) -> None:
        for each in harms:
            each(folder)

    return harm


def replaced(name: str, make):
    def harm(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return harm


def doubled_keys(folder: Path) -> None:
    found = (folder / "config.json").read_text().strip().removeprefix("{")
    (folder / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "evil.Config"},' + found)
    (folder / "evil.py").write_text(CODE)


def generates(folder: Path) -> None:
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate/generate.py").write_text(CODE)
    (folder / "custom_generate/requirements.txt").write_text("nothing-of-this-name")


def own_type(reference: str):
    return config(model_type="mine", auto_map={"AutoConfig": reference, "AutoModelForCausalLM": "evil.Model"})


WEIGHTS = "model.safetensors"
AUTO_TOKENIZER = {"tokenizer_class": "Slow", "auto_map": {"AutoTokenizer": ["evil.Slow", "evil.Fast"]}}
HARMLESS = None

HOSTILE = {
    # config.json
    "code for a type of model of its own": (own_type("evil.Config"), "it needs code from its folder"),
    "code from a repository elsewhere": (own_type("somebody/evil--evil.Config"), "it needs code from its folder"),
    "code beside a type that is known": (
        config(auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}),
        HARMLESS,
    ),
    "each key twice, the first with code": (doubled_keys, HARMLESS),
    "a configuration of brackets": (text("config.json", DEEP), "config.json"),
    "a configuration that is a pickle": (text("config.json", PICKLE), "config.json"),
    "a configuration that is a list": (text("config.json", "[1]"), "config.json"),
    "a number that is none": (config(rms_norm_eps=float("nan")), "rms_norm_eps is nan"),
    "a number without end": (config(rope_theta=float("inf")), "rope_theta is inf"),
    "a billion layers": (config(num_hidden_layers=10**9), "num_hidden_layers must be from 1 to"),
    "layers below zero": (config(num_hidden_layers=-1), "num_hidden_layers must be from 1 to"),
    "a vocabulary that no memory holds": (config(vocab_size=10**13), "vocab_size must be from 1 to"),
    "a shape that is not the files'": (config(intermediate_size=128), "weights"),
    "an activation that is an attribute": (config(hidden_act="__class__"), "__class__"),
    "quantisation by code": (config(quantization_config={"quant_method": "evil"}), "quantised"),
    "attention from a repository": (config(_attn_implementation="somebody/evil:attention"), HARMLESS),
    "weights upwards": (config(transformers_weights="../outside.safetensors"), "weights"),
    "a configuration that is a pipe": (replaced("config.json", os.mkfifo), "has no config.json"),
    # generation
    "how to generate, in brackets": (text("generation_config.json", DEEP), "generation_config.json"),
    "how to generate, as code": (generates, HARMLESS),
    # chat templates
    "a template that asks for classes": (template("{{ ''.__class__.__mro__[1].__subclasses__() }}"), "unsafe"),
    "a template that reaches for a module": (
        template(f"{{{{ cycler.__init__.__globals__.os.mkdir('{CANARY}') }}}}"),
        "unsafe",
    ),
    "a template that formats its way out": (template("{{ '{0.__class__.__base__}'.format('') }}"), "unsafe"),
    "a template that includes a file": (template("{% include '/etc/passwd' %}"), "loader"),
    "a template without end": (template("{% for i in range(10 ** 9) %}a{% endfor %}"), "Range too big"),
    "a template that calls itself": (template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), "recursion"),
    "a template that wants all memory": (template("{{ 'a' * 10 ** 18 }}"), ""),
    "a template that divides by zero": (template("{{ 1 // 0 }}"), "zero"),
    # tokenizers
    "a tokenizer with code": (tokenizer_config(**AUTO_TOKENIZER), "the tokenizer in"),
    "a tokenizer with code, and a model": (
        several(own_type("evil.Config"), tokenizer_config(**AUTO_TOKENIZER)),
        "needs code from its folder",
    ),
    "a tokenizer that is a pickle": (text("tokenizer.json", PICKLE), "the tokenizer in"),
    "a tokenizer of brackets": (text("tokenizer.json", DEEP), "the tokenizer in"),
    "a tokenizer that is a list": (text("tokenizer.json", "[1]"), "the tokenizer in"),
    "a tokenizer's settings in brackets": (text("tokenizer_config.json", DEEP), "the tokenizer in"),
    "an old tokenizer that is a pickle": (swapped("tokenizer.json", "tokenizer.model", PICKLE), "the tokenizer in"),
    # weights
    "weights that are a pickle": (text(WEIGHTS, PICKLE), "weights"),
    "weights that are a zip": (text(WEIGHTS, archive("zip")), "weights"),
    "weights that are a tar": (text(WEIGHTS, archive("tar")), "weights"),
    "a header longer than the file": (text(WEIGHTS, struct.pack("<Q", 2**60) + b"{}"), "weights"),
    "a header of brackets": (text(WEIGHTS, with_header("[" * 100_000)), "weights"),
    "a header that is no text": (text(WEIGHTS, with_header(b"\xff\xfe{}")), "weights"),
    "offsets behind the end": (text(WEIGHTS, with_header(f'{{"w":{tensor(0, 2**40)}}}')), "weights"),
    "offsets below zero": (text(WEIGHTS, with_header(f'{{"w":{tensor(-8, 0)}}}')), "weights"),
    "offsets of two that overlap": (text(WEIGHTS, with_header(f'{{"v":{tensor(0, 8)},"w":{tensor(4, 12)}}}')), "weights"),
    "a shape without end": (text(WEIGHTS, with_header(f'{{"w":{tensor(0, 8, f"[{2**62},{2**62}]")}}}')), "weights"),
    "one name twice": (text(WEIGHTS, with_header(f'{{"w":{tensor(0, 8)},"w":{tensor(8, 16)}}}')), "weights"),
    "old weights that are a pickle": (swapped(WEIGHTS, "pytorch_model.bin", PICKLE), "weights"),
    "old weights that are a zip": (swapped(WEIGHTS, "pytorch_model.bin", archive("zip")), "weights"),
    "old weights that are a tar": (swapped(WEIGHTS, "pytorch_model.bin", archive("tar")), "weights"),
    "pickles beside the weights": (
        several(*(text(name, PICKLE) for name in ("pytorch_model.bin", "optimizer.pt", "training_args.bin", "rng.pth"))),
        HARMLESS,
    ),
    "weights that are a pipe": (replaced(WEIGHTS, os.mkfifo), "is no file"),
    "a pipe beside the weights": (replaced("more.safetensors", os.mkfifo), HARMLESS),
    "weights that are a device": (replaced(WEIGHTS, lambda path: path.symlink_to("/dev/zero")), "is no file"),
    "an adapter beside the model": (
        several(
            text("adapter_config.json", json.dumps({"peft_type": "LORA", "base_model_name_or_path": "../other"})),
            text("adapter_model.bin", PICKLE),
        ),
        "adapter_config.json",
    ),
    # indices
    "an index upwards": (index("../outside.safetensors"), "not a file in that folder"),
    "an index of a whole path": (index("{folder}/../outside.safetensors"), "not a file in that folder"),
    "an index of a device": (index("/dev/zero"), "not a file in that folder"),
    "an index of numbers": (index(3), "not a file in that folder"),
    "an index of brackets": (text("model.safetensors.index.json", DEEP), "index.json is damaged"),
}


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("clean"), "llama")


@pytest.fixture
def folder(clean, tmp_path, monkeypatch):
    """A copy of a model, in whose parent everything runs, and somebody who says yes to all questions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 100))
    return shutil.copytree(clean, tmp_path / "model")


def encodes(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    check_chat_template(tokenizer)
    (encoded,) = ChatEncoder(tokenizer, max_length=512).conversation(MESSAGES)
    assert MESSAGES[0]["content"] in tokenizer.decode(encoded.ids)  # a message is text, whatever it looks like


def generate(folder: Path) -> None:
    engine = EmbeddedEngineConfig(kv_cache_gib=0.01, max_running=2)
    options = {"placement": "colocate", "threads": 1, "device": "cpu", "deterministic": False}
    build_inference_engine(RolloutConfig(dtype="float32", engine=engine), folder=folder, **options).close()


def trains(folder: Path) -> None:
    found = load_causal_lm(folder).model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in load_file(folder / WEIGHTS).items())


READERS = (encodes, generate, trains, lambda folder: open_unfilled(folder, torch.device("cpu"), "lm"), load_scalar_model)
"""What a run does with a model's folder: alone and on several ranks, policy and critic."""


def refusals(folder: Path) -> list[str]:
    """What is said; an error of another kind than a refusal passes through."""
    found = []
    for read in READERS:
        try:
            read(resolve(folder))
        except TandemError as error:
            found.append(str(error))
    return found


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", HOSTILE)
def test_nothing_of_a_hostile_folder_runs_and_what_is_wrong_is_named(folder, case):
    harm, words = HOSTILE[case]
    harm(folder)
    said = refusals(folder)
    assert not Path(CANARY).exists()
    assert (said != []) == (words is not HARMLESS), said
    assert words is HARMLESS or any(words in text for text in said), said


def test_there_are_more_than_fifty_of_them_and_the_folder_is_fine_without(folder):
    assert len(HOSTILE) > 50
    assert refusals(folder) == []


def test_the_traps_do_snap(folder):
    for snap in (
        lambda: pickle.loads(PICKLE),
        lambda: torch.load(io.BytesIO(archive("zip")), weights_only=False),
        lambda: runpy.run_path(str(folder / "evil.py")),
    ):
        config()(folder)
        snap()
        Path(CANARY).rmdir()


# ---------------------------------------------------------------------- adapters, configurations, rows


def adapter(folder: Path, about: dict[str, str] | None = None, **settings) -> Path:
    place = folder.parent / "adapter"
    place.mkdir()
    save_file({"base_model.model.x.lora_A.weight": torch.ones(1, 2)}, place / "adapter_model.safetensors", about)
    found = {"r": 1, "lora_alpha": 1, "base_model_name_or_path": str(folder)} | settings
    (place / "adapter_config.json").write_text(json.dumps(found))
    return place


@pytest.mark.parametrize(
    ("settings", "about", "words"),
    [
        ({"r": 0}, None, r"adapter_config\.json cannot be read: ZeroDivisionError"),
        ({"lora_alpha": [DEEP[:9]]}, None, r"adapter_config\.json cannot be read: TypeError"),
        ({"base_model_name_or_path": "../../etc"}, None, "is neither a folder nor a hub name"),
        ({}, {"base_dtype": "load"}, "names the base_dtype 'load', which is not a torch dtype"),
    ],
)
def test_an_adapter_that_lies_is_refused_by_name(folder, settings, about, words):
    with pytest.raises(ConfigError, match=words):
        MergedWeights(adapter(folder, about, **settings))


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_an_adapter_that_is_a_pickle_runs_nothing(folder, name):
    place = adapter(folder)
    (place / name).write_bytes(PICKLE)
    with pytest.raises(ConfigError, match="adapter has no readable adapter"):
        MergedWeights(place)
    assert not Path(CANARY).exists()


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.mkdir", "!!python/name:os.mkdir", "!!python/module:os"])
def test_a_configuration_that_names_code_runs_none(tmp_path, monkeypatch, tag):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(f"seed: {tag} [{CANARY}]\n")
    with pytest.raises(ConfigError):
        load_config(SFTConfig, Path("mine.yaml"), ["train_dataset.path=addition"])
    run = tmp_path / "runs"
    (run / "checkpoints/step_1").mkdir(parents=True)
    shutil.copy("mine.yaml", run / "config.yaml")
    (run / "run.json").write_text(DEEP)
    assert existing_run(run).status == "unknown"
    with pytest.raises(ConfigError, match=r"config\.yaml cannot be read"):
        may_go_on(load_config(SFTConfig, None, ["train_dataset.path=addition"]).config)(run)
    assert not Path(CANARY).exists()


@pytest.mark.parametrize(("name", "content"), [("rows.jsonl", DEEP), ("rows.json", DEEP), ("rows.jsonl", "9" * 5000)])
def test_rows_that_no_reader_takes_are_named(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        load_dataset(DatasetConfig(path=str(tmp_path / name)))


def test_a_configuration_is_read_again_if_its_file_has_changed_and_each_gets_a_copy(folder):
    first = read_hf_config(folder)
    first.vocab_size = 1
    assert read_hf_config(folder).vocab_size == 304

    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"vocab_size": 305}))
    assert read_hf_config(folder).vocab_size == 305
