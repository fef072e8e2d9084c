"""The guard: whoever is killed, clocks go back."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cli_helpers import envplan
from envplan.devices import DeviceError, locks, opened
from envplan.devices import guard as guard_module
from envplan.devices.guard_protocol import Request
from envplan.devices.locks import LockFile, Mark, recover
from envplan.runtime import Guard
from fake_nvml import FakeNvml, open_fake_nvml, wait_for
from shim_helpers import end, holding, training

PATIENCE_S = 60.0
HOUR_NS = 3600 * 10**9


def next_problem(guard: Guard) -> str:
    problems: list[str] = []
    wait_for(lambda: problems.extend(guard.problems()) or problems)
    (problem,) = problems
    return problem


def test_clocks_are_set_in_order_but_once_and_given_back(fake_nvml: FakeNvml) -> None:
    clocks = [1005, 600, 1740, 900, 0] * 20
    with Guard.start("nvml", 2, every_request=True) as guard:
        assert guard.alive
        for mhz in clocks:
            guard.request(mhz)
            guard.request(mhz)  # what is set is not set again
        wait_for(lambda: len(fake_nvml.clock_changes(2)) >= len(clocks))
        assert guard.problems() == []
    assert fake_nvml.clock_changes(2) == [*clocks, 0]
    assert fake_nvml.locked(2) is None
    assert not guard.alive
    assert {call.pid for call in fake_nvml.calls(2, "lock")} == {guard.pid}


def test_a_slow_driver_gets_the_newest_clock(fake_nvml: FakeNvml) -> None:
    fake_nvml.gpu(0).lock_delay_ns = 50_000_000
    with Guard.start("nvml", 0) as guard:
        for mhz in range(300, 1500, 15):
            guard.request(mhz)
        wait_for(lambda: fake_nvml.locked() == 1485)
    assert len(fake_nvml.clock_changes()) < 10


def test_a_request_is_carried_out_when_it_is_due_and_not_before(fake_nvml: FakeNvml) -> None:
    with Guard.start("nvml", 0) as guard:
        now_ns = time.perf_counter_ns()
        guard.send([Request(1, now_ns, 900), Request(2, now_ns + 50_000_000, 1005)])
        wait_for(lambda: fake_nvml.locked() == 1005)
        assert time.perf_counter_ns() >= now_ns + 50_000_000
        wait_for(lambda: guard.problems() == [] and guard.done == 2)
        assert all(lag > 0 for lag in guard.lags.values())
        guard.send([Request(3, time.perf_counter_ns() + HOUR_NS, 600)])
        guard.send([Request(3, time.perf_counter_ns(), 600)])  # sooner, after all
        wait_for(lambda: fake_nvml.locked() == 600)
        guard.send([Request(4, time.perf_counter_ns() + HOUR_NS, 1740)])  # is not waited for
    assert fake_nvml.clock_changes() == [900, 1005, 600, 0]


def test_a_request_is_overtaken_by_a_newer_one_that_is_due_before_it(fake_nvml: FakeNvml) -> None:
    with Guard.start("nvml", 0) as guard:
        now_ns = time.perf_counter_ns()
        delays_ms = {900: 20, 1200: 120, 1050: 60}
        for number, (mhz, delay_ms) in enumerate(delays_ms.items(), 1):
            guard.send([Request(number, now_ns + 1_000_000 * delay_ms, mhz)])
        wait_for(lambda: fake_nvml.clock_changes() == [900, 1050])
        time.sleep(0.1)
    assert fake_nvml.clock_changes() == [900, 1050, 0]


def test_a_request_that_is_not_due_for_long_is_no_sign_of_a_hanging_driver(
    fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_module, "ACKNOWLEDGE_TIMEOUT_S", 0.1)
    with Guard.start("nvml", 0) as guard:
        now_ns = time.perf_counter_ns()
        guard.send([Request(1, now_ns, 900), Request(2, now_ns + HOUR_NS, 1005)])
        wait_for(lambda: guard.problems() == [] and guard.done == 1)
        time.sleep(0.15)
        assert guard.problems() == []
        assert not guard.failing
        fake_nvml.hang("lock")
        guard.send([Request(3, time.perf_counter_ns(), 600)])  # the second one does not come
        assert "is not set yet" in next_problem(guard)
        fake_nvml.hang()


def test_requests_are_acknowledged_by_number_and_those_overtaken_are_not(
    fake_nvml: FakeNvml,
) -> None:
    fake_nvml.hang("lock")
    with Guard.start("nvml", 0) as guard:
        guard.request(900)
        time.sleep(0.05)  # long enough for it to be begun, mostly
        for mhz in (600, 1005, 1005):
            guard.request(mhz)
        assert guard.problems() == []
        assert guard.done == 0
        fake_nvml.hang()
        wait_for(lambda: guard.problems() == [] and guard.done == 4)
        assert 4 in guard.lags
        assert 2 not in guard.lags
        assert all(lag > 0 for lag in guard.lags.values())
    assert fake_nvml.clock_changes()[-2:] == [1005, 0]


def test_driver_that_hangs_is_failing_until_it_has_done_what_was_asked(
    fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_module, "ACKNOWLEDGE_TIMEOUT_S", 0.1)
    fake_nvml.hang("lock")
    with Guard.start("nvml", 0) as guard:
        assert guard.problems() == []
        assert not guard.failing
        guard.request(1005)
        assert "is not set yet; the driver hangs" in next_problem(guard)
        assert guard.failing
        assert guard.problems() == []
        fake_nvml.hang()
        wait_for(lambda: guard.problems() == [] and not guard.failing)
    assert fake_nvml.clock_changes() == [1005, 0]


@pytest.mark.parametrize("killed", [False, True])
def test_close_does_not_wait_for_a_driver_that_hangs(
    fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    monkeypatch.setattr(guard_module, "CLOSE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(guard_module, "TERMINATE_TIMEOUT_S", 0.1)
    guard = holding(fake_nvml)
    fake_nvml.hang("reset")
    if killed:
        os.kill(guard.pid, signal.SIGKILL)
    guard.close()
    (problem,) = guard.problems()
    assert "the clock may still be set: " in problem
    assert ("the clock guard hangs" in problem) == (not killed)
    assert problem.endswith("run: envplan reset")
    assert fake_nvml.locked() == 1005
    fake_nvml.hang()
    assert fake_nvml.wait_until_free(PATIENCE_S) is not None


def test_guard_with_much_to_read_ends_soon_after_it_is_closed(
    fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_module, "CLOSE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(guard_module, "TERMINATE_TIMEOUT_S", PATIENCE_S)
    fake_nvml.gpu(0).lock_delay_ns = 50_000_000
    guard = Guard.start("nvml", 0, every_request=True)
    for k in range(300):
        guard.request(300 + 15 * (k % 90))
    guard.close()
    assert guard.problems() == []
    assert fake_nvml.locked() is None
    assert len(fake_nvml.clock_changes()) < 250  # and not all 300


@pytest.mark.parametrize("kind", ["init", "handle", "limit"])
def test_start_does_not_wait_for_a_driver_that_hangs(
    fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(guard_module, "START_TIMEOUT_S", 0.3)
    fake_nvml.hang(kind)
    with pytest.raises(DeviceError, match="does not answer; the driver may hang"):
        Guard.start("nvml", 0)
    fake_nvml.hang()
    assert fake_nvml.clock_changes() == []
    assert fake_nvml.locked() is None


def test_guard_that_hangs_after_its_owner_is_named_for_what_it_is(
    fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_module, "HANDOVER_TIMEOUT_S", 0.2)
    process, guard = training(fake_nvml)
    fake_nvml.hang("reset")
    end(process)
    with pytest.raises(DeviceError, match=f"training that has ended, process {guard}, does not"):
        Guard.start("nvml", 0)
    fake_nvml.hang()
    assert fake_nvml.wait_until_free(PATIENCE_S) is not None


def test_training_that_is_process_1_is_told_what_its_end_does(
    fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    script = "from envplan.runtime import Guard; Guard.start('nvml', 0).close()"
    command = ["unshare", "--pid", "--fork", sys.executable, "-c", script]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if "unshare failed" in ran.stderr:
        pytest.skip("this user may not make a container")
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("\n") == 1
    assert "training is process 1 of its container" in ran.stderr
    assert fake_nvml.locked() is None


def test_a_full_pipe_neither_blocks_nor_raises(fake_nvml: FakeNvml) -> None:
    guard = Guard.start("nvml", 0)
    os.kill(guard.pid, signal.SIGSTOP)
    for k in range(60_000):
        guard.request(300 + k % 1000)
    (problem,) = guard.problems()
    assert "does not keep up" in problem
    guard.request(1005)
    os.kill(guard.pid, signal.SIGCONT)
    wait_for(lambda: guard.problems() is not None and fake_nvml.locked() == 1005)
    guard.close()
    assert fake_nvml.locked() is None


@pytest.mark.parametrize(
    "way",
    [
        "pass",
        "raise SystemExit(3)",
        "raise ValueError",
        "os._exit(1)",
        "os.abort()",
        "guard.close()",
        "del guard; time.sleep(600)",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "os.execlp('sleep', 'sleep', '600')",
    ],
)
def test_however_the_owner_ends_the_clock_goes_back(fake_nvml: FakeNvml, way: str) -> None:
    process, _ = training(fake_nvml, way)
    assert fake_nvml.wait_until_free(PATIENCE_S) is not None
    end(process)
    assert fake_nvml.clock_changes() == [1005, 0]


def test_forked_children_that_outlive_the_owner_do_not_keep_the_clock(
    fake_nvml: FakeNvml,
) -> None:
    way = "child = os.fork(); print(child, flush=True) if child else None; time.sleep(600)"
    process, _ = training(fake_nvml, way)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    end(process)
    assert fake_nvml.wait_until_free(PATIENCE_S) is not None
    assert lives(child)
    os.kill(child, signal.SIGKILL)


def test_a_forked_child_can_neither_set_nor_end_anything(fake_nvml: FakeNvml) -> None:
    way = "\n".join(
        [
            "if os.fork() == 0:",
            "    guard.request(600); guard.close(); os._exit(0)",
            "os.wait(); print(guard.alive, flush=True); time.sleep(600)",
        ]
    )
    process, _ = training(fake_nvml, way)
    assert process.stdout is not None
    assert process.stdout.readline() == "True\n"
    assert fake_nvml.clock_changes() == [1005]
    end(process)
    assert fake_nvml.wait_until_free(PATIENCE_S) is not None


def test_an_owner_with_sigpipe_at_its_default_outlives_its_guard(fake_nvml: FakeNvml) -> None:
    way = (
        "signal.signal(signal.SIGPIPE, signal.SIG_DFL)\n"
        "os.kill(guard.pid, signal.SIGKILL)\n"
        "with contextlib.suppress(ChildProcessError):\n"  # it is waited for in a thread, too
        "    os.waitid(os.P_PID, guard.pid, os.WEXITED | os.WNOWAIT)\n"
        "guard.request(600); guard.close()"
    )
    process, _ = training(fake_nvml, way)
    assert process.wait() == 0
    assert fake_nvml.locked() is None


def test_guard_that_was_stopped_gives_the_clock_back_when_it_is_closed(
    fake_nvml: FakeNvml,
) -> None:
    with holding(fake_nvml) as guard:
        os.kill(guard.pid, signal.SIGSTOP)
    assert guard.problems() == []
    assert fake_nvml.clock_changes() == [1005, 0]


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU],
)
def test_a_guard_asked_to_stop_gives_the_clock_back(fake_nvml: FakeNvml, number: int) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [number])  # its owner cannot be asked
    try:
        guard = holding(fake_nvml)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.kill(guard.pid, number)
    assert fake_nvml.wait_until_free(PATIENCE_S) is not None
    wait_for(lambda: not guard.alive)
    guard.request(600)
    guard.close()
    assert guard.problems() == ["the clock guard is gone; its clock was given back"]
    assert fake_nvml.clock_changes() == [1005, 0]


def test_signals_meant_for_the_training_do_not_end_the_guard(fake_nvml: FakeNvml) -> None:
    with holding(fake_nvml) as guard:
        for name in ("USR1", "USR2", "VTALRM", "PROF", "PIPE", "POLL", "PWR", "TSTP", "RTMIN"):
            os.kill(guard.pid, signal.Signals[f"SIG{name}"])
        guard.request(600)
        wait_for(lambda: fake_nvml.locked() == 600)
    assert guard.problems() == []


def test_killed_guard_is_noticed_and_its_clock_given_back_without_a_request(
    fake_nvml: FakeNvml,
) -> None:
    with holding(fake_nvml) as guard:
        os.kill(guard.pid, signal.SIGKILL)
        assert fake_nvml.wait_until_free(PATIENCE_S) is not None
        assert next_problem(guard) == "the clock guard is gone; its clock was given back"
        assert not guard.alive
        guard.request(600)
        assert guard.problems() == []
    assert fake_nvml.clock_changes() == [1005, 0]


@pytest.mark.parametrize("children", [signal.SIG_DFL, signal.SIG_IGN], ids=["", "as Ray's workers"])
def test_killed_guard_is_cleaned_up_by_the_time_its_owner_has_closed_it(
    fake_nvml: FakeNvml, children: signal.Handlers
) -> None:
    before = signal.signal(signal.SIGCHLD, children)
    try:
        with holding(fake_nvml) as guard:
            os.kill(guard.pid, signal.SIGKILL)
            guard.request(600)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert fake_nvml.locked() is None
    assert guard.problems()[1:] == []


def test_clock_that_another_guard_has_set_since_is_left_alone(fake_nvml: FakeNvml) -> None:
    with holding(fake_nvml), opened("nvml") as source:
        recover(source.devices()[0])
        assert fake_nvml.clock_changes() == [1005]


def test_recovery_goes_on_while_the_gpu_is_lost_and_though_it_is_killed_itself(
    fake_nvml: FakeNvml,
) -> None:
    with holding(fake_nvml) as guard:
        fake_nvml.fail("handle")  # from now on no process gets at it
        os.kill(guard.pid, signal.SIGKILL)
        recovery = wait_for_child(guard.pid)
        os.kill(recovery, signal.SIGKILL)
        wait_for(lambda: wait_for_child(guard.pid, recovery) != recovery)
        time.sleep(3.0)  # it was given up after two seconds
        assert fake_nvml.locked() == 1005
        fake_nvml.fail("handle", 0)
        assert next_problem(guard) == "the clock guard is gone; its clock was given back"
    assert fake_nvml.locked() is None


def wait_for_child(*others: int) -> int:
    """A guard process that this process has started, beside others."""
    found: list[int] = []

    def find() -> list[int]:
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                children = map(int, (task / "children").read_text().split())
                found.extend(pid for pid in children if pid not in others and lives(pid))
        return [pid for pid in found if is_guard(pid)]

    wait_for(find)
    return find()[-1]


def is_guard(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"guard_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def test_an_owner_may_set_the_clock_itself(fake_nvml: FakeNvml) -> None:
    with opened("nvml") as source, Guard.start("nvml", 0):
        source.devices()[0].lock_clock(1200)
        assert fake_nvml.locked() == 1200
    assert fake_nvml.locked() is None


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_guard_that_was_killed_or_stopped_and_lost_its_owner_makes_way_for_the_next(
    fake_nvml: FakeNvml, how: signal.Signals
) -> None:
    process, guard = training(fake_nvml)
    os.kill(guard, how)
    end(process)
    assert fake_nvml.locked() == 1005
    with Guard.start("nvml", 0):
        assert fake_nvml.clock_changes() == [1005, 0]


def test_killed_guard_is_cleaned_up_by_envplan_reset(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    process, guard = training(fake_nvml)
    os.kill(guard, signal.SIGKILL)
    end(process)
    first = envplan("reset", cwd=tmp_path)
    assert first.code == 0, first.err
    assert "GPU 0 (NVIDIA A40): clock given back; a training that was killed" in first.out
    assert first.out.count("killed") == 1
    assert fake_nvml.locked() is None
    assert "killed" not in envplan("reset", cwd=tmp_path).out


def test_one_gpu_has_one_guard(fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_module, "HANDOVER_TIMEOUT_S", 0.1)
    with holding(fake_nvml) as guard, Guard.start("nvml", 1):
        with pytest.raises(DeviceError, match=f"GPU 0: another training.*process {guard.pid}"):
            Guard.start("nvml", 0)
        assert fake_nvml.locked() == 1005
    Guard.start("nvml", 0).close()


def test_a_restarted_job_waits_for_the_guard_of_the_one_before(fake_nvml: FakeNvml) -> None:
    process, _ = training(fake_nvml)
    fake_nvml.fail("reset", times=8)  # it goes on trying for so long
    end(process)
    Guard.start("nvml", 0).close()
    assert fake_nvml.locked() is None


def test_start_is_refused_with_the_reason_and_changes_nothing(fake_nvml: FakeNvml) -> None:
    with pytest.raises(DeviceError, match="there is no GPU 7; there are 4"):
        Guard.start("nvml", 7)
    fake_nvml.gpu(0).permission = 0
    with pytest.raises(DeviceError, match="GPU 0: this user may not set clocks; run as root"):
        Guard.start("nvml", 0)
    fake_nvml.gpu(1).mig = 1
    with pytest.raises(DeviceError, match="GPU 1: MIG is on"):
        Guard.start("nvml", 1)
    with pytest.raises(DeviceError, match="backend"):
        Guard.start("cuda", 0)
    assert fake_nvml.clock_changes() == fake_nvml.clock_changes(1) == []


def test_what_else_is_printed_in_the_guard_is_passed_over(
    fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('welcome'); print(7, end='', flush=True)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with holding(fake_nvml) as guard:
        pass
    assert guard.problems() == []
    assert fake_nvml.clock_changes() == [1005, 0]


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", "<&- >&-", ">&- 2>&-"])
def test_what_an_owner_without_standard_streams_prints_is_no_clock(
    fake_nvml: FakeNvml, closed: str
) -> None:
    script = (
        "import os, sys; from envplan.runtime import Guard\n"
        "with Guard.start('nvml', 0, every_request=True) as guard:\n"
        "    for stream in (1, 2): os.write(stream, b'a line\\n')\n"
        "    guard.request(1005)\n"
        "sys.exit(len(guard.problems()))"
    )
    command = [f'exec "$0" -c "$1" {closed}', sys.executable, script]
    subprocess.run(["sh", "-c", *command], check=True)
    assert fake_nvml.clock_changes() == [1005, 0]


def test_modelled_gpus_have_guards_too() -> None:
    with Guard.start("modelled", 0, gpu="a40") as one, Guard.start("modelled", 0, gpu="a40"):
        one.request(1005)
        one.request(0)
        assert one.problems() == []
    assert one.problems() == []


def test_an_error_that_lasts_is_reported_once_and_its_end_is_known(fake_nvml: FakeNvml) -> None:
    with Guard.start("nvml", 0) as guard:
        assert not guard.failing
        fake_nvml.fail("lock")
        guard.request(1005)
        assert next_problem(guard).startswith("GPU 0: ")
        wait_for(lambda: len(fake_nvml.calls(kind="lock")) > 3)
        assert guard.problems() == []
        assert guard.failing
        fake_nvml.fail("lock", 0)
        wait_for(lambda: guard.problems() == [] and not guard.failing)
        assert fake_nvml.locked() == 1005


def test_random_errors_never_reach_the_caller(fake_nvml: FakeNvml) -> None:
    for kind in ("lock", "reset"):
        fake_nvml.fail(kind, probability=0.4)
    problems = []
    with Guard.start("nvml", 0, every_request=True) as guard:
        for k in range(300):
            guard.request(600 + 15 * (k % 50))
        guard.request(1500)
        wait_for(lambda: fake_nvml.locked() == 1500)
        problems += guard.problems()
    assert problems
    # Of requests, the last problems may be told late; of giving back there is none.
    assert not any("envplan reset" in problem for problem in guard.problems())
    assert fake_nvml.locked() is None


def test_a_clock_that_cannot_be_given_back_is_reported_and_remembered(
    fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_module, "CLOSE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(guard_module, "TERMINATE_TIMEOUT_S", 0.1)
    guard = holding(fake_nvml)
    fake_nvml.fail("reset")
    guard.close()
    problems = guard.problems()
    assert problems
    assert all("run: envplan reset" in problem for problem in problems)
    fake_nvml.fail("reset", 0)
    Guard.start("nvml", 0).close()
    assert fake_nvml.locked() is None


def test_one_user_has_one_place_of_locks_whatever_the_environment_says(
    fake_nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_module, "HANDOVER_TIMEOUT_S", 0.1)
    with Guard.start("nvml", 0):
        for name in ("XDG_RUNTIME_DIR", "TMPDIR", "HOME"):
            monkeypatch.setenv(name, str(tmp_path))
        with pytest.raises(DeviceError, match="GPU 0: another training"):
            Guard.start("nvml", 0)


def test_lock_files_are_for_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = os.geteuid()
    assert locks.default_lock_folders(0)[0] == Path("/run/envplan")
    assert locks.default_lock_folders(1000) == [Path("/tmp/envplan-1000")]
    monkeypatch.setattr(
        locks, "default_lock_folders", lambda _: [tmp_path / "none" / "x", tmp_path / "envplan"]
    )
    LockFile("GPU-x").close()
    folder = tmp_path / "envplan"
    assert locks.lock_folders(own) == [folder]
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "GPU-x.lock").unlink()
    (folder / "GPU-x.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DeviceError, match="remove it"):
        LockFile("GPU-x")
    assert not (tmp_path / "elsewhere").exists()
    folder.chmod(0o777)  # somebody else's now, for all we know
    LockFile("GPU-x").close()
    (other,) = locks.lock_folders(own)
    assert other.name.startswith("envplan-")
    assert other.stat().st_mode & 0o777 == 0o700


def test_recovery_waits_for_the_service_that_looks_at_the_mark(fake_nvml: FakeNvml) -> None:
    fake_nvml.gpu().locked = 1005
    uuid = fake_nvml.gpu().uuid.decode()
    with LockFile(uuid) as lock:
        lock.set_mark(Mark(999999, os.getpid()))
    looking = os.open(lock.path, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    looked = threading.Timer(0.05, os.close, [looking])
    looked.start()
    with opened("nvml") as source:
        recover(source.devices()[0])
    assert fake_nvml.locked() is None
    looked.join()


# Starts owners at once: it has everything imported and forks. For a line "GPU SEED" it answers the
# pid of a process that has a guard of that GPU and asks for one clock after another.
NURSERY = """
import os, random, signal, sys, time
import subprocess
from envplan.runtime import Guard

