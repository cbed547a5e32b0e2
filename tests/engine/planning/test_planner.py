"""Plans: the recommendation fits and is the fastest tried; the ladder gives every rung's reason."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from engine.errors import SpecError, UnsupportedError
from engine.planning import judge, knee, largest_micro_batch, largest_seq, limits, pareto, plan
from engine.planning.candidates import micro_batches, varied
from engine.planning.course import reconciliations
from engine.planning.export import export
from engine.spec import RunSpec


def spec(**fields: Any) -> RunSpec:
    return RunSpec.model_validate({"model": "llama-2-7b", "seq": 4096, "micro_batch": 8} | fields)


def test_a_model_that_fits_is_not_checkpointed() -> None:
    answer = plan(spec(model="gpt2", seq=1024, checkpointing="per-layer"), "a100")
    assert answer.recommended
    assert answer.recommended.spec.checkpointing == "none"
    assert answer.ladder[0].fits
    assert "taken" in answer.ladder[0].reason
    assert any("not needed" in warning for warning in answer.warnings)


def test_the_recommendation_fits_and_nothing_that_fits_is_faster() -> None:
    answer = plan(spec(), "a100")
    best = answer.recommended
    assert best
    assert best.fits
    there = limits("a100", 1, 512, 0)
    assert best.device_peak_bytes <= there.device
    assert best.host_peak_bytes <= there.host
    assert best.spec.micro_batch * best.spec.grad_accumulation == 8
    others = [candidate for candidate in [*answer.ladder, *answer.frontier] if candidate.fits]
    assert best.speed == max(candidate.speed for candidate in others)
    RunSpec.model_validate(best.spec.model_dump())


def test_the_loss_in_chunks_comes_before_what_costs_time() -> None:
    spec = RunSpec(model="llama-3.2-1b", micro_batch=8, seq=4096)
    made = plan(spec, "a100-80gb-sxm")
    whole, chunked = made.ladder[:2]
    assert not whole.fits
    assert (chunked.fits, chunked.spec.loss_chunks, chunked.spec.checkpointing) == (True, 8, "none")
    assert made.recommended is not None
    assert made.recommended.spec.offload_optimizer == "none"
    assert made.recommended.speed >= chunked.speed
    assert all(rung.spec.loss_chunks == 4 for rung in plan(varied(spec, loss_chunks=4), "a100-80gb-sxm").ladder)


def test_the_ladder_says_why_each_rung_was_passed() -> None:
    answer = plan(spec(), "a100")
    passed = [candidate for candidate in answer.ladder if not candidate.fits]
    assert passed
    assert all("needs" in candidate.reason and "usable" in candidate.reason for candidate in passed)
    assert sum("taken" in candidate.reason for candidate in answer.ladder) == 1


def test_the_frontier_rises() -> None:
    front = plan(spec(), "h100", 8).frontier
    peaks, speeds = [c.device_peak_bytes for c in front], [c.speed for c in front]
    assert peaks == sorted(peaks)
    assert speeds == sorted(speeds)


def test_what_fits_nowhere_says_how_far_off_it_is() -> None:
    answer = plan(spec(model="llama-3.1-405b"), "t4", host_memory_gib=16)
    assert answer.recommended is None
    assert "nothing fits" in answer.warnings[0]


def test_nvme_is_used_only_where_there_is_some() -> None:
    without = plan(spec(model="llama-2-70b", micro_batch=1), "a100", host_memory_gib=256)
    with_disk = plan(spec(model="llama-2-70b", micro_batch=1), "a100", host_memory_gib=256, nvme_gib=4000)
    assert without.recommended is None
    assert with_disk.recommended
    assert with_disk.recommended.spec.offload_optimizer == "nvme"


def test_a_plan_takes_under_a_fifth_of_a_second() -> None:
    plan(spec(), "h100", 8)
    took = []
    for _ in range(5):
        start = time.process_time()
        plan(spec(), "h100", 8)
        took.append(time.process_time() - start)
    assert min(took) < 0.2


def test_micro_batches_of_any_number_of_sequences_are_found_at_once() -> None:
    huge = spec().model_copy(update={"micro_batch": 2**24, "grad_accumulation": 4096})
    assert micro_batches(huge) == [2**24]
    some = spec().model_copy(update={"micro_batch": 12, "grad_accumulation": 1})
    assert micro_batches(some) == [12, 6, 4, 3, 2, 1]


@pytest.mark.parametrize(
    ("options", "field"),
    [({"gpus": 0}, "gpus"), ({"host_memory_gib": -1}, "host_memory_gib"), ({"objective": "joy"}, "objective")],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError, match=field):
        plan(spec(), "a100", **options)


def test_inference_and_encoders_have_no_plan() -> None:
    with pytest.raises(UnsupportedError, match="mode"):
        plan(RunSpec(mode="inference"), "a100")
    with pytest.raises(UnsupportedError, match="closed form"):
        plan(RunSpec(model="t5-base"), "a100")


def test_the_largest_sizes_fit_and_the_next_ones_do_not() -> None:
    base, there = spec(model="gpt2", seq=1024, micro_batch=1, gpu="rtx-4090"), limits("rtx-4090", 1, 64, 0)
    size = largest_micro_batch(base, there)
    assert judge(base.model_copy(update={"micro_batch": size}), there).fits
    assert not judge(base.model_copy(update={"micro_batch": size + 1}), there).fits
    made = spec(model="gpt:12,768,12", micro_batch=1, gpu="rtx-4090")
    tokens = largest_seq(made, there)
    assert judge(made.model_copy(update={"seq": tokens}), there).fits
    assert not judge(made.model_copy(update={"seq": tokens + 128}), there).fits


def test_pareto_and_knee() -> None:
    points = [(1.0, 1.0), (2.0, 5.0), (3.0, 5.5), (3.0, 4.0), (4.0, 6.0)]
    assert pareto(points) == [0, 1, 2, 4]
    assert knee(points) == 1
    assert knee([]) is None
    assert knee([(1.0, 2.0)]) == 0


def test_the_course_figures_and_ours() -> None:
    rows = reconciliations()
    notes = [(row.row, round(row.notes, 1)) for row in rows]
    assert notes == [(1, 84.0), (1, 120.3), (1, 204.0), (2, 400.0), (9, 0.4), (12, 8.6), (12, 8.6)]
    states, activations, total, larger, offload, scores, kept = rows
    assert states.ours == pytest.approx(16 * 6.738415616)
    assert activations.ours == pytest.approx(436.75, abs=0.01)
    assert total.ours > 204
    assert larger.ours > 400
    assert offload.ours == pytest.approx(4 * 6.738415616 / 24.8)
    assert scores.ours == pytest.approx(8.589934592)
    assert kept.ours == pytest.approx(2.5 * 8.589934592)
    assert all(row.why for row in rows)


def test_exports_carry_the_plan() -> None:
    chosen = spec(
        checkpointing="every-4", sharding="zero-3", world_size=8, offload_optimizer="cpu", grad_accumulation=2
    )
    texts = export(chosen)
    assert set(texts) == {"remat", "torch", "transformers", "fsdp", "deepspeed"}
    settings = json.loads(texts["deepspeed"])
    assert settings["zero_optimization"]["stage"] == 3
    assert settings["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert settings["gradient_accumulation_steps"] == 2
    for name in ("torch", "transformers", "fsdp"):
        compile(texts[name], name, "exec")
    assert "--checkpointing every-4" in texts["remat"]
