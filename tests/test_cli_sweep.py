from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import pytest

from cli_helpers import Ran, assert_refused, done, envplan, in_this_process, says, small_profile
from envplan.errors import InputError
from envplan.plotting.sweep import sweep_figure
from envplan.sweep.table import COLUMNS, Row

EXAMPLE = Path(__file__).parents[1] / "examples" / "sweep.toml"

SWEEP = """
[grid]
profiles = ["profile.csv"]
microbatches = [2, 4]
planners = ["frontier", "max_frequency"]
slowdowns = [0, 5]
min_energy = true
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_profile().save_csv(tmp_path / "profile.csv")
    (tmp_path / "sweep.toml").write_text(SWEEP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("envplan.sweep.running.run_on_processes", in_this_process)
    return tmp_path


def sweep(*arguments: str) -> Ran:
    return envplan("sweep", *arguments)


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_sweep_makes_a_table_and_a_plot(folder: Path) -> None:
    says(
        done("sweep sweep.toml --plot"),
        "One iteration, all GPUs, modelled | T_star | +5% | 8 points: 8 planned, 0 failed",
        "wrote sweep.csv | wrote sweep.png",
    )
    rows = table(folder / "sweep.csv")
    assert list(rows[0]) == list(COLUMNS)
    assert len(rows) == 8
    assert [row["microbatches"] for row in rows] == ["2"] * 4 + ["4"] * 4
    assert all(row["source"] == "modelled" and not row["error"] for row in rows)
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "sweep.csv.journal").exists()


def test_the_same_command_again_computes_nothing(folder: Path) -> None:
    first = json.loads(sweep("sweep.toml", "--json").out)
    before = (folder / "sweep.csv").read_bytes()
    (folder / "sweep.csv").unlink()
    second = json.loads(sweep("sweep.toml", "--json").out)
    assert (first["computed"], first["resumed"]) == (8, 0)
    assert (second["computed"], second["resumed"]) == (0, 8)
    assert second["journal"] == "sweep.csv.journal"
    assert (folder / "sweep.csv").read_bytes() == before
    assert json.loads(sweep("sweep.toml", "--json", "--fresh").out)["computed"] == 8


def test_parquet_holds_what_csv_holds(folder: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    (folder / "sweep.toml").write_text(SWEEP + "target_times = [0.001]\n")
    assert sweep("sweep.toml").code == 0
    shutil.copy(folder / "sweep.csv.journal", folder / "sweep.parquet.journal")
    assert sweep("sweep.toml", "-o", "sweep.parquet").code == 0
    written = parquet.read_table(folder / "sweep.parquet")
    assert tuple(written.column_names) == COLUMNS
    types = {field.name: str(field.type) for field in written.schema}
    assert (types["energy_j"], types["stages"], types["recompute"]) == ("double", "int64", "bool")
    expected = table(folder / "sweep.csv")
    for row, as_text in zip(written.to_pylist(), expected, strict=True):
        assert Row.model_validate(row).model_dump() == row
        shown = {name: "" if value is None else str(value) for name, value in row.items()}
        assert shown == as_text


def test_what_is_best_and_what_varies_is_said(folder: Path) -> None:
    (folder / "sweep.toml").write_text(SWEEP)
    ran = sweep("sweep.toml")
    rows = table(folder / "sweep.csv")
    document = json.loads(sweep("sweep.toml", "--json").out)
    assert document["schema"] == "envplan/sweep/v1"
    most = max(float(row["savings_percent"]) for row in rows)
    assert document["best"][0]["savings_percent"] == most
    shares = {(one["name"], one["value"]): one for one in document["by_what_varies"]}
    for name in ("microbatches", "schedule"):
        values = {row[name] for row in rows}
        assert {value for known, value in shares if known == name} == (
            values if len(values) > 1 else set()
        )
        for value in values if len(values) > 1 else ():
            saved = [float(row["savings_percent"]) for row in rows if row[name] == value]
            share = shares[name, value]
            assert share["points"] == len(saved)
            assert share["savings_percent"] == pytest.approx(sum(saved) / len(saved))
            assert share["most_percent"] == max(saved)
            assert f"{share['savings_percent']:.2f}" in ran.out
    assert "next: envplan solve profile.csv --microbatches" in ran.out


def test_parallelism_is_the_sidecars_unless_the_file_says_it(folder: Path) -> None:
    sidecar = folder / "profile.meta.json"
    known = json.loads(sidecar.read_text())
    sidecar.write_text(json.dumps(known | {"tensor_parallel": 4, "job": {"replicas": 2}}))
    grid = '[grid]\nprofiles = ["profile.csv"]\nmicrobatches = [4]\n'
    (folder / "sweep.toml").write_text(grid)
    sweep("sweep.toml")
    (said,) = table(folder / "sweep.csv")
    assert (said["gpus_per_stage"], said["replicas"]) == ("4", "2")
    (folder / "sweep.toml").write_text(grid + "tp = 2\ncp = 3\ndp = 5\n")
    sweep("sweep.toml")
    (own,) = table(folder / "sweep.csv")
    assert (own["gpus_per_stage"], own["replicas"]) == ("6", "5")
    each = float(said["energy_j"]) / 8, float(own["energy_j"]) / 30
    assert each[0] == pytest.approx(each[1])


def test_failures_are_rows_and_are_said(folder: Path) -> None:
    (folder / "sweep.toml").write_text(SWEEP + "target_times = [0.001]\n")
    ran = sweep("sweep.toml")
    assert ran.code == 0
    says(
        ran.out,
        "10 points: 8 planned, 2 failed",
        "failed: profile.csv, 1f1b, frontier, 0.001 s, 2 microbatches: no plan",
    )
    failed = [row for row in table(folder / "sweep.csv") if row["error"]]
    assert len(failed) == 2
    assert all(row["t_min_s"] and not row["energy_j"] for row in failed)


def test_when_all_fail_so_does_the_sweep_but_the_table_is_there(folder: Path) -> None:
    (folder / "sweep.toml").write_text('[grid]\nprofiles = ["nothere.csv"]\n')
    ran = sweep("sweep.toml", "--plot")
    assert ran.code == 1
    assert "1 points: 0 planned, 1 failed" in ran.out
    assert "no such file" in table(folder / "sweep.csv")[0]["error"]
    assert not (folder / "sweep.png").exists()


def test_profiles_are_looked_for_beside_the_sweeps_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert json.loads(sweep("../sweep.toml", "--json").out)["failed"] == 0
    assert (folder / "elsewhere" / "sweep.csv").exists()


def test_the_example_runs(folder: Path) -> None:
    shutil.copy(EXAMPLE, folder / "example.toml")
    ran = sweep("example.toml", "--json", "-o", "example.csv")
    assert ran.code == 0, ran.err
    summary = json.loads(ran.out)
    assert (summary["points"], summary["failed"]) == (58, 0)
    last = table(folder / "example.csv")[-1]
    assert (last["schedule"], last["stages"], last["chunks"]) == ("interleaved", "4", "2")
    assert last["replayed_time_s"]


def test_a_journal_that_is_none_is_refused_and_left_alone(folder: Path) -> None:
    (folder / "sweep.csv.journal").write_text("Dear diary\n")
    assert_refused(sweep("sweep.toml", "--fresh"), 2, "sweep.csv.journal:1:", "journal")
    assert (folder / "sweep.csv.journal").read_text() == "Dear diary\n"


def planned(profile: str, planner: str, slower: float, saved: float) -> Row:
    return Row(
        profile=profile,
        chunks=1,
        planner=planner,
        target="slowdown",
        p2p_latency_s=0.0,
        gpus_per_stage=1,
        replicas=1,
        recompute=False,
        seed=0,
        slowdown_percent=slower,
        savings_percent=saved,
    )


def test_a_figure_joins_the_points_of_a_job_and_planner_by_slowdown() -> None:
    rows = [planned("a", "frontier", slower, 10 + slower) for slower in (4.0, 0.0, 2.0)]
    rows.append(planned("a", "zeus_global", 1.0, 3.0))
    lines = [line for line in sweep_figure(rows).axes[0].lines if len(line.get_xdata())]
    drawn = [list(line.get_xdata()) for line in lines]
    assert [0.0, 2.0, 4.0] in drawn
    assert [1.0] in drawn


def test_plans_for_slow_clocks_are_a_line_and_a_row_of_their_own(folder: Path) -> None:
    point = "[[points]]\nprofile = 'profile.csv'\nmicrobatches = 4\nslowdown = 5\n"
    (folder / "slow.toml").write_text(f"{point}{point}switch_latency = 3\nmin_dwell = 20\n")
    ran = sweep("slow.toml", "-o", "slow.csv")
    assert "+5%, clocks 3 ms late, clocks for 20 ms" in ran.out
    slow = {"switch_latency_ms": 3.0, "min_dwell_ms": 20.0}
    usual = planned("a", "frontier", 1.0, 2.0)
    legend = sweep_figure([usual, usual.model_copy(update=slow)]).legends[0]
    words = [text.get_text() for text in legend.get_texts()]
    assert words == ["no conditions", "clocks 3 ms late, clocks for 20 ms"]


def test_profiles_have_panels_of_their_own_a_dozen_at_most() -> None:
    rows = [planned(f"job{k:02d}", "frontier", 0.0, k) for k in range(20)]
    figure = sweep_figure(rows)
    titles = [axes.get_title(loc="left") for axes in figure.axes if axes.get_visible()]
    assert titles == [f"job{k:02d}" for k in range(12)]
    assert "12 of 20 shown" in str(figure.get_suptitle())
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["envplan"]


def test_a_legend_names_a_dozen_kinds_of_jobs_at_most() -> None:
    usual = planned("a", "frontier", 0.0, 1.0)
    several = [usual.model_copy(update={"microbatches": count}) for count in range(1, 21)]
    rows = [*several, *(row.model_copy(update={"profile": "b"}) for row in several)]
    words = [text.get_text() for text in sweep_figure(rows).legends[0].get_texts()]
    assert words[:2] == ["1 microbatch", "2 microbatches"]
    assert words[12:] == ["and 8 more"]


def test_long_names_leave_the_axes_their_room() -> None:
    rows = [planned("a-very-long-name-of-a-profile" * 3 + str(k), "frontier", 0, k) for k in (1, 2)]
    figure = sweep_figure(rows)
    figure.savefig(io.BytesIO())
    (legend,) = figure.legends
    box, axes = legend.get_window_extent(), figure.axes[0]
    assert axes.bbox.width > 0.4 * figure.bbox.width
    assert not box.overlaps(axes.get_tightbbox())
    assert box.x1 <= figure.bbox.width


def test_nothing_is_drawn_of_failures_only() -> None:
    row = planned("a", "frontier", 0.0, 0.0).model_copy(update={"error": "no plan"})
    with pytest.raises(InputError, match="nothing to draw"):
        sweep_figure([row])
