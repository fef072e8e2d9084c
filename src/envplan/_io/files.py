"""Files: read within bounds, JSON that says one thing, and writing whole or not at all."""

from __future__ import annotations

import difflib
import errno
import fcntl
import gzip
import io
import json
import os
import re
import secrets
import shutil
import stat
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, cast

from envplan.errors import InputError, meant

#: Characters of a field's name that an error shows.
_MAX_SHOWN_NAME = 60

#: No line that append_line writes is longer.
_LONGEST_LINE = 2**24

#: Added to the error of a file that cannot be written.
_ELSEWHERE = "; choose a path in a folder you can write to"

#: The path that stands for standard input.
STANDARD_INPUT: Final = "-"

#: As much of standard input is kept as of the largest file that is read whole.
_MOST_STANDARD_INPUT: Final = 256 * 2**20

#: A gzip file may unpack to this many bytes, and to this many times its size beside.
_SMALL_BYTES: Final = 4 * 2**20
_MOST_SHRINKING: Final = 50

#: Streams are read in pieces of this size.
_PIECE_BYTES: Final = 2**16

#: Lists and objects within each other, values in all, and lists and objects in all of a document.
MOST_LEVELS: Final = 64
_MOST_VALUES: Final = 2**24
_MOST_LISTS: Final = 2**21

#: Digits of a number; a double has 17, and the smallest one written out 767.
MOST_DIGITS: Final = 1000
_LONG_NUMBER: Final = re.compile(rf"[0-9][0-9a-fA-F_]{{{MOST_DIGITS}}}")

#: A path as users give it.
AnyPath = str | os.PathLike[str]


@contextmanager
def _named_errors(participle: str, path: AnyPath, remedy: str = "") -> Iterator[None]:
    """Let errors of the system name the file that cannot be read or written.

    Args:
        participle: "read" or "written".
        path: of the file.
        remedy: what to do about it, added to the error.
    """
    try:
        yield
    except OSError as error:
        reason = f"cannot be {participle} ({error.strerror or error}){remedy}"
        raise InputError(reason, path=path) from error
    except ValueError as error:
        raise InputError(f"is not a usable file name ({error})", path=path) from error


@dataclass(frozen=True)
class ReadLimits:
    """How much of a file is read, before anybody asks what it holds.

    A file that is larger, on the disk or once it is unpacked, is refused as soon as that is known.

    Attributes:
        max_bytes: of the content, unpacked.
        longest_line: bytes of a line, where lines are read one after the other, give or take a
            piece of 64 KiB; None: any.
    """

    max_bytes: int = 64 * 2**20
    longest_line: int | None = None

    def unpacked(self, packed_bytes: int) -> int:
        """The most bytes that a gzip file of some size may unpack to.

        Our files shrink to a tenth, or a thirtieth where rows repeat; a file that is made to fill
        the memory shrinks to a thousandth.
        """
        return min(self.max_bytes, _SMALL_BYTES + _MOST_SHRINKING * packed_bytes)


def read_bounded(path: AnyPath, max_bytes: int = ReadLimits.max_bytes) -> bytes:
    """The content of a regular file, unpacked if it is gzipped; "-" is standard input.

    Raises:
        InputError: the file cannot be read, is none that ends, or is too large.
    """
    limits = ReadLimits(max_bytes)
    with _named_errors("read", path), _opened(path) as source:
        most = limits.unpacked(source.size) if source.is_packed else max_bytes
        if source.size > max_bytes:
            raise _too_large(path, max_bytes, is_packed=False)
        try:
            data = source.file.read(most + 1)
        except (EOFError, zlib.error):
            raise OSError(None, "it is no whole gzip file") from None
    if len(data) > most:
        raise _too_large(path, max_bytes, source.is_packed)
    return data


