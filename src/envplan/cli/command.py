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
from typing import Annotated, Any, Final, TypeVar, dataclass_transform, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import ArgumentInfo

from envplan._io.files import check_writable, same_file
from envplan.cli import state
from envplan.cli.types import InputFile
from envplan.errors import InputError
from envplan.quantities import COUNT, ENERGY, PERCENT, POWER, TIME, WHOLE, Quantity

#: The panels of `--help` that come first and last; others keep the order of their options.
_FIRST: Final = ("Arguments", "Most used", "Job", "Target", "Slow clocks", "Noise", "Money")
_LAST: Final = "Output"
_OPTIONAL_FILE: Final = "[FILE]"
#: What help says of a file that is written: its types, and what it is called without a name.
_FILE_TYPES: Final = re.compile(r": ((?:\.\w+(?:, | or )?)+)")
_WITHOUT_A_NAME: Final = re.compile(r"without a name: ([\w.-]+\w)")
_SAYS_DEFAULT: Final = "efault: "
#: What an option takes whose spec ends so.
_QUANTITIES: Final[dict[str, Any]] = {
    "TIME": TIME, "PCT": PERCENT, "W": POWER, "J": ENERGY, "N": COUNT, "M": COUNT
}  # fmt: skip

Kind = TypeVar("Kind", bound=type)
Declaring = TypeVar("Declaring", bound=Callable[..., Any])
#: Turns the text that an option is given, and the option's name, into its value.
Parser = Callable[[str, str], Any]
#: Options and arguments by the names of their fields.
Table = dict[str, Any]


def argument(
    name: str,
    about: str,
    default: Any = dataclasses.MISSING,
    **more: Any,
) -> Any:
    """An argument: the value of a field or parameter.

    Args:
        default: the value where the argument is left out; without one it must be given.
        more: for typer.Argument.
    """
    shown = _SAYS_DEFAULT not in about
    declared: Any = typer.Argument(metavar=name, help=about, show_default=shown, **more)
    return dataclasses.field(default=default, metadata={"declared": declared})


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
            declared[spec.lower()] = argument(spec, about).metadata["declared"]
            continue
        long = [name.split("/")[0] for name in names if name.startswith("--")]
        fields = [name.removeprefix("--").replace("-", "_") for name in long]
        takes = _QUANTITIES.get(spec.split()[-1])
        if types := _FILE_TYPES.search(about):
            bare = _WITHOUT_A_NAME.search(about)
            takes = _file_of(re.findall(r"\.\w+", types[1]), bare[1] if bare else "")
        takes = next((parsers[field] for field in fields if field in parsers), takes)
        # The default is that of the field or parameter; Typer adds it where the help says none.
        option: Any = typer.Option(
            *names,
            help=about,
            metavar=" ".join(spec.split()[len(names) :]) or None,
            rich_help_panel=panel,
            parser=_of_text(takes, "/".join(long)) if takes else None,
            show_default=_SAYS_DEFAULT not in about,
        )
        option.writes = "output" in fields or hasattr(takes, "writes")
        option.reads = spec.endswith(" FILE") and not option.writes
        declared |= dict.fromkeys(fields, option)
    return declared


def _of_text(takes: Quantity | Parser, label: str) -> Callable[[Any], Any]:
    """What Typer calls with the text that an option is given, and also with its default."""
    parse = takes.parse if isinstance(takes, Quantity) else takes
    return lambda given: parse(given, label) if isinstance(given, str) else given


def takes(table: str, **parsers: Any) -> Callable[[Declaring], Declaring]:
    """Declare parameters of a function, or fields of a dataclass, by a table; see `options`."""
    own = read_table(table, parsers)

    def declaring(thing: Declaring) -> Declaring:
        held = {name for kind in getattr(thing, "__mro__", [thing]) for name in _annotated(kind)}
        used = {id(own[name]) for name in held & own.keys()}
        lost = [name for name, info in own.items() if id(info) not in used]
        assert not lost, f"{thing.__name__} has no place for {', '.join(lost)}"
        thing.declared = SHARED | getattr(thing, "declared", {}) | own  # type: ignore[attr-defined]
        return thing

    return declaring


def _annotated(thing: Any) -> Iterable[str]:
    return getattr(thing, "__annotations__", {})


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

    def made(kind: Kind) -> Kind:
        frozen: Any = takes(table, **parsers)(
            dataclasses.dataclass(frozen=True, kw_only=True)(kind)
        )
        fields = dataclasses.fields(frozen)
        given = {field.name: field.metadata["declared"] for field in fields if field.metadata}
        frozen.declared |= given
        return frozen  # type: ignore[no-any-return]

    return made


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


