"""Korthikanti et al. 2022 (arXiv 2205.05198): activation bytes of one GPT layer, from the same table as our own.

The paper's accounting (section 4.1) is our block's table for a GPT in a 2-byte dtype with dropout and materialised
scores, less the norms' statistics, which the paper leaves out as small (ours keeps 16·B·S bytes a layer of them in
fp32). Everything else agrees tensor by tensor: head-first copies of q, k and v instead of the projections' outputs,
2 + 1 + 2 bytes a score for softmax, mask and dropped product, one byte a mask element.
"""

from __future__ import annotations

from dataclasses import replace

from engine.architecture import Architecture
from engine.closed_form.block import block_tape
from engine.closed_form.ops import Context
from engine.closed_form.tape import Tensor, total_bytes


def paper_context(arch: Architecture, batch: int, seq: int) -> Context:
    """A GPT block as the paper has it: 2-byte dtype, dropout, scores materialised."""
    return Context(
        arch=replace(arch, norm="layernorm"), batch=batch, seq=seq, weight="bf16", compute="bf16",
        attention="standard", dropout=True, cuda=True,
    )  # fmt: skip


def layer_tensors(arch: Architecture, batch: int, seq: int, scheme: str = "none") -> list[Tensor]:
    """The tensors that the paper counts for one layer: `none` keeps all, `selective` recomputes the attention core
    (scores, softmax, its dropout), `full` keeps the layer's input."""
    tape = block_tape(paper_context(arch, batch, seq))
    if scheme == "full":
        return list(tape.inputs.values())
    tensors = [tensor for tensor in tape.saved.values() if not _statistic(tensor)]
    if scheme == "selective":
        return [tensor for tensor in tensors if "S²" not in tensor.formula]
    return tensors


def _statistic(tensor: Tensor) -> bool:
    """Norm statistics, which the paper leaves out as small."""
    return tensor.shape[-1] == 1


def layer_bytes(arch: Architecture, batch: int, seq: int, scheme: str = "none") -> int:
    """sbh(34 + 5as/h), 34sbh or 2sbh, summed from the table."""
    return total_bytes(layer_tensors(arch, batch, seq, scheme))


def formula_bytes(batch: int, seq: int, hidden: int, heads: int, scheme: str = "none") -> int:
    """The paper's closed forms: equations 1 (none) and 4 (selective), and the layer's input (full)."""
    sbh = seq * batch * hidden
    return {"none": 34 * sbh + 5 * heads * seq * seq * batch, "selective": 34 * sbh, "full": 2 * sbh}[scheme]
