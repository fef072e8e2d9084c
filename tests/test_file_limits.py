"""Files that never end, that unpack without end, or that ask for much in a few words."""

from __future__ import annotations

import gzip
import io
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from envplan._io import files
from envplan._io.files import MOST_LEVELS, ReadLimits, parse_json, read_bounded, stream
from envplan._io.markup import MAX_YAML_BYTES, parse_yaml, read_toml
from envplan._io.tables import MAX_ROWS
from envplan.errors import InputError
from envplan.profile import Profile
from envplan.sweep.running import open_journal

RELEASED = Path(__file__).parent / "fixtures" / "v0.1"
PROFILE = RELEASED / "profile.csv"
PLAN = json.loads((RELEASED / "plan.json").read_bytes())
PLAN["job"]["microbatches"] = 250_000
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 100_000,
    "intermediate_size": 14336,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
}
NINES = b"9" * 5000
DEEP = b"[" * 100_000
MEGATRON = ("schedule", "import", "FILE", "--format", "megatron", "-m", "8")
CHROME = ("schedule", "import", "FILE", "--format", "chrome-trace")
CHROME += ("--map", "forward=f", "--map", "backward=b")

#: Name and content of a file, and the command that reads it as FILE.
SMALL_FILES: list[tuple[str, bytes, tuple[str, ...]]] = [
    ("a.csv", b"0F1048577\n", ("schedule", "import", "FILE")),
    ("b.csv", b"0F9999999,0B9999999\n", ("schedule", "import", "FILE")),
    ("a.json", b'{"pipeline_model_parallel_size": 9223372036854775807}', MEGATRON),
    ("b.json", b'{"pipeline_model_parallel_size": 8, "num_layers": 1e300}', MEGATRON),
    ("c.json", b'{"pipeline_model_parallel_size": 131000}', MEGATRON),
    ("digits.yaml", b"pipeline_model_parallel_size: " + NINES, MEGATRON),
    ("hex.yaml", b"pipeline_model_parallel_size: 0x" + b"f" * 5000, MEGATRON),
    ("date.yaml", b"pipeline_model_parallel_size: 2026-99-99", MEGATRON),
    ("deep.yaml", b"a: " + DEEP, MEGATRON),
    ("flow.yaml", b"{a: " * 3000, MEGATRON),
    ("config.json", json.dumps(CONFIG).encode(), ("profile", "--model", "FILE", "--gpu", "h100")),
    ("digits.json", b'{"schema": "envplan/plan/v1", "x": ' + NINES + b"}", ("check", "FILE")),
    ("plan.json", json.dumps(PLAN).encode(), ("check", "FILE", "--profile", str(PROFILE))),
    ("deep.json", DEEP, ("check", "FILE")),
    ("nested.json", b"[" * 500 + b"]" * 500, ("check", "FILE")),
    ("lists.json", b"[" + b"[]," * 3_000_000 + b"[]]", ("check", "FILE")),
    ("digits.csv", b"stage,instruction,frequency,time,energy\n0,f," + NINES, ("check", "FILE")),
    ("rows.csv", b"stage,instruction,frequency,time,energy\n" + b"0\n" * 5_000_000,
     ("check", "FILE")),
    ("deep.toml", b"a = " + DEEP, ("sweep", "FILE")),
    ("digits.toml", b"a = " + NINES, ("sweep", "FILE")),
    ("key.toml", b"[" + b"a." * 100_000 + b"a]", ("sweep", "FILE")),
    ("site.toml", b"[" + b"a." * 100_000 + b"a]", ("site", "FILE", "--power", "1000")),
    ("trace.json", b'[{"ph": "X", "ts": 1e999999999, "dur": 1, "name": "f"}]', CHROME),
    ("ts.json", b'[{"ph": "X", "ts": ' + NINES + b', "dur": 1, "name": "f"}]', CHROME),
]  # fmt: skip

#: Runs commands one after the other; what each one printed, and how it ended. The peak is that of
#: this process: ru_maxrss also knows what its parent had as it was started.
RUN_ALL = """
import contextlib, io, json, re, sys
from pathlib import Path
from envplan.cli.app import run
for words in json.load(sys.stdin):
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        code = run(words)
    peak_kb = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text()).group(1))
    print(json.dumps([code, err.getvalue(), peak_kb]))
"""


def limit_child() -> None:
    """No result within these limits is a failure, of whatever took so much."""
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
    resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))


def run_all(commands: list[list[str]]) -> list[tuple[int, str, int]]:
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        preexec_fn=limit_child,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def refused_all(commands: list[list[str]]) -> None:
    """Each is refused in a line, and none of them takes 300 MB."""
    for words, (code, err, peak_kb) in zip(commands, run_all(commands), strict=True):
        assert code == 2, (words, err)
        assert err.startswith("envplan: error: "), (words, err)
        assert err.count("\n") == 1, (words, err)
        assert peak_kb < 300_000, words


