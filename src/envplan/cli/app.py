"""The `envplan` command: where errors become one line and an exit code."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from typer import Abort, BadParameter

from envplan.cli import state
from envplan.cli.commands import app
from envplan.errors import DoubtWarning, EnvplanError

_INTERRUPTED = 130
_LONGEST_LINE = 1000


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 1 no answer, 2 bad input or usage, 130 interrupted.

    Args:
        arguments: what follows `envplan`; default: the process's own.
    """
    sys.exit(_run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    # Releases of typer differ in whether click is inside it or beside it; its errors derive from
    # one class either way.
    usage_error: type[Any] = next(
        base for base in BadParameter.__mro__ if base.__name__ == "ClickException"
    )
    given = sys.argv[1:] if arguments is None else list(arguments)
    state.command, state.json, state.color = "", "--json" in given, None
    state.doubts.clear()
    _mend_streams()
    warnings.simplefilter("always", DoubtWarning)
    warnings.showwarning = _warn
    # Looking for plugins of pydantic that others have installed takes longer than a small plan.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        code = app(given, prog_name="envplan", standalone_mode=False)
        sys.stdout.flush()
        for doubt in state.doubts:  # an error stands alone
            print(f"envplan: warning: {doubt}", file=sys.stderr)
    except EnvplanError as error:
        return _fail(str(error), error.exit_code)
    except SystemExit as done:  # a shell's completion ends so
        return done.code if isinstance(done.code, int) else 0
    except (KeyboardInterrupt, Abort):
        return _fail("interrupted", _INTERRUPTED)
    except BrokenPipeError:
        _drop_output()  # whoever read it has left
        return 1
    except OSError as error:
        _drop_output()
        where = f"{error.filename}: " if error.filename else "the output "
        return _fail(f"{where}cannot be written or read ({error.strerror or error})", 2)
    except usage_error as error:
        return _fail(error.format_message(), 2)
    if code == _INTERRUPTED:
        return _fail("interrupted", _INTERRUPTED)
    return code if isinstance(code, int) else 0


def _mend_streams() -> None:
    """Have somewhere to print to, and print every file name, whatever bytes are in it."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # the caller has closed it
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _warn(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    """Keep a doubt for the end, once; what libraries warn of is for developers."""
    if issubclass(category, DoubtWarning):
        state.doubts[str(message)] = None


def _drop_output() -> None:
    """Point stdout nowhere, or the exit would complain again of what is still to be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int) -> int:
    """One line on stderr, whatever characters are in the message; with --json also on stdout."""
    line = re.sub(r"\s*[\r\n]\s*", " ", message.strip())
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    if len(safe) > _LONGEST_LINE:  # it quotes something huge
        safe = f"{safe[: _LONGEST_LINE // 2]} ... {safe[-_LONGEST_LINE // 2 :]}"
    print(f"envplan: error: {safe}", file=sys.stderr)
    if state.json:
        document = {"schema": "envplan/error/v1", "error": safe, "exit_code": code}
        print(json.dumps(document, indent=2))
    return code


if __name__ == "__main__":
    main()
