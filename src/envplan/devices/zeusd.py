"""NVIDIA GPUs whose clocks the Zeus daemon sets, for users who may not set them themselves.

zeusd runs as root and serves HTTP over a Unix socket (https://ml.energy/zeus/zeusd/api/, from
version 0.4 on). Only what needs rights goes through it. All reading is NVML's own, which every user
may do.
"""

from __future__ import annotations

import json
import os
import pathlib
import socket
from collections.abc import Sequence
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from typing import Any, ClassVar, Final
from urllib.parse import urlencode

import pynvml  # type: ignore[import-untyped]

from envplan.devices import DeviceError, PermissionDeniedError
from envplan.devices.nvml import NvmlBackend, NvmlDevice, once

__all__ = ["ZeusdBackend", "ZeusdDevice"]

_SOCKETS: Final = ("/run/zeusd/zeusd.sock", "/var/run/zeusd.sock")
_TIMEOUT_S: Final = 10.0
_MAX_ANSWER_BYTES: Final = 2**20
_NOT_ALLOWED: Final = "; does it run as root, and is $ZEUSD_TOKEN right?"
#: What to do about answers that trying again does not change.
_REMEDIES: Final = {
    401: _NOT_ALLOWED,
    403: _NOT_ALLOWED,
    404: "; is it 0.4 or later, with the group gpu-control?",
}


class ZeusdBackend(NvmlBackend):
    """The GPUs of this machine, their clocks set by zeusd.

    Args:
        path: of zeusd's socket; default: $ZEUSD_SOCK_PATH, or where its packages put it.

    Raises:
        DeviceError: no driver is installed or loaded.
    """

    name: ClassVar = "zeusd"

    def __init__(self, path: str | None = None) -> None:
        super().__init__()
        existing = [socket_path for socket_path in _SOCKETS if pathlib.Path(socket_path).exists()]
        default = existing[0] if existing else _SOCKETS[0]
        self.socket = path or os.environ.get("ZEUSD_SOCK_PATH") or default

    def _device(self, index: int) -> ZeusdDevice:
        return ZeusdDevice(index, self.socket)


class ZeusdDevice(NvmlDevice):
    """One NVIDIA GPU, its clock set by zeusd.

    Args:
        path: of the daemon's socket.
    """

    def __init__(self, index: int, path: str) -> None:
        super().__init__(index)
        self._path = path
        self._daemon = f"zeusd at {path}"

    def give_back_clock(self, previous_mhz: int = 0) -> None:
        """As Device has it; by NVML where zeusd does not do it and this user may."""
        try:
            super().give_back_clock(previous_mhz)
        except DeviceError as error:
            try:
                NvmlDevice(self._index).give_back_clock(previous_mhz)
            except PermissionDeniedError:
                raise type(error)(
                    f"{error} This user may not do it without; an administrator must start it "
                    f"again, or run: nvidia-smi -i {self._index} --reset-gpu-clocks"
                ) from error

    def _set_clock(self, mhz: int) -> None:
        clocks = {"min_clock_mhz": mhz, "max_clock_mhz": mhz} if mhz else {}
        query = urlencode({"gpu_ids": self._id, **clocks, "block": "true"})
        action = "set" if mhz else "reset"
        self._ask_daemon("POST", f"/gpu/{action}_gpu_locked_clocks?{query}")

    def _permission_refusal(self, *, probe: bool) -> str | None:
        daemon = self._ask_daemon("GET", "/discover")
        if "gpu-control" not in daemon.get("enabled_api_groups", ()):
            return (
                f"{self._name}: {self._daemon} sets no clocks; start zeusd with the API group "
                "gpu-control"
            )
        if daemon.get("auth_required"):
            scopes = self._ask_daemon("GET", "/auth/whoami").get("scopes", ())
            if "gpu-control" not in scopes:
                return f"{self._name}: the token in $ZEUSD_TOKEN does not allow gpu-control"
        _ = self._id  # raises where zeusd does not know this GPU
        return None

    @once
    def _id(self) -> int:
        """The number that zeusd knows this GPU by: in a container NVML may count others.

        Raises:
            DeviceError: it does not know it, or does not tell enough to be sure.
        """
        gpus = self._ask_daemon("GET", "/discover").get("gpus", ())
        bus = self._ask(pynvml.nvmlDeviceGetPciInfo)
        address = f"{bus.domain:04x}:{bus.bus:02x}:{bus.device:02x}"
        for gpu in gpus:
            if _bus_address(gpu) == address:
                return int(gpu["id"])
        tells_addresses = any(_bus_address(gpu) for gpu in gpus)
        if not tells_addresses and self._is_counted_alike(gpus):  # as by daemons up to 0.5
            return self._index
        raise DeviceError(f"{self._name}: {self._daemon} does not name a GPU at {address}")

    def _is_counted_alike(self, gpus: Sequence[dict[str, Any]]) -> bool:
        """Whether zeusd has as many GPUs as NVML, and one of this GPU's name at its index."""
        with self._errors():
            count = pynvml.nvmlDeviceGetCount()
        names = [gpu.get("name") for gpu in gpus if gpu.get("id") == self._index]
        return len(gpus) == count and names[:1] == [self.info.name]

    def _ask_daemon(self, method: str, path: str) -> dict[str, Any]:
        """Ask zeusd, by a connection of its own.

        Args:
            method: "GET" or "POST".
            path: with the query.

        Returns:
            The object that it answers; empty if it answers nothing or something else.

        Raises:
            PermissionDeniedError: it does not let this user.
            DeviceError: it does not answer, or fails.
        """
        daemon = f"{self._name}: {self._daemon}"
        token = os.environ.get("ZEUSD_TOKEN")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            with closing(_UnixConnection(self._path)) as connection:
                connection.request(method, path, headers=headers)
                answer = connection.getresponse()
                status, text = answer.status, answer.read(_MAX_ANSWER_BYTES)
        except PermissionError as error:
            raise PermissionDeniedError(
                f"{self._name}: this user may not talk to {self._daemon}; see its "
                "--socket-permissions"
            ) from error
        except (OSError, HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise DeviceError(f"{daemon} does not answer ({reason}); is it running?") from error
        if status == HTTPStatus.OK:
            return _parse_object(text)
        remedy = _REMEDIES.get(status, "")
        error_type = PermissionDeniedError if remedy else DeviceError
        raise error_type(f"{daemon} answers {status}: {_problem_in(text)}{remedy}")


def _bus_address(gpu: dict[str, Any]) -> str:
    """The PCI address of a GPU as zeusd describes it, without the function; "" if it tells none."""
    return str(gpu.get("pci_address", "")).rpartition(".")[0].lower()


def _problem_in(text: bytes) -> str:
    """The problem that zeusd tells in the body of an answer; the body itself if it tells none."""
    document = _parse_object(text)
    problem = document.get("errors") or document.get("error")
    if not problem:
        return text[:200].decode("utf-8", "replace")
    if isinstance(problem, dict):
        return "; ".join(map(str, problem.values()))
    return str(problem)


def _parse_object(text: bytes) -> dict[str, Any]:
    """The JSON object in a text; an empty one if it is something else."""
    try:
        document = json.loads(text)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


class _UnixConnection(HTTPConnection):
    """HTTP over a Unix socket.

    Args:
        path: of the socket.
    """

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket; called by HTTPConnection."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
