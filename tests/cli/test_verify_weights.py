"""`tandem verify-weights`: an engine proves what it serves, or is told apart."""

import json

import pytest

from tandem.api.failures import DeliveryDisproved
from tandem.cli.main import main
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.generation import GenerationConfig
from tandem.config.load import load_config, to_yaml
from tandem.config.rollout import EmbeddedEngineConfig, RolloutConfig
from tandem.engines.inference.build import build_inference_engine
from tandem.trainers.verify_server import Model, find_model, verify_engine
from tests.tiny import tiny_model_folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [tiny_model_folder(folder, seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def run(models, tmp_path_factory):
    """A run folder whose first weights were model 0, with checkpoints of models 1 and 2."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    config = load_config(TrainConfig, None, ["train_dataset.path=addition", f"actor.path={models[0]}"]).config
    (folder / "config.yaml").write_text(to_yaml(config))
    for step, model in ((5, models[1]), (10, models[2])):
        (folder / "checkpoints" / f"step_{step}").symlink_to(model)
    return folder


def test_the_embedded_engine_proves_its_weights(models, capsys):
    options = ["--dtype", "float32", "--questions", "4", "--max-new-tokens", "8", "--json"]
    assert main(["verify-weights", str(models[0]), *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["server"] == "the embedded engine" and found["gap/verified"] == 1
    assert found["gap/numeric"] < 1e-4 and 0 < found["tokens"] <= 32


def test_what_a_run_should_serve_is_its_newest_checkpoint_and_the_others_are_known(run, models):
    model = find_model(str(run))
    assert (model.number, model.folder.resolve()) == (10, models[2])
    assert {number: folder.resolve() for number, folder in model.others.items()} == {0: models[0], 5: models[1]}
    assert find_model(str(models[0])) == Model(models[0], 0, {})


@pytest.mark.parametrize(("served", "words"), [(1, "all of them are from version 5"), (0, "from version 0"), (2, None)])
def test_a_server_with_other_weights_is_told_which_they_are(run, models, served, words):
    config = EmbeddedEngineConfig(max_running=8, kv_cache_gib=0.02, threads=1)
    engine = build_inference_engine(
        RolloutConfig(dtype="float32", engine=config),
        folder=models[served],
        placement="colocate",
        threads=1,
        device="cpu",
        deterministic=False,
    )
    gconfig = GenerationConfig(max_new_tokens=12, temperature=0.7)
    options = {"dtype": "float32", "questions": 4, "tolerance": None}
    try:
        if words is None:
            assert verify_engine(engine, find_model(str(run)), gconfig, **options)["gap/numeric"] < 1e-4
        else:
            with pytest.raises(DeliveryDisproved, match=words):
                verify_engine(engine, find_model(str(run)), gconfig, **options)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--questions", "0"], "--questions must be at least 1, got 0"),
        (["--temperature", "0"], "--temperature must be above 0"),
        (["http://127.0.0.1:8000"], "KIND=URL"),
        (["--token-file", "nowhere", "vllm=http://127.0.0.1:1"], "nowhere"),
    ],
)
def test_arguments_that_cannot_be_are_refused(models, capsys, arguments, words):
    assert main(["verify-weights", str(models[0]), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_run_without_a_checkpoint_has_nothing_to_compare_with(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no checkpoint whose weights could be compared; set checkpoint\.every_steps"):
        find_model(str(tmp_path))
