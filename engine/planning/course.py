"""The course's rule-of-thumb figures, computed as the notes compute them, beside ours and why they differ.

Rows are those of the course notes: 1 and 2 (memory of a 7B and a 70B model), 9 (optimizer offload), 12 (attention).
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.closed_form import predict
from engine.closed_form.block import block_tape, context_of
from engine.closed_form.tape import total_bytes
from engine.spec import RunSpec
from engine.units import GB


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """One figure of the notes beside ours, both in `unit`."""

    row: int
    what: str
    notes_formula: str
    notes: float
    ours: float
    unit: str
    why: str


PARAMETERS_7B, PARAMETERS_70B = 7e9, 70e9  # the notes' round numbers
PCIE4_BYTES_PER_SECOND = 32e9
BYTES_12N = 12


def reconciliations() -> tuple[Reconciliation, ...]:
    """Every figure of the notes that is a rule of thumb, with ours."""
    return (
        _states(),
        _activations_7b(),
        _total_7b(),
        _activations_70b(),
        _offload(),
        _one_score_matrix(),
        _attention(),
    )


def _training(model: str, **fields: object) -> RunSpec:
    return RunSpec.model_validate({"model": model, "seq": 4096, "attention": "standard", "gpu": "a100-80gb", **fields})


def saved_gb(model: str, micro_batch: int, attention: str = "standard", loss: str = "fused") -> float:
    """GB of activations kept for backward by `none`."""
    spec = _training(model, micro_batch=micro_batch, attention=attention, loss=loss, precision="bf16-12")
    return (predict(spec).memory.saved_activation_bytes or 0) / GB


def _states() -> Reconciliation:
    parameters = predict(_training("llama-2-7b")).parameters or 0
    return Reconciliation(
        1, "weights, gradients and optimizer states of a 7B model", "12·N", BYTES_12N * PARAMETERS_7B / GB,
        16 * parameters / GB, "GB",
        "12 bytes a parameter is bf16 weights and gradients with fp32 moments and no fp32 master copy; the usual mixed "
        "precision keeps one and takes 16 (ZeRO, arXiv 1910.02054), and LLaMA-2-7B has 6.74 G parameters, not 7 G",
    )  # fmt: skip


def _activations_7b() -> Reconciliation:
    tensors = 14  # hidden-sized tensors a layer that give the notes' 120 GB: 8·4096·4096·32·2 bytes each
    one = 8 * 4096 * 4096 * 32 * 2 / GB
    flash = saved_gb("llama-2-7b", 8, "flash")
    return Reconciliation(
        1, "activations of a 7B model, B=8, S=4096", f"{tensors}·B·S·d·L·2", tensors * one, saved_gb("llama-2-7b", 8),
        "GB",
        f"the notes' 120 GB are {tensors} hidden-sized tensors a layer at {one:.1f} GB each; with flash attention the "
        f"table sums to {flash:.0f} GB, with materialised scores to ours",
    )  # fmt: skip


def _total_7b() -> Reconciliation:
    spec = _training("llama-2-7b", micro_batch=8, precision="bf16-12")
    return Reconciliation(
        1, "everything for a 7B model, B=8, S=4096", "84 + 120", 204.0,
        (predict(spec).memory.device_peak_bytes or 0) / GB, "GB",
        "the peak is the most alive at one time, gradients and activations never whole together; the conclusion "
        "stands: it does not fit an 80 GB card",
    )  # fmt: skip


def _activations_70b() -> Reconciliation:
    flash = saved_gb("llama-2-70b", 32, "flash")
    boundary = 80 * 32 * 4096 * 8192 * 2 / GB
    return Reconciliation(
        2, "activations of a 70B model, B=32, S=4096", "400 GB+", 400.0, saved_gb("llama-2-70b", 32), "GB",
        f"400 GB is between what per-layer checkpointing keeps ({boundary:.0f} GB of layer inputs) and three such "
        f"tensors a layer; keeping everything takes {flash:.0f} GB even with flash attention",
    )  # fmt: skip


def _offload() -> Reconciliation:
    parameters = predict(_training("llama-2-7b")).parameters or 0
    return Reconciliation(
        9, "optimizer offload of a 7B model over PCIe 4.0, a step", "2·N / 32 GB/s",
        2 * PARAMETERS_7B / PCIE4_BYTES_PER_SECOND, 2 * 2 * parameters / 24.8e9, "s",
        "gradients go down and parameters come up, 2N bytes and 0.42 to 0.44 s each way at the link's 32 GB/s. "
        "One after the other, at the 24.8 GB/s that an A100 reaches, they take ours; side by side half of it",
    )  # fmt: skip


def _one_score_matrix() -> Reconciliation:
    ours = 8 * 32 * 4096**2 * 2 / GB
    return Reconciliation(
        12, "one layer's scores, B=8, H=32, S=4096", "B·H·S²·2", 8.6, ours, "GB",
        "the same figure: one fp16 score matrix of one layer",
    )  # fmt: skip


def _attention() -> Reconciliation:
    spec = _training("gpt:1,4096,32,32000", micro_batch=8, dropout=0.1, precision="bf16-12")
    square = total_bytes(t for t in block_tape(context_of(spec)).saved.values() if "S²" in t.formula)
    return Reconciliation(
        12, "what one layer keeps of its scores with dropout, B=8, H=32, S=4096", "B·H·S²·2", 8.6, square / GB, "GB",
        "a layer keeps the softmax (2 bytes a score), the dropout mask (1) and the dropped product (2): 5·H·S²·B "
        "(Korthikanti et al. 2022, arXiv 2205.05198)",
    )  # fmt: skip
