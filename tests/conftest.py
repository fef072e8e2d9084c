"""Fixtures that several test modules use."""

from __future__ import annotations

from fake_nvml import fake_nvml

__all__ = ["fake_nvml"]
