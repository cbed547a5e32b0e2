"""What the training codes of the published rows do otherwise than ours: each difference with the line that says so.

Nothing here is fitted. A difference is a tensor that their code keeps and ours does not (or the reverse), read in the
source at the row's date:

| difference                                               | where it stands                                          |
|----------------------------------------------------------|----------------------------------------------------------|
| fp32 shards, gathered as bf16, gradients reduced in fp32 | torchtitan `apply_fsdp`: MixedPrecisionPolicy(bf16, fp32)|
| the last block stays whole after forward                 | torchtitan `apply_fsdp` until #1094 (July 2025)          |
| embedding apart; norm and head stay whole                | torchtitan `apply_fsdp` since #1094                      |
| gradients are scattered from a buffer on a side stream   | torch until pytorch #129721 (June 2024)                  |
| FSDP1: two blocks gathered, freed when the GPU is past   | torch `fsdp/_limiter_utils.py`: at most 2 in flight      |
| fp32 log-softmax of all logits                           | `F.cross_entropy(pred.float(), labels)`: our `standard`  |
| fp32 logits held by the training loop                    | torchtitan train.py until #391 ("del logits", June 2024) |
| log-softmax of every chunk waits for backward            | torchtitan #996: chunks of logits that are there already |
| bf16 logits of every chunk wait for backward             | torchtune transformer.py: `chunked_output`               |
| compiled loss: no log-softmax is kept (our `fused`)      | torchtitan components/loss.py since #1033 (April 2025)   |
| RMSNorm of single ops: fp32 input and bf16 result kept   | torchtitan model.py until #985 (March 2025); torchtune   |
|                                                          | modules/rms_norm.py. torch.compile fuses it.             |
| keys and values repeated for every query head            | torchtitan model.py `repeat_kv`; torchtune attention.py  |
|                                                          | (`expand`, then `reshape`). torch.compile fuses it.      |
| tied embedding and head                                  | Llama-3.2-3B's config.json                               |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from engine.closed_form.gathering import OURS, Wrapping
from engine.spec import RunSpec

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Trainer:
    """One training code at one time."""

    fsdp: Wrapping = OURS
    held_logit_bytes: int = 0
    """Bytes a logit alive all step long."""
    chunk_logit_bytes: int = 0
    """Bytes a logit that a chunked loss keeps until its backward is over."""
    compiled_loss: bool = False
    """Where the run is compiled, its loss is too."""
    single_ops: bool = False
    """Norms of single ops and repeated keys, where the run is eager."""


WITH_LAST_BLOCK = Wrapping(fp32=True, staying=1)
FIRST = Trainer(replace(WITH_LAST_BLOCK, scatter_input_aside=True), held_logit_bytes=4, single_ops=True)
UNTIL_MARCH_2025 = Trainer(WITH_LAST_BLOCK, chunk_logit_bytes=4, single_ops=True)
UNTIL_JULY_2025 = Trainer(WITH_LAST_BLOCK, compiled_loss=True)
SINCE_JULY_2025 = Trainer(Wrapping(fp32=True, embedding_apart=True), compiled_loss=True)
TORCHTUNE = Trainer(chunk_logit_bytes=2, single_ops=True)

TRAINERS: dict[str, Trainer] = {
    "torchtitan commit 83c879f18 (#165)": FIRST,
    "torchtitan commit 40f8fd007 (#355)": FIRST,
    "torchtitan benchmarks/llama3_h100_202412": UNTIL_MARCH_2025,
    "torchtitan commit 069bae286 (#808)": UNTIL_MARCH_2025,
    "torchtitan commit 5940ddeb5 (#822)": UNTIL_MARCH_2025,
    "torchtitan commit 3b39d7ab0 (#985)": UNTIL_MARCH_2025,
    "torchtitan commit e23bb707d (#996)": UNTIL_MARCH_2025,
    "torchtitan commit c31ff8b05 (#1287)": UNTIL_JULY_2025,
    "torchtitan commit f8f545c45 (#1230)": UNTIL_JULY_2025,
    "torchtitan commit d48445865 (#1625)": SINCE_JULY_2025,
    "torchtitan commit d66b72a6a (#1690)": SINCE_JULY_2025,
    "torchtitan commit d9bdfbb20 (#1881)": SINCE_JULY_2025,
    "ao torchao/prototype/float8nocompile": UNTIL_MARCH_2025,
    "ao docs/source/workflows/training.md": UNTIL_MARCH_2025,
    "torchtune README.md": TORCHTUNE,
}
"""By what a row's source contains."""

LATER_CARDS = ("MI300X", "B200")
"""torchao's training guide ran these with torchtitan of August 2025, and H100 with torchtitan 0.0.2."""


def trainer_of(row: Row) -> Trainer:
    """The code that a row was measured with; ours for a source without an entry."""
    name = next((name for name in TRAINERS if name in row["source"]), "")
    trainer, text = TRAINERS.get(name, Trainer()), row["sharding/parallelism"] or ""
    if "workflows/training" in name and row["gpu"].startswith(LATER_CARDS):
        return SINCE_JULY_2025
    staying = {"FSDP1": 2, "always (ZeRO-3)": 0, "never (ZeRO-2)": row["layers"]}
    blocks = next((count for words, count in staying.items() if words in text), trainer.fsdp.staying)
    return replace(trainer, fsdp=replace(trainer.fsdp, staying=blocks))


def kept_besides(trainer: Trainer, spec: RunSpec, *, compiled: bool) -> int:
    """Bytes that a trainer's code keeps all through the peak and our decoder does not."""
    arch, tokens = spec.architecture, spec.micro_batch * spec.seq
    held = trainer.held_logit_bytes * tokens * arch.vocab
    if compiled or not trainer.single_ops:
        return held
    whole = arch.layers if spec.checkpointing == "none" else 0
    norms = 4 * tokens * arch.hidden * (1 + 2 * whole)  # 4 bytes of fp32 input and 2 of the result, less our 2
    repeated = 2 * 2 * tokens * (arch.query_width - arch.kv_width) * whole
    return held + norms + repeated