def one_of(*choices: str) -> Parser:
    """What an option takes that has one of these values."""

    def chosen(text: str, name: str) -> str:
        if text not in choices:
            raise InputError(f"{name} must be {either(choices)}, not {text}")
        return text

    return chosen


class Numbers(list[int]):
    """Whole numbers that one option lists. Typer takes a plain list for an option given often."""


def numbers(example: str, least: int = 1, most: int = 2**31 - 1) -> Parser:
    """What an option takes that lists whole numbers, separated by commas."""
    what = f"numbers separated by commas, as in {example}"
    each = dataclasses.replace(WHOLE, what=what, least=least, most=most)
    return lambda text, name: Numbers(int(each.parse(part, name)) for part in text.split(","))


def _file_of(types: Sequence[str], default: str) -> Parser:
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
            is_argument = isinstance(group.declared[field.name], ArgumentInfo)
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
        for name in sorted(panels, key=_LAST.__eq__):
            if panels[name]:
                with formatter.section(name):
                    formatter.write_dl(panels[name])


class Group(TyperGroup):
    """A command of commands: bare, it prints its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        bare = not args and not self.invoke_without_command
        return super().parse_args(ctx, ["--help"] if bare else args)


def add(app: typer.Typer, function: Callable[..., None], name: str | None = None) -> None:
    """Make a function a command of an app.

    For each parameter that is a dataclass, the command has the fields of it as parameters. Fields
    and parameters keep their types and defaults; no name may come twice.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, type[Any]] = {}
    # Of each option its name, type, default and what Typer shall know of it.
    known: list[tuple[str, Any, Any, Any]] = []
    for own, parameter in inspect.signature(function).parameters.items():
        default, kind = parameter.default, hints[own]
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            groups[own], held = kind, get_type_hints(kind, include_extras=True)
            for field in dataclasses.fields(kind):
                inner = held[field.name]
                declared = annotated(inner) or getattr(kind, "declared", {})[field.name]
                known.append((field.name, bare_type(inner), field.default, declared))
        elif (info := annotated(kind)) is not None:
            known.append((own, bare_type(kind), default, info))
        elif isinstance(default, dataclasses.Field):
            known.append((own, kind, default.default, default.metadata["declared"]))
        else:
            known.append((own, kind, default, getattr(function, "declared", SHARED)[own]))
    known += [(own, bool, False, SHARED[own]) for own in ("json", "quiet")]

    def command(**given: Any) -> None:
        state.inputs, state.outputs, outputs = [], [], []
        for own, _, _, declared in known:
            for file in given[own] if isinstance(given[own], list) else [given[own]]:
                if getattr(declared, "writes", False) and file is not None:
                    outputs.append(file)
                elif getattr(declared, "reads", False) and file is not None:
                    state.inputs.append(file)
        will_write(*outputs)
        state.json, state.quiet = given.pop("json"), given.pop("quiet")
        built = {
            own: kind(**{field.name: given.pop(field.name) for field in dataclasses.fields(kind)})
            for own, kind in groups.items()
        }
        function(**built, **given)

    empty = inspect.Parameter.empty
    keywords = [
        inspect.Parameter(
            own,
            inspect.Parameter.KEYWORD_ONLY,
            default=empty if default in (dataclasses.MISSING, inspect._empty) else default,
            annotation=Annotated[kind, declared],
        )
        for own, kind, default, declared in known
    ]
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in keywords}
    app.command(name, cls=Command)(command)


def annotated(hint: Any) -> Any:
    """The option or argument of `Annotated[T, typer.Option(...)]`, else None."""
    info, *marks = getattr(hint, "__metadata__", (None,))
    if info is not None:
        info.reads = any(isinstance(mark, InputFile) for mark in marks)
        info.writes = getattr(info, "writes", hasattr(info.parser, "writes"))
    return info


def bare_type(hint: Any) -> Any:
    """T of `Annotated[T, ...]`."""
    return getattr(hint, "__origin__", hint) if hasattr(hint, "__metadata__") else hint


def group(about: str, functions: Mapping[str, Callable[..., None]]) -> typer.Typer:
    """A command of commands, by their names; `about` is its help."""
    made = typer.Typer(cls=Group, rich_markup_mode=None, add_completion=False, help=about)
    for name, function in functions.items():
        add(made, function, name)
    return made


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
