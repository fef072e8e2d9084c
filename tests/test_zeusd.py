"""Clocks set through the Zeus daemon.

No registry here has zeusd itself. What answers is a stand-in written from zeusd's documented HTTP
API (https://ml.energy/zeus/zeusd/api/): it sets the clocks of the fake NVML, which only root may.
Zeus's own client talks to it, too, where that is installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pynvml
import pytest

from cli_helpers import COMMAND, envplan
from envplan.devices import Device, DeviceError, PermissionDeniedError, opened
from envplan.devices.locks import lock_folders
from envplan.profiling.switch_latency import LatencySettings
from envplan.runtime import Guard
from fake_nvml import NO_PERMISSION, FakeNvml
from shim_helpers import A40
from test_service import (
    OTHER,
    VICTIM,
    as_user,
    envplan_guard,
    for_all,
    kill_both,
    needs_root,
    one_at_a_time,
    python_as,
    wait_for,
)

__all__ = ["for_all", "one_at_a_time"]


class StandIn(ThreadingUnixStreamServer):
    """zeusd, as far as its API is documented and clocks are concerned.

    Attributes:
        groups: the API groups that are enabled.
        tokens: what each bearer token may do; none: no authentication.
        order: the NVML index of each GPU, by zeusd's own number.
        first_number: zeusd's own number of the first GPU.
        tells_addresses: as daemons after 0.5 do.
    """

    daemon_threads = True

    def __init__(self, path: Path) -> None:
        self.groups = ["gpu-control", "gpu-read"]
        self.tokens: dict[str, list[str]] = {}
        self.order = [0, 1, 2, 3]
        self.first_number = 0
        self.tells_addresses = True
        super().__init__(str(path), _Handler)
        path.chmod(0o666)


class _Handler(BaseHTTPRequestHandler):
    server: StandIn

    def address_string(self) -> str:
        return "socket"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path == "/discover":
            gpus = [self._describe(number) for number in range(len(self.server.order))]
            answer = {"gpus": gpus, "cpus": [], "enabled_api_groups": self.server.groups}
            self._answer(200, {**answer, "auth_required": bool(self.server.tokens)})
        elif path == "/auth/whoami":
            scopes = self._scopes()
            if scopes is None:
                self._answer(401, {"error": "Authentication required."})
            else:
                self._answer(200, {"sub": "alice", "scopes": scopes})
        else:
            self._answer(404, None)

    def do_POST(self) -> None:
        url = urlsplit(self.path)
        asked = {name: value[0] for name, value in parse_qs(url.query).items()}
        clocks = set() if "reset" in url.path else {"min_clock_mhz", "max_clock_mhz"}
        if "gpu-control" not in self.server.groups or url.path not in (
            "/gpu/set_gpu_locked_clocks",
            "/gpu/reset_gpu_locked_clocks",
        ):
            self._answer(404, None)
        elif self.server.tokens and self._scopes() is None:
            self._answer(401, {"error": "Authentication required."})
        elif set(asked) != {"gpu_ids", "block", *clocks} or asked["block"] not in ("true", "false"):
            self._answer(400, None)
        else:
            self._carry_out(asked)

    def _carry_out(self, asked: dict[str, str]) -> None:
        errors = {}
        for number in map(int, asked["gpu_ids"].split(",")):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(self.server.order[number])
                if "max_clock_mhz" in asked:
                    low, high = int(asked["min_clock_mhz"]), int(asked["max_clock_mhz"])
                    pynvml.nvmlDeviceSetGpuLockedClocks(handle, low, high)
                else:
                    pynvml.nvmlDeviceResetGpuLockedClocks(handle)
            except pynvml.NVMLError as error:
                errors[str(number)] = f"NVML error: {error}"
                status = 403 if isinstance(error, pynvml.NVMLError_NoPermission) else 500
        self._answer(status if errors else 200, {"errors": errors} if errors else None)

    def _describe(self, number: int) -> dict[str, Any]:
        index = self.server.order[number]
        gpu = {
            "id": number + self.server.first_number,
            "name": A40,
            "cumulative_energy_available": True,
        }
        address = {"pci_address": f"0000:{index + 1:02x}:00.0"}
        return {**gpu, **(address if self.server.tells_addresses else {})}

    def _scopes(self) -> list[str] | None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        return self.server.tokens.get(token)

    def _answer(self, status: int, answer: object) -> None:
        body = b"" if answer is None else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def zeusd(for_all: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A stand-in for zeusd over fake GPUs whose clocks only root may set."""
    for_all.gpu().permission = 2
    path = for_all.path.parent / "zeusd.sock"
    monkeypatch.setenv("ZEUSD_SOCK_PATH", str(path))
    pynvml.nvmlInit()
    with StandIn(path) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()
    pynvml.nvmlShutdown()


@pytest.fixture
def gpu(zeusd: StandIn) -> Iterator[Device]:
    with opened("zeusd") as source:
        yield source.devices()[0]