def test_small_file_that_asks_for_much_is_refused_in_a_line(tmp_path: Path) -> None:
    commands = []
    for name, content, words in SMALL_FILES:
        (tmp_path / name).write_bytes(content)
        commands.append([str(tmp_path / name) if word == "FILE" else word for word in words])
    refused_all(commands)


#: Every command that reads a file, which stands for FILE.
READERS = [
    ("check", "FILE"),
    ("frontier", "FILE"),
    ("apply", "FILE"),
    ("sweep", "FILE"),
    ("site", "FILE", "--power", "1000"),
    ("serving", "compare", "--trace", "FILE"),
    ("schedule", "import", "FILE"),
    MEGATRON,
    CHROME,
    ("profile", "--model", "FILE", "--gpu", "h100"),
]


def test_what_never_ends_or_unpacks_without_end_is_refused_in_a_line(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    bomb = tmp_path / "bomb.gz"
    with gzip.open(bomb, "wb") as file:
        for _ in range(100):
            file.write(b"0" * 10**7)
    sources = [pipe, Path("/dev/zero"), bomb]
    refused_all(
        [
            [str(source) if word == "FILE" else word for word in words]
            for source in sources
            for words in READERS
        ]
    )


def test_pipe_is_refused_although_nobody_writes_to_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe or a device"):
        read_bounded(tmp_path / "pipe")


def test_file_of_too_many_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * (2**20 + 1))
    with pytest.raises(InputError, match="is larger than 1 MiB"):
        read_bounded(path, 2**20)
    path.write_bytes(b"x" * 2**20)
    assert len(read_bounded(path, 2**20)) == 2**20


def test_gzip_file_of_usual_content_is_unpacked(tmp_path: Path) -> None:
    text = b"".join(b"%d,forward,1740,0.%d\n" % (row % 8, row) for row in range(500_000))
    path = tmp_path / "table.csv.gz"
    path.write_bytes(gzip.compress(text))
    assert read_bounded(path) == text


def test_stream_hands_out_a_gzip_file_in_pieces_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(b"line\n" * 1000))
    with stream(path, ReadLimits(5000)) as lines:
        assert list(lines) == [b"line\n"] * 1000
    with stream(path, ReadLimits(4999)) as lines, pytest.raises(InputError, match="is larger"):
        list(lines)


def test_stream_refuses_a_line_that_never_ends(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"a\n" + b"x" * 2**18 + b"\n")
    with stream(path, ReadLimits(longest_line=2**19)) as lines:
        assert len(list(lines)) == 2
    refused = pytest.raises(InputError, match="a line of more than 64 KiB")
    with stream(path, ReadLimits(longest_line=2**16)) as lines, refused:
        list(lines)


def test_error_of_the_one_who_reads_a_stream_stays_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"a\n")
    with pytest.raises(ValueError, match="mine"), stream(path, ReadLimits()):
        raise ValueError("mine")


def test_standard_input_is_read_where_a_path_is_a_dash(monkeypatch: pytest.MonkeyPatch) -> None:
    class Standard:
        buffer = io.BytesIO(PROFILE.read_bytes())

    monkeypatch.setattr(sys, "stdin", Standard())
    files._standard_input.cache_clear()
    assert Profile.open("-").num_stages == 2
    assert read_bounded("-") == PROFILE.read_bytes()  # and once more
    files._standard_input.cache_clear()


def test_as_many_levels_as_allowed_are_read() -> None:
    def nested(levels: int) -> bytes:
        return b"[" * levels + b"]" * levels

    assert parse_json(nested(MOST_LEVELS), "x.json")
    with pytest.raises(InputError, match="nested too deeply"):
        parse_json(nested(MOST_LEVELS + 1), "x.json")
    brackets = json.dumps({"name": "[" * 5000}).encode()
    assert parse_json(brackets, "x.json")["name"] == "[" * 5000


def test_table_of_too_many_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"stage\n" + b"0\n" * (2 * MAX_ROWS))
    with pytest.raises(InputError, match="rows"):
        Profile.read_csv(path)


@pytest.mark.parametrize(
    "read",
    [read_toml, lambda path: parse_yaml("a: " * MAX_YAML_BYTES, path)],
    ids=["toml", "yaml"],
)
def test_hand_written_file_is_small(tmp_path: Path, read: Callable[[Path], object]) -> None:
    path = tmp_path / "file.toml"
    path.write_bytes(b"# " + b"x" * 2**20)
    with pytest.raises(InputError, match="is larger than"):
        read(path)


def test_journal_of_a_sweep_is_no_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (
        pytest.raises(InputError, match="journal is a regular file"),
        open_journal(tmp_path / "pipe"),
    ):
        pass
