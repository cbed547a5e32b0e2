"""A worker on runners that misbehave: what is stored, what is said, and what is left running."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from app.db.models import Job
from app.jobs import log, queue
from app.jobs.process import try_lock
from app.jobs.worker import WorkerProcess
from app.settings import Settings

StartWorker = Callable[..., WorkerProcess]
Until = Callable[..., None]


def runners() -> list[psutil.Process]:
    """This process's fake runners and whatever they started."""
    return [child for child in psutil.Process().children(recursive=True) if _runs_for_us(child)]


def _runs_for_us(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
        return process.status() != psutil.STATUS_ZOMBIE and ("fake_runner" in command or "sleep" in command)
    except psutil.NoSuchProcess:
        return False


def test_a_job_runs_to_its_end(board: Any, start_worker: StartWorker) -> None:
    job_id = board.submit()
    start_worker()
    job = board.ended(job_id)
    assert (job.status, job.runs_done, job.attempt) == ("succeeded", 2, 1)
    assert [result["spec"]["seq"] for result in board.results(job_id)] == [8, 16]


def test_failed_runs_fail_the_job_but_not_its_other_runs(board: Any, start_worker: StartWorker) -> None:
    job_id = board.submit()
    start_worker("fail")
    job = board.ended(job_id)
    assert (job.status, job.runs_done) == ("failed", 2)
    assert job.error == "2 of 2 runs failed: it was told to"


def test_a_run_that_kills_its_runner_twice_has_failed_and_the_job_goes_on(
    board: Any, start_worker: StartWorker
) -> None:
    job_id = board.submit()
    start_worker("die")
    assert board.ended(job_id).status == "failed"
    assert [result["outcome"] for result in board.results(job_id)] == ["failed", "failed"]
    assert all("SIGKILL" in result["error"] for result in board.results(job_id))


def test_noise_is_bounded_and_false_results_are_dropped(board: Any, start_worker: StartWorker) -> None:
    job_id = board.submit(seqs=(8,))
    start_worker("noisy", log_bytes=20_000)
    assert board.ended(job_id).status == "succeeded"
    kept = board.lines(job_id)
    assert len(board.results(job_id)) == 1
    assert sum(map(len, kept)) < 25_000
    assert "full" in kept[-1]
    assert not any("\x1b" in line or "\x00" in line for line in kept)
    assert len(kept[0]) == log.MAX_LINE


@pytest.mark.parametrize("behaviour", ["slow", "deaf", "grandchild"])
def test_cancelling_leaves_no_process(board: Any, start_worker: StartWorker, until: Until, behaviour: str) -> None:
    job_id = board.submit()
    start_worker(behaviour)
    until(lambda: board.job(job_id).progress and board.results(job_id))
    with board.database.write() as session:
        queue.cancel(session, job_id)
    job = board.ended(job_id)
    assert (job.status, job.runs_done) == ("cancelled", 1)
    until(lambda: not runners(), 3)


def test_a_job_over_its_time_keeps_what_it_has(board: Any, start_worker: StartWorker, until: Until) -> None:
    job_id = board.submit(timeout_seconds=1.0)
    start_worker("slow")
    job = board.ended(job_id)
    assert (job.status, job.runs_done) == ("timed_out", 1)
    assert "time limit of 1 s" in str(job.error)
    until(lambda: not runners(), 3)


def test_a_stopping_worker_gives_its_job_back_and_the_next_goes_on(
    board: Any, start_worker: StartWorker, until: Until
) -> None:
    job_id = board.submit()
    worker = start_worker("slow")
    until(lambda: board.results(job_id))
    worker.stop()
    until(lambda: board.job(job_id).status == "queued")
    first = board.results(job_id)
    start_worker("quick")
    job = board.ended(job_id)
    assert (job.status, job.runs_done, job.attempt) == ("succeeded", 2, 2)
    assert board.results(job_id)[0] == first[0]


def test_a_retried_job_goes_on_where_it_stopped(board: Any, start_worker: StartWorker) -> None:
    job_id = board.submit(timeout_seconds=1.0)
    worker = start_worker("slow")
    board.ended(job_id)
    worker.stop()
    kept = board.results(job_id)
    with board.database.write() as session:
        queue.retry(session, job_id)
    start_worker("quick")
    assert board.ended(job_id).status == "succeeded"
    assert board.results(job_id)[0] == kept[0]


def test_simulations_do_not_wait_behind_benchmarks(board: Any, start_worker: StartWorker, until: Until) -> None:
    benchmark = board.submit(seqs=(16,))
    start_worker("slow")
    until(lambda: board.job(benchmark).status == "running")
    simulation = board.submit(seqs=(8,), method="simulated")
    assert board.ended(simulation).status == "succeeded"
    assert board.job(benchmark).status == "running"


def test_benchmarks_wait_for_their_device(
    board: Any, start_worker: StartWorker, until: Until, settings: Settings
) -> None:
    job_id = board.submit()
    with try_lock(settings.lock_dir, "benchmark-cpu") as mine:
        assert mine
        start_worker()
        until(lambda: any("another benchmark" in line for line in board.lines(job_id)))
        assert board.results(job_id) == []
    assert board.ended(job_id).status == "succeeded"


def test_a_job_that_this_version_refuses_fails_and_the_lane_lives(board: Any, start_worker: StartWorker) -> None:
    refused, good = board.submit(), board.submit()
    with board.database.write() as session:
        session.get_one(Job, refused).spec = {"model": "gone"}
    start_worker()
    assert "unknown model" in str(board.ended(refused).error)
    assert board.ended(good).status == "succeeded"


def test_a_stolen_job_is_dropped(board: Any, start_worker: StartWorker, until: Until) -> None:
    job_id = board.submit()
    worker = start_worker("slow")
    until(lambda: board.results(job_id))
    with board.database.write() as session:
        session.get_one(Job, job_id).attempt_token = "another"
    until(lambda: not runners(), 5)
    assert board.job(job_id).attempt_token == "another"
    assert not worker.stopping.is_set()


def test_a_killed_runner_is_replaced_and_the_job_goes_on(board: Any, start_worker: StartWorker, until: Until) -> None:
    job_id = board.submit()
    start_worker("slow")
    until(lambda: board.results(job_id) and runners())
    (first,) = runners()
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: any(runner.pid != first.pid for runner in runners()))
    until(lambda: any("SIGKILL" in line for line in board.lines(job_id)))
    assert board.job(job_id).status == "running"
