"""Random damage to every kind of file: it is read, or refused in one line, and nothing else.

A few examples of each in `make test`; `make fuzz` draws anew until it has spent FUZZ_SECONDS on all
of them. The samples are the files of a release, and what other tools write.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envplan._io.tables import read_table
from envplan.check.files import check_file
from envplan.costs.rate_file import read_rate
from envplan.devices.locks import Mark
from envplan.enforce.clock_files import read_clocks
from envplan.enforce.freqplan import FrequencyPlan
from envplan.errors import EnvplanError
from envplan.pipeline import Pipeline
from envplan.pipeline.imports.chrome import TraceMapping, read_chrome_traces
from envplan.pipeline.imports.torch_csv import as_torch_csv, read_torch_csv
from envplan.plan import Plan
from envplan.plan.frontier_file import FrontierFile, Row
from envplan.profile import Profile, ProfileMetadata
from envplan.profiling.huggingface import read_model
from envplan.runtime.runlog import read_run_log
from envplan.serving.apply import ServingApplied
from envplan.serving.plan import ServingPlan
from envplan.serving.profile import ServingProfile
from envplan.serving.trace import Trace
from envplan.simulation.cluster import read_slowdowns
from envplan.sweep import read_config
from envplan.sweep.running import open_journal
from test_imports_chrome import PYTORCH, traced

EXAMPLES = 30
SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
RELEASED = Path(__file__).parent / "fixtures" / "v0.1"
SCHEDULES = Path(__file__).parents[1] / "examples" / "schedules"
PIPELINE = Pipeline("1f1b", num_stages=2, num_microbatches=4)
SERVING = (
    b"tp,frequency,phase,size,time_s,power_w\n"
    b"2,1000,idle,0,0,90\n2,1000,prefill,512,0.1,900\n2,1000,decode,8,0.02,700\n"
)
AZURE = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
    b"2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
)
ZEUS = (
    b"[\n  [('forward', 1740), ('backward', 1500)],\n  [('forward', 1260), ('backward', 780)],\n]\n"
)
OVERLAPS = repr(
    [[(("forward", "norm_0-none-12-1024"), ("backward", "rope_0-none-6-1024"))] * 4] * 2
).encode()
CONFIG = (
    b'{"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 4096, '
    b'"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, '
    b'"intermediate_size": 14336, "vocab_size": 32000, "max_position_embeddings": 32768, '
    b'"sliding_window": null, "num_local_experts": 8, "num_experts_per_tok": 2, '
    b'"tie_word_embeddings": false}'
)
CLOCKS = b"stage,position,frequency\n" + b"".join(
    b"%d,%d,%d\n" % (stage, position, 1740 - 60 * position)
    for stage in range(2)
    for position in range(8)
)
TARIFF = b"hour,price,carbon\n0,0.2,300\n6,0.3,250\n12,0.25,200\n"
STRAGGLERS = b"iteration,replica,slowdown\n0,1,1.2\n1,0,1\n"


def released(name: str) -> bytes:
    return (RELEASED / name).read_bytes()


def read_overlaps(path: Path) -> Any:
    path.replace(path.with_name("scheds_1.py"))
    clocks = path.with_name("freqs_1.py")
    clocks.write_text(repr([[1740] * 8] * 2))
    return read_clocks(clocks, PIPELINE)


def read_journal(path: Path) -> Any:
    with open_journal(path) as journal:
        return journal.rows


def read_serving_profile(path: Path) -> ServingProfile:
    """With a sidecar that fits SERVING."""
    path.with_suffix(".meta.json").write_text('{"kv_tokens": {"2": 9000}}')
    return ServingProfile.read_csv(path)


#: What each kind of file is, its suffix and what reads it.
READERS: dict[str, tuple[bytes, str, Callable[[Path], Any]]] = {
    "profile": (released("profile.csv"), ".csv", Profile.read_csv),
    "sidecar": (released("profile.meta.json"), ".json", ProfileMetadata.read_json),
    "plan": (released("plan.json"), ".json", Plan.load),
    "frequency plan": (released("run.freqplan.json"), ".json", FrequencyPlan.load),
    "frontier": (released("frontier.json"), ".json", FrontierFile.load),
    "frontier table": (
        released("frontier.csv"),
        ".csv",
        lambda file: read_table(file, Row, kind="a frontier"),
    ),
    "dag": (released("job.dag.json"), ".json", Pipeline.from_dag_file),
    "run log": (released("run.jsonl"), ".jsonl", lambda path: list(read_run_log([path]))),
    "sweep": (released("sweep.toml"), ".toml", read_config),
    "serving plan": (released("serving-plan.json"), ".json", ServingPlan.load),
    "serving clocks": (released("serving.clocks.json"), ".json", ServingApplied.load),
    "serving profile": (SERVING, ".csv", read_serving_profile),
    "Azure's trace": (AZURE, ".csv", Trace.read_csv),
    "lists of clocks": (ZEUS, ".py", lambda path: read_clocks(path, PIPELINE)),
    "Kareus's overlaps": (OVERLAPS, ".py", read_overlaps),
    "config.json of a model": (CONFIG, ".json", read_model),
    "journal of a sweep": (released("sweep.csv.journal"), "", read_journal),
    "table of clocks": (CLOCKS, ".csv", lambda path: read_clocks(path, PIPELINE)),
    "clocks of a plan": (
        released("run.freqplan.json"),
        ".json",
        lambda path: read_clocks(path, PIPELINE),
    ),
    "torch's schedule": (as_torch_csv(PIPELINE).encode(), ".csv", read_torch_csv),
    "Chrome trace": (
        json.dumps({"traceEvents": traced(PIPELINE)}).encode(),
        ".json",
        lambda path: read_chrome_traces([path], TraceMapping.of(instructions=PYTORCH)),
    ),
    "tariff": (TARIFF, ".csv", lambda path: read_rate(str(path), "price")),
    "stragglers": (STRAGGLERS, ".csv", lambda path: read_slowdowns(path, 2)),
    "mark of a guard": (b"123 456 1200 zeusd\n", "", lambda path: Mark.parse(path.read_bytes())),
}

CHECKED = ("plan.json", "frontier.json", "run.freqplan.json", "profile.csv")

WEIRD = [
    *b"0 -1 -0.0 1e308 1e999 nan inf 1_000 1e-400 1.5e3 null true [] {} \" \\ ,,,, ' =1+1".split(),
    *b"9223372036854775807 -9223372036854775809 2147483648 4294967295 __import__('os')".split(),
    *(b"", b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\xd9\xa3", b"\xe2\x80\xae", b"\n\n", b"\r"),
    *(b"9" * 400, b"[" * 3000, b"(" * 300),
]


@st.composite
def damaged(draw: Any, sample: bytes) -> bytes:
    """A sample with a few bytes, words or lines replaced, taken out, doubled or put elsewhere."""
    data = sample
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.integers(0, 12)))
        match draw(st.sampled_from(["replace", "number", "number", "cut", "line", "bytes"])):
            case "replace":
                data = data[:at] + draw(st.sampled_from(WEIRD)) + data[end:]
            case "number":  # a whole word from here on
                while at < len(data) and not data[at : at + 1].isalnum():
                    at += 1
                end = at
                while end < len(data) and (data[end : end + 1].isalnum() or data[end] in b".+-_"):
                    end += 1
                data = data[:at] + draw(st.sampled_from(WEIRD)) + data[end:]
            case "cut":
                data = data[:at]
            case "line":
                lines = data.splitlines(keepends=True) or [b""]
                line = lines[draw(st.integers(0, len(lines) - 1))]
                lines.insert(draw(st.integers(0, len(lines))), line)
                data = b"".join(lines)
            case "bytes":
                data = data[:at] + draw(st.binary(max_size=8)) + data[end:]
    return data


@pytest.mark.parametrize("kind", READERS)
def test_sample_is_read(kind: str, tmp_path: Path) -> None:
    sample, suffix, read = READERS[kind]
    path = tmp_path / f"file{suffix}"
    path.write_bytes(sample)
    assert read(path) is not None


@pytest.fixture
def fuzz(capfd: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Read damaged samples, a few or for a share of the seconds that there are."""

    def fuzz(
        kind: str, path: Path, sample: bytes, read: Callable[[Path], Any], share: float
    ) -> None:
        tried, end = 0, time.monotonic() + share * SECONDS

        @settings(max_examples=EXAMPLES)
        @given(damaged(sample))
        def check(data: bytes) -> None:
            nonlocal tried
            tried += 1
            path.write_bytes(data)
            with suppress(EnvplanError):
                read(path)

        check()
        while time.monotonic() < end:
            check()
        with capfd.disabled():
            print(f" {kind}: {tried} damaged files" if SECONDS else "", end="")

    return fuzz


@pytest.mark.parametrize("kind", READERS)
def test_damaged_file_is_read_or_refused_in_a_line(
    kind: str, tmp_path: Path, fuzz: Callable[..., None]
) -> None:
    sample, suffix, read = READERS[kind]
    fuzz(kind, tmp_path / f"file{suffix}", sample, read, 0.8 / len(READERS))


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKED)
def test_damaged_file_is_proved_or_refused_by_check(
    name: str, tmp_path: Path, fuzz: Callable[..., None]
) -> None:
    for file in ("profile.csv", "profile.meta.json", name):
        (tmp_path / file).write_bytes(released(file))
    fuzz(f"check {name}", tmp_path / name, released(name), check_file, 0.2 / len(CHECKED))
