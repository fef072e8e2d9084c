"""Writing files whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from envplan.errors import InputError


def atomic_write(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Put `content` at `path` such that a reader sees the old file or the new one, never a part.

    The bytes go to a temporary file in the same folder, are flushed to the disk and then renamed.
    A symbolic link is written through, an existing file keeps its permissions, and a device or
    pipe such as /dev/stdout, which cannot be replaced, is written directly.

    Args:
        path: where the file shall be; its folder must exist.
        content: bytes, or text to be encoded as UTF-8.

    Raises:
        InputError: the folder is missing or not writable, the path is a folder, or the disk is
            full; nothing is left behind.
    """
    target = Path(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        if target.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        if target.exists() and not target.is_file():
            target.write_bytes(data)
        else:
            _replace(target.resolve(), data)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(
            f"cannot be written ({reason}); choose a path in a folder you can write to", path=path
        ) from error
    except ValueError as error:
        raise InputError(f"is not a usable file name ({error})", path=path) from error


def append_whole(descriptor: int, data: bytes) -> None:
    """Write all of `data` and return once it is on the disk.

    Raises:
        OSError: the disk is full or fails.
    """
    while data:
        data = data[os.write(descriptor, data) :]
    os.fsync(descriptor)


def _replace(target: Path, data: bytes) -> None:
    # Opened by hand rather than by tempfile: a new file then gets the permissions the umask says.
    temporary = target.with_name(f".envplan-{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, temporary)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
