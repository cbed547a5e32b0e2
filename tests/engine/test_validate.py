"""The accuracy report: its arithmetic, its grid, and which published rows it judges."""

import pytest

from engine.catalog import published_measurements
from engine.units import MIB
from engine.validate import published
from engine.validate.__main__ import main
from engine.validate.grid import grid
from engine.validate.statistics import Comparison, outliers, summarise


def test_a_summary_by_hand() -> None:
    rows = [Comparison("", "", predicted, 100) for predicted in (90, 98, 100, 101, 130)]
    summary = summarise(rows)
    assert summary is not None
    assert (summary.count, summary.under_estimate_rate) == (5, 0.2)
    assert summary.median_error == pytest.approx(0.02)
    assert summary.worst_error == pytest.approx(0.30)
    assert summary.bias == pytest.approx(0.0)
    assert [row.predicted for row in outliers(rows)] == [130]
    assert summarise([]) is None


def test_the_grid_is_wide_and_fixed() -> None:
    specs = grid()
    assert len(specs) >= 60
    assert len({spec.spec_hash for spec in specs}) == len(specs)
    assert [spec.spec_hash for spec in specs] == [spec.spec_hash for spec in grid()]
    for field, least in (("checkpointing", 5), ("attention", 3), ("precision", 5), ("optimizer", 3), ("seq", 2)):
        assert len({getattr(spec, field) for spec in specs}) >= least


def test_every_published_row_is_judged_or_has_a_reason() -> None:
    assert sum(published.counts_out().values()) + len(published.rows_in_scope()) == len(published_measurements())


def test_judged_rows_are_what_the_scope_says() -> None:
    for judged in published.rows_in_scope():
        text = judged.row["sharding/parallelism"].lower()
        assert not any(word in text for word in ("float8", "tp 2", "tp=2", "tp8", "pp2", "ep 8"))
        assert all(spec.world_size == (judged.row["n_gpus"] or 1) for spec in judged.specs)


def test_no_reserved_row_is_judged_by_its_own_source() -> None:
    ratio = [row for row in published_measurements() if published.RATIO_SOURCE in row["source"]]
    assert ratio
    judged = [row for row in published.compare() if row.group.startswith("reserved")]
    assert not any(published.RATIO_SOURCE in row.label for row in judged)


def test_published_peaks_are_predicted() -> None:
    rows = list(published.compare())
    for quantity, limit in (("allocated", 0.05), ("reserved", 0.10)):
        summary = summarise([row for row in rows if row.group.startswith(quantity)])
        assert summary is not None
        assert summary.median_error <= limit


@pytest.mark.parametrize(
    "row",
    [row for row in published_measurements() if "attention op only" in row["model"] and row["seq"] >= 512],
    ids=lambda row: f"{row['attention']} {row['seq']}",
)
def test_flash_attention_table_21(row: dict) -> None:
    """FlashAttention (Dao et al. 2022, arXiv 2205.14135) table 21, to the printed megabyte."""
    batch, seq, heads, hidden = row["micro_batch"], row["seq"], row["heads"], row["hidden"]
    whole = 8 * batch * heads * seq**2 + 20 * batch * seq * hidden
    flash = 26 * batch * seq * hidden + 8 * batch * heads * seq
    expected = flash if row["attention"] == "FlashAttention" else whole
    assert expected / MIB == pytest.approx(float(row["notes"].split(" MB")[0]), abs=0.51)


def test_the_command_writes_both_files(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--only", "published", "--write", str(tmp_path)])
    assert "Closed form against published" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"accuracy.json", "accuracy.md"}
