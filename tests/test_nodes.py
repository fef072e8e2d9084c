"""Nodes that only follow a plan need little: a few small packages, no compiled core, no solver."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import envplan
from envplan.pipeline import Pipeline
from fake_nvml import FakeNvml
from shim_helpers import frequency_plan

PACKAGE = Path(envplan.__file__).parent
ROOT = Path(__file__).parents[1]

#: What `pip install --no-deps` gets beside envplan, as docs/operations.md has it, by import name.
NODE_PACKAGES = {
    "nvidia-ml-py": "pynvml",
    "pydantic": "pydantic",
    "pydantic-core": "pydantic_core",
    "annotated-types": "annotated_types",
    "typing-extensions": "typing_extensions",
    "typing-inspection": "typing_inspection",
}
#: And for the commands guard, preflight and reset.
COMMAND_PACKAGES = {
    "typer": "typer",
    "annotated-doc": "annotated_doc",
    "click": "click",
    "shellingham": "shellingham",
    "rich": "rich",
}
MAX_BYTES = 25 * 10**6

#: Modules of envplan.runtime that measure profiles, which is no part of following a plan.
MEASURING = {
    "clock_sweep",
    "energy_log",
    "metering",
    "power_regression",
    "profile_parts",
    "profiler",
    "work_timeline",
}
#: What their users have installed, each for its own module.
FRAMEWORKS = {"torch", "deepspeed", "megatron"}

FOLLOW = """
import sys
from envplan.runtime import Shim

with Shim("run.freqplan.json", rank=0, world_size=2, every_request=True, log="run.jsonl") as shim:
    for _ in range(3):
        for key in shim.operations:
            shim.begin(*key)
            shim.end(*key)
        shim.step()
print("mismatches", shim.mismatches, "clock errors", shim.clock_errors)
outside = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
print("loaded", *sorted(outside & {"numpy", "pandas", "ortools", "matplotlib", "typer"}))
"""


def follow_modules() -> list[str]:
    """The modules that a node which follows plans may load."""
    runtime = [path.stem for path in (PACKAGE / "runtime").glob("*.py")]
    names = [f"envplan.runtime.{name}" for name in runtime if name not in MEASURING]
    devices = [f"envplan.devices.{path.stem}" for path in (PACKAGE / "devices").glob("*.py")]
    return sorted([*names, *devices, "envplan.enforce.freqplan"])


def imports_when_loaded(module: str) -> Iterator[str]:
    """The modules that a module imports as it is loaded: not within functions, not for types."""
    file = PACKAGE.parent / Path(*module.split("."))
    path = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    statements = list(ast.parse(path.read_text(encoding="utf-8")).body)
    while statements:
        match statements.pop():
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=source, names=names) if source is not None:
                yield source
                for alias in names:
                    if is_module(f"{source}.{alias.name}"):
                        yield f"{source}.{alias.name}"
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=orelse):
                statements += orelse
            case ast.If(body=body, orelse=orelse) | ast.Try(body=body, orelse=orelse):
                statements += body + orelse
            case ast.ClassDef(body=body) | ast.With(body=body):
                statements += body


def is_module(name: str) -> bool:
    path = PACKAGE.parent / Path(*name.split("."))
    return name.startswith("envplan.") and (path.is_dir() or path.with_suffix(".py").exists())


def loaded_with(module: str) -> set[str]:
    """All that is loaded with a module of envplan."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        if name.partition(".")[0] == "envplan":
            parts = name.split(".")
            waiting += [".".join(parts[:count]) for count in range(1, len(parts))]
            waiting += imports_when_loaded(name)
    return found


@pytest.mark.parametrize("module", follow_modules())
def test_following_loads_the_standard_library_pydantic_and_nvml_only(module: str) -> None:
    roots = {name.partition(".")[0] for name in loaded_with(module)}
    outside = roots - set(sys.stdlib_module_names) - {"envplan"}
    allowed = set(NODE_PACKAGES.values())
    if outside & FRAMEWORKS:
        assert module.startswith("envplan.runtime.")
    assert outside - allowed - FRAMEWORKS == set()


