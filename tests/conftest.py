"""Fixtures that several test modules use, and how hypothesis draws.

`make test` draws the same examples every time, few of them. `make test-slow` draws freely; what it
finds to fail is kept as an @example.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from fake_nvml import fake_nvml

__all__ = ["fake_nvml"]

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "fixed",
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=_SLOW,
)
settings.register_profile(
    "free", max_examples=200, deadline=None, print_blob=True, suppress_health_check=_SLOW
)
settings.load_profile("fixed")


#: Whose tests wait for processes or clocks: on one worker, one after the other.
_TIMED = {"test_guard.py", "test_profiler.py", "test_runtime_frameworks.py"}
_TIMED |= {"test_runtime_torch.py", "test_shim.py", "test_sweep_running.py", "test_waiting.py"}
_TIMED |= {"test_service.py", "test_zeusd.py", "test_metrics.py"}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests share its fixtures, so they run on one worker.

    Marks of xdist 3.8 for that have no effect with pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = Path(nodeid.partition("::")[0]).name
            return "timed" if file in _TIMED else file

    return ByFile(config, log)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a small modelled profile.csv."""
    from cli_helpers import small_profile

    small_profile().save_csv(tmp_path / "profile.csv")
    monkeypatch.chdir(tmp_path)
    return tmp_path
