"""What the environment says about the processes that train together: torchrun's variables, and Slurm's."""

from __future__ import annotations

from itertools import islice

import pytest

from pulsetrain.engine.distributed.launcher import Started, hosts, slurm_job, started
from pulsetrain.engine.errors import ConfigurationError

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29400"}
JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_NTASKS": "4"}
BATCH = {**JOB, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
STEP = {
    **JOB, "SLURM_STEP_ID": "2", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu08,gpu07", "SLURMD_NODENAME": "gpu07",
}  # fmt: skip


def without(name: str) -> dict[str, str]:
    return {key: value for key, value in STEP.items() if key != name}


def test_torchruns_variables_count_inside_a_step_of_slurm_too():
    expected = Started(5, 8, 1, "node1", 29400, "torchrun")
    assert started(TORCHRUN) == started(STEP | TORCHRUN) == expected


def test_a_task_of_srun_gets_its_rank_and_where_to_meet_from_slurm():
    found = started(STEP)
    assert found == Started(3, 4, 1, "gpu08", found.port, "Slurm")
    assert found.port in range(20_000, 30_000)
    assert found.port == started(STEP | {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURMD_NODENAME": "gpu08"}).port
    assert len({started(STEP | {"SLURM_STEP_ID": str(step)}).port for step in range(4)}) == 4, "steps on one host"
    ports = [started(STEP | {"SLURM_RESTART_COUNT": str(count)}).port for count in range(3)]
    assert ports[0] == found.port
    assert len(set(ports)) == 3, "a requeued job, whose old processes may still be there"
    assert started(without("SLURM_STEP_NODELIST")).address == "gpu07"
    assert started(without("SLURM_STEP_NUM_TASKS")).world_size == 4


def test_what_is_set_besides_slurms_variables_is_respected():
    found = started(STEP | {"MASTER_ADDR": "node9", "MASTER_PORT": "1234", "WORLD_SIZE": "4", "RANK": ""})
    assert found == Started(3, 4, 1, "node9", 1234, "Slurm")


@pytest.mark.parametrize(
    "environment",
    [
        {},
        BATCH,
        BATCH | {"SLURM_STEP_ID": "batch"},
        BATCH | {"SLURM_STEP_ID": "extern"},
        BATCH | {"SLURM_STEP_ID": "4294967291"},  # a batch script's
        BATCH | {"SLURM_STEP_ID": "4294967290"},  # the shell's of salloc
        {key: value for key, value in STEP.items() if key != "SLURM_PROCID"},
        STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # although the job has four
        STEP | {"RANK": "0", "WORLD_SIZE": "1"},  # tasks that train a model each
        {"RANK": "1"},
    ],
    ids=["nothing", "batch", "batch's name", "extern", "batch's number", "salloc", "no rank", "one", "apart", "half"],
)  # fmt: skip
def test_a_process_that_waits_for_no_others(environment: dict[str, str]):
    assert started(environment).world_size == 1


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            TORCHRUN | {"RANK": "8"},
            "RANK=8 and WORLD_SIZE=8 contradict each other: .*start the processes with torchrun",
        ),
        (TORCHRUN | {"RANK": "first"}, "RANK=first: is not a number"),
        (TORCHRUN | {"MASTER_PORT": "-1"}, "MASTER_PORT=-1: is not a number"),
        (TORCHRUN | {"MASTER_PORT": "99999"}, "MASTER_PORT=99999: ports end at 65535"),
        (STEP | {"MASTER_PORT": "99999"}, "MASTER_PORT=99999: ports end at 65535"),
        (STEP | {"SLURM_PROCID": "4"}, "SLURM_PROCID=4 and SLURM_STEP_NUM_TASKS=4 contradict each other"),
        (STEP | {"WORLD_SIZE": "8"}, "WORLD_SIZE=8 and SLURM_STEP_NUM_TASKS=4 contradict .*or none of them"),
        (
            STEP | {"RANK": "0"},
            "RANK=0 and SLURM_PROCID=3 contradict each other; set RANK, WORLD_SIZE, MASTER_ADDR and",
        ),
        (STEP | {"SLURM_STEP_NODELIST": "gpu[08"}, r"SLURM_STEP_NODELIST: .*'gpu\[08'; set MASTER_ADDR"),
        (
            STEP | {"SLURM_PROCID": "0"},
            "SLURM_STEP_NODELIST=gpu08,gpu07 begins with gpu08, and SLURMD_NODENAME=gpu07 is .*set MASTER_ADDR",
        ),
    ],
)
def test_variables_that_contradict_each_other_are_named(environment: dict[str, str], said: str):
    with pytest.raises(ConfigurationError, match=said):
        started(environment)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("login1", ["login1"]),
        ("gpu[01-03,07],login1", ["gpu01", "gpu02", "gpu03", "gpu07", "login1"]),
        ("gpu[9-11]", ["gpu9", "gpu10", "gpu11"]),
        ("gpu[099-101]", ["gpu099", "gpu100", "gpu101"]),
        ("a[1-2]b[3,5]c,d", ["a1b3c", "a1b5c", "a2b3c", "a2b5c", "d"]),
        ("gpu-a.site[4].org", ["gpu-a.site4.org"]),
    ],
)
def test_lists_of_nodes_are_expanded(nodes: str, expected: list[str]):
    assert list(hosts(nodes)) == expected


def test_the_first_hosts_of_a_huge_list_cost_nothing():
    assert list(islice(hosts("a[0-9999999999]b[0-9999999999]"), 2)) == ["a0b0", "a0b1"]


@pytest.mark.parametrize(
    "nodes", ["", "a,,b", "a,", "a[1", "a]1[", "a[1]]", "a[[1]]", "a[]", "a[1-]", "a[-1]", "a[3-1]", "a[x]", "a[1-2-3]"]
)
def test_other_lists_are_refused(nodes: str):
    with pytest.raises(ValueError, match=r"in '|empty"):
        list(hosts(nodes))


def test_the_job_is_known_in_a_batch_script_too():
    assert (slurm_job(BATCH), slurm_job({})) == ("4711", "")
