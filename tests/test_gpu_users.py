"""Two trainings on one GPU that do not see each other's lock files, as in two containers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from envplan.devices import DeviceError, opened
from envplan.devices import guard as guard_module
from envplan.devices.gpu_users import may_be_set_by_a_guard, others_computing
from envplan.pipeline import Pipeline
from envplan.runtime import Guard, Shim
from fake_nvml import FakeNvml, wait_for
from shim_helpers import frequency_plan
from test_service import OTHER, for_all, needs_root, one_at_a_time

__all__ = ["for_all", "one_at_a_time"]

#: A training that waits for a line before it starts, and for another before it ends.
_TRAINING = """
import sys, time
from envplan.devices import DeviceError, guard as guard_module
from envplan.runtime import Guard

guard_module.HANDOVER_TIMEOUT_S = 0.2
sys.stdin.readline()
try:
    with Guard.start("nvml", 0, share={share}) as guard:
        guard.request({mhz})
        while not guard.done:
            guard.problems()
            time.sleep(0.01)
        print("set", flush=True)
        sys.stdin.readline()
except DeviceError as error:
    print(error, flush=True)
"""


class Container:
    """A training with PIDs and a /run of its own, which is where root has its lock files."""

    def __init__(self, mhz: int, *, share: bool = False) -> None:
        run = 'mount -t tmpfs none /run; exec "$0" -c "$1"'
        script = _TRAINING.format(mhz=mhz, share=share)
        unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-ec"]
        self._process = subprocess.Popen(
            [*unshare, run, sys.executable, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def host_pid(self) -> int:
        """The number of its process 1 on the host."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        wait_for(lambda: children.read_text().split())
        return int(children.read_text())

    def go_on(self) -> str:
        """Let it start or end; what it says then."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        said = self._process.stdout.readline().strip()
        if not said and self._process.wait() and "unshare" in self._process.stderr.read():
            pytest.skip("this user may not make a container")
        return said

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def container(mhz: int, *, share: bool = False) -> Iterator[Container]:
    try:
        made = Container(mhz, share=share)
    except FileNotFoundError:
        pytest.skip("needs unshare")
    try:
        yield made
    finally:
        made.close()


@needs_root
def test_second_container_does_not_keep_the_clock_of_the_first(fake_nvml: FakeNvml) -> None:
    with container(600) as first, container(1005) as second:
        assert first.go_on() == "set"
        assert second.go_on() == "set"  # the driver lists nothing: it cannot know of the first
        assert fake_nvml.locked() == 1005
        first.go_on()
        wait_for(lambda: fake_nvml.locked() is None)
        second.go_on()
        assert fake_nvml.clock_changes()[-1] == 0
    assert fake_nvml.wait_until_free(60) is not None


@needs_root
def test_container_leaves_a_gpu_alone_on_which_somebody_else_computes(fake_nvml: FakeNvml) -> None:
    with container(600) as first, container(1005) as second:
        assert first.go_on() == "set"
        fake_nvml.compute(first.host_pid())  # a driver that lists the host's numbers
        said = second.go_on()
        assert re.match(r"GPU 0: process \d+.* computes on it.*share=True, or --share", said)
        assert fake_nvml.clock_changes() == [600]
        first.go_on()
    assert fake_nvml.wait_until_free(60) is not None


@needs_root
def test_who_insists_on_sharing_sets_the_clock_and_puts_none_back(fake_nvml: FakeNvml) -> None:
    with container(600) as first:
        assert first.go_on() == "set"
        fake_nvml.compute(first.host_pid())
        with Guard.start("nvml", 0, share=True) as guard:
            guard.request(1005)
            wait_for(lambda: fake_nvml.locked() == 1005)
        assert fake_nvml.clock_changes() == [600, 1005, 0]
        first.go_on()
    assert fake_nvml.wait_until_free(60) is not None


@needs_root
def test_host_leaves_a_gpu_alone_on_which_a_container_computes(
    fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_module, "HANDOVER_TIMEOUT_S", 0.2)
    with container(600) as first:
        assert first.go_on() == "set"
        fake_nvml.compute(first.host_pid(), os.getpid())  # that of ours does no harm
        pid = first.host_pid()
        with pytest.raises(DeviceError, match=f"GPU 0: process {pid} of root computes on it"):
            Guard.start("nvml", 0)
        first.go_on()
    assert fake_nvml.clock_changes() == [600, 0]


def test_process_that_ends_in_time_is_waited_for(fake_nvml: FakeNvml) -> None:
    fake_nvml.compute(os.getpid(), 2**22 + 1)  # of a job that is ending
    end = threading.Timer(0.3, fake_nvml.compute, [os.getpid()])
    end.start()
    Guard.start("nvml", 0).close()
    end.join()
    assert fake_nvml.clock_changes() == [0]


@needs_root
def test_a_clock_is_an_administrators_only_where_all_others_are_seen(
    fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened("nvml") as source:
        device = source.devices()[0]
        assert not may_be_set_by_a_guard(device)
        monkeypatch.setattr(device, "compute_processes", lambda: None)
        assert may_be_set_by_a_guard(device)
        assert others_computing(device) == []


def test_shim_trains_without_clocks_where_somebody_else_computes(
    fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guard_module, "HANDOVER_TIMEOUT_S", 0.1)
    fake_nvml.compute(2**22 + 1)
    plan = frequency_plan(Pipeline("1f1b", num_stages=2, num_microbatches=3))
    with Shim(plan, rank=0, log=None) as shim:
        assert shim.guard is None
        for key in shim.operations:
            shim.begin(*key)
            shim.end(*key)
        shim.step()
    assert "clocks are left alone: GPU 0: process 4194305 computes on it" in caplog.text
    assert fake_nvml.clock_changes() == []
    with Shim(plan, rank=0, log=None, share=True) as shim:
        assert shim.guard is not None


@needs_root
def test_clock_of_another_users_dead_guard_is_not_put_back(for_all: FakeNvml) -> None:
    for_all.gpu().locked = 600
    uuid = for_all.gpu().uuid.decode()
    folder = Path(f"/tmp/envplan-{OTHER}")
    folder.mkdir(mode=0o700)
    os.chown(folder, OTHER, OTHER)
    with opened("nvml") as source:
        assert not may_be_set_by_a_guard(source.devices()[0])
        (folder / f"{uuid}.lock").write_text("999999 999998 0 nvml\n")
        assert may_be_set_by_a_guard(source.devices()[0])
    Guard.start("nvml", 0).close()
    assert for_all.locked() is None
