"""Where the process begins: an interruption is one line from the first moment on.

Little is imported here, because Python prints a traceback of an import that Ctrl-C meets. So it is
`_signal`, which is built into the interpreter, and not `signal`.
"""

import _signal  # type: ignore[import-not-found]
import os

_INTERRUPTED = 130
_NOT_INSTALLED = (
    "envplan: error: {} is not installed here; for guard, preflight and reset: "
    "pip install --no-deps typer annotated-doc click shellingham rich, "
    "and for all of envplan: pip install envplan\n"
)


def _leave(*_: object) -> None:
    os.write(2, b"envplan: error: interrupted\n")
    os._exit(_INTERRUPTED)


_USUAL = _signal.getsignal(_signal.SIGINT)
if _USUAL is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _leave)


def main() -> None:
    """Run the command line and exit; see app.main."""
    try:
        from envplan.cli.app import main as run
    except ModuleNotFoundError as error:  # a node on which plans are only followed
        if error.name is None or error.name.partition(".")[0] == "envplan":
            raise
        os.write(2, _NOT_INSTALLED.format(error.name).encode())
        os._exit(2)

    _signal.signal(_signal.SIGINT, _USUAL)
    run()


if __name__ == "__main__":
    main()
