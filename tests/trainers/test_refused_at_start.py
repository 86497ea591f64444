"""What a start refuses, a dry run refuses: the same sentence, the same exit code, and no folder is left by either."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification

from tandem.cli.main import EXIT_CONFIG, main
from tests.tiny import tiny_config, tiny_model_folder, tiny_tokenizer

REWARDS = Path(__file__).parent / "small_rewards.py"
SIZES = ["rollout.batch_size=2", "gconfig.n_samples=2", "gconfig.max_new_tokens=4", "rollout.engine.kv_cache_gib=0.05"]
TRAIN = [*SIZES, "train_dataset.path=addition", f"reward={REWARDS}:even", "total_train_steps=1"]
PAIRS = [{"prompt": f"{i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(8)]
SFT = ["train_dataset.path=addition", "batch_size=2", "total_train_steps=1"]

FAILS = """
from tandem.rollout.workflows import ChatWorkflow


class Fails(ChatWorkflow):
    def __init__(self, reward, gconfig, tokenizer):
        raise ValueError("no such table")

    async def arun_episode(self, engine, data):
        return None
"""


def classifier(folder, labels):
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(tiny_config("llama", num_labels=labels))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Name → path of what the table below names in braces."""
    root = tmp_path_factory.mktemp("places")
    folders = {name: root / name for name in ("vision", "judge", "classes")}
    folders["model"] = tiny_model_folder(root)
    folders["mute"] = tiny_model_folder(root, seed=1, chat_template=None)
    folders["other"] = tiny_model_folder(root, seed=2)
    file = folders["other"] / "tokenizer.json"
    file.write_bytes(file.read_bytes().replace(b'"!"', b'"!?"'))
    folders["vision"].mkdir()
    (folders["vision"] / "config.json").write_text(json.dumps({"model_type": "gemma3"}))
    save_file({"w": torch.ones(1)}, folders["vision"] / "model.safetensors")
    tiny_tokenizer().save_pretrained(folders["vision"])
    classifier(folders["judge"], 1)
    classifier(folders["classes"], 3)
    texts = {
        "fails.py": FAILS,
        "pairs.jsonl": "".join(json.dumps(row) + "\n" for row in PAIRS),
        "questions.jsonl": '{"prompt": "2 + 2?"}\n',
        "empty_token": "",
    }
    for name, text in texts.items():
        (root / name).write_text(text)
        folders[name.partition(".")[0]] = root / name
    return folders


def without(library):
    return pytest.mark.skipif(importlib.util.find_spec(library) is not None, reason=f"{library} is installed here")


no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")

REFUSED = {
    "train": (
        TRAIN,
        [
            pytest.param("rollout.backend=vllm:d1", "vLLM", marks=without("vllm")),
            pytest.param("rollout.backend=embedded:d1+sglang:d1", "SGLang", marks=without("sglang")),
            ("rollout.backend=vllm:d1 rollout.fleet.vllm_python=/nowhere/python", "rollout.fleet.vllm_python"),
            ("rollout.backend=embedded:d1 rollout.fleet.token_file={empty_token}", "rollout.fleet.token_file"),
            pytest.param("device=cuda", "torch sees no GPU", marks=no_gpu),
            ("device=cpu actor.offload=true", "actor.offload=true"),
            ("actor.path={vision}", "gemma3"),
            ("actor.path={judge}", "sequence classifier"),
            ("actor.path={mute}", "no chat template"),
            ("actor.path=nowhere", "nowhere"),
            pytest.param(  # three ranks, twice
                "actor.backend=fsdp:d1t3", "divided", marks=[pytest.mark.slow, pytest.mark.invariant]
            ),
            ("actor.backend=deepspeed:zero1:d1 actor.dtype=bfloat16", "stage 1"),
            ("actor.lora.rank=4 actor.lora.target_modules=[nothing]", "lora.target_modules"),
            ("rollout.engine.max_model_len=100000", "rollout.engine.max_model_len"),
            ("rollout.engine.max_model_len=10", "leaves room for an answer in the context of 10"),
            ("rollout.engine.kv_cache_gib=1e-6", "rollout.engine.kv_cache_gib"),
            ("critic.optimizer.lr=0.001", "critic.optimizer.lr=0.001 is not used"),
            ("algorithm=ppo critic.path={classes}", "3 labels"),
            ("algorithm.kl.coefficient=0.1 reference.path={vision}", "gemma3"),
            ("algorithm.kl.coefficient=0.1 reference.path={other}", "reference.path={other} has another tokenizer"),
            ("rollout.weights.channel=disk rollout.weights.folder={questions}/x", "cannot hold the weights for the servers"),
            ("reward=math train_dataset.path={questions}", "answer"),
            ("workflow={fails}:Fails", "no such table"),
            ("rollout.max_head_offpolicyness=0 async_training=true", "rollout.max_head_offpolicyness=0"),
            ("algorithm.allow_truncated_sampling=true", "algorithm.allow_truncated_sampling=true"),
        ],
    ),
    "sft": (
        SFT,
        [
            ("device=cpu actor.offload=true", "actor.offload=true"),
            ("actor.path={vision}", "gemma3"),
            ("actor.path={mute}", "no chat template"),
            ("max_length=2", "usable rows"),
        ],
    ),
    "preference": (
        ["train_dataset.path={pairs}", "batch_size=2", "total_train_steps=1"],
        [("actor.path={vision}", "gemma3"), ("reference.path={judge}", "sequence classifier")],
    ),
    "reward": (
        ["train_dataset.path={pairs}", "batch_size=2", "total_train_steps=1"],
        [("actor.path={classes}", "3 labels"), ("actor.path={vision}", "gemma3")],
    ),
    "distill": (
        [*SIZES, "train_dataset.path=addition", "total_train_steps=1", "teacher.path={model}"],
        [
            ("teacher.path={vision}", "gemma3"),
            ("teacher.path={judge}", "sequence classifier"),
            ("actor.path={mute}", "no chat"),
        ],
    ),
}


