"""A signal: the power that a site may draw now, in a file or at a URL of the operator's own.

Its text is a power with its unit, such as `612kW`, or a share of the site's full power, such as
`75%`; or a JSON object whose field `power` is one of these, or a number of watts. A unit or a brace
stands at the end of each, so that a file which is only half written is no signal.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from typing import Final, NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

from envplan._io.files import decoded, read_bounded
from envplan.errors import InputError, shown
from envplan.quantities import PERCENT, POWER

__all__ = ["Signal", "read_signal"]

_MAX_BYTES: Final = 64 * 2**10
_URL_TIMEOUT_S: Final = 5.0
_POWER: Final = replace(POWER, plain=None)


class Signal(NamedTuple):
    """What a signal said when it was read.

    Attributes:
        text: as it was given, such as "75%".
        power_w: that the site may draw.
        changed_s: when the file was written, s since 1970; of a URL when it was read.
    """

    text: str
    power_w: float
    changed_s: float


def read_signal(source: str, full_power_w: float) -> Signal:
    """Read a signal.

    Args:
        source: path of a file, or a URL that begins with http:// or https://.
        full_power_w: what a percentage is a share of.

    Raises:
        InputError: it cannot be read, or is no power.
    """
    if source.startswith(("http://", "https://")):
        data, changed_s = _fetched(source), time.time()
    else:
        path = Path(source)
        data = read_bounded(path, _MAX_BYTES)
        try:
            changed_s = path.stat().st_mtime
        except OSError:
            changed_s = time.time()
    text = _power_text(decoded(data, source).strip(), source)
    return Signal(text, _power_w(text, full_power_w, source), changed_s)


def _fetched(url: str) -> bytes:
    """What is at a URL.

    Raises:
        InputError: it cannot be read, or is too long.
    """
    try:
        with urlopen(url, timeout=_URL_TIMEOUT_S) as response:
            data: bytes = response.read(_MAX_BYTES + 1)
            is_cut_short = bool(response.length)  # bytes that were announced and have not come
    except URLError as error:
        raise InputError(f"cannot be read ({error.reason})", path=url) from None
    except (OSError, ValueError, HTTPException) as error:
        reason = str(error) or type(error).__name__
        raise InputError(f"cannot be read ({reason})", path=url) from None
    if len(data) > _MAX_BYTES:
        raise InputError(f"is larger than {_MAX_BYTES // 2**10} KiB", path=url)
    if is_cut_short:
        raise InputError("cannot be read (the answer is cut short)", path=url)
    return data


def _power_text(text: str, source: str) -> str:
    """The power in the text of a signal, as it is written there."""
    if not text.startswith("{"):
        return text
    try:
        power = json.loads(text)["power"]
    except (ValueError, RecursionError, KeyError):
        raise InputError("is no JSON object with a field power", path=source) from None
    return f"{power} W" if isinstance(power, int | float) else str(power)


def _power_w(text: str, full_power_w: float, source: str) -> float:
    """The power that the text of a signal means, W."""
    name = f"the signal {source}"
    if text.endswith("%"):
        return full_power_w * PERCENT.within(0, 100).parse(text, name) / 100
    try:
        return _POWER.parse(text, name)
    except InputError:
        raise InputError(
            "must be a power with its unit, such as 612kW, or a share of --power, such as 75%; it "
            f"says {shown(text)}",
            path=source,
        ) from None
