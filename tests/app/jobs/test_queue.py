from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from pydantic import ValidationError
from sqlalchemy import update

from app.db import runs
from app.db.migrate import open_database
from app.db.models import FINAL, STATUSES, Job, new_id, now
from app.db.session import Database
from app.errors import KeyReused, LeaseLost
from app.jobs import queue
from app.jobs.process import is_alive, try_lock, worker_id
from app.jobs.worker import beat
from engine.errors import SpecError
from engine.result import RunResult
from engine.spec import RunSpec

SPEC = {"model": "gpt-tiny", "device": "cpu"}
DEAD_HERE = worker_id().rsplit("/", 2)[0] + "/999999999/1.00"
ELSEWHERE = "another-host/1/1.00"


def submission(**more: Any) -> queue.Submission:
    return queue.prepare(SPEC, {"seq": [8, 16]}, **{"timeout_seconds": 60.0, **more})


def submit(database: Database, **more: Any) -> str:
    with database.write() as session:
        return queue.submit(session, submission(**more))[0].id


def claim(database: Database, worker: str | None = None, lane: str = "benchmark", lease: float = 30) -> Job | None:
    with database.write() as session:
        beat(session, worker or worker_id())
        return queue.claim(session, worker or worker_id(), lane, lease)


def status(database: Database, job_id: str) -> str:
    with database.read() as session:
        return session.get_one(Job, job_id).status


def result(seq: int = 8, outcome: str = "ok") -> RunResult:
    spec = RunSpec.model_validate({**SPEC, "seq": seq})
    return RunResult(id=new_id(), spec=spec, spec_hash=spec.spec_hash, method="measured", outcome=outcome)


def token(job: Job | None) -> str:
    assert job is not None
    assert job.attempt_token is not None
    return job.attempt_token


def test_a_job_is_queued_with_its_runs_counted(database: Database) -> None:
    job_id = submit(database, name="mine")
    with database.read() as session:
        view = queue.view(session.get_one(Job, job_id))
    assert (view["status"], view["runs_total"], view["runs_done"], view["name"]) == ("queued", 2, 0, "mine")


