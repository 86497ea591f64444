"""Saves beside training where the state is spread over ranks, and where it is an adapter's."""

from importlib.util import find_spec

import pytest
import torch.multiprocessing as mp
from safetensors.torch import load_file

from tests.engines_train.steps import distance
from tests.ranks import alone_and_on_two, on_two
from tests.tiny import tiny_model_folder
from tests.trainers.saving_on_ranks import LAYOUTS, MORE, ZERO, both_ways, compared, trained

DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed, an extra, is not installed")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What one process, and each of two ranks, saw."""
    out = tmp_path_factory.mktemp("saves")
    folder = tiny_model_folder(out, "qwen3", num_key_value_heads=4, vocab_size=305)
    return alone_and_on_two(both_ways, folder, out / "runs", out=out)


def test_beside_training_the_same_files_are_written_while_the_weights_move_on(found):
    alone, (first, second) = found
    for saved, layouts in ((alone["saved"], LAYOUTS[1]), (first["saved"], LAYOUTS[2])):
        assert saved.keys() == set(layouts)
        for layout, (meanwhile, one, two, differ) in saved.items():
            assert meanwhile == ([".step_1.partial"], True), layout  # beside training, and nothing is complete
            assert one == two and differ == [], layout
            assert {"model.safetensors", "state/manifest.json", "state/tensors-00001.safetensors"} <= set(one)
            assert ("adapter/adapter_model.safetensors" in one) == ("adapted" in layout)
    assert all(meanwhile == ([], True) for meanwhile, *_ in second["saved"].values())


def test_a_save_that_failed_is_raised_on_every_rank_and_the_one_before_stays(found):
    alone, ranks = found
    for heard, saved in (alone["failed"], ranks[0]["failed"]):
        assert "the newest complete checkpoint is" in heard and saved == ["step_1", "step_2"]
    assert ranks[1]["failed"][0] == ranks[0]["failed"][0]


def test_where_each_rank_writes_its_part_all_hear_of_a_full_disk_of_any(found):
    (heard, saved, differ), other = (rank["waited"] for rank in found[1])
    assert "there is no earlier checkpoint" in heard and other == (heard, [], [])
    assert saved == ["step_1", "step_2"] and differ == ["state/manifest.json", "state/state.json"]  # the step's number


def test_a_model_on_a_part_of_the_ranks_is_written_whole_either_way(found):
    main, other = (rank["unlike"] for rank in found[1])
    assert main == [([0.0], [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]])] * 2 and other == [None, None]


def test_every_rank_goes_on_where_it_may_and_waits_where_a_save_is_under_way(found):
    alone, ranks = found
    for each in (alone, *ranks):
        saved, waited, failed = each["tolerated"]
        assert waited > 0.1 and failed == 1
        assert saved == ([] if each is ranks[1] else ["step_2", "step_3"])


def test_where_no_copy_can_be_made_or_written_training_waits_for_the_save(found):
    alone, ranks = found
    assert alone["poor"] == (["step_1", "step_2"], True)  # the files of an adapter's base are gone
    assert [each["poor"] for each in ranks] == [(["step_1"], True), ([], True)]  # one rank has too little memory


@pytest.mark.slow
@pytest.mark.invariant
@pytest.mark.parametrize("layouts", [MORE, pytest.param(ZERO, marks=DEEPSPEED)], ids=["more", "deepspeed"])
def test_so_it_is_under_other_layouts(layouts, tmp_path):
    folder = tiny_model_folder(tmp_path, "gemma2", num_key_value_heads=4)
    first, second = on_two(compared, folder, tmp_path / "runs", layouts, out=tmp_path)
    for layout, (meanwhile, one, two, differ) in first.items():
        assert meanwhile == ([".step_1.partial"], True), layout
        assert one == two and differ == [], layout
    assert all(meanwhile == ([], True) for meanwhile, *_ in second.values())


@pytest.mark.slow
@pytest.mark.invariant
@pytest.mark.parametrize("lora", [False, True])
def test_killed_while_two_ranks_train_and_one_writes_the_run_goes_on_to_the_bit(lora, model, tmp_path):
    items = [f"actor.path={model}", "actor.dtype=bfloat16", "actor.optimizer.lr=0.01", "train_dataset.path=addition"]
    items += ["batch_size=8", "threads=1", "deterministic=true", "train_dataset.size=20", "total_train_steps=4"]
    items += ["tracking.plot_every_steps=null"]
    items += ["checkpoint.every_steps=1", "checkpoint.keep_last=null", *(["actor.lora.rank=4"] if lora else [])]

    def run(trial, out, instant=None, nth=0):
        (tmp_path / out).mkdir()
        return on_two(trained, [*items, f"trial_name={trial}"], tmp_path, instant, nth, out=tmp_path / out)

    checkpoints = tmp_path / "tandem/killed/checkpoints"
    run("whole", "one")
    with pytest.raises(mp.ProcessExitedException, match="SIGKILL"):
        run("killed", "two", "between state and manifest", 2)
    assert sorted(path.name for path in checkpoints.iterdir()) == [".step_2.partial", "step_1"]
    run("killed", "three")
    assert sorted(path.name for path in checkpoints.iterdir()) == [f"step_{step}" for step in (1, 2, 3, 4)]

    ends = [load_file(tmp_path / f"tandem/{trial}/checkpoints/step_4/model.safetensors") for trial in ("whole", "killed")]
    assert distance(*ends) == 0 < distance(ends[0], load_file(checkpoints / "step_1/model.safetensors"))
