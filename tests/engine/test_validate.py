"""The accuracy report: its arithmetic, its grid, and which published rows it judges."""

import json

import pytest

from engine.catalog import DATA, published_measurements
from engine.closed_form.hardware import RESERVED_OVER_MAIN
from engine.units import MIB
from engine.validate import published, speed
from engine.validate.__main__ import main
from engine.validate.grid import grid
from engine.validate.report import report, section
from engine.validate.statistics import OUTLIER, TOO_LOW, Comparison, outliers, quantile, summarise
from engine.validate.trainers import TRAINERS, kept_besides


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


@pytest.mark.parametrize(("quantity", "limit"), [("allocated", 0.05), ("reserved", 0.10)])
def test_published_peaks_are_predicted_and_rarely_too_low(quantity: str, limit: float) -> None:
    summary = summarise([row for row in published.compare() if row.group.startswith(quantity)])
    assert summary is not None
    assert summary.median_error <= limit
    assert summary.under_estimate_rate <= 0.10


def test_outliers_and_what_is_too_low_have_a_note() -> None:
    rows = list(published.compare())
    unexplained = {row.row for row in rows if abs(row.error) > OUTLIER or row.error < -TOO_LOW}
    assert unexplained == set(published.UNSAID)


def test_the_closed_form_reserves_as_the_source_that_prints_both() -> None:
    assert pytest.approx(published.reserved_over_main(compiled=False), abs=0.005) == RESERVED_OVER_MAIN


def test_a_quantile_lies_between_its_neighbours() -> None:
    assert quantile([4, 1, 3, 2], 0.5) == pytest.approx(2.5)
    assert quantile([1, 2], 0.9) == pytest.approx(1.9)
    assert quantile([7], 0.9) == quantile([1, 7], 1.0) == 7


def judged_row(index: int) -> published.Judged:
    return next(judged for judged in published.rows_in_scope() if judged.index == index)


def test_every_source_in_scope_has_its_trainer() -> None:
    rows = published.rows_in_scope()
    used = {name for name in TRAINERS for judged in rows if name in judged.row["source"]}
    assert used == set(TRAINERS)
    assert all(sum(name in judged.row["source"] for name in TRAINERS) == 1 for judged in rows)


def test_trainers_differ_by_date_and_by_what_the_row_says() -> None:
    by_label = {judged.row["sharding/parallelism"]: judged.trainer.fsdp for judged in published.rows_in_scope()}
    assert by_label["FSDP1 over 8 eager"].staying == 2
    assert by_label["FSDP2 over 8, eager, reshard_after_forward=never (ZeRO-2)"].staying == 32
    assert by_label["FSDP2 over 8, eager, reshard_after_forward=always (ZeRO-3)"].staying == 0
    assert by_label["FSDP2 eager FSDP=8"].embedding_apart


def test_what_a_trainer_keeps_besides_by_hand() -> None:
    """Llama-3.2-3B, 2 sequences of 4096 tokens, 28 blocks of 3072, 24 query heads for 8 key heads of 128."""
    eager, compiled = judged_row(159), judged_row(160)
    tokens = 2 * 4096
    norms, repeated = 4 * tokens * 3072 * 57, 4 * tokens * 2048 * 28
    assert kept_besides(eager.trainer, eager.specs[0], compiled=False) == norms + repeated
    assert kept_besides(compiled.trainer, compiled.specs[0], compiled=True) == 0
    first = judged_row(83)  # Llama-7B, every block checkpointed, fp32 logits held
    assert kept_besides(first.trainer, first.specs[0], compiled=False) == 4 * 8 * 2048 * (32000 + 4096)


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


def test_labels_and_notes_are_whole_words() -> None:
    """A label is told in a sentence: it must not end inside a word or a bracket."""
    for judged in published.rows_in_scope():
        parallel = judged.row["sharding/parallelism"]
        assert judged.label.endswith((f", {parallel}", " …"))
        assert judged.label.partition(": ")[0].removesuffix(" …").split()[-1] in judged.row["source"].split()
    shipped = json.loads((DATA / "accuracy.json").read_text())["published"]["rows"]
    labels = {judged.index: judged.label for judged in published.rows_in_scope()}
    assert {row["published_row"]: row["label"] for row in shipped}.items() <= labels.items()


def test_the_command_writes_both_files(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--only", "published", "--write", str(tmp_path)])
    assert "Closed form against published" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"accuracy.json", "accuracy.md"}


def test_speeds_are_judged_on_other_sources_than_the_rates_are_from() -> None:
    rows = list(speed.compare())
    assert len(rows) > 200
    assert not [row for row in rows if any(name in row.label for name in speed.FITTED)]
    groups = {row.group for row in rows}
    assert {"A100, eager", "A100, compiled", "H100, eager", "H100 at 500 W, compiled"} <= groups


def test_speeds_on_the_cards_of_the_catalog_are_of_the_right_size() -> None:
    for card, limit in (("A100", 0.15), ("H100", 0.25)):
        summary = summarise([row for row in speed.compare() if row.group.split(",")[0] == card])
        assert summary is not None
        assert summary.median_error <= limit
        assert abs(summary.bias) <= limit


def test_a_report_names_the_unit_of_its_rows() -> None:
    made = report({"speed": [Comparison("a", "A100, eager", 90, 100)], "catalog": [Comparison("b", "ours", 2, 1)]})
    assert made["speed"]["rows"][0]["predicted_tokens_per_second"] == 90
    assert made["speed"]["outliers"] == []
    assert made["catalog"]["outliers"][0]["actual_bytes"] == 1


def test_quantities_of_several_kinds_are_also_summed_up() -> None:
    kinds = [Comparison("a", "reserved, eager", 1, 1), Comparison("b", "reserved, compiled", 3, 2)]
    assert list(section([*kinds, Comparison("c", "allocated, eager", 1, 1)])["summaries"]) == [
        "reserved", "reserved, eager", "reserved, compiled", "allocated, eager",
    ]  # fmt: skip


def test_a_folder_that_cannot_be_made_is_refused_before_the_work(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--write", "/proc/no/such/folder"])
    assert ended.value.code == 2
    assert "--write" in capfd.readouterr().err.splitlines()[-1]
