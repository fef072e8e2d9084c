"""`envplan guard`, locks of other tools, and users who wish each other ill."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import COMMAND, envplan
from envplan.devices.locks import MARK_BYTES, LockFile, Mark, lock_folders
from envplan.runtime import Guard
from envplan.runtime.service import Service, give_back_left_behind
from fake_nvml import FakeNvml, open_fake_nvml, wait_for
from shim_helpers import end, holding, training

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users")
VICTIM, OTHER = 54321, 54322


def kill_both(fake: FakeNvml, **how: Any) -> None:
    if "user" in how:
        how["python"] = python_for_all()
    process, guard = training(fake, **how)
    os.kill(process.pid, signal.SIGSTOP)  # it must not notice
    os.kill(guard, signal.SIGKILL)
    end(process)
    assert fake.locked() == 1005


def envplan_guard(*options: str) -> int:
    command = [COMMAND, "guard", "--once", *options]
    return subprocess.run(command, cwd="/", check=False).returncode


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, check=True)


@pytest.fixture(autouse=True)
def one_at_a_time() -> Iterator[None]:
    """The service sees the lock files of all tests of this user."""
    with Path("/tmp/test_service.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture
def for_all(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    """Fake GPUs that other users see, too, and no locks of theirs before or after."""
    folder = Path(tempfile.mkdtemp(prefix="envplan-test-"))
    folder.chmod(0o755)
    fake = open_fake_nvml(folder, monkeypatch)
    fake.path.chmod(0o666)

    def clean() -> None:
        for user in (VICTIM, OTHER):
            for left in Path("/tmp").glob(f"envplan-{user}*"):
                shutil.rmtree(left)

    clean()
    yield fake
    fake.close()
    clean()
    shutil.rmtree(folder)


def as_user(user: int) -> dict[str, Any]:
    # A Python that others may run finds all that this one has.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return {"user": user, "group": user, "extra_groups": [], "cwd": "/", "env": environment}


@cache
def python_for_all() -> str:
    """A Python like this one that other users can run."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        script = [python, "-c", "import envplan.devices.guard_process, pynvml"]
        try:
            subprocess.run(script, check=True, capture_output=True, **as_user(VICTIM))
            return python
        except (OSError, subprocess.CalledProcessError):
            continue
    pytest.skip("there is no Python that other users can run")


def python_as(user: int, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python_for_all(), "-c", script],
        capture_output=True,
        text=True,
        check=False,
        **as_user(user),
    )


def test_service_gives_back_what_nobody_is_left_to_give_back(fake_nvml: FakeNvml) -> None:
    kill_both(fake_nvml)
    with Guard.start("nvml", 1) as living:
        living.request(900)
        wait_for(lambda: fake_nvml.locked(1) == 900)
        ran = command("guard", "--once")
        assert "GPU 0 (NVIDIA A40): given back; a killed training had left it" in ran.stdout
        assert ran.stdout.endswith("next: envplan devices\n")
        assert fake_nvml.locked(0) is None
        assert fake_nvml.locked(1) == 900


