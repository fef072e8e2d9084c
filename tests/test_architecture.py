"""Imports go one way, those for types included; the planning core needs no framework or driver."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp
import networkx as nx
import pytest

import envplan

#: The rooms of the house, in the way of the data: nothing imports what stands in a later line.
LAYERS = [
    ["errors"],
    ["units", "quantities", "_io"],
    ["clocks"],
    ["pipeline", "costs", "devices"],
    ["profile"],
    ["replay", "profiling"],
    ["frontier"],
    ["request"],
    ["plan"],
    ["solve", "enforce"],
    ["planners", "runtime", "serving"],
    ["simulation"],
    ["sweep", "site"],
    ["check", "plotting"],
    ["cli"],
]
COMPILED = {"_kernel", "_serving"}
CORE = ["envplan.solve", "envplan.planners", "envplan.check.plans", "envplan.simulation.iteration"]
OUTSIDE = ["torch", "pynvml", "matplotlib"]


PACKAGE = Path(envplan.__file__).parent
ROOMS = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """For each module those that it imports, within functions and for types, too."""
    graph = grimp.build_graph("envplan", exclude_type_checking_imports=False, cache_dir=None)
    # An editable installation shows more folders of the checkout as if they were in the package.
    modules = {module for module in graph.modules if room(module) in ROOMS}
    return {
        module: {
            imported
            for imported in graph.find_modules_directly_imported_by(module) & modules
            if not only_compiled(graph, module, imported)
        }
        for module in modules
    }


def only_compiled(graph: grimp.ImportGraph, module: str, imported: str) -> bool:
    """Whether `from envplan import _kernel` is all that a module takes from the package's face."""
    details = graph.get_import_details(importer=module, imported=imported)
    lines = [str(detail["line_contents"]) for detail in details]
    return imported == "envplan" and all(
        line.startswith("from envplan import ") and line.split()[-1] in COMPILED for line in lines
    )


def room(module: str) -> str:
    """The folder or file of envplan that a module is in; "" for the API."""
    return module.partition(".")[2].partition(".")[0]


def circles(edges: set[tuple[str, str]]) -> list[list[str]]:
    """Groups of names that reach each other."""
    components = nx.strongly_connected_components(nx.DiGraph(edges))
    return [sorted(part) for part in components if len(part) > 1]


def test_no_module_imports_what_imports_it(imports: dict[str, set[str]]) -> None:
    assert circles({(module, other) for module, used in imports.items() for other in used}) == []


def test_no_room_imports_what_imports_it(imports: dict[str, set[str]]) -> None:
    edges = {(room(module), room(other)) for module, used in imports.items() for other in used}
    assert circles({(one, other) for one, other in edges if one != other and one}) == []


def test_rooms_import_only_earlier_rooms(imports: dict[str, set[str]]) -> None:
    level = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    rooms = {room(module) for module in imports} - {"", "schemas", *COMPILED}
    assert rooms == level.keys()
    # Rooms of one line may use each other, as long as there is no circle.
    backwards = [
        (module, other)
        for module, used in imports.items()
        for other in used
        if level.get(room(module), len(level)) < level.get(room(other), -1)
    ]
    assert backwards == []


@pytest.mark.parametrize("name", [name for layer in LAYERS for name in layer])
def test_every_folder_says_what_enters_what_leaves_and_who_may_import_it(name: str) -> None:
    face = PACKAGE / name / "__init__.py"
    if face.exists():
        text = " ".join(face.read_text().split('"""')[1].split())
        assert "Enters: " in text
        assert "Leaves: " in text
        assert "import" in text