@pytest.mark.parametrize(
    ("spec", "vary", "error"),
    [
        pytest.param({"model": "nope"}, {}, ValidationError, id="unknown model"),
        pytest.param(SPEC, {"nope": [1]}, SpecError, id="unknown field"),
        pytest.param(SPEC, {"seq": []}, SpecError, id="no values"),
        pytest.param(SPEC, {"seq": list(range(1, 600))}, SpecError, id="too many runs"),
    ],
)
def test_a_job_with_a_refused_run_is_refused(spec: Any, vary: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        queue.prepare(spec, vary, timeout_seconds=60.0)


def test_highest_priority_then_oldest(database: Database) -> None:
    first, second, urgent = submit(database), submit(database), submit(database, priority=5)
    claimed = [claim(database) for _ in range(4)]
    assert [job.id if job else None for job in claimed] == [urgent, first, second, None]


def test_a_lane_takes_only_its_own_jobs(database: Database) -> None:
    submit(database)
    simulated = submit(database, method="simulated")
    job = claim(database, lane="simulation")
    assert job is not None
    assert job.id == simulated


def test_a_result_is_stored_once(database: Database) -> None:
    submit(database)
    job = claim(database)
    assert job is not None
    with database.write() as session:
        assert queue.store(session, job.id, token(job), result(), None)
        assert not queue.store(session, job.id, token(job), result(), None)
    with database.read() as session:
        assert runs.count(session, runs.Filters(job_id=[job.id])) == 1
        assert session.get_one(Job, job.id).runs_done == 1


def test_an_attempt_that_lost_its_lease_changes_nothing(database: Database) -> None:
    submit(database)
    old = claim(database, DEAD_HERE)
    assert old is not None
    with database.write() as session:
        assert queue.reap(session, max_losses=3) == [old.id]
    new = claim(database)
    assert new is not None
    assert new.attempt == 2
    with database.write() as session:
        for late in (
            lambda: queue.store(session, old.id, token(old), result(), None),
            lambda: queue.renew(session, old.id, token(old), 30, None),
            lambda: queue.finish(session, old.id, token(old), "succeeded"),
        ):
            with pytest.raises(LeaseLost):
                late()
        queue.release(session, old.id, token(old))
    assert status(database, old.id) == "running"
    with database.read() as session:
        assert runs.count(session, runs.Filters()) == 0


def test_a_lease_of_another_host_expires_by_the_clock(database: Database) -> None:
    job_id = submit(database)
    claim(database, ELSEWHERE, lease=1000)
    with database.write() as session:
        assert queue.reap(session, max_losses=3) == []
        session.execute(update(Job).values(lease_expires_at=now() - timedelta(seconds=1)))
    with database.write() as session:
        assert queue.reap(session, max_losses=3) == [job_id]


def test_a_living_worker_of_this_host_keeps_its_job_when_the_clock_jumps(database: Database) -> None:
    submit(database)
    claim(database)
    with database.write() as session:
        session.execute(update(Job).values(lease_expires_at=now() - timedelta(days=1)))
    with database.write() as session:
        assert queue.reap(session, max_losses=3) == []


def test_a_job_that_kills_its_workers_fails_with_the_reason(database: Database) -> None:
    job_id = submit(database)
    for _ in range(3):
        claim(database, DEAD_HERE)
        with database.write() as session:
            queue.reap(session, max_losses=3)
    with database.read() as session:
        job = session.get_one(Job, job_id)
    assert job.status == "failed"
    assert "3 times" in str(job.error)


def test_a_result_in_between_forgives_the_losses(database: Database) -> None:
    job_id = submit(database)
    for seq in (8, 16, 8):
        job = claim(database, DEAD_HERE)
        with database.write() as session:
            queue.store(session, job_id, token(job), result(seq), None)
        with database.write() as session:
            queue.reap(session, max_losses=2)
    assert status(database, job_id) == "queued"


def test_cancel_is_exact_and_idempotent(database: Database) -> None:
    waiting, running = submit(database), submit(database, priority=1)
    job = claim(database)
    with database.write() as session:
        assert [queue.cancel(session, waiting).status for _ in range(2)] == ["cancelled"] * 2  # type: ignore[union-attr]
        assert [queue.cancel(session, running).status for _ in range(2)] == ["cancelling"] * 2  # type: ignore[union-attr]
        assert queue.finish(session, running, token(job), "succeeded") == "cancelled"
        assert queue.cancel(session, "0" * 32) is None
    assert status(database, running) == "cancelled"


def test_a_finished_job_stays_finished(database: Database) -> None:
    job_id = submit(database)
    job = claim(database)
    with database.write() as session:
        queue.finish(session, job_id, token(job), "succeeded")
        assert queue.cancel(session, job_id).status == "succeeded"  # type: ignore[union-attr]
        assert queue.retry(session, job_id).status == "succeeded"  # type: ignore[union-attr]


def test_retry_keeps_good_results_and_forgets_failed_ones(database: Database) -> None:
    job_id = submit(database)
    job = claim(database)
    with database.write() as session:
        queue.store(session, job_id, token(job), result(8), None)
        queue.store(session, job_id, token(job), result(16, "failed"), None)
        queue.finish(session, job_id, token(job), "failed", "1 of 2")
    with database.write() as session:
        retried = queue.retry(session, job_id)
        again = queue.retry(session, job_id)
    assert retried is again
    assert retried is not None
    assert (retried.status, retried.runs_done, retried.error) == ("queued", 1, None)


def test_the_same_key_is_the_same_job(database: Database) -> None:
    with database.write() as session:
        first, is_new = queue.submit(session, submission(), "key")
        second, is_new_again = queue.submit(session, submission(), "key")
    assert first.id == second.id
    assert (is_new, is_new_again) == (True, False)
    with database.write() as session, pytest.raises(KeyReused):
        queue.submit(session, submission(priority=1), "key")


def test_ids_sort_by_time() -> None:
    ids = [new_id() for _ in range(1000)]
    assert ids == sorted(set(ids))


def test_a_process_is_told_from_a_later_one_with_its_pid() -> None:
    _, pid, started = worker_id().rsplit("/", 2)
    assert is_alive(int(pid), float(started))
    assert not is_alive(int(pid), float(started) - 100)


def test_a_lock_has_one_holder(tmp_path: Path) -> None:
    with try_lock(tmp_path, "cpu") as mine, try_lock(tmp_path, "cpu") as yours, try_lock(tmp_path, "cuda-0") as other:
        assert (mine, yours, other) == (True, False, True)
    with try_lock(tmp_path, "cpu") as mine:
        assert mine


def claim_all(data_dir: Path, start: Any, claimed: Any) -> None:
    database = open_database(data_dir)
    start.wait()
    found = []
    while (job := claim(database)) is not None:
        found.append(job.id)
    claimed.put(found)
    database.close()


@pytest.mark.slow
def test_eight_processes_claim_four_hundred_jobs_none_twice(database: Database) -> None:
    prepared = submission()
    with database.write() as session:
        submitted = {queue.submit(session, prepared)[0].id for _ in range(400)}
    context = multiprocessing.get_context("spawn")
    start, claimed = context.Barrier(8), context.Queue()
    arguments = (database.path.parent, start, claimed)
    processes = [context.Process(target=claim_all, args=arguments) for _ in range(8)]
    for process in processes:
        process.start()
    found = [job_id for _ in processes for job_id in claimed.get(timeout=60)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 8
    assert len(found) == 400
    assert set(found) == submitted


ACTIONS = st.lists(
    st.sampled_from(["claim", "claim dead", "reap", "cancel", "retry", "store", "finish", "late"]), max_size=25
)


@pytest.fixture
def empty(tmp_path: Path) -> Callable[[], Database]:
    return lambda: open_database(tmp_path / new_id())


@examples(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ACTIONS)
def test_whatever_happens_a_job_has_one_live_attempt_and_final_is_final(
    empty: Callable[[], Database], actions: list[str]
) -> None:
    database = empty()
    job_id = submit(database)
    tokens: list[str] = []
    seen = "queued"
    for action in actions:
        with database.write() as session:
            beat(session, worker_id())
            beat(session, DEAD_HERE)
            if action.startswith("claim"):
                job = queue.claim(session, DEAD_HERE if "dead" in action else worker_id(), "benchmark", 30)
                tokens += [token(job)] if job else []
            elif action == "reap":
                queue.reap(session, max_losses=100)
            elif action == "cancel":
                queue.cancel(session, job_id)
            elif action == "retry":
                queue.retry(session, job_id)
            elif tokens:
                given_token = tokens[0] if action == "late" else tokens[-1]
                try:
                    if action == "store":
                        queue.store(session, job_id, given_token, result(), None)
                    else:
                        queue.finish(session, job_id, given_token, "succeeded")
                except LeaseLost:
                    pass
        with database.read() as session:
            job = session.get_one(Job, job_id)
            assert job.status in STATUSES
            assert (job.attempt_token is not None) == (job.status in ("running", "cancelling"))
            assert runs.count(session, runs.Filters()) == job.runs_done <= 1
            if seen in FINAL and action != "retry":
                assert job.status == seen
            seen = job.status
    database.close()
