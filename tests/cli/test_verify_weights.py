"""`tandem verify-weights`: an engine proves what it serves, or is told apart."""

import json

import pytest

from tandem.api.failures import DeliveryDisproved, ServerFailed
from tandem.cli.main import main
from tandem.cli.verifying import connect
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config, to_yaml
from tandem.config.rollout import EmbeddedEngineConfig, GenerationConfig, RolloutConfig
from tandem.engines.inference.build import build_inference_engine
from tandem.engines.inference.remote.tandem_server import TandemServer
from tandem.proof.verify_server import Model, find_model, verify_engine
from tests.engines_inference.remote.wire import SGLangStandIn, VllmStandIn
from tests.serve.served import ADMIN, Served, one_by_one, request_of
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


def test_a_server_that_a_run_uses_proves_its_weights_and_stays_the_runs(models, capsys):
    options = ["--dtype", "float32", "--questions", "4", "--max-new-tokens", "8", "--json"]
    with Served(models[0]) as served:
        owner = TandemServer.attach(served.url, run="r", admin_token=ADMIN)
        owner.pause()
        owner.resume()
        before = served.json("GET", "/health")
        assert main(["verify-weights", str(models[0]), f"tandem={served.url}", *options]) == 0
        assert json.loads(capsys.readouterr().out)["gap/numeric"] < 1e-4
        assert served.json("GET", "/health") == before and before["run"] == "r"
        guest = TandemServer.attach(served.url, run="")
        with pytest.raises(ServerFailed, match="belongs to another client"):
            guest.pause()
        guest.close()
        assert one_by_one(owner, [request_of((5, 6, 7))])[0].output_ids
        owner.close()


@pytest.mark.parametrize(("kind", "server"), [("vllm", VllmStandIn), ("sglang", SGLangStandIn)])
def test_other_makers_servers_are_asked_without_being_taken(models, kind, server):
    with server(models[0]) as there:
        rollout = RolloutConfig(dtype="float32")
        guest = connect(f"{kind}={there.url}", Model(models[0], 4, {}), rollout, "cpu")
        assert one_by_one(guest, [request_of((5, 6, 7))])[0].versions == (4,) * 12
        guest.close()
        assert (there.label, there.changes) == ("default", 0)


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
