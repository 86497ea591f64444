"""The page of a user's own parts: each example is a file that a run of a tiny model uses, and what it does is seen."""

import json
import os
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, SeedOssConfig, SeedOssForCausalLM

from tandem.api.plugins import forget
from tandem.cli.main import main
from tandem.config.services import ExtendConfig
from tests.tiny import VOCAB_SIZE, tiny_model_folder, tiny_tokenizer

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(
    r"^```python\n(# (\w+\.py), used with ([^\n]*)\n.*?)^```", (ROOT / "docs/extending.md").read_text(), re.M | re.S
)
USED = {name: used for _, name, used in BLOCKS}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("models"))


@pytest.fixture
def train(model, tmp_path, monkeypatch):
    """Runs `tandem train` on a tiny model beside the files of the page; returns its metrics by step."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TANDEM_MODEL_FAMILY", "")  # what a run sets is undone
    for code, name, _ in BLOCKS:
        (tmp_path / name).write_text(code)
    usual = {
        "run.root": "runs",
        "actor.path": str(model),
        "actor.optimizer.lr": "0.01",
        "actor.dtype": "float32",
        "rollout.dtype": "float32",
        "rollout.batch_size": "4",
        "rollout.engine.kv_cache_gib": "0.05",
        "gconfig.n_samples": "4",
        "gconfig.max_new_tokens": "8",
        "train_dataset.path": "addition",
        "reward": f"{ROOT}/tests/trainers/small_rewards.py:even",
        "evaluate.every_steps": "null",
        "total_train_steps": "2",
        "tracking.plot_every_steps": "null",
        "deterministic": "true",
        "threads": "1",
    }

    def run(*items, trial="trial", code=0):
        words = usual | dict(item.partition("=")[::2] for item in items) | {"trial_name": trial}
        assert main(["train", *(f"{key}={value}" for key, value in words.items() if value)]) == code
        file = tmp_path / "runs/tandem" / trial / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []

    return run


def keys_of(name):
    """The keys that the page names behind a file, as words of a command."""
    return USED[name].replace("'", "").split()


def weights(trial):
    return AutoModelForCausalLM.from_pretrained(f"runs/tandem/{trial}/checkpoints/step_2").state_dict()


def test_every_key_for_a_part_of_ones_own_has_an_example():
    table = (ROOT / "docs/extending.md").read_text().partition("| reward |")[2].partition("\n\n")[0]
    assert {f"extend.{field.name}" for field in fields(ExtendConfig)} <= set(re.findall(r"`([\w.]+)`", table))
    used = " ".join(USED.values())
    assert [field.name for field in fields(ExtendConfig) if f"extend.{field.name}=" not in used] == []
    assert len(BLOCKS) == 11 and max(len(code.splitlines()) for code, *_ in BLOCKS) <= 14


def test_rows_reward_sink_loss_channel_and_engines_of_ones_own_are_those_of_the_run(train):
    names = ("my_reward.py", "my_rows.py", "my_sink.py", "my_loss.py", "my_channel.py", "my_inference.py")
    metrics = train(*(word for name in names for word in keys_of(name)), "tracking.trajectories_per_step=null")
    lines = Path("runs/tandem/trial/lines.txt").read_text().splitlines()
    assert [line.split() for line in lines] == [[str(row["step"]), str(row["reward/mean"])] for row in metrics]
    assert all(row["reward/mean"] < 0.5 and "rewards/brief" not in row for row in metrics)
    records = [json.loads(line) for line in Path("runs/tandem/trial/trajectories/step_1.jsonl").read_text().splitlines()]
    assert records and all(re.search(r"\d\+\d=", json.dumps(record)) for record in records)
    size = sum(tensor.numel() * 4 for tensor in weights("trial").values())
    assert {int(line) for line in Path("versions.txt").read_text().split()} == {size}
    assert [row["my/requests"] for row in metrics] == [16.0, 32.0]


def test_a_step_of_ones_own_is_that_of_the_run(train):
    train(trial="usual")
    metrics = train(*keys_of("my_step.py"))
    assert all(row["my/after_batch_s"] > row["time/train_s"] > 0 for row in metrics)
    assert all(torch.equal(tensor, weights("trial")[name]) for name, tensor in weights("usual").items())


def test_a_training_engine_of_ones_own_clips_otherwise(train):
    train(trial="usual")
    wide = train("extend.train_engine=my_engine.py:ByValue(most=1000000)", trial="wide")
    narrow = train("extend.train_engine=my_engine.py:ByValue(most=0.000001)", trial="narrow")
    same = [torch.equal(tensor, weights("wide")[name]) for name, tensor in weights("usual").items()]
    assert all(same)
    size = sum(tensor.numel() for tensor in weights("usual").values())
    assert wide[0]["grad_norm"] > narrow[0]["grad_norm"] > 0
    assert narrow[0]["grad_norm"] <= 1e-6 * size**0.5


OWN_ENGINE = """
from tandem.engines.inference.core import EngineCore
from tandem.engines.inference.embedded import EmbeddedEngine


