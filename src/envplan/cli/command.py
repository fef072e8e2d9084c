"""Commands as Typer sees them: groups of options, help in panels, a `--plot` without a name.

A command takes its options in groups, each a dataclass that a table declares (see `options`):

    def frontier(job: JobOptions, plans: int = 33) -> None: ...

`add` gives such a function to Typer with the fields of its groups as options of its own, and with
`--json` and `--quiet`. Files that options name are checked before the function begins.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Final,
    TypeVar,
    dataclass_transform,
    get_type_hints,
)

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import ArgumentInfo

from envplan._files import check_writable, same_file
from envplan.cli import state
from envplan.errors import InputError
from envplan.quantities import COUNT, ENERGY, PERCENT, POWER, TIME, WHOLE, Quantity

#: The panels of `--help` that come first and last; others keep the order of their options.
_FIRST: Final = ("Arguments", "Most used", "Job", "Target", "Slow clocks", "Noise", "Money")
_LAST: Final = "Output"
_OPTIONAL_FILE: Final = "[FILE]"
#: What help says of a file that is written: its types, and what it is called without a name.
_FILE_TYPES: Final = re.compile(r": ((?:\.\w+(?:, | or )?)+)")
_WITHOUT_A_NAME: Final = re.compile(r"without a name: ([\w.-]+\w)")
_DECLARED: Final = "declared"
_SAYS_DEFAULT: Final = "efault: "
#: What an option takes whose spec ends so.
_QUANTITIES: Final[dict[str, Any]] = {
    "TIME": TIME, "PCT": PERCENT, "W": POWER, "J": ENERGY, "N": COUNT, "M": COUNT
}  # fmt: skip

Kind = TypeVar("Kind", bound=type)
Function = TypeVar("Function", bound=Callable[..., None])
#: Options and arguments by the names of their fields.
Table = dict[str, Any]


def argument(
    name: str,
    about: str,
    default: Any = dataclasses.MISSING,
    *,
    in_place: bool = False,
    **more: Any,
) -> Any:
    """An argument: the value of a field or parameter.

    Args:
        default: the value where the argument is left out; without one it must be given.
        in_place: the file that it names may be an output, too.
        more: for typer.Argument.
    """
    said = _SAYS_DEFAULT in about
    declared: Any = typer.Argument(metavar=name, help=about, show_default=not said, **more)
    declared.in_place = in_place
    return dataclasses.field(default=default, metadata={_DECLARED: declared})


def read_table(table: str, parsers: Mapping[str, Any]) -> Table:
    """What a table declares, by the name of each option as a field, every one of its names."""
    declared: Table = {}
    panel = ""
    for line in re.sub(r"\n {3,}", " ", textwrap.dedent(table).strip()).splitlines():
        if not line.startswith(" "):
            panel = line.removesuffix(":")
            continue
        spec, _, about = line.strip().partition("  ")
        names = [word.rstrip(",") for word in spec.split() if word.startswith("-")]
        if not names:
            declared[spec.lower()] = argument(spec, about).metadata[_DECLARED]
            continue
        long = [name.split("/")[0] for name in names if name.startswith("--")]
        fields = [name.removeprefix("--").replace("-", "_") for name in long]
        usual = _QUANTITIES.get(spec.split()[-1])
        if types := _FILE_TYPES.search(about):
            bare = _WITHOUT_A_NAME.search(about)
            usual = _file_of(re.findall(r"\.\w+", types[1]), bare[1] if bare else "")
        takes = next((parsers[field] for field in fields if field in parsers), usual)
        # The default is that of the field or parameter; Typer adds it where the help says none.
        option: Any = typer.Option(
            *names,
            help=about,
            metavar=" ".join(spec.split()[len(names) :]) or None,
            rich_help_panel=panel,
            parser=_parser(takes, "/".join(long)) if takes else None,
            show_default=_SAYS_DEFAULT not in about,
        )
        option.writes = "output" in fields or hasattr(takes, "writes")
        declared |= dict.fromkeys(fields, option)
    return declared


def _parser(takes: Any, label: str) -> Callable[[Any], Any]:
    """What turns the text that an option is given into its value."""
    parse = takes.parse if isinstance(takes, Quantity) else takes

    def parser(given: Any) -> Any:
        return parse(given, label) if isinstance(given, str) else given

    return parser


def _check_used(declared: Table, names: Iterable[str], where: str) -> None:
    """Find options that no field or parameter of a group or command receives."""
    used = {id(declared[name]) for name in names if name in declared}
    lost = [name for name, info in declared.items() if id(info) not in used]
    assert not lost, f"{where} has no place for {', '.join(lost)}"


@dataclass_transform(kw_only_default=True, frozen_default=True)
def options(table: str = "", **parsers: Any) -> Callable[[Kind], Kind]:
    """Make a class a frozen dataclass of options, which a table declares as `--help` shows them.

        @options(
            \"""
            Most used:
              -o, --output FILE  Where the plan goes: .json.
              --slowdown PCT  Least energy at most PCT percent above T_min.
            \""",
            slowdown=PERCENT.within(0, 100),
        )
        class Options:
            output: Path = Path("plan.json")
            slowdown: float | None = None

    A panel ends with a colon; two spaces stand before the help, which goes on where a line is
    indented further. TIME, PCT, W, J, N and M are quantities. A file is written where types of it
    follow a colon. A name in capitals is an argument.

    Args:
        parsers: for each field what turns text and the option's name into its value, where it is
            something else; None: the type does.
    """
    own = read_table(table, parsers)

    def made(kind: Kind) -> Kind:
        frozen: Any = dataclasses.dataclass(frozen=True, kw_only=True)(kind)
        fields = {field.name: field for field in dataclasses.fields(frozen)}
        _check_used(own, fields, kind.__name__)
        given = {name: f.metadata[_DECLARED] for name, f in fields.items() if f.metadata}
        frozen.declared = SHARED | getattr(kind, _DECLARED, {}) | own | given
        return frozen  # type: ignore[no-any-return]

    return made


def takes(table: str, **parsers: Any) -> Callable[[Function], Function]:
    """The same for parameters of a function."""

    def declaring(function: Function) -> Function:
        own = read_table(table, parsers)
        _check_used(own, function.__annotations__, function.__name__)
        function.declared = own  # type: ignore[attr-defined]
        return function

    return declaring


#: Options for every field and parameter of their name that nothing else declares.
SHARED: Final[Table] = read_table(
    """
    Most used:
      -m, --microbatches M  Microbatches per iteration; default: what the profile's sidecar says.
    Job:
      -s, --pp, --stages N  Pipeline stages (ranks of a pipeline); default: the profile's stages
          over --vp.
      --vp, --chunks N  Model chunks per pipeline stage, for interleaved, looped-bfs and
          interleaved-zb; the profile has a stage for each. Default: 1; zb-v and dualpipe-v always
          have 2.
      --microbatch-group N  Schedule interleaved: microbatches that go through a chunk before the
          next, Megatron's microbatch_group_size_per_vp_stage. Default: the number of stages.
      --tp, --gpus-per-stage N  GPUs that run each stage together (tensor parallel); default: what
          the profile or plan says, else 1.
      --cp N  Context-parallel size, by which a stage has further GPUs; default: as --tp.
      --dp, --replicas N  Data-parallel replicas of the pipeline; default: as --tp.
      --p2p-latency TIME  How long a transfer between stages takes, as in 2ms or 0.002 (seconds);
          default: what the profile's sidecar says, else 0.
    Target:
      --reconfigure HOW  With planner envpipe: balanced (the default) or greedy.
    Slow clocks:
      --switch-latency TIME  A clock comes so long after it is asked for, as in 20ms or 20
          (milliseconds).
      --min-dwell TIME  No stage asks for another clock within TIME, as in 100ms or 100
          (milliseconds).
    Noise:
      --noise PCT  Standard deviation of times; with --robust, default: the profile's column
          time_std.
    Output:
      --profile PROFILE  The profile that the file was made from, if it has moved.
      --force  Go on though the profile has changed since.
      -j, --jobs N  Cores to use; default: all there are. Answers do not depend on it.
      --json  Print JSON instead of a table; errors, too.
      -q, --quiet  Print nothing but errors; files are still written.
    """,
    {
        "switch_latency": TIME.plainly("ms").within(0, 3600),
        "min_dwell": TIME.plainly("ms").within(0, 3600),
        "noise": PERCENT.within(0, 100),
    },
)


def one_of(*choices: str) -> Callable[[str, str], str]:
    """What an option takes that has one of these values."""

    def chosen(text: str, name: str) -> str:
        if text not in choices:
            raise InputError(f"{name} must be {either(choices)}, not {text}")
        return text

    return chosen


class Numbers(list[int]):
    """Whole numbers that one option lists. Typer takes a plain list for an option given often."""


def numbers(example: str, least: int = 1, most: int = 2**31 - 1) -> Callable[[str, str], Numbers]:
    """What an option takes that lists whole numbers, separated by commas."""
    what = f"numbers separated by commas, as in {example}"
    each = dataclasses.replace(WHOLE, what=what, least=least, most=most)

    def listed(text: str, name: str) -> Numbers:
        return Numbers(int(each.parse(part, name)) for part in text.split(","))

    return listed


def _file_of(types: Sequence[str], default: str) -> Callable[[str, str], Path]:
    """What an option takes that names a file of one of these types, to be written.

    Args:
        default: the file that an empty text names; "" where none does.
    """

    def named(text: str, name: str) -> Path:
        path = Path(text or default)
        if path.suffix.lower() not in types:
            before = f"; other arguments go before {name}" if default else ""
            raise InputError(f"{name} {path} must end in {' or '.join(types)}{before}")
        return path

    named.writes = True  # type: ignore[attr-defined]
    return named


def dashed(name: str) -> str:
    """What to type for an option, by the name of its field."""
    return f"--{name.replace('_', '-')}"


def either(names: Iterable[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def given(group: Any, names: str = "") -> dict[str, Any]:
    """The options of a group that differ from their defaults, by their names as typed.

    Args:
        names: of its fields, those that are meant; default: all.
    """
    usual = {field.name: field.default for field in dataclasses.fields(group)}
    values = {name: getattr(group, name) for name in names.split() or usual}
    return {dashed(name): value for name, value in values.items() if value != usual[name]}


def refuse(options: Iterable[str], why: str) -> None:
    """Raises: InputError: there is an option, which `why` says more of."""
    for name in options:
        raise InputError(f"{name} {why}")


def refuse_both(options: Iterable[str]) -> None:
    """Raises: InputError: of options that exclude each other there are two."""
    for first, second in pairwise(options):
        raise InputError(f"{first} and {second} exclude each other; give one of them")


def needs(group: Any, **needed: str) -> None:
    """Raises: InputError: an option is given without any of the others that it goes with."""
    for name, others in needed.items():
        if not given(group, others):
            refuse(given(group, name), f"goes with {either(map(dashed, others.split()))}")


def typed(group: Any) -> list[str]:
    """What to type for the options and arguments of a group that differ from their defaults."""
    words: list[str] = []
    for field in dataclasses.fields(group):
        for name, value in given(group, field.name).items():
            text = ",".join(map(str, value)) if isinstance(value, Numbers) else str(value)
            is_argument = isinstance(type(group).declared[field.name], ArgumentInfo)
            words += [*([] if is_argument else [name]), *([] if value is True else [text])]
    return words


class Command(TyperCommand):
    """A command with help in panels, and with options that may stand without their file name."""

    def invoke(self, ctx: Any) -> Any:
        state.command = "-".join(ctx.command_path.split()[1:])
        return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        bare = {name for one in self.params if one.metavar == _OPTIONAL_FILE for name in one.opts}
        named = [
            f"{argument}=" if argument in bare and following.startswith("-") else argument
            for argument, following in pairwise([*args, "--"])
        ]
        return super().parse_args(ctx, named)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {name: [] for name in _FIRST}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is None:
                continue
            panel = getattr(param, "rich_help_panel", None) or _LAST
            if param.param_type_name == "argument":
                panel, record = _FIRST[0], (param.metavar or record[0], record[1])
            panels.setdefault(panel, []).append(record)
        last = panels.pop(_LAST)
        for name, rows in {**panels, _LAST: last}.items():
            if rows:
                with formatter.section(name):
                    formatter.write_dl(rows)


class Group(TyperGroup):
    """A command of commands: bare, it prints its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not self.invoke_without_command:
            args = ["--help"]
        return super().parse_args(ctx, args)


def add(app: typer.Typer, function: Callable[..., None], name: str | None = None) -> None:
    """Make a function a command of an app.

    For each parameter that is a dataclass, the command has the fields of it as parameters. Fields
    and parameters keep their types and defaults; no name may come twice.
    """
    hints = get_type_hints(function)
    table = SHARED | getattr(function, _DECLARED, {})
    groups: dict[str, type[Any]] = {}
    keywords: list[inspect.Parameter] = []

    def take(name: str, kind: Any, default: Any, declared: Table) -> None:
        keyword = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
        annotation = Annotated[kind, declared[name]]
        default = keyword.empty if default is dataclasses.MISSING else default
        keywords.append(keyword.replace(default=default, annotation=annotation))

    for own, parameter in inspect.signature(function).parameters.items():
        default, kind = parameter.default, hints[own]
        if hasattr(kind, _DECLARED):
            groups[own] = kind
            held = get_type_hints(kind)
            for field in dataclasses.fields(kind):
                take(field.name, held[field.name], field.default, kind.declared)
        elif isinstance(default, dataclasses.Field):
            take(own, kind, default.default, {own: default.metadata[_DECLARED]})
        else:
            take(own, kind, default, table)
    take("json", bool, False, SHARED)
    take("quiet", bool, False, SHARED)

    def command(**given: Any) -> None:
        _note_files(keywords, given)
        state.json, state.quiet = given.pop("json"), given.pop("quiet")
        built = {
            name: kind(**{f.name: given.pop(f.name) for f in dataclasses.fields(kind)})
            for name, kind in groups.items()
        }
        function(**built, **given)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in keywords}
    app.command(name, cls=Command)(command)


def group(about: str, functions: Mapping[str, Callable[..., None]]) -> typer.Typer:
    """A command of commands, by their names; `about` is its help."""
    made = typer.Typer(cls=Group, rich_markup_mode=None, add_completion=False, help=about)
    for name, function in functions.items():
        add(made, function, name)
    return made


def _note_files(keywords: Iterable[inspect.Parameter], given: Mapping[str, Any]) -> None:
    """Keep in mind what a command may read and write, by the values of its options.

    Raises: InputError: as for will_write.
    """
    state.inputs, state.outputs, outputs = [], [], []
    for keyword in keywords:
        (declared,) = keyword.annotation.__metadata__
        value = given[keyword.name]
        for file in value if isinstance(value, list) else [value]:
            if getattr(declared, "writes", False) and file is not None:
                outputs.append(file)
            elif isinstance(file, (str, Path)) and not getattr(declared, "in_place", False):
                state.inputs.append(file)
    will_write(*outputs)


def will_write(*outputs: Path) -> None:
    """Refuse outputs that cannot or must not be written, before any work is done for them.

    Those that options name are checked before a command begins. `answer` lists all.

    Raises:
        InputError: one cannot be written, is an input, or is named twice.
    """
    for output in outputs:
        check_writable(output)
        known = [path.resolve() for path in state.outputs]
        if output.resolve() in known and not output.is_char_device():
            raise InputError("is named for two outputs; choose another file", path=output)
        state.outputs.append(output)
    refuse_overwriting(*state.inputs)


def refuse_overwriting(*inputs: str | Path | None) -> None:
    """Keep a slip of the hand from replacing a file by what is made from it.

    Raises:
        InputError: an output is one of these.
    """
    for output in state.outputs:
        if any(file is not None and same_file(file, output) for file in inputs):
            raise InputError("is an input itself; choose another output file", path=output)
