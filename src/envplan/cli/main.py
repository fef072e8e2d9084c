"""Where the process begins: an interruption is one line from the first moment on.

Little is imported here, because Python prints a traceback of an import that Ctrl-C meets.
"""

import os
import signal

_INTERRUPTED = 130


def main() -> None:
    """Run the command line and exit; see app.main."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from envplan.cli.app import main as run

    signal.signal(signal.SIGINT, usual)
    run()


def _leave(*_: object) -> None:
    os.write(2, b"envplan: error: interrupted\n")
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
