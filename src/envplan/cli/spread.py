"""Options in groups: dataclasses whose fields become options of a command.

    @dataclass(frozen=True, kw_only=True)
    class TargetOptions:
        slowdown: Annotated[float | None, typer.Option(parser=quantity(PERCENT))] = None

    def solve(target: TargetOptions, output: OutputOption = Path("plan.json")) -> None: ...

Typer knows parameters and no groups. `spread_options` makes a function of the parameters `slowdown`
and `output`, which puts values back into their groups before it calls the command. Every command
also takes --json and --quiet.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

from envplan.cli.invocation import Invocation, invocation
from envplan.cli.shared import JsonOption, QuietOption
from envplan.cli.types import TERMINAL, InputFile, OutputFile


def spread_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command as Typer takes it, with the fields of its groups as parameters.

    Fields and parameters keep their annotations and defaults. A group may hold groups. The files
    that options name are checked before the command begins.

    Args:
        command: a function whose parameters are annotated for Typer, or are groups.
    """
    hints = get_type_hints(command, include_extras=True)
    command_parameters = inspect.signature(command).parameters
    parameters: list[inspect.Parameter] = []
    for name, parameter in command_parameters.items():
        parameters += _spread(name, hints[name], parameter.default)
    parameters += _spread("json", JsonOption, False)
    parameters += _spread("quiet", QuietOption, False)

    def run(**values: Any) -> None:
        call = invocation()
        _note_files(call, parameters, values)
        call.json = values["json"]
        call.quiet = values["quiet"]
        arguments = {}
        for name in command_parameters:
            arguments[name] = _gather(name, hints[name], values)
        command(**arguments)

    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _is_group(annotation: Any) -> bool:
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def _spread(name: str, annotation: Any, default: Any) -> list[inspect.Parameter]:
    """The parameters that a parameter or field stands for: those of a group, else itself."""
    if not _is_group(annotation):
        return [_keyword_parameter(name, annotation, default)]
    hints = get_type_hints(annotation, include_extras=True)
    parameters: list[inspect.Parameter] = []
    for field in dataclasses.fields(annotation):
        parameters += _spread(field.name, hints[field.name], field.default)
    return parameters


def _keyword_parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    if default is dataclasses.MISSING:  # a field without a default
        default = inspect.Parameter.empty
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=default, annotation=annotation)


def _gather(name: str, annotation: Any, values: dict[str, Any]) -> Any:
    """The value of a parameter or field: a group of its fields' values, else its own."""
    if not _is_group(annotation):
        return values[name]
    hints = get_type_hints(annotation)
    fields = {}
    for field in dataclasses.fields(annotation):
        fields[field.name] = _gather(field.name, hints[field.name], values)
    return annotation(**fields)


def _note_files(
    call: Invocation, parameters: list[inspect.Parameter], values: dict[str, Any]
) -> None:
    """Note which files the options name to be read and written.

    Raises:
        InputError: an output cannot be written, or is an input, too.
    """
    inputs: list[str | Path] = []
    outputs: list[Path] = []
    for parameter in parameters:
        value = values[parameter.name]
        if value is None:
            continue
        files = value if isinstance(value, list) else [value]
        if _names_output(parameter.annotation):
            outputs += [file for file in files if file != TERMINAL]
        elif _names_input(parameter.annotation):
            inputs += files
    call.will_read(*inputs)
    call.will_write(*outputs)


def _names_output(annotation: Any) -> bool:
    """Whether an option names a file to be written."""
    declaration, *_ = annotation.__metadata__
    return isinstance(declaration.parser, OutputFile)


def _names_input(annotation: Any) -> bool:
    """Whether an option or argument names a file to be read, which no output may replace."""
    _, *marks = annotation.__metadata__
    return any(isinstance(mark, InputFile) for mark in marks)
