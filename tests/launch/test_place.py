"""Places of ranks over machines, and Slurm's lists of hosts."""

import os
import random
import shutil
import subprocess
import sys

import pytest

from tandem.config.errors import ConfigError
from tandem.launch.local import run_ranks
from tandem.launch.place import Place, free_port, hostnames, interface_to, place_of, slurm_place

TASK = {"SLURM_PROCID": "4", "SLURM_NTASKS": "5", "SLURM_LOCALID": "0", "SLURM_NODEID": "2", "MASTER_PORT": "4711"}
STEP = TASK | {"SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_JOB_NODELIST": "no-such-node-[07-09]"}


@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [
        ("login", ["login"]),
        ("n[08-10,3],login", ["n08", "n09", "n10", "n3", "login"]),
        ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
        ("a,a", ["a", "a"]),
    ],
)
def test_a_list_of_hosts_is_expanded_in_its_order(nodes, hosts):
    assert hostnames(nodes) == hosts


@pytest.mark.parametrize("nodes", ["", "n[1-", "n]1[", "n[5-3]", "n[a-b]", "n[0-99999]", "n[0-300]m[0-300]"])
def test_a_list_that_is_none_is_refused(nodes):
    with pytest.raises(ConfigError, match="hosts"):
        hostnames(nodes)


def test_a_task_of_slurm_knows_its_place_without_scontrol(monkeypatch):
    """The third node has one task of five; no name service knows the first node, so its address is taken."""
    monkeypatch.setenv("PATH", "")
    place = slurm_place(STEP | {"SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"})
    assert place == Place(4, 1, 5, 0, 1, "127.0.0.1", 4711)
    assert place_of(place.variables()) == place
    assert place_of({}) is None


def test_outside_of_a_step_the_missing_variable_is_named():
    with pytest.raises(ConfigError, match="SLURM_NODEID"):
        slurm_place({name: value for name, value in STEP.items() if name != "SLURM_NODEID"})


def test_two_groups_meet_as_one_run(tmp_path):
    """Two launchers with a group each, as on two machines: the ranks know their numbers and meet in one store."""
    code = f"""
import os, torch, torch.distributed as dist
from tandem.launch.rank import meeting_place
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=meeting_place(), rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
total = torch.tensor([10.0**rank])
dist.all_reduce(total)
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE".split()
open({str(tmp_path)!r} + "/" + str(rank), "w").write(" ".join([*(os.environ[n] for n in names), str(int(total))]))
dist.destroy_process_group()
"""
    port = free_port()
    places = [Place(0, 2, 3, 0, 2, "127.0.0.1", port), Place(2, 1, 3, 0, 1, "127.0.0.1", port)]
    script = "import sys\nfrom tandem.launch.local import run_ranks\nfrom tandem.launch.place import Place\n"
    script += f"sys.exit(run_ranks([sys.executable, '-c', {code!r}], 2, place={places[0]!r}))"
    with subprocess.Popen([sys.executable, "-c", script]) as other:
        assert run_ranks([sys.executable, "-c", code], 1, place=places[1]) == 0
        assert other.wait(60) == 0
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["0 0 3 2 111", "1 1 3 2 111", "2 0 3 1 111"]


def test_a_rank_of_a_group_is_named_by_its_number_in_the_run(capfd):
    place = Place(6, 1, 8, 0, 1, "127.0.0.1", free_port())
    assert run_ranks([sys.executable, "-c", "import sys; sys.exit(5)"], 1, place=place) == 5
    assert "rank 6 of 8 ended with exit status 5" in capfd.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="the name of the loopback interface is Linux's")
def test_the_interface_towards_an_address_is_found():
    assert interface_to("127.0.0.1", 4711) == "lo"
    assert interface_to("no-such-host.invalid", 4711) is None


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("scontrol") is None, reason="scontrol, a part of Slurm, is not installed")
def test_five_hundred_random_lists_are_expanded_as_scontrol_does():
    made = random.Random(7)
    for _ in range(500):
        nodes = ",".join(random_hosts(made) for _ in range(made.randint(1, 3)))
        done = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, env=os.environ)
        if "configuration" in done.stderr:
            pytest.skip("scontrol has no configuration here (SLURM_CONF)")
        assert hostnames(nodes) == done.stdout.split(), nodes


def random_hosts(made):
    """One host, or a range of them; Slurm knows no text behind the last bracket."""
    text = "".join(made.choices("abnx-", k=made.randint(1, 3))).strip("-") or "n"
    for number in range(made.randint(0, 2)):
        ranges = []
        for _ in range(made.randint(1, 3)):
            low, width = made.randint(0, 120), made.randint(1, 4)
            high = f"-{str(low + made.randint(1, 9)).zfill(width)}" if made.random() < 0.6 else ""
            ranges.append(str(low).zfill(width) + high)
        text += (made.choice(["", "-ib", "x"]) if number else "") + f"[{','.join(ranges)}]"
    return text