@contextmanager
def stream(path: AnyPath, limits: ReadLimits) -> Iterator[IO[bytes]]:
    """A file that is read in pieces and never held as a whole, within the same limits.

    Raises:
        InputError: the file cannot be read, or is none that ends; while it is read, that it is no
            whole gzip file, is too large, or has too long a line.
    """
    with ExitStack() as stack:
        with _named_errors("read", path):
            source = stack.enter_context(_opened(path))
        most = limits.unpacked(source.size) if source.is_packed else limits.max_bytes
        yield io.BufferedReader(_BoundedStream(source, path, most, limits), _PIECE_BYTES)


class _BoundedStream(io.RawIOBase):
    """The bytes of a source; an error instead of those beyond the limits."""

    def __init__(self, source: _Source, path: AnyPath, most: int, limits: ReadLimits) -> None:
        super().__init__()
        self._source = source
        self._path = path
        self._left = most
        self._limits = limits
        self._line_bytes = 0

    def readable(self) -> bool:
        """It is read, never written."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with the next bytes; returns how many there are."""
        try:
            data = self._source.file.read(len(buffer))
        except (EOFError, zlib.error):
            raise InputError("is no whole gzip file", path=self._path) from None
        self._left -= len(data)
        if self._left < 0:
            raise _too_large(self._path, self._limits.max_bytes, self._source.is_packed)
        longest = self._limits.longest_line
        if longest is not None:
            last_end = data.rfind(b"\n")
            is_within = last_end < 0
            self._line_bytes = self._line_bytes + len(data) if is_within else len(data) - last_end
            if self._line_bytes > longest:
                raise InputError(f"has a line of more than {longest // 2**10} KiB", path=self._path)
        buffer[: len(data)] = data
        return len(data)


def _too_large(path: AnyPath, max_bytes: int, is_packed: bool) -> InputError:
    reason = f"is larger than {max_bytes // 2**20} MiB"
    if is_packed:
        reason += f", or than {_MOST_SHRINKING} times its packed size"
    return InputError(reason, path=path)


class _Source(NamedTuple):
    """A file that is open.

    Attributes:
        file: its bytes, unpacked.
        size: in bytes, as it lies there.
        is_packed: whether it is gzipped.
    """

    file: IO[bytes]
    size: int
    is_packed: bool


@contextmanager
def _opened(path: AnyPath) -> Iterator[_Source]:
    """Open a regular file or, where the path is "-", standard input.

    Raises:
        OSError: it cannot be opened.
        InputError: it is no regular file.
    """
    if os.fspath(path) == STANDARD_INPUT:
        content = _standard_input()
        with _unpacked(io.BufferedReader(io.BytesIO(content)), len(content)) as source:
            yield source
        return
    with open_regular(path) as file, _unpacked(file, os.fstat(file.fileno()).st_size) as source:
        yield source


def open_regular(path: AnyPath) -> io.BufferedReader:
    """Open a regular file to read it, as it is.

    A pipe or a device is refused before anything is read: it may never end, or never begin.

    Raises:
        OSError: it cannot be opened.
        InputError: it is no regular file.
    """
    # Opened in this way, a pipe to which nobody writes holds nobody up.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    reason = "is a pipe or a device; only regular files are read, and - is standard input"
    raise InputError(reason, path=path)


@contextmanager
def _unpacked(file: io.BufferedReader, size: int) -> Iterator[_Source]:
    if file.peek(2)[:2] != b"\x1f\x8b":
        yield _Source(file, size, is_packed=False)
        return
    with gzip.GzipFile(fileobj=file) as unpacked:
        yield _Source(cast(IO[bytes], unpacked), size, is_packed=True)


@lru_cache(maxsize=1)
def _standard_input() -> bytes:
    """All of standard input, which can be read but once.

    Raises:
        InputError: it is larger than the largest file that is read whole.
    """
    content = sys.stdin.buffer.read(_MOST_STANDARD_INPUT + 1)
    if len(content) > _MOST_STANDARD_INPUT:
        raise _too_large(STANDARD_INPUT, _MOST_STANDARD_INPUT, is_packed=False)
    return content


