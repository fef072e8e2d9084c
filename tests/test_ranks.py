"""Ranks as launchers say them."""

from __future__ import annotations

import pytest

from envplan.errors import InputError
from envplan.runtime.ranks import RankNumber, number_of_process, number_or_none

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1"}
STEP_OF_SLURM = {**SLURM, "SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "8"}
TORCHRUN_IN_A_BATCH_JOB = {**TORCHRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for variables in (TORCHRUN, STEP_OF_SLURM, OPEN_MPI, MPICH):
        for variable in variables:
            monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize(
    "environment",
    [TORCHRUN, SLURM, STEP_OF_SLURM, OPEN_MPI, MPICH, TORCHRUN_IN_A_BATCH_JOB],
    ids=["torchrun", "Slurm", "a step of Slurm", "Open MPI", "MPICH", "torchrun under Slurm"],
)
def test_a_process_knows_its_numbers_from_its_launcher(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for variable, text in environment.items():
        monkeypatch.setenv(variable, text)
    assert [number_or_none(kind) for kind in RankNumber] == [3, 8, 1]


def test_numbers_of_two_launchers_are_not_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    assert number_or_none(RankNumber.WORLD_SIZE) is None


def test_without_a_launcher_the_rank_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    assert number_of_process(5, RankNumber.RANK) == 5
    with pytest.raises(InputError, match="torchrun, srun or mpirun"):
        number_of_process(None, RankNumber.RANK)


def test_an_initialized_torch_distributed_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    dist = pytest.importorskip("torch.distributed")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 6)
    monkeypatch.setattr(dist, "get_world_size", lambda: 7)
    assert number_or_none(RankNumber.RANK) == 6
    assert number_or_none(RankNumber.WORLD_SIZE) == 7