def rows():
    for command, (common, cases) in REFUSED.items():
        for case in cases:
            case = case if hasattr(case, "values") else pytest.param(*case)
            items, words = case.values
            few = ["train_dataset.size=16"] if "addition" in str(common) and "train_dataset" not in items else []
            yield pytest.param(command, [*common, *few, *items.split()], words, id=f"{command} {items}", marks=case.marks)


def said(argv, capfd):
    """The exit code, and the error without what a launcher of several ranks puts around it."""
    code = main(argv)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    return code, lines[:1]


@pytest.mark.parametrize(("command", "items", "words"), list(rows()))
def test_a_dry_run_refuses_what_the_start_refuses(command, items, words, places, tmp_path, capfd):
    keys = [f"actor.path={places['model']}", f"run.root={tmp_path}", "threads=1", *items]
    argv = [command, *(key.format(**places) for key in {key.partition("=")[0]: key for key in keys}.values())]

    dry, start = said([*argv, "--dry-run"], capfd), said(argv, capfd)

    assert dry == start
    assert start[0] == EXIT_CONFIG and words.format(**places) in start[1][0]
    assert list(tmp_path.iterdir()) == []


EVALUATIONS = [
    pytest.param("{model} device=cuda", "torch sees no GPU", marks=no_gpu),
    ("{vision}", "gemma3"),
    ("{judge}", "sequence classifier"),
    ("{mute}", "no chat template"),
    ("{model} engine.max_model_len=100000", "max_model_len"),
    ("{model} workflow={fails}:Fails", "no such table"),
    ("{model} reward=nothing", "nothing"),
]


@pytest.mark.parametrize(("items", "words"), EVALUATIONS)
def test_a_dry_evaluation_refuses_what_the_start_refuses(items, words, places, tmp_path, capfd):
    words_of = items.format(**places).split()
    argv = ["eval", *words_of, "--data", "addition", "--max-rows", "2", "--max-new-tokens", "4", "--out", str(tmp_path)]

    dry, start = said([*argv, "--dry-run"], capfd), said(argv, capfd)

    assert dry == start
    assert start[0] == EXIT_CONFIG and words in start[1][0]
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_refuses_the_folder_that_the_start_refuses(places, tmp_path, capfd):
    keys = [*SFT, f"actor.path={places['model']}", "threads=1"]
    folder = tmp_path / "tandem" / "trial"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "run.json").write_text('{"status": "finished", "steps": 3}')
    (folder / "metrics.jsonl").write_text('{"step": 3, "loss": 1.0}\n')
    (folder / "config.yaml").write_text("seed: 0\n")
    before = sorted(tmp_path.rglob("*"))

    argv = ["sft", *keys, f"run.root={tmp_path}"]
    dry, start = said([*argv, "--dry-run"], capfd), said(argv, capfd)

    assert dry == start and start[0] == EXIT_CONFIG and "holds a run" in start[1][0]
    assert [path for path in sorted(tmp_path.rglob("*")) if path.name != ".lock"] == before

    (tmp_path / "file").touch()
    argv = ["sft", *keys, f"run.root={tmp_path / 'file'}"]
    dry, start = said([*argv, "--dry-run"], capfd), said(argv, capfd)
    assert dry == start and start[0] == EXIT_CONFIG and "cannot hold the run folder" in start[1][0]