class Mine(EmbeddedEngine):
    def __init__(self, folder, settings, dtype, device, version, threads, deterministic):
        core = EngineCore(folder, settings, dtype, device, version, deterministic)
        super().__init__(core, version=version, threads=threads, deterministic=deterministic)

    def statistics(self):
        return super().statistics() | {"my/engines": 1.0}
"""


def test_an_inference_engine_of_ones_own_takes_the_place_of_that_of_the_run(train):
    Path("mine.py").write_text(OWN_ENGINE)
    train(trial="usual")
    metrics = train("extend.inference_engine=mine.py:Mine")
    assert [row["my/engines"] for row in metrics] == [1.0, 1.0]
    assert all(torch.equal(tensor, weights("trial")[name]) for name, tensor in weights("usual").items())


def test_a_wrapper_that_forgets_the_engine_is_told_so(train, capsys):
    Path("mine.py").write_text(
        "from tandem import EngineWrapper\n\n\nclass Mine(EngineWrapper):\n    def __init__(self, engine): ...\n"
    )
    train("extend.inference_engine=mine.py:Mine", code=2)
    assert "must call super().__init__(engine)" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("ending", "says", "code"),
    [
        ("pass", r"weight channel Mine: put\(\) returned a NoneType, .* tandem.Delivery", 2),
        ("return 1 / 0", r"ZeroDivisionError: division by zero \(mine.py:7 in put: return 1 / 0\)", 1),
    ],
)
def test_a_channel_whose_put_delivers_nothing_is_told_so(train, capsys, ending, says, code):
    Path("mine.py").write_text(
        "from tandem import LocalChannel\n\n\nclass Mine(LocalChannel):\n    def put(self, named_tensors, dtype):\n"
        f"        super().put(named_tensors, dtype)\n        {ending}\n"
    )
    train("extend.weight_channel=mine.py:Mine", code=code)
    assert re.search(says, " ".join(capsys.readouterr().err.split()))


def test_an_environment_of_ones_own_is_played(train):
    metrics = train(*keys_of("my_world.py"), "reward=", "train_dataset.path=seeds", "train_dataset.size=8")
    assert [row["step"] for row in metrics] == [1, 2] and all(row["reward/mean"] >= 0 for row in metrics)


def seed_oss(folder):
    """A model of the family, whose biases are not zero, in a folder with a tokenizer."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    more = {"num_key_value_heads": 2, "attention_bias": True, "attention_out_bias": False, "attention_dropout": 0.0}
    torch.manual_seed(0)
    model = SeedOssForCausalLM(SeedOssConfig(vocab_size=VOCAB_SIZE, **sizes, **more, eos_token_id=2, pad_token_id=2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_family_of_ones_own_is_computed_alike_by_engine_and_trainer(train, tmp_path, capsys):
    items = [f"actor.path={seed_oss(tmp_path / 'seed')}", "placement=decoupled"]
    train(*items, code=2)
    assert "model type 'seed_oss' is not supported" in capsys.readouterr().err
    metrics = train(*keys_of("my_family.py"), *items)
    assert metrics[0]["gap/numeric"] < 1e-4
    assert type(AutoModelForCausalLM.from_pretrained("runs/tandem/trial/checkpoints/step_2")) is SeedOssForCausalLM
    Path("wrong.py").write_text("from tandem import ModelFamily\n\nseed = ModelFamily('seed_oss', like='llama')\n")
    train("extend.model_family=wrong.py:seed", *items, trial="wrong", code=2)
    for name, facts, says in (
        ("raises", "1 / 0", "ZeroDivisionError"),
        ("none", "None", "facts of the family seed_oss returned"),
    ):
        Path(f"{name}.py").write_text(
            f"from tandem import ModelFamily\n\nseed = ModelFamily('seed_oss', like='llama', facts=lambda config: {facts})\n"
        )
        train(f"extend.model_family={name}.py:seed", *items, trial=name, code=2)
        assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "items", "says"),
    [
        ("", "extend.step=gone.py:step", "there is no file .*gone.py"),
        ("", "extend.train_engine=wrong.py:Mine", "wrong.py has no 'Mine'"),
        (
            "def Mine(): ...",
            "extend.train_engine=wrong.py:Mine",
            "Mine in wrong.py is a function .* derived from tandem.TrainEngine",
        ),
        (
            "class Mine: ...",
            "extend.weight_channel=wrong.py:Mine",
            "Mine in wrong.py is a class .* derived from tandem.WeightChannel",
        ),
        (
            "from tandem import WeightChannel\nclass Mine(WeightChannel):\n    def close(self): ...",
            "extend.weight_channel=wrong.py:Mine",
            "class Mine in wrong.py has no method put, which every WeightChannel has",
        ),
        (
            "from tandem import EngineWrapper as Mine",
            "extend.inference_engine=wrong.py:Mine(speed=2)",
            "extend.inference_engine=wrong.py:Mine .*'speed'",
        ),
        (
            "from tandem import EngineWrapper\nclass Mine(EngineWrapper):\n    def __init__(self, motor): ...",
            "extend.inference_engine=wrong.py:Mine",
            "Mine asks for 'motor', which nobody gives it",
        ),
        (
            OWN_ENGINE,
            "extend.inference_engine=wrong.py:Mine rollout.backend=embedded:d1 deterministic=",
            "has no argument `engine`",
        ),
        (
            "from tandem import LocalChannel as Mine",
            "extend.weight_channel=wrong.py:Mine rollout.weights.channel=disk",
            "leave one",
        ),
        (
            "from tandem import LocalChannel as Mine",
            "extend.weight_channel=wrong.py:Mine runner=ray",
            "does not go with runner=ray",
        ),
        ("def step(): ...", "extend.step=wrong.py:step", "step in wrong.py must be written as `def step\\(run\\)`"),
        (
            "def step(run):\n    run.verifier.verify_if_due(run.rollout.prepare_batch(run.loader, run.workflow))",
            "extend.step=wrong.py:step rollout.verify.every_steps=null",
            "a step read .verify_if_due of None: an optional role that this run does not have",
        ),
        ("def step(run):\n    return {}", "extend.step=wrong.py:step", "leaves out|must return the batch"),
        ("", "extend.step=step", "extend.step=step: name an object in a file of yours, as my_file.py:Name"),
        (
            "from tandem import ModelFamily\nfamily = ModelFamily('mine', like='llama')",
            "extend.model_family=wrong.py:family(size=1)",
            "a family has no knobs",
        ),
        ("family = 3", "extend.model_family=wrong.py:family", "family in .*wrong.py is a int; write family = ModelFamily"),
        (
            "from tandem import ModelFamily\nfamily = ModelFamily('mine', like='lama')",
            "extend.model_family=wrong.py:family",
            "like='lama' is not a supported family; did you mean 'llama'",
        ),
        (
            "from tandem import ModelFamily\nfamily = ModelFamily('nobody', like='llama')",
            "extend.model_family=wrong.py:family",
            "for models of model_type 'nobody', and this run has none .* is 'llama'.*leave extend.model_family out",
        ),
        (
            "class Sink:\n    def close(self): ...",
            "tracking.sinks=[wrong.py:Sink]",
            "class Sink in wrong.py has no method log",
        ),
        (
            "class World:\n    def reset(self): ...",
            "workflow=environment environment=wrong.py:World reward=",
            "environment=wrong.py:World has no method 'step'",
        ),
        (
            "from tandem import RewardFn\nclass Mine(RewardFn): ...",
            "reward=wrong.py:Mine",
            "Mine in wrong.py has no method __call__",
        ),
        (
            "from tandem import RolloutWorkflow\nclass Mine(RolloutWorkflow): ...",
            "workflow=wrong.py:Mine reward=",
            "no method arun_episode",
        ),
        ("rows = 3", "train_dataset.path=wrong.py:rows", "wrong.py:rows.*not iterable"),
    ],
)
def test_what_is_wrong_is_refused_at_the_start_in_a_sentence_that_names_it(train, tmp_path, capsys, code, items, says):
    (tmp_path / "wrong.py").write_text(code)
    train(*items.split(), code=2)
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(says, said), said
    assert not list(tmp_path.rglob("run.json"))