@pytest.mark.parametrize("module", follow_modules())
def test_following_loads_no_planning(module: str) -> None:
    rooms = {name.split(".")[1] for name in loaded_with(module) if name.startswith("envplan.")}
    assert rooms <= {"_io", "clocks", "devices", "enforce", "errors", "runtime", "units"}


def environment(folder: Path, packages: dict[str, str]) -> Path:
    """A Python with these packages of ours and envplan's own files, and nothing else."""
    venv.create(folder, with_pip=False)
    site = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    for name in packages.values():
        origin = import_module(name).__file__
        assert origin is not None
        source = Path(origin)
        source = source.parent if source.name == "__init__.py" else source
        (site / source.name).symlink_to(source)
    (site / "envplan").symlink_to(PACKAGE)
    return folder / "bin" / "python"


def followed_on_node(python: Path, folder: Path, fake: FakeNvml) -> str:
    frequency_plan(Pipeline("1f1b", num_stages=2, num_microbatches=3)).save(
        folder / "run.freqplan.json"
    )
    done = subprocess.run(
        [python, "-c", FOLLOW],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert fake.locked() is None
    planned_mhz = frequency_plan(Pipeline("1f1b", num_stages=2, num_microbatches=3)).ranks[0]
    assert set(planned_mhz.frequencies) <= set(fake.clock_changes())
    return done.stdout


def test_a_plan_is_followed_where_little_is_installed(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    python = environment(tmp_path / "node", NODE_PACKAGES)
    said = followed_on_node(python, tmp_path, fake_nvml)
    assert said == "mismatches 0 clock errors 0\nloaded\n"


def test_planning_on_such_a_node_says_in_a_line_what_is_missing(tmp_path: Path) -> None:
    python = environment(tmp_path / "node", NODE_PACKAGES)
    done = subprocess.run([python, "-m", "envplan.cli.main"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "envplan: error: typer is not installed here; for guard, preflight and reset: "
        "pip install --no-deps typer annotated-doc click shellingham rich, "
        "and for all of envplan: pip install envplan\n"
    )


def test_commands_of_nodes_run_with_a_few_packages_more(
    fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    python = environment(tmp_path / "node", NODE_PACKAGES | COMMAND_PACKAGES)
    for command in (["guard", "--once"], ["reset"], ["devices"]):
        subprocess.run([python, "-m", "envplan.cli.main", *command], check=True)
    done = subprocess.run(
        [python, "-m", "envplan.cli.main", "frontier", "a40-gpt3-1.3b-4stage"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "envplan: error: numpy is not installed here; it comes with: pip install envplan\n"
    )


@pytest.mark.slow
def test_the_wheel_and_what_it_needs_on_nodes_take_less_than_25_mb(
    fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    pip = [sys.executable, "-m", "pip"]
    wheel = [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT]
    subprocess.run(wheel, check=True)
    node = tmp_path / "node"
    venv.create(node, with_pip=False)
    python = node / "bin" / "python"
    install = [*pip, "--python", python, "install", "--quiet", "--no-deps", "--no-compile"]
    subprocess.run([*install, *tmp_path.glob("envplan-*.whl"), *NODE_PACKAGES], check=True)
    said = followed_on_node(python, tmp_path, fake_nvml)
    assert said == "mismatches 0 clock errors 0\nloaded\n"
    site = node / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    sizes = [path.stat().st_size for path in site.rglob("*") if "__pycache__" not in path.parts]
    assert 10**6 < sum(sizes) < MAX_BYTES


def test_a_missing_compiler_is_one_line_with_what_to_install(tmp_path: Path) -> None:
    make = tmp_path / "bin" / "make"
    make.parent.mkdir()
    make.symlink_to("/usr/bin/make")
    cmake = Path(sys.executable).with_name("cmake")
    done = subprocess.run(
        [cmake, "-S", ROOT / "csrc", "-B", tmp_path / "build", "-G", "Unix Makefiles"],
        env={"PATH": str(make.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    told = [line.strip() for line in done.stderr.splitlines() if "C++ compiler" in line]
    assert told == [
        "envplan: no C++ compiler here. Install one (apt-get install g++, dnf install gcc-c++)"
        " or take the wheel: pip install --only-binary envplan envplan"
    ]
