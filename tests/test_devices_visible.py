"""Which GPUs are a process's own."""

from __future__ import annotations

import pytest

from envplan.devices import Counted, DeviceError, backend, choose, opened, visible_gpus
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
    assert visible_gpus(source) == expected
    source.close()


def test_gpus_go_by_uuid_too(fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    source = backend("nvml")
    source.devices()
    fake_nvml.fail("handle", GPU_IS_LOST, index=0)
    names = [fake_nvml.gpu(k).uuid.decode() for k in (2, 1)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(names))
    assert visible_gpus(source) == [2, 1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-")  # the beginning of several
    assert visible_gpus(source) == []
    source.close()


@pytest.mark.parametrize(
    ("visible", "counted", "number", "index"),
    [
        (None, Counted.BY_CUDA, 1, 1),
        (None, Counted.BY_CUDA, 4, "there is no GPU 4; there are 4, counted from 0$"),
        (None, Counted.BY_PLAN, 7, "there is no GPU 7; there are 4, counted from 0$"),
        (None, Counted.BY_DRIVER, -1, "there is no GPU -1"),
        ("3,1", Counted.BY_CUDA, 0, 3),
        ("3,1", Counted.BY_CUDA, 1, 1),
        ("3,1", Counted.BY_CUDA, -1, "no GPU -1; there are 2, .*CUDA_VISIBLE_DEVICES=3,1"),
        ("3,1", Counted.BY_CUDA, 2, "no GPU 2; there are 2, .*CUDA_VISIBLE_DEVICES=3,1"),
        ("3,1", Counted.BY_DRIVER, 0, 0),
        ("3,1", Counted.BY_PLAN, 3, 3),
        ("3,1", Counted.BY_PLAN, 0, "GPU 0, .* hidden by CUDA_VISIBLE_DEVICES=3,1; name"),
        ("3", Counted.BY_PLAN, 0, 3),
        ("1", Counted.BY_CUDA, 1, 1),
        ("1", Counted.BY_CUDA, 5, 1),
        ("", Counted.BY_CUDA, 0, "there are 0, .* with CUDA_VISIBLE_DEVICES="),
    ],
)
def test_gpu_of_a_number_depends_on_who_counts(
    fake_nvml: FakeNvml,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    counted: Counted,
    number: int,
    index: int | str,
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with opened() as source:
        if isinstance(index, str):
            with pytest.raises(DeviceError, match=index):
                choose(source, number, counted)
        else:
            assert choose(source, number, counted).info.index == index
    with opened("modelled", count=9) as source:
        if number >= 0:
            assert choose(source, number, counted).info.index == number