def test_clock_is_set_read_and_given_back(gpu: Device, for_all: FakeNvml) -> None:
    assert gpu.lock_refusal() is None
    assert gpu.lock_refusal(probe=True) is None
    assert for_all.calls() == []
    gpu.lock_clock(1005)
    assert for_all.locked() == gpu.clock() == 1005
    gpu.reset_clock()
    assert for_all.locked() is None
    assert gpu.energy() > 0


def test_gpu_is_found_though_zeusd_counts_others(zeusd: StandIn, for_all: FakeNvml) -> None:
    zeusd.order = [3, 2, 0, 1]  # as from inside a container, which sees some of them
    with opened("zeusd") as source:
        source.devices()[0].lock_clock(1005)
        assert [for_all.locked(k) for k in range(4)] == [1005, None, None, None]
        source.devices()[0].reset_clock()
    zeusd.order = [3, 2, 1]
    with opened("zeusd") as source:
        refusal = source.devices()[0].lock_refusal()
    assert refusal is not None
    assert "does not name a GPU at 0000:01:00" in refusal


def test_older_zeusd_is_believed_only_where_it_counts_the_same(
    zeusd: StandIn, for_all: FakeNvml
) -> None:
    zeusd.tells_addresses = False
    with opened("zeusd") as source:
        source.devices()[0].lock_clock(1005)
        assert for_all.locked() == 1005
        source.devices()[0].reset_clock()
    zeusd.order = [0, 1]
    with opened("zeusd") as source:
        assert "does not name" in str(source.devices()[0].lock_refusal())


def test_zeusd_whose_numbers_are_others_names_no_gpu(zeusd: StandIn, for_all: FakeNvml) -> None:
    zeusd.tells_addresses = False
    zeusd.first_number = 1
    with opened("zeusd") as source:
        assert "does not name a GPU" in str(source.devices()[0].lock_refusal())


