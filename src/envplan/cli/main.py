"""Where the process begins: an interruption is one line from the first moment on.

Little is imported here, because Python prints a traceback of an import that Ctrl-C meets. So it is
`_signal`, which is built into the interpreter, and not `signal`.
"""

import _signal  # type: ignore[import-not-found]
import os

_INTERRUPTED = 130


def _leave(*_: object) -> None:
    os.write(2, b"envplan: error: interrupted\n")
    os._exit(_INTERRUPTED)


_USUAL = _signal.getsignal(_signal.SIGINT)
if _USUAL is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _leave)


def main() -> None:
    """Run the command line and exit; see app.main."""
    from envplan.cli.app import main as run

    _signal.signal(_signal.SIGINT, _USUAL)
    run()


if __name__ == "__main__":
    main()
