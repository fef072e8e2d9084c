"""Which frameworks were tried, in which versions, and what worked: docs/compatibility.md.

    python -m tools.compat [docs/compatibility.md] [--only NAME ...] [--minutes M] [--build]

Each environment is built once, below $ENVPLAN_COMPAT (default: ~/.cache/envplan-compat), on top of
the one that this runs in: the frameworks are its own, everything else is shared. Then the tests of
each row run in it. With --only, the page keeps what was found of other environments the last time.
Exit code 1: a test fails; 75: an environment cannot be built, or the time is over.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_CACHE = Path(os.environ.get("ENVPLAN_COMPAT", Path.home() / ".cache" / "envplan-compat"))
_COLUMNS = ("import", "follow", "record", "profile in job")
_LIMIT_S = 900
_TRIES = 3
_NOT_TRIED = "not tried"
#: Exit code where the code itself was not found wanting, but not all was tried.
_NOT_ALL = 75


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
    rows: tuple[Row, ...]
    packages: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    torch: str = ""


_OLDEST, _NEWEST = "2.12.0", "2.15.0"
_TORCH = {
    "import": "tests/test_schedules_against_torch.py",
    "follow": "tests/test_runtime_torch.py -k 'identical or clocks'",
    "record": "tests/test_runtime_torch.py -k recorded",
    "profile in job": "tests/test_runtime_torch.py -k profiles_itself",
}
_TITAN = {"follow": "tests/test_torchtitan.py"}
_CPU = "on CPUs; a GPU's questions are answered by stand-ins"
_NVIDIA = "on CPUs, with empty stand-ins for NVIDIA's libraries"


def _megatron(task: str) -> str:
    return f"tests/test_runtime_frameworks.py -k {task}"


ENVIRONMENTS = (
    Environment("torch-oldest", (Row("PyTorch", _OLDEST, _TORCH, _NVIDIA),), torch=_OLDEST),
    Environment(
        "torch-here",
        (
            Row("PyTorch", version("torch").partition("+")[0], _TORCH),
            Row(
                "torchrun, Ray Train",
                f"{version('torch').partition('+')[0]}, {version('ray')}",
                {"follow": "tests/test_restarts.py -m slow"},
                "a rank is killed, and the launcher starts the job again",
            ),
        ),
    ),
    Environment(
        "torch-newest",
        (
            Row("PyTorch", _NEWEST, _TORCH, _NVIDIA),
            Row("torchtitan", "0.3.0", _TITAN, f"PP=2, Llama 3 debug model, {_CPU}"),
        ),
        packages=("torchtitan==0.3.0",),
        bare=("triton~=3.9.0",),
        torch=_NEWEST,
    ),
    Environment(
        "frameworks",
        (
            Row("torchtitan", "0.2.2", _TITAN, f"PP=2, Llama 3 debug model, {_CPU}"),
            Row(
                "Megatron-core",
                "0.16.1",
                {
                    "import": "tests/test_imports_megatron.py",
                    "follow": _megatron("'(follows or example or ramp_up) and megatron'"),
                    "record": _megatron("'follows and megatron'"),
                    "profile in job": _megatron("'profiles and megatron'"),
                },
                "1F1B, interleaved, groups of microbatches, overlapped transfers, ramp-up of the "
                f"batch size; the example with PP=8, VP=4; {_CPU}",
            ),
            Row(
                "DeepSpeed",
                "0.19.8",
                {
                    "import": "tests/test_pipeline_schedules.py -k deepspeed",
                    "follow": _megatron("'(follows or example) and deepspeed'"),
                    "record": _megatron("'follows and deepspeed'"),
                    "profile in job": _megatron("'profiles and deepspeed'"),
                },
                "on CPUs; the example with PP=4, too",
            ),
            Row(
                "Kareus",
                "artifact",
                {"import": "tests/test_kareus.py"},
                "profiles, clocks and overlaps, in its formats",
            ),
        ),
        packages=("torchtitan==0.2.2", "deepspeed==0.19.8"),
        bare=("triton==3.6.0", "megatron-core==0.16.1"),
    ),
    Environment(
        "bridge",
        (
            Row(
                "NeMo Megatron-Bridge",
                "0.3.1",
                {"import": "tests/test_imports_megatron.py -k recipe"},
                "run_config.yaml of its Llama 3.1 405B recipe; stand-ins for its LoRA layers, "
                "which need Transformer Engine",
            ),
        ),
        packages=(
            *("transformers<5", "datasets", "einops", "hydra-core>1.3,<=1.3.2", "omegaconf"),
            *("regex", "six", "tqdm"),
        ),
        bare=("triton==3.6.0", "megatron-core==0.16.1", "megatron-bridge==0.3.1"),
    ),
    Environment(
        "models",
        (
            Row(
                "transformers",
                "5.24.0",
                {"import": "tests/test_model_types.py -k still_counts"},
                "config.json of each type whose layers differ: parameters on the meta device",
            ),
        ),
        packages=("transformers==5.24.0",),
    ),
    Environment(
        "operations",
        (
            Row(
                "Slurm",
                "Debian's",
                {"follow": "tests/test_slurm.py -m slow"},
                "two nodes on one machine: to the end, scancel, requeue, everything killed",
            ),
            Row(
                "Prometheus, Kubernetes",
                "Debian's, 1.37",
                {"import": "tests/test_deploy.py"},
                "promtool on rules, schemas and client on manifests; no cluster",
            ),
        ),
        packages=("kubernetes==37.0.2", "kubernetes-validate==1.37.0"),
    ),
)


_NAMES = tuple(environment.name for environment in ENVIRONMENTS)


def main() -> None:
    """Test every environment and write the page of what worked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("page", type=Path, nargs="?", help="none: nothing is written")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", choices=_NAMES)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing after these")
    parser.add_argument("--build", action="store_true", help="environments only; run no tests")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    found: dict[str, list[str]] = {}
    missing = []
    wanted = [one for one in ENVIRONMENTS if one.name in (options.only or _NAMES)]
    # The next one is built while tests run in this one.
    builder = ThreadPoolExecutor(1)
    built = [builder.submit(_python, one, end) for one in wanted]
    for environment, building in zip(wanted, built, strict=True):
        try:
            python = building.result()
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            missing.append(f"environment {environment.name} cannot be built: {error}")
            continue
        if options.build:
            continue
        results: dict[str, str] = {}
        found[environment.name] = []
        for row in environment.rows:
            for tests in row.tests.values():
                if tests not in results:
                    results[tests] = _result(python, tests, end)
            cells = [results[row.tests[c]] if c in row.tests else _NOT_TRIED for c in _COLUMNS]
            line = f"| {row.framework} | {row.version} | {' | '.join(cells)} | {row.note} |"
            found[environment.name].append(line)
            print(line, flush=True)
        if time.monotonic() > end:
            missing.append(f"environment {environment.name}: the time was over before its end")
            if options.page is not None:
                del found[environment.name]
    print("".join(f"NOT TRIED: {line}\n" for line in missing), end="")
    if options.page is not None:
        options.page.write_text(_page(_with_earlier(found)))
    sys.exit(1 if "FAILS" in str(found) else _NOT_ALL if missing else 0)