def test_refusals_say_what_to_do(
    zeusd: StandIn, for_all: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal() -> str:
        with opened("zeusd") as source:
            return str(source.devices()[0].lock_refusal())

    zeusd.tokens = {"right": ["gpu-control"], "other": ["gpu-read"]}
    assert "is $ZEUSD_TOKEN right?" in refusal()
    monkeypatch.setenv("ZEUSD_TOKEN", "other")
    assert "does not allow gpu-control" in refusal()
    monkeypatch.setenv("ZEUSD_TOKEN", "right")
    assert refusal() == "None"
    zeusd.groups = ["gpu-read"]
    assert "start zeusd with the API group gpu-control" in refusal()
    with opened("zeusd") as source:
        for_all.gpu().mig = 1
        with pytest.raises(DeviceError, match="MIG is on"):
            source.devices()[0].lock_clock(900)
        for_all.gpu().mig = 0
    zeusd.groups = ["gpu-control"]
    with opened("zeusd") as source:
        for_all.fail("lock", NO_PERMISSION)
        with pytest.raises(PermissionDeniedError, match="does it run as root"):
            source.devices()[0].lock_clock(900)
        for_all.fail("lock")
        with pytest.raises(DeviceError, match="answers 500: NVML error: Unknown Error"):
            source.devices()[0].lock_clock(900)
    monkeypatch.setenv("ZEUSD_SOCK_PATH", "/nowhere")
    assert "zeusd at /nowhere does not answer (No such file or directory)" in refusal()


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\n\r\n[1]", b"HTTP/1.1 200 OK\r\n\r\n{", b"\xff" * 4096]
)
def test_whoever_else_answers_on_the_socket_is_one_line_of_error(
    for_all: FakeNvml, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    class Other(BaseHTTPRequestHandler):
        def handle(self) -> None:
            self.rfile.readline()
            self.wfile.write(answer)

    path = for_all.path.parent / "other.sock"
    monkeypatch.setenv("ZEUSD_SOCK_PATH", str(path))
    with ThreadingUnixStreamServer(str(path), Other) as server, opened("zeusd") as source:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        assert "zeusd at" in str(source.devices()[0].lock_refusal())
        server.shutdown()


@needs_root
def test_training_without_rights_follows_its_plan(zeusd: StandIn, for_all: FakeNvml) -> None:
    script = f"""
from envplan.runtime import Guard
import os
assert os.geteuid() == {VICTIM}
try:
    Guard.start("nvml", 0)
except Exception as error:
    print(error)
with Guard.start("zeusd", 0) as guard:
    guard.request(1005)
    while guard.done < 1:
        assert not guard.problems()
"""
    ran = python_as(VICTIM, script)
    assert ran.returncode == 0, ran.stderr
    assert "this user may not set clocks" in ran.stdout
    assert "or let zeusd set them" in ran.stdout
    assert for_all.clock_changes() == [1005, 0]


@needs_root
def test_service_gives_back_through_zeusd_what_a_users_training_left(
    zeusd: StandIn, for_all: FakeNvml
) -> None:
    kill_both(for_all, backend="zeusd", **as_user(VICTIM))
    assert lock_folders(VICTIM)
    assert envplan_guard() == 0
    assert for_all.locked() is None


def test_shim_uses_zeusd_where_its_socket_is_named(
    zeusd: StandIn, for_all: FakeNvml, tmp_path: Path
) -> None:
    script = "from envplan.devices import DEFAULT_BACKEND; print(DEFAULT_BACKEND)"
    assert python_as(OTHER, script).stdout == "zeusd\n"
    ran = envplan("devices", "--backend", "zeusd", "--json", cwd=tmp_path)
    assert [gpu["refusal"] for gpu in json.loads(ran.out)["gpus"]] == [None] * 4


def test_latency_is_measured_through_zeusd(
    zeusd: StandIn, for_all: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    for_all.gpu().clock_delay_ns = 20_000_000
    quick = LatencySettings(rounds=2, steady_s=0.1, window_s=0.06)
    monkeypatch.setattr("envplan.profiling.switch_latency.LatencySettings", lambda: quick)
    options = ("--backend", "zeusd", "--measure-latency", "--slices", "late_slices:make")
    ran = envplan("devices", *options, "--json")
    assert ran.code == 0, ran.err
    latency = json.loads(ran.out)["switch_latency"]
    # What the daemon takes to answer is part of it.
    assert all(to_clock["median_s"] >= 0.02 for to_clock in latency["by_mhz"].values())
    assert for_all.locked() is None


def test_zeusd_that_ends_is_a_clock_error_and_training_goes_on(
    zeusd: StandIn, for_all: FakeNvml
) -> None:
    with Guard.start("zeusd", 0) as guard:
        guard.request(1005)
        wait_for(lambda: for_all.locked() == 1005)
        path = Path(os.environ["ZEUSD_SOCK_PATH"])
        path.rename(path.with_suffix(".away"))
        guard.request(900)
        problems: list[str] = []
        wait_for(lambda: problems.extend(guard.problems()) or problems)
        assert "does not answer" in problems[0]
        path.with_suffix(".away").rename(path)
        wait_for(lambda: for_all.locked() == 900)
    assert for_all.locked() is None


def test_stand_in_is_what_zeus_own_client_expects(zeusd: StandIn, for_all: FakeNvml) -> None:
    client = pytest.importorskip("zeus.utils.zeusd").ZeusdClient()
    assert client.gpu_ids == [0, 1, 2, 3]
    assert client.can_control_gpu
    client.set_gpu_locked_clocks([0], 1005, 1005, True)
    assert for_all.locked() == 1005
    client.reset_gpu_locked_clocks([0], True)
    assert for_all.locked() is None


def kill_both_and_zeusd(zeusd: StandIn, fake: FakeNvml, user: int) -> None:
    """Nobody but an administrator can set the clock any more."""
    kill_both(fake, backend="zeusd", **as_user(user))
    zeusd.shutdown()
    zeusd.server_close()
    Path(os.environ["ZEUSD_SOCK_PATH"]).unlink()


@needs_root
def test_clock_is_given_back_by_zeusd_though_nobody_names_its_socket(
    zeusd: StandIn, for_all: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_both(for_all, backend="zeusd", **as_user(VICTIM))
    monkeypatch.delenv("ZEUSD_SOCK_PATH")  # as of root's service
    assert envplan_guard() == 0
    assert for_all.locked() is None


@needs_root
def test_user_resets_his_clock_by_the_zeusd_that_his_mark_names(
    zeusd: StandIn, for_all: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_both(for_all, backend="zeusd", **as_user(VICTIM))
    monkeypatch.delenv("ZEUSD_SOCK_PATH")
    script = (
        "from envplan.devices import opened\n"
        "from envplan.devices.locks import give_back_all\n"
        "with opened('nvml') as source: print(give_back_all(source.devices()[:1], 1.0))"
    )
    ran = python_as(VICTIM, script)
    assert "left_behind=True" in ran.stdout, ran.stderr
    assert "problem=None" in ran.stdout
    assert for_all.locked() is None


@needs_root
def test_dead_zeusd_of_root_is_done_without(zeusd: StandIn, for_all: FakeNvml) -> None:
    kill_both_and_zeusd(zeusd, for_all, 0)
    assert envplan_guard("--wait", "0.5s") == 0
    assert for_all.locked() is None


@needs_root
def test_dead_zeusd_of_a_user_is_said_with_what_an_administrator_must_run(
    zeusd: StandIn, for_all: FakeNvml, tmp_path: Path
) -> None:
    kill_both_and_zeusd(zeusd, for_all, VICTIM)
    command = [COMMAND, "guard", "--once", "--wait", "0.5s"]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 1
    assert "nvidia-smi -i 0 --reset-gpu-clocks; GPU 0 is left at 1005 MHz" in said.stdout
    assert for_all.locked() == 1005
    ran = envplan("reset", cwd=tmp_path)  # as an administrator
    assert ran.code == 0, ran.err
    assert for_all.locked() is None
