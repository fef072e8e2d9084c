"""What `make docs` generates from the code: the command-line reference and the theory's figures."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

PROFILE = "sosp24-a100-gpt3-xl-4stage"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages and figures to the site."""
    files.append(File.generated(config, "reference/cli.md", content=cli_reference()))
    for name, content in figures().items():
        files.append(File.generated(config, f"images/{name}", content=content))
    return files


def cli_reference() -> str:
    """Every command with its help and its options, as the program itself has them."""
    import typer

    from envplan.cli.app import app

    root: Any = typer.main.get_command(app)
    parts = [
        "# Command line",
        "",
        "Exit codes: 0 done, 1 the question has no answer, 2 bad input.",
        "",
    ]
    for path, command in commands("envplan", root):
        parts += section(path, command)
    return "\n".join(parts)


def commands(path: str, command: Any) -> list[tuple[str, Any]]:
    """All commands that do something themselves, with what to type for them."""
    inner = getattr(command, "commands", None)
    if inner is None:
        return [(path, command)]
    return [
        found for name, sub in sorted(inner.items()) for found in commands(f"{path} {name}", sub)
    ]


def section(path: str, command: Any) -> list[str]:
    """One command's part of the page."""
    about, _, example = (
        inspect.cleandoc(command.help or "").replace("\b\n", "").partition("Example:\n")
    )
    arguments = " ".join(
        param.metavar or param.name.upper()
        for param in command.params
        if param.param_type_name == "argument"
    )
    parts = [f"## {path}", "", f"`{path} {arguments}`".replace(" `", "`"), "", about.strip(), ""]
    if example.strip():
        parts += ["```", inspect.cleandoc(example), "```", ""]
    rows = [
        record for param in command.params if (record := param.get_help_record(_context(command)))
    ]
    if rows:
        parts += ["| option | |", "| --- | --- |"]
        parts += [f"| `{names}` | {cell(text)} |" for names, text in rows]
    return [*parts, ""]


def _context(command: Any) -> Any:
    import typer

    return typer.Context(command, info_name=command.name)


def cell(text: str) -> str:
    """Text as the cell of a table."""
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def figures() -> dict[str, bytes]:
    """The figures of the theory page, drawn from a built-in profile."""
    import envplan
    from envplan.plotting.figures import made
    from envplan.plotting.frontier import frontier_figure
    from envplan.plotting.timeline import timeline_figure

    profile = envplan.Profile.builtin(PROFILE)
    frontier = envplan.trace_frontier(envplan.Pipeline("1f1b", 4, 8), profile)
    before = envplan.simulate(frontier.max_frequency_plan(), profile)
    after = envplan.simulate(frontier.plan(), profile)
    along = frontier.sample_plans(17)
    return {
        "frontier.svg": made(frontier_figure(frontier, along), "svg"),
        "timeline.png": made(timeline_figure(after, before=before), "png"),
        "compare.svg": made(frontier_figure(frontier, [], envplan.compare(frontier)), "svg"),
    }