def is_file(path: AnyPath) -> bool:
    """Whether there is such a file; there is none of a name that no file can have."""
    return os.path.isfile(path)  # noqa: PTH113 (Path.is_file raises where a name is too long)


def exists(path: AnyPath) -> bool:
    """Whether a path leads to something; a name that no file can have leads nowhere."""
    return os.path.exists(path)  # noqa: PTH110 (as above)


def named_file(
    path_or_name: AnyPath, builtins: Mapping[str, Path], noun: str, hint: str = ""
) -> Path:
    """The file at a path or, where no such path exists, the built-in one of that name.

    Args:
        path_or_name: of the file.
        builtins: the built-in files by name.
        noun: what they are, such as "profile".
        hint: for errors, where there is none.

    Raises:
        InputError: it is neither.
    """
    name = os.fspath(path_or_name)
    if name == STANDARD_INPUT or exists(name):
        return Path(name)
    if name not in builtins:
        problem = f"no such file, and no built-in {noun} of that name{meant(name, builtins)}{hint}"
        raise InputError(problem, path=name)
    return builtins[name]


def decoded(data: bytes, path: AnyPath | None) -> str:
    """UTF-8 text of a file, without a byte order mark.

    Raises:
        InputError: it is something else; says the line.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1  # without a byte order mark
        raise InputError("is not UTF-8 text", path=path, line=line) from None
    null = text.find("\0")
    if null >= 0:
        line = text.count("\n", 0, null) + 1
        raise InputError("is not UTF-8 text", path=path, line=line)
    return text


def parse_json(data: bytes, path: AnyPath) -> Any:
    """The JSON value in a file's content. No field of an object may come twice.

    Raises:
        InputError: it is not JSON; says line and column.
    """

    def object_of(fields: list[tuple[str, object]]) -> dict[str, object]:
        value = dict(fields)
        if len(value) < len(fields):
            name = _most_common(name for name, _ in fields)[:_MAX_SHOWN_NAME]
            raise InputError(f"an object has the field {json.dumps(name)} twice", path=path)
        return value

    def refuse_constant(name: str) -> None:
        raise InputError(f"is not valid JSON: {name} is not a number", path=path)

    text = decoded(data, path)
    refuse_much(text, path, "JSON")
    try:
        value = json.loads(text, object_pairs_hook=object_of, parse_constant=refuse_constant)
        if "\\ud" in text.lower():  # half a character that is written as two: no text has that
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        problem = f"is not valid JSON, or cut short: {error.msg}"
        raise InputError(problem, path=path, line=error.lineno, column=error.colno) from None
    except UnicodeEncodeError:
        reason = "a \\u escape of half a character"
    except RecursionError:
        reason = "nested too deeply"
    else:
        refuse_depth(value, path, "JSON")
        return value
    raise InputError(f"is not valid JSON: {reason}", path=path)


def refuse_much(text: str, path: AnyPath | None, language: str) -> None:
    """Refuse a document that would take far more memory or time than its size, before it is parsed.

    Raises:
        InputError: it has too many values, or a number with too many digits.
    """
    num_lists = text.count("[") + text.count("{")
    num_values = num_lists + text.count(",")
    if num_lists > _MOST_LISTS or num_values > _MOST_VALUES:
        raise InputError(f"holds more than {_MOST_VALUES} values or {_MOST_LISTS} lists", path=path)
    if _LONG_NUMBER.search(text):
        reason = f"is not valid {language}: a number with too many digits"
        raise InputError(reason, path=path)


def refuse_depth(document: object, path: AnyPath | None, language: str) -> None:
    """Refuse a document whose lists and objects lie too deep within each other.

    Raises:
        InputError: there are more than MOST_LEVELS levels.
    """
    level = [document]
    for _ in range(MOST_LEVELS + 1):
        containers = [value for value in level if isinstance(value, dict | list)]
        if not containers:
            return
        level = []
        for container in containers:
            level += container.values() if isinstance(container, dict) else container
    raise InputError(f"is not valid {language}: nested too deeply", path=path)


def _most_common(names: Iterable[str]) -> str:
    """The name that comes most often; of several the first."""
    [(name, _)] = Counter(names).most_common(1)
    return name


def refuse_slip(
    name: str, known: Iterable[str], path: AnyPath | None, line: int | None = None
) -> None:
    """Keep a field or column that was meant to be a known one from being passed over.

    Args:
        name: what is in the file and is not among `known`.
        known: names of fields or columns.
        path: of the file, for errors.
        line: where the name stands, for errors.

    Raises:
        InputError: it is nearly one of them.
    """
    similar = difflib.get_close_matches(name.lower().replace("-", "_"), known, n=1, cutoff=0.8)
    if similar:
        problem = f"is not known; is {similar[0]} meant?"
        raise InputError(problem, path=path, line=line, column=name)


def same_file(path: AnyPath, other_path: AnyPath) -> bool:
    """Whether two paths lead to one file that exists."""
    try:
        return Path(path).samefile(other_path)
    except (OSError, ValueError):
        return False


def check_writable(path: AnyPath) -> None:
    """Refuse a path that atomic_write could not write to, before any work is done for it.

    Raises:
        InputError: the folder is missing or not writable, or the path is a folder or no path.
    """
    with _named_errors("written", path, _ELSEWHERE):
        target = _target(path)
        written = target.path.parent if target.is_replaceable else target.path
        written.stat()
        if not os.access(written, os.W_OK):
            raise PermissionError(None, "Permission denied")


def atomic_write(path: AnyPath, content: bytes | str) -> None:
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
    data = content.encode() if isinstance(content, str) else content
    with _named_errors("written", path, _ELSEWHERE):
        target = _target(path)
        if target.is_replaceable:
            _replace(target.path, data)
        else:
            target.path.write_bytes(data)


class _Target(NamedTuple):
    """The file that a path leads to, and whether it can be replaced, as a device cannot."""

    path: Path
    is_replaceable: bool


def _target(path: AnyPath) -> _Target:
    """The file that a path leads to; it need not exist.

    Raises:
        OSError, ValueError: it leads to a folder, to itself, or nowhere.
    """
    with suppress(FileNotFoundError):
        mode = Path(path).stat().st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(None, "it is a folder")
        if not stat.S_ISREG(mode):
            return _Target(Path(path), is_replaceable=False)
    return _Target(Path(path).resolve(), is_replaceable=True)


def append_whole(descriptor: int, data: bytes, *, flush: bool = True) -> None:
    """Write all of `data`; with `flush`, return once it is on the disk.

    Raises:
        OSError: the disk is full or fails.
    """
    while data:
        data = data[os.write(descriptor, data) :]
    if flush:
        os.fsync(descriptor)


def append_line(descriptor: int, line: bytes) -> None:
    """Append a line to a file that others append to, whole or not at all.

    Works where appending is not atomic, as on network file systems, but for those without locks. A
    line that whoever was killed left unfinished is taken away.

    Args:
        descriptor: open for reading and appending.
        line: with its end.

    Raises:
        OSError: the disk is full or fails.
    """
    with suppress(OSError):
        fcntl.lockf(descriptor, fcntl.LOCK_EX)
    try:
        end = os.fstat(descriptor).st_size
        if end and os.pread(descriptor, 1, end - 1) != b"\n":
            begin = max(0, end - _LONGEST_LINE)
            end = begin + os.pread(descriptor, _LONGEST_LINE, begin).rfind(b"\n") + 1
            os.ftruncate(descriptor, end)
        try:
            append_whole(descriptor, line, flush=False)
        except OSError:
            os.ftruncate(descriptor, end)
            raise
    finally:
        with suppress(OSError):
            fcntl.lockf(descriptor, fcntl.LOCK_UN)


def _replace(target: Path, data: bytes) -> None:
    """Put data in the place of a file, whole or not at all, and on the disk."""
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
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
