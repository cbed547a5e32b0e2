from __future__ import annotations

import csv
import io
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from app import cli
from app.db import runs
from app.fields import OPTIONAL
from app.flags import grid
from app.settings import Settings, read_settings
from app.terminal import results_table
from engine.result import RunResult
from engine.spec import expand
from engine.units import format_bytes

Command = Callable[..., tuple[int, str, str]]
SMALL = ("--model", "gpt:2,64,2,256", "--precision", "fp32", "--device", "cpu")
TINY = (*SMALL, "--seq", "32")


@pytest.fixture
def remat(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, settings: Settings) -> Command:
    """Run the command line in this process: its exit code, stdout and stderr."""
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["remat", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def results(out: str) -> list[RunResult]:
    """stdout as RunResults; anything else on it is an error."""
    return [RunResult.model_validate_json(line) for line in out.splitlines()]


def test_predict_prints_one_result_a_combination(remat: Command) -> None:
    code, out, err = remat(
        "predict", *TINY, "--checkpointing", "none,per-layer", "--attention", "standard,flash", "--json"
    )
    assert (code, err) == (0, "")
    found = [(result.spec.checkpointing, result.spec.attention, result.method) for result in results(out)]
    combinations = [("none", "standard"), ("none", "flash"), ("per-layer", "standard"), ("per-layer", "flash")]
    assert found == [(*pair, "closed-form") for pair in combinations]


def test_predict_shows_a_table(remat: Command) -> None:
    code, out, _ = remat("predict", *TINY, "--checkpointing", "none,per-layer")
    assert code == 0
    assert "per-layer" in out
    assert "MiB" in out


def test_the_table_says_what_does_not_fit(remat: Command) -> None:
    words = ("--model", "llama-3.1-8b", "--gpu", "a100-80gb-sxm,b200-sxm", "--seq", "1024")
    _, out, _ = remat("predict", *words)
    _, answers, _ = remat("predict", *words, "--json")
    small, large = (result.fits for result in results(answers))
    assert small is not None
    assert large is not None
    assert (small.fits, large.fits) == (False, True)
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert rows["a100-80gb-sxm"].rstrip().endswith(f"  {format_bytes(-small.headroom_bytes)} over")
    assert rows["b200-sxm"].rstrip().endswith("  fits")
    _, out, _ = remat("predict", *TINY)
    assert "fits" not in out  # no card was named


def test_progress_and_notes_name_their_run(remat: Command, capfd: pytest.CaptureFixture[str]) -> None:
    _, _, err = remat("predict", *SMALL, "--method", "simulated", "--seq", "8,16", "--checkpointing", "none,per-layer")
    told = [line for line in err.splitlines() if line.endswith(": ok")]
    assert [line.split(":")[0] for line in told] == [
        f"run {number} of 4 ({name})"
        for number, name in enumerate(("8, none", "8, per-layer", "16, none", "16, per-layer"), 1)
    ]
    specs = expand({"model": "gpt-tiny"}, {"seq": [8, 16]})
    noisy, calm = (
        RunResult(spec=spec, spec_hash=spec.spec_hash, method="measured", outcome="ok", warnings=["for all", *more])
        for spec, more in zip(specs, (["times spread over 14 %"], []), strict=True)
    )
    results_table([noisy, calm])
    out, _ = capfd.readouterr()
    assert "note: for all" in out
    assert "note (8): times spread over 14 %" in out


def test_a_simulated_prediction_asks_the_runner(remat: Command) -> None:
    code, out, _ = remat("predict", *TINY, "--method", "simulated", "--json")
    assert code == 0
    assert results(out)[0].method == "simulated"


def test_measure_records_unless_told_not_to(remat: Command, database: object, board: object) -> None:
    code, out, _ = remat("measure", *SMALL, "--seq", "8,16", "--json")
    assert code == 0
    assert [result.spec.seq for result in results(out)] == [8, 16]
    code, _, _ = remat("measure", *TINY, "--no-save", "--json")
    assert code == 0
    with database.read() as session:  # type: ignore[attr-defined]
        stored = list(runs.every(session, runs.Filters()))
    assert [result["id"] for result in stored] == [result.id for result in results(out)]
    assert {result["job_id"] for result in stored} == {None}


@pytest.mark.parametrize(
    ("words", "field"),
    [
        pytest.param(("predict", "--model", "nope"), "model", id="unknown model"),
        pytest.param(("predict", "--micro-batch", "0"), "micro_batch", id="zero"),
        pytest.param(("predict", "--micro-batch", "x"), "micro_batch", id="no integer"),
        pytest.param(("predict", "--seq", "1.5"), "seq", id="fraction"),
        pytest.param(("predict", "--seq", "1_000"), "seq", id="underscore"),
        pytest.param(("predict", "--seq", "１６"), "seq", id="digits of another script"),
        pytest.param(("predict", "--dropout", "1e400"), "dropout", id="infinite"),
        pytest.param(("predict", "--seq", ","), "seq", id="no value"),
        pytest.param(("predict", "--dropout", "nan"), "dropout", id="NaN"),
        pytest.param(("predict", "--checkpointing", "every-0"), "checkpointing", id="every-0"),
        pytest.param(("predict", "--compile", "maybe"), "compile", id="no boolean"),
        pytest.param(("predict", "--mode", "inference", "--dropout", "0.1"), "dropout, mode", id="two fields"),
        pytest.param(("predict", "--seq", ",".join(map(str, range(1, 600)))), "vary", id="too many"),
        pytest.param(("predict", "--model", "./missing.json"), "model", id="missing config"),
        pytest.param(("measure", "--gpu", "abacus"), "gpu", id="unknown GPU"),
        pytest.param(("predict", "--batch", "1"), "--batch", id="unknown flag"),
        pytest.param(("predict", "--method", "guessed"), "--method", id="unknown method"),
    ],
)
def test_bad_input_is_exit_2_and_names_the_field(remat: Command, words: tuple[str, ...], field: str) -> None:
    code, out, err = remat(*words)
    assert (code, out) == (2, "")
    assert field in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "words",
    [
        ("predict", "--seq", "8", "--seq", "16"),
        ("predict", "--seq=8", "--device", "cpu", "--seq", "8"),
        ("predict", "--method", "simulated", "--method", "closed-form"),
        ("runs", "export", "--format", "json", "--format", "csv"),
        ("jobs", "list", "--limit", "5", "--limit", "6"),
        ("exercise", "1", "--layers", "8", "--layers", "9"),
    ],
    ids=" ".join,
)
def test_a_flag_given_twice_is_refused(remat: Command, words: tuple[str, ...]) -> None:
    code, out, err = remat(*words)
    assert (code, out) == (2, "")
    assert "given twice" in err.splitlines()[-1]
    assert words[-2].removeprefix("--").partition("=")[0] in err.splitlines()[-1]