def test_planning_loads_no_framework_driver_or_picture() -> None:
    code = (
        f"import sys, {', '.join(CORE)}\nprint([name for name in {OUTSIDE} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_loads_no_numpy() -> None:
    code = (
        "import sys\n"
        "from envplan.cli.app import run\n"
        "assert run(['--help']) == 0\n"
        "print('loaded:', [name for name in ('numpy', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded: []"


#: `folder/file.py: name` or `Name` of code, as the page of the architecture writes them.
_CODE = re.compile(r"`(?:([\w/]+\.py): )?([A-Za-z_][\w.]*)`")


def test_what_the_page_of_the_architecture_names_is_there() -> None:
    page = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    story = page[page.index("## One plan, from") : page.index("## What a change touches")]
    sources = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    defined: set[str] = set()
    for text in sources.values():
        defined.update(re.findall(r"(?:class|def) (\w+)", text))
        defined.update(re.findall(r"^    (\w+): ", text, re.MULTILINE))
    files = {path.relative_to(PACKAGE).as_posix() for path in sources}
    for file, name in _CODE.findall(story):
        assert not file or file in files, file
        if name.endswith(".py"):
            assert any(known.endswith(name) for known in files), name
        elif name[0].isupper() or file:
            for part in name.split("."):
                assert part in defined, name


#: Borders at which values of any type are at hand: JSON before it is checked, objects of Typer,
#: torch and matplotlib, and keywords that are passed on.
BORDERS = {
    "_io/documents.py: read_json",
    "_io/files.py: parse_json",
    "_io/notebook.py: drawing",
    "_io/tables.py: Table.columns",
    "check/provers.py: OpenedFile.document",
    "cli/app.py: Commands.get_command",
    "cli/help.py: Command.invoke",
    "frontier/relaxation.py: RECENT_TRACES",
    "pipeline/graph.py: Pipeline.to_job",
    "pipeline/imports/trace_events.py: TraceEvent.fields",
    "pipeline/spec.py: PipelineSpec.dag",
    "plotting/figures.py: legible_ink",
    "profile/sidecar.py: ProfileMetadata.extra",
    "request/limits/base.py: LimitOption.value_from",
    "request/limits/base.py: as_float",
    "runtime/frameworks.py: Hooks.iteration",
    "runtime/frameworks.py: Hooks.operation",
    "sweep/config.py: Sweep.grid",
}


def test_nothing_public_hands_out_values_of_any_type() -> None:
    handed_out = {
        f"{path.relative_to(PACKAGE).as_posix()}: {name}"
        for path in PACKAGE.rglob("*.py")
        for name in public_values_of_any_type(ast.parse(path.read_text(encoding="utf-8")).body)
    }
    assert handed_out - BORDERS == set()


def public_values_of_any_type(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Public functions that return, and public attributes that hold, what is annotated as Any."""
    for statement in body:
        match statement:
            case ast.ClassDef(name=name, body=inner) if not name.startswith("_"):
                yield from public_values_of_any_type(inner, f"{prefix}{name}.")
            case ast.FunctionDef(name=name, returns=annotation):
                if not name.startswith("_") and is_any(annotation):
                    yield prefix + name
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                if not name.startswith("_") and is_any(annotation):
                    yield prefix + name


def is_any(annotation: ast.expr | None) -> bool:
    """Whether Any is a part of an annotation, other than of what a function takes."""
    if annotation is None:
        return False
    if isinstance(annotation, ast.Subscript) and "Callable" in ast.unparse(annotation.value):
        return False
    if isinstance(annotation, ast.Name):
        return annotation.id == "Any"
    return any(
        is_any(child) for child in ast.iter_child_nodes(annotation) if isinstance(child, ast.expr)
    )


#: Modules that open files by themselves, and why. All others read through _io, which knows that a
#: file may be a pipe, a device or a bomb.
READS_BY_ITSELF = {
    "_io/files.py": "it is the reader",
    "cli/app.py": "opens /dev/null where a standard stream is closed",
    "devices/guard.py": "the guard opens /dev/null in the place of closed streams",
    "devices/locks.py": "locks are held open without following links; /proc says who lives",
    "devices/marks.py": "looks at the locks without following links",
    "devices/nvml.py": "/proc says which rights this process has",
    "profiling/sweep_file.py": "holds the file of a sweep open and locked to append to it",
    "profiling/waiting.py": "opens /dev/null",
    "runtime/iteration_counts.py": "shares a file of its own, open and locked",
    "runtime/run_log_file.py": "holds its log open to append to it",
    "runtime/status.py": "looks at the files of other users without following links",
    "runtime/service.py": "looks at the locks without following links",
    "sweep/running.py": "holds its journal open and locked",
}
#: Functions and methods that read files, whatever they are of; Profile.open and the like are ours.
READING = {
    "read_text",
    "read_bytes",
    "loadtxt",
    "genfromtxt",
    "fromfile",
    "open_text",
    "open_binary",
}
OWN_OPEN = {"Profile", "ServingProfile", "Trace"}


def reads_by_itself(tree: ast.AST) -> bool:
    """Whether a module opens or reads files otherwise than through _io."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="open")):
                return True
            case ast.Call(func=ast.Attribute(attr="open", value=value)):
                owner = ast.unparse(value).rpartition(".")[2]
                if owner not in OWN_OPEN:
                    return True
            case ast.Call(func=ast.Attribute(attr="load", value=ast.Name(id="json" | "tomllib"))):
                return True
            case ast.Call(func=ast.Attribute(attr="loadtxt"), args=[ast.Name(id="table"), *_]):
                pass  # of bytes that were read
            case ast.Call(func=ast.Attribute(attr=name)) if name in READING:
                return True
    return False


def test_files_are_read_by_the_one_reader() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if reads_by_itself(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found - READS_BY_ITSELF.keys() == set()
    assert READS_BY_ITSELF.keys() - found == set()  # no excuse outlives its need


def test_what_reads_by_itself_is_found() -> None:
    code = "from pathlib import Path\ndef read(path):\n    return Path(path).read_bytes()\n"
    assert reads_by_itself(ast.parse(code))
    assert not reads_by_itself(ast.parse("profile = Profile.open(path)"))
