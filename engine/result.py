"""RunResult: what a spec costs, by whichever method. What a method cannot know is None, never 0."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field

from engine.spec import RunSpec

Method = Literal["closed-form", "simulated", "measured"]
Outcome = Literal["ok", "oom", "failed"]
Phase = Literal["forward", "backward", "optimizer", "prefill", "decode"]

CATEGORIES = ("parameters", "gradients", "optimizer_states", "activations", "temporaries")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, ser_json_inf_nan="null")


class AtPeak(_Part):
    """Bytes alive at the peak, by category; they sum to `device_peak_bytes`.

    `parameters` includes buffers and, for inference, the KV cache is part of `activations`.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer_states: int = 0
    activations: int = 0
    temporaries: int = 0


class Memory(_Part):
    device_peak_bytes: int | None = None
    """Bytes live in the device allocator at the peak of a steady step."""
    device_reserved_bytes: int | None = None
    """What the CUDA caching allocator holds for it; None where it is neither measured nor modelled."""
    first_step_peak_bytes: int | None = None
    """Peak of the very first step, kept when it is larger than the steady one."""
    host_peak_bytes: int | None = None
    nvme_bytes: int | None = None
    nvme_written_bytes_per_step: int | None = None
    saved_activation_bytes: int | None = None
    """Distinct storages held for backward when forward ends, parameters excluded."""
    peak_phase: Phase | None = None
    at_peak: AtPeak | None = None


class PhaseSeconds(_Part):
    forward: float | None = None
    backward: float | None = None
    optimizer: float | None = None
    exposed_transfer: float | None = None


class Timing(_Part):
    step_seconds: float | None = None
    step_seconds_p20: float | None = None
    step_seconds_p80: float | None = None
    steps: int | None = None
    tokens_per_second: float | None = None
    model_flops: int | None = None
    """FLOPs of one step without recomputation (the M of MFU)."""
    hardware_flops: int | None = None
    """FLOPs of one step with recomputation (the H of HFU)."""
    mfu: float | None = None
    hfu: float | None = None
    phases_seconds: PhaseSeconds = Field(default_factory=PhaseSeconds)


class Inference(_Part):
    weights_bytes: int | None = None
    kv_cache_bytes: int | None = None
    """Keys and values of the prompt: 2·L·B·S·n_kv·head_dim·bytes."""
    kv_cache_allocated_bytes: int | None = None
    """The same with room for the new tokens, as it is allocated."""
    activation_peak_bytes: int | None = None
    """Peak bytes beyond weights and KV cache."""
    time_to_first_token_seconds: float | None = None
    decode_tokens_per_second: float | None = None
    generated_tokens: list[int] | None = None
    """The first sequence's generated token ids (greedy)."""


class Fits(_Part):
    fits: bool
    headroom_bytes: int
    limit_bytes: int
    assumes: str


class LedgerRow(_Part):
    """One named tensor (or `count` equal ones) that the prediction counts."""

    tensor: str
    shape: list[int]
    dtype: str
    bytes: int
    group: str
    count: int = 1
    category: str = "activations"
    formula: str = ""
    source: str = ""


class RunResult(_Part):
    id: str = Field(default_factory=lambda: uuid4().hex)
    spec: RunSpec
    spec_hash: str
    method: Method
    outcome: Outcome
    memory: Memory = Field(default_factory=Memory)
    timing: Timing = Field(default_factory=Timing)
    inference: Inference | None = None
    parameters: int | None = None
    losses: list[float] | None = None
    """Training loss of every step run, warm-up included."""
    ranks: list[dict[str, Any]] | None = None
    """Per rank, where there are several: rank, device_peak_bytes, host_peak_bytes."""
    fits: Fits | None = None
    ledger: list[LedgerRow] | None = None
    warnings: list[str] = Field(default_factory=list)
    error: str | None = None
    environment: dict[str, Any] = Field(default_factory=dict)
    created_at: datetime = Field(default_factory=lambda: datetime.now(UTC))


class Timeline(_Part):
    """Live bytes by category over one step, stacked; `x` is seconds (measured) or allocator events (simulated)."""

    x_unit: Literal["seconds", "events"]
    x: list[float]
    parameters: list[int]
    gradients: list[int]
    optimizer_states: list[int]
    activations: list[int]
    temporaries: list[int]
    phases: list[dict[str, Any]]
    """{"name", "start", "end"} in units of x."""
    blocks: list[dict[str, Any]]
    """{"name", "start", "end", "phase"}: which block was running."""
    peak_index: int
    alive_at_peak: list[dict[str, Any]]
    """{"bytes", "category", "count", "where"}: the largest groups of storages alive at the peak."""
