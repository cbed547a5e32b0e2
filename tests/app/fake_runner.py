"""A runner that speaks the protocol and trains nothing: `python fake_runner.py BEHAVIOUR`. For tests of faults.

BEHAVIOUR: `quick`; `slow` (a progress line every 50 ms, for a minute); `deaf` (slow, and ignores SIGTERM);
`grandchild` (slow, with a child process that sleeps); `die` (is killed at its first run, always);
`noisy` (a flood of log, a false result, a result twice); `fail` (every run fails).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

from engine.result import AtPeak, Memory, RunResult, Timing
from engine.spec import RunSpec

BEHAVIOUR = sys.argv[1]
BANDWIDTHS = {
    "host_to_device_bytes_per_second": 25_000_000_000,
    "device_to_host_bytes_per_second": 24_000_000_000,
    "disk_error": "the NVMe tier in /dev/shm: tmpfs is memory, not a disk",
}


def emit(**event: object) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def result_of(spec: RunSpec, method: str) -> dict[str, object]:
    made = RunResult(
        spec=spec,
        spec_hash=spec.spec_hash,
        method=method,
        outcome="failed" if BEHAVIOUR == "fail" else "ok",
        error="it was told to" if BEHAVIOUR == "fail" else None,
        memory=Memory(device_peak_bytes=spec.seq * 1000, at_peak=AtPeak(activations=spec.seq * 1000)),
        timing=Timing(step_seconds=0.01, tokens_per_second=spec.seq * 100.0),
    )
    return made.model_dump(mode="json")


def run(request: dict[str, object]) -> None:
    run_id, spec = request["id"], RunSpec.model_validate(request["spec"])
    emit(event="progress", run_id=run_id, phase="timing", step=1, steps=5)
    if BEHAVIOUR == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if BEHAVIOUR == "grandchild":
        subprocess.Popen(["sleep", "60"])
    if BEHAVIOUR in ("slow", "deaf", "grandchild") and spec.seq > 8:
        for step in range(1200):
            emit(event="progress", run_id=run_id, phase="timing", step=step, steps=1200)
            time.sleep(0.05)
    result = result_of(spec, str(request["method"]))
    if BEHAVIOUR == "noisy":
        print("x" * 5000 + "\x1b[31mred\x00</script>")
        for number in range(2000):
            emit(event="log", run_id=run_id, message=f"line {number} " + "y" * 100)
        emit(event="result", run_id="nobody", result=result, timeline=None)
        emit(event="result", run_id=run_id, result=result, timeline=None)
    emit(event="result", run_id=run_id, result=result, timeline=None)


def main() -> None:
    if BEHAVIOUR == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    requests: list[dict[str, object]] = []
    ended = threading.Event()

    def read() -> None:
        for line in sys.stdin:
            message = json.loads(line)
            if message.get("end"):
                ended.set()
            elif "probe" in message:
                emit(event="bandwidths", bandwidths=BANDWIDTHS)
            else:
                requests.append(message["run"])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=read, daemon=True).start()
    emit(event="ready", environment={"torch": "none", "threads": 1, "device": "cpu", "device_kind": "cpu",
                                     "device_name": "fake"})  # fmt: skip
    while requests or not ended.is_set():
        if requests:
            run(requests.pop(0))
        else:
            time.sleep(0.005)
    os._exit(0)


main()
