"""RunSpec: what to train (or serve) and how. One of Remat's two types; the other is `engine.result.RunResult`.

The keys are the JSON keys of the REST API, the CLI flags (with dashes) and the form fields. A RunSpec that exists
is valid: every rule that a combination must keep is checked here, with a message that names the fields.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from engine.architecture import Architecture, resolve_model
from engine.catalog import gpu as find_gpu
from engine.checkpoint_names import parse_checkpointing
from engine.errors import SpecError

MAX_GRID = 500  # runs one job or command line may expand to

LARGEST_SIZE = 2**24
Size = Annotated[int, Field(strict=True, ge=1, le=LARGEST_SIZE)]
Count = Annotated[int, Field(strict=True, ge=0, le=LARGEST_SIZE)]

Mode = Literal["train", "inference"]
Precision = Literal["bf16-mixed", "bf16", "bf16-12", "fp32", "bf16-autocast"]
Optimizer = Literal["adamw", "sgd", "adamw-8bit"]
Attention = Literal["flash", "standard", "tiled", "triton"]
Tier = Literal["none", "cpu", "nvme"]
Sharding = Literal["none", "zero-1", "zero-2", "zero-3"]


class RunSpec(BaseModel):
    """One configuration. Frozen and hashable by `spec_hash`; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str | dict[str, Any] = Field(
        default="gpt-tiny",
        description="A preset name, `gpt:L,d,a[,V]`, `llama:L,d,a,kv,f[,V]`, or a Hugging Face config.json object.",
    )
    mode: Mode = Field(default="train", description="A training step, or prefill and decode.")
    micro_batch: Size = Field(default=1, description="Sequences in one forward pass (on one rank).")
    seq: Size = Field(default=512, description="Tokens in a sequence (the prompt, for inference).")
    grad_accumulation: Annotated[int, Field(strict=True, ge=1, le=4096)] = Field(
        default=1, description="Micro-batches whose gradients are added before one optimizer step."
    )
    precision: Precision = Field(
        default="bf16-mixed",
        description="`bf16-mixed` bf16 weights and gradients with an fp32 master copy and fp32 moments (16 bytes a "
        "parameter); `bf16` everything bf16 (8); `bf16-12` bf16 weights and gradients, fp32 moments, no master copy "
        "(12, the course's); `fp32` (16); `bf16-autocast` fp32 weights, bf16 matmuls (16).",
    )
    optimizer: Optimizer = Field(
        default="adamw", description="AdamW, SGD without momentum, or AdamW with 8-bit moments."
    )
    max_grad_norm: Annotated[float, Field(strict=True, gt=0)] | None = Field(
        default=None, description="Gradients are scaled so that their global L2 norm is at most this; `none` = as is."
    )
    checkpointing: str = Field(
        default="none",
        description="`none`, `per-layer`, `sqrt`, `every-K`, `selective` or `selective:GROUP+GROUP` (the op groups to "
        "recompute), `nested`, `budget-F` (the fastest plan that keeps at most F of `none`'s activations).",
    )
    attention: Attention = Field(
        default="flash",
        description="`flash` the device's fused kernel; `standard` scores materialised; `tiled` ours in PyTorch; "
        "`triton` ours on CUDA.",
    )
    dropout: Annotated[float, Field(strict=True, ge=0.0, lt=1.0)] = Field(
        default=0.0, description="Dropout probability in training."
    )
    loss_chunks: Annotated[int, Field(strict=True, ge=1, le=4096)] = Field(
        default=1,
        description="Above 1, logits and cross-entropy are computed chunk by chunk, few logits alive at once.",
    )
    loss: Literal["auto", "fused", "standard"] = Field(
        default="auto",
        description="`fused` ours: the gradient is made in forward and no logits are kept; `standard` logits and their "
        "softmax are kept, as most code does; `auto` is fused in our decoder, transformers' own in its classes.",
    )
    offload_optimizer: Tier = Field(default="none", description="Where master weights and optimizer states live.")
    offload_parameters: Tier = Field(
        default="none", description="Where a block's parameters live while it does not run."
    )
    offload_activations: Literal["none", "cpu"] = Field(
        default="none",
        description="`cpu` moves what the checkpoint policy keeps to host memory until backward needs it.",
    )
    offload_overlap: Annotated[bool, Field(strict=True)] = Field(
        default=True, description="Transfers run beside compute; `false` is strictly serial."
    )
    sharding: Sharding = Field(default="none", description="ZeRO stage over `world_size` ranks (`none` = plain DDP).")
    world_size: Annotated[int, Field(strict=True, ge=1, le=2**16)] = Field(
        default=1, description="Data-parallel ranks."
    )
    prefill_chunk: Count = Field(default=0, description="Inference: prompt tokens per forward pass; 0 = all at once.")
    new_tokens: Count = Field(default=0, description="Inference: tokens to generate after the prompt.")
    compile: Annotated[bool, Field(strict=True)] = Field(
        default=False, description="Run the model under torch.compile."
    )
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda|cuda:[0-9]{1,3})$")] = Field(
        default="auto", description="Where a measurement runs: `auto`, `cpu`, `cuda`, `cuda:N`."
    )
    gpu: str | None = Field(default=None, description="A catalog GPU: what predicted times and `fits` refer to.")
    memory_limit_gib: Annotated[float, Field(strict=True, gt=0, le=2**20)] | None = Field(
        default=None, description="A hard cap on the device memory of a measured run, in GiB."
    )
    steps: Annotated[int, Field(strict=True, ge=1, le=10_000)] = Field(default=5, description="Timed steps.")
    warmup: Annotated[int, Field(strict=True, ge=0, le=1000)] = Field(
        default=2, description="Steps before the timed ones."
    )
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)] = Field(
        default=0, description="Seed of weights, data, dropout."
    )

    @field_validator("model", mode="before")
    @classmethod
    def _name_or_object(cls, value: object) -> object:
        """One message for the field, rather than one for each half of its union."""
        if not isinstance(value, str | dict):
            raise SpecError("model", "must be a preset name, gpt:…, llama:… or the object of a config.json")
        return value

    @field_validator("model")
    @classmethod
    def _known_model(cls, value: str | dict[str, Any]) -> str | dict[str, Any]:
        resolve_model(value)
        return value

    @field_validator("checkpointing")
    @classmethod
    def _known_checkpointing(cls, value: str) -> str:
        parse_checkpointing(value)
        return value

    @field_validator("gpu")
    @classmethod
    def _known_gpu(cls, value: str | None) -> str | None:
        if value is not None:
            find_gpu(value)
        return value

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        for fields, wrong, why in _refusals(self):
            if wrong:
                raise SpecError(fields, why)
        return self

    @property
    def architecture(self) -> Architecture:
        """The model's shapes; the learned position table of a made-up model has grown to `seq`."""
        return resolve_model(self.model).for_sequence(self.seq + (self.new_tokens if self.mode == "inference" else 0))

    @property
    def runs_transformers(self) -> bool:
        """Whether the real transformers class runs rather than our decoder."""
        return self.architecture.runs_transformers

    @property
    def fused_loss(self) -> bool:
        """Which loss `auto` means here. In chunks it is always ours."""
        if self.loss != "auto":
            return self.loss == "fused"
        return self.loss_chunks > 1 or not self.runs_transformers

    @property
    def spec_hash(self) -> str:
        """Sixteen hex digits that two specs share only if every field is equal. A field that came later counts only
        where it is set, so that results stored before it keep their hash."""
        later = {name for name in ("max_grad_norm",) if getattr(self, name) is None}
        canonical = json.dumps(self.model_dump(exclude=later), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    @property
    def tokens_per_step(self) -> int:
        """Tokens one optimizer step learns from, on one rank."""
        return self.micro_batch * self.seq * self.grad_accumulation


def _refusals(spec: RunSpec) -> Iterator[tuple[str, bool, str]]:
    """(fields, refused?, why) for every rule that concerns two fields."""
    training = spec.mode == "train"
    for name in ("checkpointing", "offload_optimizer", "offload_activations", "sharding"):
        wrong = not training and getattr(spec, name) != "none"
        yield f"{name}, mode", wrong, f"{name} applies to training; with mode=inference it must be none"
    neutral = {"grad_accumulation": 1, "loss_chunks": 1, "dropout": 0.0, "max_grad_norm": None}
    for name, value in neutral.items():
        wrong = not training and getattr(spec, name) != value
        shown = "none" if value is None else value
        yield f"{name}, mode", wrong, f"{name} applies to training; with mode=inference it must be {shown}"
    for name in ("prefill_chunk", "new_tokens"):
        wrong = training and getattr(spec, name) != 0
        yield f"{name}, mode", wrong, f"{name} needs mode=inference; with mode=train it must be 0"
    yield (
        "loss, loss_chunks",
        spec.loss == "standard" and spec.loss_chunks > 1,
        "the standard loss keeps all logits: use loss=fused (or auto) with loss_chunks above 1",
    )
    yield (
        "prefill_chunk, seq",
        spec.prefill_chunk > spec.seq,
        f"prefill_chunk must be at most seq ({spec.seq}); 0 means the whole prompt at once",
    )
    yield (
        "offload_parameters, offload_optimizer",
        training and spec.offload_parameters != "none" and spec.offload_optimizer == "none",
        "offloaded parameters are updated where they live: set offload_optimizer to cpu or nvme too",
    )
    yield (
        "offload_parameters, offload_optimizer",
        spec.offload_parameters == "nvme" and spec.offload_optimizer == "cpu",
        "parameters on nvme with the optimizer in host memory is not supported: set offload_optimizer to nvme",
    )
    offloaded = {spec.offload_optimizer, spec.offload_parameters, spec.offload_activations} != {"none"}
    for name, only in {"checkpointing": "none", "sharding": "none", "world_size": 1, "mode": "train"}.items():
        wrong = spec.compile and getattr(spec, name) != only
        yield f"compile, {name}", wrong, f"with compile=true {name} must be {only}: Remat's policies run eagerly"
    yield "compile, offload_*", spec.compile and offloaded, "torch.compile does not trace the offload hooks: use one"
    yield (
        "sharding, offload_*",
        spec.sharding in ("zero-1", "zero-2") and spec.offload_parameters != "none",
        "zero-1 and zero-2 keep whole parameters on the device: use sharding=zero-3 to offload them",
    )
    yield (
        "attention, device",
        spec.attention == "triton" and spec.device == "cpu",
        "the triton kernel needs a CUDA device: use attention=tiled on the CPU",
    )


def expand(spec: Mapping[str, Any], vary: Mapping[str, Sequence[Any]]) -> list[RunSpec]:
    """The grid: `spec` with every combination of the values in `vary`, in order, without duplicates.

    Raises SpecError if a key of `vary` is no field, has no values, or the grid is larger than MAX_GRID; pydantic's
    ValidationError if a combination is refused.
    """
    size = 1
    for key, values in vary.items():
        if key not in RunSpec.model_fields:
            raise SpecError(f"vary.{key}", f"no such field; one of {', '.join(RunSpec.model_fields)}")
        if not values:
            raise SpecError(f"vary.{key}", "needs at least one value")
        size *= len(values)
    if size > MAX_GRID:
        raise SpecError("vary", f"{size} combinations; at most {MAX_GRID} runs a job")
    grid = (
        RunSpec.model_validate({**spec, **dict(zip(vary, values, strict=True))})
        for values in itertools.product(*vary.values())
    )
    return list({run.spec_hash: run for run in grid}.values())
