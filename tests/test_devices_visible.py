"""Which GPUs are a process's own."""

from __future__ import annotations

import pytest

from envplan.devices import DeviceError, backend, opened
from envplan.devices.visible import Counted, choose, gpu_of_rank, planned_gpu, visible_gpus
from fake_nvml import GPU_IS_LOST, FakeNvml, fake_nvml

__all__ = ["fake_nvml"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2", [2]),
        ("3, 1", [3, 1]),
        ("1,9,2", [1]),
        ("1,-1,2", [1]),
        ("MIG-0123", []),
    ],
)
def test_cuda_shows_what_its_variable_says(
    fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, text: str | None, expected: list[int]
) -> None:
    if text is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    source = backend("nvml")
    assert visible_gpus(source.devices()) == expected
    source.close()


def test_gpus_go_by_uuid_too(fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    source = backend("nvml")
    devices = source.devices()
    fake_nvml.fail("handle", GPU_IS_LOST, index=0)
    names = [fake_nvml.gpu(k).uuid.decode() for k in (2, 1)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(names))
    assert visible_gpus(devices) == [2, 1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-")  # the beginning of several
    assert visible_gpus(devices) == []
    source.close()


def test_planned_gpu_is_one_that_the_process_has(
    fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = backend("nvml")
    devices = source.devices()
    assert planned_gpu(devices, 7) == 7  # there is none, as others will say
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert planned_gpu(devices, 3) == 3
    with pytest.raises(DeviceError, match=r"GPU 0, .* hidden by CUDA_VISIBLE_DEVICES=2,3; name"):
        planned_gpu(devices, 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert planned_gpu(devices, 0) == 2
    source.close()


def test_gpu_of_a_rank_is_counted_among_those_that_are_shown(
    fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = backend("nvml")
    devices = source.devices()
    with pytest.raises(DeviceError, match=r"there is no GPU 4; there are 4, counted from 0$"):
        gpu_of_rank(devices, 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert [gpu_of_rank(devices, rank) for rank in (0, 1)] == [3, 1]
    with pytest.raises(DeviceError, match=r"there are 2, .*CUDA_VISIBLE_DEVICES=3,1"):
        gpu_of_rank(devices, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert gpu_of_rank(devices, 5) == 1
    source.close()


@pytest.mark.parametrize(
    ("visible", "counted", "number", "index"),
    [
        (None, Counted.BY_CUDA, 1, 1),
        ("3,1", Counted.BY_CUDA, 1, 1),
        ("3,1", Counted.BY_CUDA, 0, 3),
        ("3,1", Counted.BY_CUDA, 2, None),
        ("3,1", Counted.BY_DRIVER, 0, 0),
        ("3,1", Counted.BY_PLAN, 3, 3),
        ("3,1", Counted.BY_PLAN, 0, None),
        ("3", Counted.BY_PLAN, 0, 3),
    ],
)
def test_gpu_of_a_number_depends_on_who_counts(
    fake_nvml: FakeNvml,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    counted: Counted,
    number: int,
    index: int | None,
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with opened() as source:
        if index is None:
            with pytest.raises(DeviceError):
                choose(source, number, counted)
        else:
            assert choose(source, number, counted).info.index == index
    with opened("modelled", count=4) as source:
        assert choose(source, number, counted).info.index == number