def test_what_a_message_repeats_cannot_steer_the_terminal(remat: Command) -> None:
    code, _, err = remat("predict", "--model", "a/\x1b[31m\udced\n.json")
    assert code == 2
    assert "a/\\x1b[31m\\udced\\n.json" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("words", [("runs", "export"), ("measure",), ("serve",)], ids=" ".join)
def test_an_empty_data_dir_is_not_the_current_one(
    remat: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    code, out, err = remat(*words, "--data-dir", "")
    assert (code, out) == (2, "")
    assert "DATA_DIR: must name a folder" in err
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    "host", ["", " ", "300.1.1.1", "1.2.3", "a..b", "\x1b[31m", "127.0.0.1:80", "http://localhost"]
)
def test_a_host_that_is_no_address_is_said(remat: Command, host: str) -> None:
    code, out, err = remat("serve", "--host", host)
    assert (code, out) == (2, "")
    assert "no address this machine can listen on" in err
    assert len(err.splitlines()) == 1
    assert err.rstrip("\n").isprintable()


@pytest.mark.parametrize("host", ["nosuch.invalid", "192.0.2.1", "2001:db8::1", "a" * 64])
def test_an_address_of_no_interface_is_said(remat: Command, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("REMAT_TOKEN", "x" * 16)
    code, out, err = remat("serve", "--host", host)
    assert (code, out) == (1, "")
    assert err == f"{host} is no address this machine can listen on. Choose another --host.\n"


def test_a_failed_run_is_exit_1(
    remat: Command, monkeypatch: pytest.MonkeyPatch, make_settings: Callable[..., Settings]
) -> None:
    command = " ".join((sys.executable, str(Path(__file__).parent / "fake_runner.py"), "fail"))
    monkeypatch.setenv("REMAT_RUNNER_COMMAND", command)
    code, out, err = remat("measure", *TINY, "--json")
    assert code == 1
    assert results(out)[0].outcome == "failed"
    assert "it was told to" in err


def test_a_runner_that_dies_fails_its_run_and_the_rest_go_on(remat: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    command = " ".join((sys.executable, str(Path(__file__).parent / "fake_runner.py"), "die"))
    monkeypatch.setenv("REMAT_RUNNER_COMMAND", command)
    code, out, _ = remat("measure", *SMALL, "--seq", "8,16", "--json")
    assert code == 1
    assert ["SIGKILL" in str(result.error) for result in results(out)] == [True, True]


def test_a_model_may_be_a_config_file(remat: Command, tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, err = remat("predict", "--model", str(tmp_path / "config.json"), "--seq", "32", "--json")
    assert (code, err) == (0, "")
    assert results(out)[0].spec.architecture.layers == 2


def test_a_pipe_is_no_config_and_is_not_waited_for(remat: Command, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    code, out, err = remat("predict", "--model", str(tmp_path / "config.json"))
    assert (code, out) == (2, "")
    assert "no regular file" in err


@pytest.mark.parametrize(
    ("text", "models"),
    [
        ("gpt2,llama-tiny", ["gpt2", "llama-tiny"]),
        ("gpt:2,64,2,256", ["gpt:2,64,2,256"]),
        ("gpt:2,64,2,gpt2", ["gpt:2,64,2", "gpt2"]),
    ],
)
def test_commas_inside_a_model_are_its_own(text: str, models: list[str]) -> None:
    spec, vary = grid({"model": text})
    assert (vary.get("model") or [spec["model"]]) == models


def test_plan(remat: Command) -> None:
    words = ("plan", "--model", "llama-2-7b", "--seq", "4096", "--gpu", "a100-80gb")
    code, out, _ = remat(*words, "--gpus", "8", "--json")
    assert code == 0
    assert json.loads(out)["recommended"]["fits"]
    code, out, _ = remat(*words, "--gpus", "8")
    assert "recommended" in out
    code, _, err = remat("plan", "--model", "llama-2-7b")
    assert (code, err.startswith("gpu: ")) == (2, True)


def test_export(remat: Command) -> None:
    remat("measure", *SMALL, "--seq", "8,16", "--json")
    code, out, _ = remat("runs", "export", "--method", "measured")
    assert code == 0
    assert [row["spec.seq"] for row in csv.DictReader(io.StringIO(out))] == ["8", "16"]


def test_export_of_an_unknown_job_is_refused(remat: Command) -> None:
    for job_id in ("nonsense", "0" * 32):
        code, out, err = remat("runs", "export", "--job-id", job_id)
        assert (code, out) == (2, "")
        assert err.startswith(f"job_id: no job '{job_id}'")


def test_a_job_id_that_is_no_text_is_refused(remat: Command) -> None:
    code, out, err = remat("runs", "export", "--job-id", "\udced\udca0\udc80")
    assert (code, out) == (2, "")
    assert err.startswith("job_id: no job '\\udced")


def test_doctor_tells_what_is_there(remat: Command) -> None:
    code, out, _ = remat("doctor")
    assert code == 0
    for word in ("SQLite", "database", "disk", "torch", "device"):
        assert word in out
    assert "25.00 GB/s to the device, 24.00 GB/s back" in out
    assert "tmpfs is memory" in out


def test_doctor_says_that_the_runner_is_broken(remat: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_RUNNER_COMMAND", f"{sys.executable} -c 'raise SystemExit(3)'")
    code, out, _ = remat("doctor")
    assert code == 1
    assert "exit code 3" in out


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("REMAT_HOST", "0.0.0.0", "REMAT_TOKEN"),
        ("REMAT_PORT", "99999", "REMAT_PORT"),
        ("REMAT_TOKEN", "short", "REMAT_TOKEN"),
    ],
)
def test_a_wrong_setting_is_refused_before_serving(
    remat: Command, monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    monkeypatch.setenv("REMAT_TOKEN", "")  # as a compose file passes on a variable that is not set
    monkeypatch.setenv(name, value)
    code, out, err = remat("serve")
    assert (code, out) == (2, "")
    assert says in err
    assert len(err.splitlines()) == 1


def test_a_database_that_cannot_be_used_is_one_line(remat: Command, settings: Settings) -> None:
    settings.database_path.write_bytes(b"not a database" * 500)
    code, _, err = remat("serve", "--no-worker")
    assert code == 1
    assert "not a database" in err.splitlines()[-1]
    assert "Traceback" not in err


def test_a_port_in_use_is_one_line_before_anything_starts(remat: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, out, err = remat("serve", "--port", str(taken.getsockname()[1]))
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith("cannot listen on 127.0.0.1")
    assert "Traceback" not in err
    assert "uvicorn" not in err


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("runs", "export", "--output", "/proc/no/such/folder"), "output"),
        (("runs", "export", "--output", "/"), "output"),
        (("runs", "export", "--method", "guessed"), "--method"),
        (("runs", "export", "--outcome", "fine"), "--outcome"),
        (("jobs", "list", "--url", "zzz"), "url"),
        (("jobs", "list", "--url", "file:///etc"), "url"),
        (("jobs", "list", "--url", "http://[::1"), "url"),
        (("jobs", "list", "--url", "http://\udcff/"), "url"),
        (("jobs", "list", "--url", "http://127.0.0.1/\x1b"), "url"),
        (("jobs", "list", "--status", "fialed"), "--status"),
        (("jobs", "list", "--status", "\udcff"), "--status"),
        (("jobs", "list", "--url", "http://127.0.0.1:port"), "url"),
        (("jobs", "submit", "--key", "a\nb"), "key"),
        (("jobs", "show", "nosuch"), "no job 'nosuch': an id is 32 hexadecimal digits"),
        (("jobs", "log", "../runs"), "no job"),
        (("jobs", "cancel", "0" * 31), "no job"),
        (("jobs", "retry", "nosuch"), "no job"),
    ],
    ids=lambda value: ascii(" ".join(value)) if isinstance(value, tuple) else value,
)
def test_what_cannot_be_reached_or_written_names_its_flag(remat: Command, words: tuple[str, ...], field: str) -> None:
    code, out, err = remat(*words)
    assert (code, out) == (2, "")
    assert field in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.parametrize("key", sorted(OPTIONAL))
def test_none_is_accepted_wherever_a_value_may_be_absent(key: str) -> None:
    assert grid({key: "none"}) == ({key: None}, {})


def test_a_recommended_plan_can_be_pasted(remat: Command) -> None:
    words = ("--model", "llama-2-7b", "--gpu", "a100-80gb", "--offload-overlap", "false")
    _, out, _ = remat("plan", *words)
    flags = " ".join(out.split("recommended: ")[1].split("note: ")[0].split("\n", 1)[1].split())
    code, _, err = remat("predict", *flags[flags.index("--") :].split())
    assert (code, err) == (0, "")


def test_no_server_is_one_line(remat: Command) -> None:
    code, out, err = remat("jobs", "list", "--url", "http://127.0.0.1:9")
    assert (code, out) == (1, "")
    assert "does not answer" in err


@pytest.mark.parametrize("name", Settings.model_fields)
def test_a_blank_variable_is_one_that_is_not_set(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv(f"REMAT_{name.upper()}", raising=False)
    unset = read_settings()
    monkeypatch.setenv(f"REMAT_{name.upper()}", "")
    assert read_settings() == unset