def test_service_gives_back_what_the_end_of_a_container_left(fake_nvml: FakeNvml) -> None:
    script = (
        "import os, signal, time\n"
        "from envplan.runtime import Guard\n"
        "guard = Guard.start('nvml', 0)\n"
        "guard.request(1005)\n"
        "while not guard.done: guard.problems(); time.sleep(0.01)\n"
        "os.kill(guard.pid, signal.SIGSTOP)\n"  # or else it may be quick enough
        "os._exit(3)\n"
    )
    run = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", script]
    try:
        ran = subprocess.run(run, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if "unshare" in ran.stderr:
        pytest.skip("this user may not make a container")
    assert ran.returncode == 3, ran.stderr
    assert fake_nvml.locked() == 1005  # its guard ended with all else in it
    assert envplan_guard() == 0
    assert fake_nvml.wait_until_free(60) is not None


def test_with_json_the_document_is_all_there_is_on_stdout(fake_nvml: FakeNvml) -> None:
    kill_both(fake_nvml)
    ran = command("guard", "--once", "--json")
    assert json.loads(ran.stdout)["schema"] == "envplan/guard/v1"
    assert "given back" in ran.stderr
    unit = command("guard", "--unit")
    assert unit.stdout.startswith("# /etc/systemd")
    assert unit.stderr == "next: systemctl enable --now envplan-guard\n"


def test_service_that_runs_gives_back_soon_and_stops_when_told(fake_nvml: FakeNvml) -> None:
    service = subprocess.Popen([COMMAND, "guard"], stdout=subprocess.PIPE, text=True)
    for _ in range(2):
        kill_both(fake_nvml)
        assert fake_nvml.wait_until_free(60) is not None
    service.terminate()
    service.wait(60)


def test_service_wakes_a_stopped_guard_whose_owner_was_killed(fake_nvml: FakeNvml) -> None:
    process, guard = training(fake_nvml)
    os.kill(guard, signal.SIGSTOP)
    end(process)
    assert envplan_guard() == 0
    assert fake_nvml.wait_until_free(60) is not None
    assert fake_nvml.clock_changes() == [1005, 0]


def test_service_says_what_it_cannot_give_back_and_tries_it_later(
    fake_nvml: FakeNvml, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envplan.devices.locks.START_RETRY_S", 0.1)
    kill_both(fake_nvml)
    fake_nvml.fail("reset")
    service = Service(lambda line: print(line, flush=True), timeout_s=0.3)
    service.look()
    assert not service.finish(60)
    said = capfd.readouterr().out
    assert "cannot be given back: GPU 0: Unknown Error" in said
    assert "GPU 0 is left at 1005 MHz" in said
    fake_nvml.fail("reset", 0)
    service.look()  # not at once, whatever else this user's other tests have left
    service.finish(60)
    assert fake_nvml.locked() == 1005
    service = Service(print)
    service.look()
    assert service.finish(60)
    assert fake_nvml.locked() is None


def test_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    ran = envplan("guard", "--unit", cwd=tmp_path)
    unit = tmp_path / "envplan-guard.service"
    unit.write_text(ran.out)
    assert f"ExecStart={COMMAND} guard\n" in ran.out
    assert f"{COMMAND} guard --once" in ran.out
    if shutil.which("systemd-analyze"):
        ran_systemd = subprocess.run(
            ["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False
        )
        assert (ran_systemd.returncode, ran_systemd.stderr) == (0, "")


@contextmanager
def site_lock(fake: FakeNvml) -> Iterator[None]:
    """Somebody runs `nvidia-smi -lgc 1200` before, and finds it so afterwards."""
    fake.gpu().locked = 1200
    yield
    wait_for(lambda: fake.locked() == 1200)
    fake.gpu().locked = 0


def test_clock_that_another_tool_had_set_is_put_back(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    with site_lock(fake_nvml), Guard.start("nvml", 0) as guard:
        assert fake_nvml.locked() == 1200
        guard.request(1005)
        wait_for(lambda: fake_nvml.locked() == 1005)
        guard.request(0)
        wait_for(lambda: fake_nvml.locked() == 1200)
        guard.request(600)
    with site_lock(fake_nvml):  # the owner is killed
        process, _ = training(fake_nvml)
        end(process)
    with site_lock(fake_nvml), holding(fake_nvml) as guard:  # the guard is killed
        os.kill(guard.pid, signal.SIGKILL)
    with site_lock(fake_nvml):  # both are killed
        kill_both(fake_nvml)
        assert envplan_guard() == 0
    with site_lock(fake_nvml):  # likewise, and the next training comes before the service
        kill_both(fake_nvml)
        Guard.start("nvml", 0).close()
    fake_nvml.gpu().locked = 1200
    kill_both(fake_nvml)
    assert envplan("reset", cwd=tmp_path).code == 0
    assert fake_nvml.locked() is None  # all of it, as asked for


def test_clock_that_the_driver_chose_is_no_lock(fake_nvml: FakeNvml) -> None:
    fake_nvml.gpu().boost = 1500  # as cards that never reach the highest clock they name
    Guard.start("nvml", 0).close()
    assert fake_nvml.locked() is None
    fake_nvml.gpu().throttle = 0x4
    fake_nvml.gpu().boost = 1200
    Guard.start("nvml", 0).close()
    assert fake_nvml.clock_changes() == [0, 0, 0]


@needs_root
def test_folder_that_another_user_took_first_does_not_stop_a_guard(for_all: FakeNvml) -> None:
    taken = Path(f"/tmp/envplan-{VICTIM}")
    taken.mkdir(mode=0o777)
    os.chown(taken, OTHER, OTHER)
    script = """
from envplan.devices import DeviceError
from envplan.devices import guard
from envplan.runtime import Guard
guard.HANDOVER_TIMEOUT_S = 0.1
with Guard.start("nvml", 0):
    try:
        Guard.start("nvml", 0)
    except DeviceError as error:
        print(error)
"""
    ran = python_as(VICTIM, script)
    assert "another training process of this user" in ran.stdout, ran.stderr
    assert list(taken.iterdir()) == []
    (folder,) = lock_folders(VICTIM)
    assert folder.name.startswith(f"envplan-{VICTIM}-")
    assert "another training process" in python_as(VICTIM, script).stdout
    assert lock_folders(VICTIM) == [folder]


@needs_root
def test_root_gives_back_for_other_users_with_their_rights(for_all: FakeNvml) -> None:
    kill_both(for_all, **as_user(VICTIM))
    assert envplan_guard() == 0
    assert for_all.locked() is None
    (last,) = for_all.calls(0, "reset")[-1:]
    assert last.pid != os.getpid()


@needs_root
@pytest.mark.parametrize("before", [0, 210])
def test_mark_that_a_user_made_up_gives_him_no_rights(for_all: FakeNvml, before: int) -> None:
    for_all.gpu().permission = 2
    for_all.gpu().locked = 1200  # root's
    uuid = for_all.gpu().uuid.decode()
    folder = Path(f"/tmp/envplan-{OTHER}")
    folder.mkdir(mode=0o700)
    (folder / f"{uuid}.lock").write_text(f"999999 999998 {before} nvml\n")
    (folder / "pipe.lock").unlink(missing_ok=True)
    os.mkfifo(folder / "pipe.lock")
    (folder / "link.lock").symlink_to("/etc/passwd")
    for path in (folder, *folder.iterdir()):
        os.chown(path, OTHER, OTHER, follow_symlinks=False)
    assert envplan_guard() == 1
    assert for_all.locked() == 1200
    assert all(path.lstat().st_uid == OTHER for path in (folder, *folder.iterdir()))


@needs_root
def test_root_leaves_nothing_in_a_users_folders(for_all: FakeNvml, tmp_path: Path) -> None:
    variables = ("HOME", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
    environment = {**os.environ, **dict.fromkeys(variables, str(tmp_path))}
    kill_both(for_all, env=environment)
    for words in (["guard", "--once"], ["reset"], ["devices"]):
        subprocess.run([COMMAND, *words], env=environment, check=True, capture_output=True)
    assert for_all.locked() is None
    assert list(tmp_path.iterdir()) == []


def test_mark_of_an_older_version_is_understood(fake_nvml: FakeNvml) -> None:
    with LockFile(fake_nvml.gpu().uuid.decode()) as lock:
        lock.path.write_text("123 456\n")
        assert lock.mark == Mark(123, 456, boot="")
        lock.path.write_text("nonsense")
        assert lock.mark == Mark(0, 0, boot="")
        lock.path.write_text("")
        assert lock.mark is None


def test_marks_of_a_boot_that_is_over_are_ignored(
    fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvml.gpu().locked = 1200  # an administrator's, since the machine was started
    with LockFile(fake_nvml.gpu().uuid.decode()) as lock:
        lock.set_mark(Mark(999999, 999998, boot="11111111-2222-3333-4444-555555555555"))
        assert lock.mark is None
        assert envplan_guard() == 0
        assert fake_nvml.clock_changes() == []
        lock.set_mark(Mark(999999, 999998))
        assert envplan_guard() == 0
    assert fake_nvml.locked() is None


def test_guard_once_says_that_a_gpu_cannot_be_reached(fake_nvml: FakeNvml) -> None:
    kill_both(fake_nvml)
    fake_nvml.fail("handle")
    command = [COMMAND, "guard", "--once", "--wait", "0.3s"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "its clock was left set and cannot be given back: GPU 0: " in ran.stdout
    assert "it is left at a clock that cannot be read" in ran.stdout
    assert "Traceback" not in ran.stderr
    fake_nvml.fail("handle", 0)
    assert envplan_guard() == 0
    assert fake_nvml.locked() is None


def test_giving_back_that_took_too_long_leaves_the_marks_of_other_gpus_alone(
    fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envplan.runtime.service.HANG_MARGIN_S", 0.1)
    mark = Mark(999999, 999998)
    hanging, other = (fake_nvml.gpu(index).uuid.decode() for index in (0, 1))
    for uuid in (hanging, other):
        with LockFile(uuid) as lock:
            lock.set_mark(mark)
    said: list[str] = []
    fake_nvml.hang("reset")
    files = [lock.path.with_name(f"{hanging}.lock")]
    assert not give_back_left_behind(files, said.append, 0.2)
    assert "no answer" in said[0]
    with LockFile(other) as lock:  # it may get the descriptors that were closed
        fake_nvml.hang()
        wait_for(lambda: lock.path.with_name(f"{hanging}.lock").stat().st_size == 0)
        assert lock.mark == mark


@pytest.mark.parametrize("command", ["guard --once", "reset"])
def test_lost_gpu_that_comes_back_in_time_is_given_back(fake_nvml: FakeNvml, command: str) -> None:
    kill_both(fake_nvml)
    fake_nvml.fail("handle")
    found_again = threading.Timer(4.0, fake_nvml.fail, ["handle", 0])  # longer than two seconds
    found_again.start()
    ran = subprocess.run([COMMAND, *command.split()], capture_output=True, text=True, check=False)
    found_again.join()
    assert ran.returncode == 0, ran.stderr
    wait_for(lambda: fake_nvml.locked() is None)  # another one may have been about it already


@pytest.mark.parametrize(
    ("kind", "left"), [("reset", "1005 MHz"), ("handle", "a clock that cannot be read")]
)
def test_reset_says_which_gpu_is_left_at_which_clock(
    fake_nvml: FakeNvml, kind: str, left: str
) -> None:
    kill_both(fake_nvml)
    fake_nvml.fail(kind)
    reset = [COMMAND, "reset", "--wait", "0.2s"]
    ran = subprocess.run(reset, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1
    assert f"GPU 0 is left at {left}" in ran.stderr
    assert ran.stdout.count("clock given back") == 3  # the others
    fake_nvml.fail(kind, 0)
    assert envplan_guard() == 0


def test_service_mends_a_double_kill_within_a_second_or_two(fake_nvml: FakeNvml) -> None:
    process, guard = training(fake_nvml)
    service = subprocess.Popen([COMMAND, "guard"], stdout=subprocess.PIPE, text=True)
    try:
        assert service.stdout is not None
        assert service.stdout.readline()
        os.kill(guard, signal.SIGKILL)
        os.kill(process.pid, signal.SIGKILL)  # well within 5 ms
        process.wait()
        assert fake_nvml.wait_until_free(60) is not None
    finally:
        service.terminate()
        service.wait(60)


def test_mark_with_a_socket_is_read_as_it_was_written(fake_nvml: FakeNvml) -> None:
    longest = "/" + "\N{SNOWMAN} " * 26  # 105 bytes
    for boot in ("", "11"):
        mark = Mark(1, 2, 1200, "zeusd", boot, longest)
        text = mark.to_text().encode()
        assert len(text) <= MARK_BYTES
        if not boot:
            assert Mark.parse(text) == mark
    with LockFile(fake_nvml.gpu().uuid.decode()) as lock:
        lock.set_mark(Mark(1, 2, 0, "zeusd", socket=longest))
        lock.set_mark(Mark(1, 2))
        assert lock.mark == Mark(1, 2)
