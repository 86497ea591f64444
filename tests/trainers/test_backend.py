"""`rollout.backend=auto` in runs on a CPU."""

from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.trainers import loop


def test_the_choice_is_written_into_the_run_and_stands_when_it_goes_on(overrides, capfd):
    asked = [*overrides, "device=cpu", "rollout.fleet.vllm_python=/x", "checkpoint.every_steps=1", "total_train_steps=3"]
    first = loop.train(load_config(TrainConfig, None, asked), until=1)

    assert "rollout.backend=embedded (auto: there is no GPU)" in (first.folder / "log.txt").read_text()
    written = load_config(TrainConfig, first.folder / "config.yaml").config
    assert written.rollout.backend == "embedded" and written.rollout.fleet.vllm_python is None

    loop.train(load_config(TrainConfig, None, asked), until=2)
    assert "rollout.backend=embedded (auto: as the run began)" in (first.folder / "log.txt").read_text()
    assert "rollout.backend" not in capfd.readouterr().err  # where no server was possible the terminal says nothing

    loop.train(load_config(TrainConfig, None, asked), dry_run=True)
    assert "backend: embedded" in (dry := capfd.readouterr().out) and "# auto: as the run began" in dry