@pytest.mark.slow
def test_a_launcher_of_ones_own_puts_a_program_before_its_ranks(train, model, tmp_path, capfd):
    (tmp_path / "priority.py").write_text("import os\n\n\ndef reward(completion):\n    return float(os.nice(0))\n")
    words = ["train_dataset.path=addition", f"actor.path={model}", "run.root=launched", "reward=priority.py:reward"]
    words += ["gconfig.max_new_tokens=4", "rollout.batch_size=2", "total_train_steps=1", "rollout.engine.kv_cache_gib=0.05"]
    command = ["launch", "my_launcher.py:Nice(by=3)", *words, "evaluate.every_steps=null", "checkpoint.at_end=false"]
    assert main([*command, "--dry-run"]) == 0
    assert capfd.readouterr().out.startswith("nice -n 3 ")
    before = os.nice(0)
    assert main(command) == 0
    (row,) = [json.loads(line) for line in Path("launched/tandem/trial/metrics.jsonl").read_text().splitlines()]
    assert row["reward/mean"] == min(before + 3, 19)
    for code, says in (("class Nice: ...", "not derived from tandem.Launcher"), ("Nice = 3", "is a int")):
        (tmp_path / "wrong_launcher.py").write_text(code)
        assert main(["launch", f"{tmp_path}/wrong_launcher.py:Nice", *words]) == 2
        assert says in capfd.readouterr().err
        forget(tmp_path / "wrong_launcher.py")
