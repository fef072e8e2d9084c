"""Which frameworks were tried, in which versions, and what worked: docs/compatibility.md.

    python -m tools.compat [docs/compatibility.md] [--only NAME ...]

Each environment is built once, below $ENVPLAN_COMPAT (default: ~/.cache/envplan-compat), on top of
the one that this runs in: the frameworks are its own, everything else is shared. Then the tests of
each row run in it. With --only, the page keeps what was found of other environments the last time.
Exit code 1: a test fails; 75: an environment cannot be built.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_CACHE = Path(os.environ.get("ENVPLAN_COMPAT", Path.home() / ".cache" / "envplan-compat"))
_COLUMNS = ("import", "follow", "record", "profile in job")
_LIMIT_S = 900
_TRIES = 3
#: Exit code where an environment cannot be built, for want of a network, say.
_NOT_BUILT = 75


@dataclass(frozen=True)
class Row:
    """A framework and, for each column, the tests that stand for it."""

    framework: str
    version: str
    tests: dict[str, str]
    note: str = ""


@dataclass(frozen=True)
class Environment:
    """Packages that live together; `bare` ones are installed without what they ask for."""

    name: str
    packages: tuple[str, ...]
    bare: tuple[str, ...] = ()
    torch: str = ""
    rows: tuple[Row, ...] = field(default_factory=tuple)


_TORCH = {
    "import": "tests/test_imports_torch_live.py tests/test_schedules_against_torch.py",
    "follow": "tests/test_runtime_torch.py -k identical",
    "profile in job": "tests/test_runtime_torch.py -k profiles_itself",
}
_TITAN = {"follow": "tests/test_torchtitan.py"}
_CPU = "on CPUs; a GPU's questions are answered by stand-ins"
_NVIDIA = "on CPUs, with empty stand-ins for NVIDIA's libraries"


def _megatron(task: str) -> str:
    return f"tests/test_runtime_frameworks.py -k {task}"


ENVIRONMENTS = (
    Environment("torch-oldest", (), rows=(Row("PyTorch", "2.13", _TORCH),)),
    Environment(
        "torch-newest",
        ("torchtitan==0.3.0",),
        bare=("triton~=3.9.0",),
        torch="2.15.0",
        rows=(
            Row("PyTorch", "2.15.0", _TORCH, _NVIDIA),
            Row("torchtitan", "0.3.0", _TITAN, f"PP=2, Llama 3 debug model, {_CPU}"),
        ),
    ),
    Environment(
        "frameworks",
        ("torchtitan==0.2.2", "deepspeed==0.19.8"),
        bare=("triton==3.6.0", "megatron-core==0.16.1"),
        rows=(
            Row("torchtitan", "0.2.2", _TITAN, f"PP=2, Llama 3 debug model, {_CPU}"),
            Row(
                "Megatron-core",
                "0.16.1",
                {
                    "import": "tests/test_imports_megatron.py",
                    "follow": _megatron("'follows and megatron'"),
                    "record": _megatron("'follows and megatron'"),
                    "profile in job": _megatron("'profiles and megatron'"),
                },
                "1F1B, interleaved, groups of microbatches, overlapped transfers; on CPUs",
            ),
            Row(
                "DeepSpeed",
                "0.19.8",
                {
                    "import": "tests/test_imports_deepspeed.py",
                    "follow": _megatron("'follows and deepspeed'"),
                    "record": _megatron("'follows and deepspeed'"),
                    "profile in job": _megatron("'(profiles or example) and deepspeed'"),
                },
                "on CPUs; the example with PP=4, too",
            ),
            Row(
                "NeMo Megatron-Bridge",
                "0.3.1",
                {"import": "tests/test_imports_megatron.py -k bridge"},
                "its run_config.yaml; the package needs Transformer Engine, and so a GPU, to start",
            ),
            Row(
                "Kareus",
                "artifact",
                {"import": "tests/test_kareus.py"},
                "profiles, clocks and overlaps, in its formats",
            ),
        ),
    ),
)


_NAMES = tuple(environment.name for environment in ENVIRONMENTS)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("page", type=Path, nargs="?", help="none: nothing is written")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    options = parser.parse_args()
    known = {environment.name: environment for environment in ENVIRONMENTS}
    chosen = [known[name] for name in options.only] or list(ENVIRONMENTS)
    found: dict[str, list[str]] = {}
    for environment in chosen:
        try:
            python = _python(environment)
        except subprocess.CalledProcessError as error:
            print(f"environment {environment.name} cannot be built: {error}", file=sys.stderr)
            sys.exit(_NOT_BUILT)
        results: dict[str, str] = {}
        found[environment.name] = []
        for row in environment.rows:
            for tests in row.tests.values():
                if tests not in results:
                    results[tests] = _result(python, tests)
            cells = [results[row.tests[c]] if c in row.tests else "not tried" for c in _COLUMNS]
            line = f"| {row.framework} | {row.version} | {' | '.join(cells)} | {row.note} |"
            found[environment.name].append(line)
            print(line, flush=True)
    if options.page is not None:
        options.page.write_text(_page(_with_earlier(found)))
    sys.exit("FAILS" in str(found))


def _with_earlier(found: dict[str, list[str]]) -> list[str]:
    """The rows of all environments; of those not tried now, what was found the last time."""
    file = _CACHE / "rows.json"
    earlier = json.loads(file.read_text()) if file.exists() else {}
    rows = {name: found.get(name, earlier.get(name, [])) for name in _NAMES}
    file.write_text(json.dumps(rows))
    return [line for lines in rows.values() for line in lines]


def _python(environment: Environment) -> Path:
    """The interpreter of an environment, built if it is not there."""
    if not (environment.packages or environment.bare or environment.torch):
        return Path(sys.executable)
    home = _CACHE / environment.name
    python, done = home / "bin" / "python", home / "done"
    wanted = f"{environment.packages} {environment.bare} {environment.torch} {sys.version}\n"
    if not done.exists() or done.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        site = next((home / "lib").glob("python*")) / "site-packages"
        if environment.torch:
            subprocess.run([*pip, "--no-deps", f"torch=={environment.torch}"], check=True)
            subprocess.run([sys.executable, "-m", "tools.cpu_torch", site], cwd=_ROOT, check=True)
            (metadata,) = site.glob("torch-*.dist-info/METADATA")
            nvidias = re.compile(r"^Requires-Dist: (cuda|nvidia|triton).*\n", re.MULTILINE)
            metadata.write_text(nvidias.sub("", metadata.read_text()))
        # What is shared comes after the environment's own.
        shared = sysconfig.get_path("purelib")
        (site / "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
        if environment.packages:
            subprocess.run([*pip, *environment.packages], check=True)
        if environment.bare:
            subprocess.run([*pip, "--no-deps", *environment.bare], check=True)
        done.write_text(wanted)
    return python


def _result(python: Path, tests: str) -> str:
    """ "yes", "FAILS" or "not tried": what tests say; those that measure may be disturbed once."""
    results = (_once(python, tests) for _ in range(_TRIES))
    return next((result for result in results if result != "FAILS"), "FAILS")


def _once(python: Path, tests: str) -> str:
    report = _CACHE / "report.xml"
    _CACHE.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    command = f"{python} -m pytest -o addopts= -q -p no:cacheprovider --junitxml={report} {tests}"
    try:
        run = subprocess.run(
            command, shell=True, cwd=_ROOT, capture_output=True, text=True, timeout=_LIMIT_S
        )
        suite = ElementTree.parse(report).getroot().find("testsuite")
    except (subprocess.TimeoutExpired, OSError, ElementTree.ParseError):
        return "FAILS (no result)"
    assert suite is not None
    count, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    if run.returncode not in (0, 5):
        print(run.stdout[-3000:], file=sys.stderr)
        return "FAILS"
    return "yes" if count > skipped else "not tried"


def _page(lines: list[str]) -> str:
    return f"""# Frameworks and versions that were tried

`make compat` builds these environments and writes this page, last on {date.today().isoformat()}.
A cell is the result of tests that ran: the framework's own package trained on gloo processes, its
order of operations and the clocks that were set were compared with the plan, and losses and
weights with those without a plan. "not tried" means that no test did that.

- **import**: its schedules, files or configurations become pipelines.
- **follow**: a job runs under a frequency plan.
- **record**: the order that a job really has becomes a DAG file.
- **profile in job**: a job measures its own profile.

| framework | version | {" | ".join(_COLUMNS)} | how |
|---|---|{"---|" * len(_COLUMNS)}---|
{chr(10).join(lines)}

No GPU took part: see [GPUs](gpu.md) for what was measured on one.

Packages that cannot live in one environment:

- Zeus's extra `pfo` wants pydantic 1; envplan wants pydantic 2. Zeus's server can run in an
  environment of its own, and envplan writes and reads its files.
- torchtitan 0.3 wants PyTorch 2.15; torchtitan 0.2.2 was tried with 2.13.
- Megatron-Bridge wants Transformer Engine, which needs CUDA to build and to import.
- Megatron-Bridge 0.3.1 wants transformers below 5 and with it huggingface-hub below 1.
"""


if __name__ == "__main__":
    main()
