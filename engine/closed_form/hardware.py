"""What a card achieves of its data sheet. Every constant with its source; all of them stated on the About page."""

from __future__ import annotations

from dataclasses import dataclass

from engine.catalog import Gpu

PRODUCT_EFFICIENCY = {"A100": 0.75, "H100": 0.52, "H200": 0.52, "GH200": 0.52, "B200": 0.35, "MI300X": 0.38}
"""Share of the dense bf16 peak that a training step's matrix products keep. Benchmarks of large products reach 51-87 %
(gpus.json), steps less: clocks fall under load and shapes are smaller. A100 and H100 from the 68-74 % and 46-49 % HFU
of foundation-model-stack/fms-fsdp's README; B200 and MI300X by their throughput relative to H100's in torchao's
training guide."""

PRODUCT_EFFICIENCY_ELSEWHERE = 0.60
"""For cards without a published step: between A100 and H100."""

ATTENTION_EFFICIENCY = {"H100": 0.35, "H200": 0.35, "GH200": 0.35}
"""Share of the peak that FlashAttention-2, which torch runs, reaches on Hopper (Shah et al. 2024, arXiv 2407.08608)."""

ATTENTION_EFFICIENCY_ELSEWHERE = 0.45
"""Over forward and backward: below the 73 % and 63 % that FlashAttention-2 reaches on A100 at its best shapes (Dao
2023, arXiv 2307.08691)."""

BANDWIDTH_EFFICIENCY = 0.85
"""Share of the data-sheet memory bandwidth that a pointwise kernel reaches: STREAM-like kernels, 85-92 % on
A100 and H100 (BabelStream results)."""

KERNEL_SECONDS = 4e-6
"""The least a kernel takes, launch included."""

LINK_EFFICIENCY = 0.80
"""Share of a PCIe link's rate that pinned copies reach: 24.8 of 31.5 GB/s on A100, 55 of 63 on H200 (gpus.json)."""

HOST_BYTES_PER_SECOND = 100e9
NODE_HOST_BYTES_PER_SECOND = 400e9
"""Memory bandwidth that one GPU's CPU optimizer can use, and what a node of two sockets has for all its GPUs (eight
DDR4-3200 channels a socket: 205 GB/s)."""

NVME_READ_BYTES_PER_SECOND = 6.5e9
NVME_WRITE_BYTES_PER_SECOND = 5.0e9
"""One PCIe 4.0 drive; the course says 6-12 GB/s a drive. DeepNVMe: 10 and 5 GB/s over four."""

NODE_GPUS = 8
NODE_NETWORK_BYTES_PER_SECOND = {"V100": 40e9, "A100": 160e9}
NODE_NETWORK_ELSEWHERE = 320e9
"""What a node receives from others, shared by its GPUs: a collective's rings cross nodes through all its adapters, and
what has arrived goes on over NVLink. Eight 400 Gb/s adapters on DGX H100, eight of 200 on DGX A100, four of 100 on
DGX-1 (NVIDIA data sheets), at 80 %."""

NVLINK_BYTES_PER_SECOND = {"V100": 150e9, "A100": 300e9, "H100": 450e9, "H200": 450e9, "B200": 900e9, "GH200": 450e9}
"""Per direction, SXM boards (NVIDIA data sheets). Cards without NVLink use their host link."""

CONTEXT_BYTES = 1_000_000_000
"""CUDA context, kernels and library workspaces: 0.47-0.92 GiB of context on A100 (stas00/ml-engineering) and cuBLAS
workspaces of 8-32 MiB a stream."""

FRAGMENTATION = 0.03
"""Share of the card that the caching allocator cannot hand out: reserved over allocated in published pairs of one run
is 1.03-1.36; the lower end is what expandable segments leave."""

RESERVED_OVER_MAIN = 1.15
"""What the caching allocator reserves over what is alive at once, outside the pools of side streams: the 90th
percentile of the eager FSDP2 runs that print both (torchtitan #165), a cautious figure.
`engine.validate.published.reserved_over_main` recomputes it, and judges it on the runs of other sources."""

COLLECTIVE_BYTES = 1_500_000_000
"""NCCL buffers once there is more than one rank: 1-2 GiB (stas00/ml-engineering)."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Achieved rates of one card, in base units."""

    matmul: float
    attention: float
    memory: float
    host_link: float
    peers: float
    """Between the ranks of a data-parallel group."""


def rates(card: Gpu, world_size: int) -> Rates | None:
    """None where the catalog has no half-precision peak for the card."""
    peak = card.bf16_flops_per_second or card.fp16_flops_per_second
    if peak is None:
        return None
    family = card.name.split()[0]
    link = card.measured_host_link_bytes_per_second or LINK_EFFICIENCY * (card.host_link_bytes_per_second or 12e9)
    nvlink = NVLINK_BYTES_PER_SECOND.get(family) if "PCIe" not in card.name else None
    near = LINK_EFFICIENCY * nvlink if nvlink else link
    return Rates(
        matmul=PRODUCT_EFFICIENCY.get(family, PRODUCT_EFFICIENCY_ELSEWHERE) * peak,
        attention=ATTENTION_EFFICIENCY.get(family, ATTENTION_EFFICIENCY_ELSEWHERE) * peak,
        memory=BANDWIDTH_EFFICIENCY * card.memory_bytes_per_second,
        host_link=link,
        peers=near
        if world_size <= NODE_GPUS
        else min(near, NODE_NETWORK_BYTES_PER_SECOND.get(family, NODE_NETWORK_ELSEWHERE)),
    )
