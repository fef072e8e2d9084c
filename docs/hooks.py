"""What `make docs` generates from the code: the command-line reference and the theory's figures."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

PROFILE = "sosp24-a100-gpt3-xl-4stage"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts a page for each command and each public name into the navigation."""
    for section in config.nav or []:
        for item in (
            section.get("Reference", []) if isinstance(section.get("Reference"), list) else []
        ):
            if "Command line" in item:
                item["Command line"] = [
                    {"Overview": "reference/cli.md"},
                    *({path.removeprefix("envplan "): page_of(path)} for path, _ in all_commands()),
                ]
            if "Python" in item:
                item["Python"] = [
                    {"Overview": "reference/api.md"},
                    *({name: f"reference/python/{name}.md"} for name in public_names()),
                ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages and figures to the site."""
    pages = {"reference/cli.md": cli_overview()}
    pages |= {page_of(path): "\n".join(section(path, command)) for path, command in all_commands()}
    for name in public_names():
        pages[f"reference/python/{name}.md"] = f"# envplan.{name}\n\n::: envplan.{name}\n"
    for page, content in pages.items():
        files.append(File.generated(config, page, content=content))
    for name, figure in figures().items():
        files.append(File.generated(config, f"images/{name}", content=figure))
    return files


def public_names() -> list[str]:
    """What `import envplan` gives, classes first."""
    import envplan

    names = [name for name in envplan.__all__ if not name.startswith("_")]
    return sorted(names, key=lambda name: (not name[0].isupper(), name.lower()))


def page_of(path: str) -> str:
    """The page of a command."""
    return f"reference/cli/{path.removeprefix('envplan ').replace(' ', '-')}.md"


def cli_overview() -> str:
    """The commands in the order of work, and what all of them share."""
    rows = [
        f"| [{path}]({page_of(path).removeprefix('reference/')}) | "
        f"{cell(command.get_short_help_str(100))} |"
        for path, command in all_commands()
    ]
    return "\n".join(
        [
            "# Command line",
            "",
            "Exit codes: 0 done, 1 the question has no answer (the message says the nearest), 2",
            "bad input or usage, 130 interrupted. Errors are one line on stderr.",
            "",
            "`--json` prints one JSON document with the name of its schema instead of tables; an",
            "error is one, too (`envplan/error/v1`). `envplan --color never COMMAND`, or the",
            "variable `NO_COLOR`, turns colours off. `envplan --install-completion` teaches the",
            "shell commands, options, profiles and files.",
            "",
            "Times take units (`5ms`, `7.5s`, `2h`, `1d12h`), and so do counts (`100k`, `15T`),",
            "powers (`1.2kW`) and energies (`5kJ`, `0.2kWh`). A number alone is in seconds, watts",
            "or joules; only `--switch-latency` and `--min-dwell`, which were in milliseconds",
            "before they took units, still read it so, with a warning.",
            "",
            "Parallelism is called the same everywhere: `--pp` stages, `--vp` model chunks,",
            "`--tp` tensor, `--cp` context",
            "and `--dp` data parallelism.",
            "",
            "| command | |",
            "| --- | --- |",
            *rows,
            "",
        ]
    )


def all_commands() -> list[tuple[str, Any]]:
    """All commands in the order of work, with what to type for them."""
    import typer

    from envplan.cli.app import app

    root: Any = typer.main.get_command(app)
    return commands("envplan", root)


def commands(path: str, command: Any) -> list[tuple[str, Any]]:
    """All commands that do something themselves, with what to type for them."""
    if not hasattr(command, "list_commands"):
        return [(path, command)]
    return [
        found
        for name in command.list_commands(None)
        for found in commands(f"{path} {name}", command.get_command(None, name))
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
    parts = [f"# {path}", "", f"`{path} {arguments}`".replace(" `", "`"), "", about.strip(), ""]
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
    from envplan.plotting.figures import render
    from envplan.plotting.frontier import frontier_figure
    from envplan.plotting.timeline import timeline_figure

    profile = envplan.Profile.builtin(PROFILE)
    frontier = envplan.trace_frontier(envplan.Pipeline("1f1b", 4, 8), profile)
    before = envplan.simulate(frontier.max_frequency_plan(), profile)
    after = envplan.simulate(frontier.plan(), profile)
    along = frontier.sample_plans(17)
    return {
        "frontier.svg": render(frontier_figure(frontier, along), "svg"),
        "timeline.png": render(timeline_figure(after, before=before), "png"),
        "compare.svg": render(frontier_figure(frontier, along, envplan.compare(frontier)), "svg"),
    }