def _with_earlier(found: dict[str, list[str]]) -> list[str]:
    """The rows of all environments; of those not tried now, what was found the last time."""
    file = _CACHE / "rows.json"
    earlier = json.loads(file.read_text()) if file.exists() else {}
    rows = {name: found.get(name, earlier.get(name, [])) for name in _NAMES}
    file.write_text(json.dumps(rows))
    return [line for lines in rows.values() for line in lines]


def _python(environment: Environment, end: float) -> Path:
    """The interpreter of an environment, built if it is not there.

    Raises:
        subprocess.SubprocessError, OSError, ValueError: it cannot be, or not until `end`.
    """
    if not (environment.packages or environment.bare or environment.torch):
        return Path(sys.executable)
    home = _CACHE / environment.name
    python, done = home / "bin" / "python", home / "done"
    wanted = f"{environment.packages} {environment.bare} {environment.torch} {sys.version}\n"
    if not done.exists() or done.read_text() != wanted:

        def call(*command: str | Path) -> None:
            left = min(_LIMIT_S, end - time.monotonic())
            subprocess.run(command, check=True, cwd=_ROOT, timeout=max(0, left))

        call(sys.executable, "-m", "venv", "--clear", home)
        pip = (python, "-m", "pip", "install", "-qq", "--disable-pip-version-check")
        site = next((home / "lib").glob("python*")) / "site-packages"
        if environment.torch:
            call(*pip, "--no-deps", f"torch=={environment.torch}")
            call(sys.executable, "-m", "tools.cpu_torch", site)
            (metadata,) = site.glob("torch-*.dist-info/METADATA")
            nvidias = re.compile(r"^Requires-Dist: (cuda|nvidia|triton).*\n", re.MULTILINE)
            metadata.write_text(nvidias.sub("", metadata.read_text()))
        _share(home)
        if environment.packages:
            call(*pip, *environment.packages)
        if environment.bare:
            call(*pip, "--no-deps", *environment.bare)
        done.write_text(wanted)
    _share(home)  # it may have been built from another place
    return python


def _share(home: Path) -> None:
    """Let an environment see what this runs in, after its own packages."""
    site = next((home / "lib").glob("python*")) / "site-packages"
    shared = sysconfig.get_path("purelib")
    (site / "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")


def _result(python: Path, tests: str, end: float) -> str:
    """Run tests, again where they fail: those that measure may be disturbed once.

    Returns:
        "yes", "FAILS" with what failed, or "not tried".
    """
    result = _NOT_TRIED
    for _ in range(_TRIES):
        limit = min(_LIMIT_S, end - time.monotonic())
        if limit <= 0:
            return _NOT_TRIED
        result = _once(python, tests, limit)
        if not result.startswith("FAILS"):
            break
    return result


def _once(python: Path, tests: str, limit: float) -> str:
    report = _CACHE / "report.xml"
    _CACHE.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    options = ["-o", "addopts=", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command = [str(python), "-m", "pytest", *options, *shlex.split(tests)]
    with subprocess.Popen(
        command, cwd=_ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as run:
        try:
            said, _ = run.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)  # and the ranks of its jobs
            return "FAILS (no result)" if limit == _LIMIT_S else _NOT_TRIED
    try:
        suite = ElementTree.parse(report).getroot().find("testsuite")
    except (OSError, ElementTree.ParseError):
        return "FAILS (no result)"
    assert suite is not None
    count, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    if run.returncode not in (0, 5) or not count:  # 5: all were skipped
        print(said[-3000:], file=sys.stderr)
        return "FAILS"
    return "yes" if count > skipped else _NOT_TRIED


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
- PyTorch before 2.12 cannot run all its schedules on CPUs, so that they cannot be tried here: 2.6
  hangs in 1F1B, and 2.8 and 2.10 cannot send within a rank, as ZBV does. envplan asks for 2.12.
- Megatron-Bridge wants Transformer Engine, which needs CUDA to build and to import; its
  configurations do without.
- Megatron-Bridge 0.3.1 wants transformers below 5 and with it huggingface-hub below 1.
"""


if __name__ == "__main__":
    main()
