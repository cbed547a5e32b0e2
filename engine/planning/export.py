"""A configuration as the settings of other frameworks. What they cannot express is said in a comment."""

from __future__ import annotations

import json
from collections.abc import Callable

from engine.checkpoint_names import parse_checkpointing
from engine.recipes import RECIPES
from engine.spec import RunSpec


def _command(spec: RunSpec) -> str:
    """The `remat` command line that measures the same."""
    changed = {k: v for k, v in spec.model_dump().items() if v != type(spec).model_fields[k].default}
    if isinstance(changed.get("model"), dict):
        changed["model"] = "config.json"
    flags = (f"--{key.replace('_', '-')} {str(value).lower() if isinstance(value, bool) else value}"
             for key, value in changed.items())  # fmt: skip
    return f"remat measure {' '.join(flags)}".rstrip()


def _torch(spec: RunSpec) -> str:
    """Plain PyTorch: the checkpoint policy, the attention backend and the optimizer."""
    recipe, plan = RECIPES[spec.precision], parse_checkpointing(spec.checkpointing)
    lines = ["import torch", "from torch.utils.checkpoint import checkpoint", ""]
    dtype = "bfloat16" if recipe.weight == "bf16" else "float32"
    lines.append(f"model = build_model().to(torch.{dtype})")
    if recipe.autocast:
        lines.append('# wrap forward and loss in torch.autocast("cuda", torch.bfloat16)')
    if recipe.master:
        lines.append("# keep an fp32 master copy of every parameter; step on it, then copy back")
    match plan.kind:
        case "none":
            lines.append("# checkpointing: none, autograd keeps what it needs")
        case "segments":
            length = plan.segment_length(spec.architecture.layers)
            lines += [
                f"for start in range(0, len(model.blocks), {length}):",
                f"    segment = model.blocks[start : start + {length}]",
                "    x = checkpoint(lambda x, s=segment: run(s, x), x, use_reentrant=False)",
            ]
        case _:
            lines.append(f"# checkpointing={spec.checkpointing}: see remat's engine/checkpointing; torch's nearest is")
            lines.append("# torch.utils.checkpoint.create_selective_checkpoint_contexts")
    backend = "MATH" if spec.attention == "standard" else "FLASH_ATTENTION"
    lines.append(f"# run attention under torch.nn.attention.sdpa_kernel(SDPBackend.{backend})")
    optimizer = "SGD(model.parameters(), lr=3e-4)" if spec.optimizer == "sgd" else (
        "AdamW(model.parameters(), lr=3e-4, fused=True)"
    )  # fmt: skip
    lines.append(f"optimizer = torch.optim.{optimizer}")
    return "\n".join(lines) + "\n"


def _transformers(spec: RunSpec) -> str:
    """transformers.TrainingArguments."""
    plan = parse_checkpointing(spec.checkpointing)
    attention = "eager" if spec.attention == "standard" else "sdpa"
    lines = ["from transformers import AutoModelForCausalLM, TrainingArguments", ""]
    lines.append(f'model = AutoModelForCausalLM.from_config(config, attn_implementation="{attention}")')
    lines += ["arguments = TrainingArguments("]
    lines.append('    output_dir="out",')
    lines.append(f"    per_device_train_batch_size={spec.micro_batch},")
    lines.append(f"    gradient_accumulation_steps={spec.grad_accumulation},")
    lines.append(f"    bf16={RECIPES[spec.precision].compute == 'bf16'},")
    if plan.kind != "none":
        if spec.checkpointing != "per-layer":
            lines.append(f"    # transformers checkpoints every layer; it has no {spec.checkpointing}")
        lines.append("    gradient_checkpointing=True,")
        lines.append('    gradient_checkpointing_kwargs={"use_reentrant": False},')
    optimizer = {"adamw": "adamw_torch_fused", "sgd": "sgd", "adamw-8bit": "adamw_torch_8bit"}[spec.optimizer]
    lines.append(f'    optim="{optimizer}",')
    if spec.sharding != "none" or spec.offload_optimizer != "none":
        lines.append('    deepspeed="deepspeed.json",')
    return "\n".join([*lines, ")"]) + "\n"


def _fsdp(spec: RunSpec) -> str:
    """FSDP2's fully_shard."""
    lines = [
        "import torch",
        "from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard",
        "",
    ]
    if spec.sharding == "none":
        return "# sharding=none: plain DDP, torch.nn.parallel.DistributedDataParallel(model)\n"
    if spec.sharding == "zero-1":
        lines.append("# FSDP2 has no ZeRO-1; torch.distributed.optim.ZeroRedundancyOptimizer shards the states only")
    offload = "CPUOffloadPolicy()" if spec.offload_parameters != "none" else "OffloadPolicy()"
    policy = "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
    reshard = spec.sharding == "zero-3"
    lines += [
        f"policy = {policy if RECIPES[spec.precision].compute == 'bf16' else 'MixedPrecisionPolicy()'}",
        "for block in model.blocks:",
        f"    fully_shard(block, mp_policy=policy, offload_policy={offload}, reshard_after_forward={reshard})",
        f"fully_shard(model, mp_policy=policy, offload_policy={offload})",
    ]
    return "\n".join(lines) + "\n"


def _deepspeed(spec: RunSpec) -> str:
    """deepspeed.json."""
    stage = int(spec.sharding[-1]) if spec.sharding != "none" else 0
    if spec.offload_parameters != "none":
        stage = 3  # DeepSpeed offloads parameters at stage 3 only
    elif spec.offload_optimizer != "none":
        stage = max(stage, 3 if spec.offload_optimizer == "nvme" else 2)
    zero: dict[str, object] = {"stage": stage, "overlap_comm": spec.offload_overlap}
    for name, tier in (("offload_optimizer", spec.offload_optimizer), ("offload_param", spec.offload_parameters)):
        if tier != "none":
            zero[name] = {"device": tier, "pin_memory": True}
            if tier == "nvme":
                zero[name] = {"device": tier, "pin_memory": True, "nvme_path": "/local_nvme"}
    settings: dict[str, object] = {
        "train_micro_batch_size_per_gpu": spec.micro_batch,
        "gradient_accumulation_steps": spec.grad_accumulation,
        "bf16": {"enabled": RECIPES[spec.precision].compute == "bf16"},
        "zero_optimization": zero,
    }
    if spec.offload_activations != "none":
        settings["activation_checkpointing"] = {"cpu_checkpointing": True}
    return json.dumps(settings, indent=2) + "\n"


FORMATS: dict[str, Callable[[RunSpec], str]] = {
    "remat": _command, "torch": _torch, "transformers": _transformers, "fsdp": _fsdp, "deepspeed": _deepspeed,
}  # fmt: skip


def export(spec: RunSpec) -> dict[str, str]:
    """The configuration as text by framework: remat, torch, transformers, fsdp, deepspeed."""
    return {name: write(spec) for name, write in FORMATS.items()}