def own(gpu, seed):
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    clocks = random.Random(seed)
    try:
        guard = Guard.start("nvml", gpu)
    except Exception:
        time.sleep(60)  # the guard was killed before it was ready; live on as training would
        os._exit(1)
    while True:
        guard.request(15 * clocks.randrange(14, 117))
        time.sleep(0.001)

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    gpu, seed = map(int, line.split())
    pid = os.fork()
    if pid == 0:
        own(gpu, seed)
    print(pid, flush=True)
"""


KILLS = 200
KILLED_GPUS = 8


def lives(pid: int) -> bool:
    """Whether it is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


class Nursery:
    """Owners that ask for one clock after another, one for each GPU."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._process = subprocess.Popen(
            [sys.executable, "-c", NURSERY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._stopped: list[int] = []
        self.owners = [self._start(gpu) for gpu in range(KILLED_GPUS)]

    def kill(self, gpu: int, who: str) -> int:
        """Kill the owner, the guard or both, and replace the owner; returns how many died.

        Or stop the guard and kill the owner.
        """
        pid = self.owners[gpu]
        guards: list[int] = []
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            guards = [child for child in map(int, children) if who != "owner" and lives(child)]
        killed = 0
        for victim in [*guards, *([pid] if who != "guard" else [])]:
            stops = who == "stopped" and victim != pid
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGSTOP if stops else signal.SIGKILL)
                self._stopped += [victim] if stops else []
                killed += not stops
        if who != "guard":
            self.owners[gpu] = self._start(gpu)
        return killed

    def close(self) -> None:
        for pid in self.owners:
            os.kill(pid, signal.SIGTERM)
        for pid in self._stopped:  # those that had not marked anything yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _start(self, gpu: int) -> int:
        assert self._process.stdout is not None
        print(gpu, self._chance.randrange(10**6), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())


def test_no_clock_is_left_after_200_random_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = open_fake_nvml(tmp_path, monkeypatch, count=KILLED_GPUS)
    chance = random.Random(20261121)
    nursery = Nursery(chance)

    def locked_gpus() -> list[int]:
        return [gpu for gpu in range(KILLED_GPUS) if fake.locked(gpu)]

    kills = kills_while_set = 0
    while kills < KILLS:
        gpu = chance.randrange(KILLED_GPUS)
        if chance.random() < 0.7:  # while a clock is set; else anywhere, starting included
            wait_for(locked_gpus)
            gpu = chance.choice(locked_gpus() or [gpu])
        time.sleep(chance.uniform(0, 0.01))
        was_set = fake.locked(gpu) is not None
        who = chance.choice(["owner", "guard", "both", "stopped"]) if kills < KILLS - 1 else "owner"
        killed = nursery.kill(gpu, who)
        kills += killed
        kills_while_set += killed if was_set else 0
    nursery.close()
    assert kills == KILLS
    assert kills_while_set > KILLS // 4

    with opened("nvml") as source:
        for device in source.devices():
            # Whatever is still set has been left by a guard that was killed, and says so.
            wait_for(lambda device=device: free_or_left_behind(fake, device.info.index))
            recover(device)
    assert fake.wait_until_free(0) is not None
    fake.close()


def free_or_left_behind(fake: FakeNvml, index: int) -> bool:
    with LockFile(fake.gpu(index).uuid.decode()) as lock:
        return lock.acquire() and (fake.locked(index) is None or lock.mark is not None)
