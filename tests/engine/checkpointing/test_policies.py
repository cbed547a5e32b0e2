"""Every policy gives the gradients of `none` bit for bit, keeps what its ledger says, and repeats what theory says."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from engine.checkpoint_names import parse_checkpointing
from engine.checkpointing.policies import apply_checkpointing
from engine.checkpointing.profiling import profile
from engine.checkpointing.replay import replaying
from engine.checkpointing.rng import check_replayable
from engine.closed_form import predict
from engine.closed_form.block import block_tape
from engine.closed_form.ops import context_of
from engine.errors import UnsupportedError
from engine.observe import MemoryPass
from engine.simulate import simulate
from engine.spec import RunSpec
from engine.trace import Trace
from engine.training import build

CPU = torch.device("cpu")
GPT = "gpt:4,32,4,64"
LLAMA = "llama:4,32,4,2,48,64"
ALL_BUT_DROPOUT = "selective:norms+qkv+attention-core+attention-out+mlp-in+mlp-activation+mlp-out"
POLICIES = (
    "per-layer", "every-3", "sqrt", "nested", "selective", "selective:norms", "selective:qkv+attention-core",
    "selective:attention-core", "selective:attention-out", "selective:mlp-in+mlp-activation", "selective:dropout",
    ALL_BUT_DROPOUT + "+dropout", "budget-0.5", "budget-0.15",
)  # fmt: skip

TRANSFORMERS = {
    "gpt2": {"n_layer": 3, "n_embd": 32, "n_head": 4, "n_positions": 32},
    "qwen3": {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
              "head_dim": 8, "intermediate_size": 48},
    "gemma2": {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
               "head_dim": 8, "intermediate_size": 48, "sliding_window": 4},
    "mixtral": {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
                "intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4,
                    "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1,
                    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
                    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1},
}  # fmt: skip


def small(**fields: object) -> RunSpec:
    """A spec that runs in milliseconds."""
    base = {"model": GPT, "micro_batch": 2, "seq": 16, "precision": "fp32", "device": "cpu", "attention": "standard"}
    return RunSpec.model_validate(base | fields)


def transformers_spec(kind: str, **fields: object) -> RunSpec:
    return small(model={"model_type": kind, "vocab_size": 64} | TRANSFORMERS[kind], **fields)


def gradients(spec: RunSpec) -> list[Tensor | None]:
    """The loss and the gradients of the first forward and backward of a run."""
    training = build(spec, CPU)
    loss = training._forward(0)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in training.model.parameters())]


def assert_same(first: list[Tensor | None], second: list[Tensor | None]) -> None:
    """Bit for bit."""
    for a, b in zip(first, second, strict=True):
        assert (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))


def measured(spec: RunSpec) -> Trace:
    """A steady real step's trace."""
    training = build(spec, CPU)
    training.step(0)
    return MemoryPass(training).run(1)[0]


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_gradients_are_those_of_none_with_dropout(model: str) -> None:
    expected = gradients(small(model=model, dropout=0.1))
    for policy in POLICIES:
        assert_same(gradients(small(model=model, dropout=0.1, checkpointing=policy)), expected)


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("precision", ["bf16", "bf16-autocast"])
def test_gradients_are_those_of_none_with_the_fused_kernel(model: str, precision: str) -> None:
    fields = {"model": model, "attention": "flash", "precision": precision}
    expected = gradients(small(**fields))
    for policy in ("per-layer", "nested", "selective", ALL_BUT_DROPOUT):
        assert_same(gradients(small(**fields, checkpointing=policy)), expected)


@settings(max_examples=12, deadline=None)
@given(
    style=st.sampled_from(["gpt", "llama"]), layers=st.integers(1, 5), heads=st.sampled_from([1, 2, 4]),
    width=st.sampled_from([8, 16]), batch=st.integers(1, 3), seq=st.integers(1, 17), data=st.data(),
    policy=st.sampled_from(POLICIES[:-2]), dropout=st.sampled_from([0.1, 0.5]),
)  # fmt: skip
def test_gradients_are_those_of_none_for_any_shape(
    style: str, layers: int, heads: int, width: int, batch: int, seq: int, data: st.DataObject, policy: str,
    dropout: float,
) -> None:  # fmt: skip
    kv = data.draw(st.sampled_from([n for n in (1, 2, 4) if heads % n == 0]))
    shape = f"{layers},{heads * width},{heads}"
    model = f"gpt:{shape},32" if style == "gpt" else f"llama:{shape},{kv},24,32"
    fields = {"model": model, "micro_batch": batch, "seq": seq, "dropout": dropout}
    assert_same(gradients(small(**fields, checkpointing=policy)), gradients(small(**fields)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_gradients_of_transformers_models_are_those_of_none(kind: str) -> None:
    """Masks differ from block to block in Gemma-2: a segment gives each block its own."""
    expected = gradients(transformers_spec(kind, dropout=0.1))
    groups = "selective:norms+qkv+attention-core+mlp-in+mlp-activation"
    for policy in ("per-layer", "every-2", "nested", "selective", "budget-0.5", groups):
        assert_same(gradients(transformers_spec(kind, dropout=0.1, checkpointing=policy)), expected)


def test_gradient_accumulation_replays_each_micro_batch() -> None:
    def after_two_steps(policy: str) -> list[Tensor | None]:
        training = build(small(dropout=0.2, grad_accumulation=3, checkpointing=policy), CPU)
        losses = [training.step(0), training.step(1)]
        return [*losses, *(parameter.detach() for parameter in training.model.parameters())]

    expected = after_two_steps("none")
    for policy in ("every-2", "nested", "selective"):
        assert_same(after_two_steps(policy), expected)


@pytest.mark.slow
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["plain", "dropout"])
def test_saved_bytes_are_the_ledgers(model: str, precision: str, dropout: float) -> None:
    fields = {"model": model, "precision": precision, "dropout": dropout}
    alone = ["norms", "qkv", "attention-core", "mlp-in+mlp-activation"]
    groups = [*(f"selective:{name}" for name in alone), ALL_BUT_DROPOUT]
    for policy in (
        "none",
        "per-layer",
        "every-3",
        "nested",
        "selective",
        *groups,
        *["selective:dropout"][: dropout > 0],
    ):
        spec = small(**fields, checkpointing=policy)
        assert measured(spec).saved_bytes() == predict(spec).memory.saved_activation_bytes, policy


@pytest.mark.parametrize(("kind", "layers", "kv"), [("gpt2", 3, 4), ("mixtral", 2, 2)])
def test_copies_by_head_go_with_the_projections(kind: str, layers: int, kv: int) -> None:
    """The products of the scores read copies of q, k and v: dropping the scores keeps these and not their sources, and
    dropping the projections drops them. Keys that a class repeats for grouped queries go with the scores."""
    none = measured(transformers_spec(kind)).saved_bytes()

    def dropped_bytes(groups: str) -> int:
        return none - measured(transformers_spec(kind, checkpointing=f"selective:{groups}")).saved_bytes()

    batch, heads, seq, head_dim, element = 2, 4, 16, 8, 4
    scores, mask = batch * heads * seq * seq * element, batch * seq * seq * element
    queries = batch * heads * seq * head_dim * element
    repeated = 2 * queries if kv < heads else 0
    assert dropped_bytes("attention-core") == layers * (scores + (heads - kv) * repeated // heads) - mask
    assert dropped_bytes("qkv") == layers * (queries if repeated else 3 * queries)


@pytest.mark.parametrize("attention", ["standard", "flash", "tiled"])
def test_a_kernel_without_dropout_is_not_counted_where_there_is_some(attention: str) -> None:
    for policy in ("none", "selective:attention-core"):
        spec = small(attention=attention, dropout=0.1, checkpointing=policy)
        assert measured(spec).saved_bytes() == predict(spec).memory.saved_activation_bytes, policy


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("policy", ["none", "selective", "budget-0.5"])
def test_experts_are_simulated_as_they_run(kind: str, precision: str, policy: str) -> None:
    spec = transformers_spec(kind, precision=precision, checkpointing=policy)
    saved = simulate(spec)[0].memory.saved_activation_bytes
    assert saved == pytest.approx(measured(spec).saved_bytes(), abs=32)  # scalars of the router


@pytest.mark.parametrize("fraction", [0.75, 0.5, 0.25, 0.12])
def test_a_budget_is_kept_and_predicted_to_the_byte(fraction: float) -> None:
    none = measured(small(seq=64)).saved_bytes()
    spec = small(seq=64, checkpointing=f"budget-{fraction}")
    training = build(spec, CPU)
    training.step(0)
    kept = MemoryPass(training).run(1)[0].saved_bytes()
    assert kept <= fraction * none
    assert profile(spec).none_bytes == none
    assert any(note.startswith(f"checkpointing: budget-{fraction:g}: blocks 0") for note in training.notes)


@pytest.mark.parametrize(("kind", "fractions"), [("gpt2", (0.15, 0.19, 0.4)), ("qwen3", (0.18, 0.22, 0.5))])
def test_a_mask_from_outside_the_blocks_counts_in_a_budget(kind: str, fractions: tuple[float, ...]) -> None:
    """Who makes scores again keeps the mask: one for all blocks, and much of what so few of them keep."""
    fields = {"micro_batch": 1, "seq": 32}
    none = measured(transformers_spec(kind, **fields)).saved_bytes()
    for fraction in fractions:
        spec = transformers_spec(kind, **fields, checkpointing=f"budget-{fraction}")
        assert measured(spec).saved_bytes() <= fraction * none


@pytest.mark.slow
def test_what_transformers_blocks_keep_is_traced_to_the_byte() -> None:
    """The traced tapes of LLaMA's class predict what the real run keeps under a plan made of them."""
    fields = {"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4,
              "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 64}  # fmt: skip
    spec = small(model=fields, attention="flash")
    assert profile(spec).none_bytes == measured(spec).saved_bytes()
    for fraction in (0.5, 0.2):
        budget = small(model=fields, attention="flash", checkpointing=f"budget-{fraction}")
        assert measured(budget).saved_bytes() <= fraction * profile(spec).none_bytes


@pytest.mark.slow
def test_peaks_rank_as_theory_says() -> None:
    """L = 16, d = 256: a block's inside is far more than twice its input, so longer segments only cost."""
    fields = {"model": "gpt:16,256,4,512", "seq": 512, "attention": "flash"}
    peaks = [measured(small(**fields, checkpointing=p)).peak()[1] for p in ("per-layer", "every-2", "every-4", "none")]
    assert all(low < high for low, high in pairwise(peaks))


def flops(spec: RunSpec) -> int:
    training = build(spec, CPU)
    with FlopCounterMode(display=False) as counter:
        training.step(0)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_repeated_matmuls_are_the_theorys(model: str) -> None:
    """One forward of every block in a region each time it runs again, less the last projection, at which it stops;
    selective repeats the products that a dropped tensor is made from and no others."""
    spec = small(model=model)
    tape = block_tape(context_of(spec))
    block = sum(op.flops for op in tape.ops)
    tail = tape.ops[-2].flops
    assert tape.ops[-2].name == "mlp.down"
    none = flops(spec)

    def repeated(policy: str) -> int:
        return flops(small(model=model, checkpointing=policy)) - none

    assert repeated("per-layer") == 4 * (block - tail)
    assert repeated("every-2") == 2 * (2 * block - tail)
    # Blocks 0-1, 2 and 3 as regions, and block 0 once more inside the first.
    assert repeated("nested") == (2 * block - tail) + 3 * (block - tail)
    for groups in ("norms", "attention-core", "mlp-in", "qkv+attention-core", "norms+mlp-in+mlp-activation"):
        again = tape.again(frozenset(groups.split("+")))
        assert repeated(f"selective:{groups}") == 4 * sum(op.flops for op in again)


def test_a_group_that_no_operator_belongs_to_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"checkpointing: selective: no operator .* dropout"):
        gradients(small(checkpointing="selective:norms+dropout"))


def test_a_budget_below_every_plan_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"checkpointing: budget-0\.001 is below what any plan keeps"):
        build(small(checkpointing="budget-0.001"), CPU)


def test_dropout_on_a_device_whose_generator_cannot_be_replayed_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"checkpointing, dropout: the generator of a mps device"):
        check_replayable(torch.device("mps"))


class Doubling(nn.Module):
    """A block that does not say what it returns."""

    def __init__(self, extra: bool) -> None:
        super().__init__()
        self.linear, self.extra = nn.Linear(4, 4), extra

    def forward(self, x, scale=1.0):  # type: ignore[no-untyped-def]  # as families write it
        y = torch.tanh(self.linear(x)) * scale
        return (y, y.sum() if self.extra else None)


def run_blocks(policy: str, *, extra: bool = False) -> list[Tensor | None]:
    torch.manual_seed(0)
    blocks = nn.ModuleList(Doubling(extra) for _ in range(3))
    apply_checkpointing(blocks, parse_checkpointing(policy), dropout=False)
    x = torch.ones(2, 4, requires_grad=True)
    hidden = x
    for index, block in enumerate(blocks):
        hidden = block(hidden, scale=index + 1.0)[0]
    hidden.sum().backward()
    return [x.grad, *(parameter.grad for parameter in blocks.parameters())]


class Router(nn.Module):
    """Weights that sum to one, in place: autograd keeps what they were before, too."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.sigmoid(self.gate(x)) * 2
        weights /= weights.sum(-1, keepdim=True)
        weights *= 3
        return x * weights + weights.tanh()


class Routing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Router()

    def forward(self, x: Tensor) -> Tensor:
        routed: Tensor = self.mlp(x)
        return routed


@pytest.mark.parametrize("groups", ["mlp-activation", "mlp-in", "mlp-in+mlp-activation"])
def test_a_value_that_is_written_to_is_saved_as_it_was_before(groups: str) -> None:
    def run(policy: str) -> list[Tensor | None]:
        torch.manual_seed(0)
        blocks = nn.ModuleList(Routing() for _ in range(2))
        apply_checkpointing(blocks, parse_checkpointing(policy), dropout=False)
        x = torch.rand(3, 4, requires_grad=True)
        hidden = x
        for block in blocks:
            hidden = block(hidden)
        hidden.square().sum().backward()
        return [x.grad, *(parameter.grad for parameter in blocks.parameters())]

    assert_same(run(f"selective:{groups}"), run("none"))


@pytest.mark.parametrize("policy", ["per-layer", "every-2", "every-3", "nested"])
def test_a_segment_gives_each_block_its_own_arguments_and_form(policy: str) -> None:
    assert_same(run_blocks(policy), run_blocks("none"))


def test_blocks_that_hand_tensors_to_each_other_cannot_share_a_segment() -> None:
    with pytest.raises(UnsupportedError, match="returns more than its hidden states"):
        run_blocks("every-3", extra=True)


def test_a_wrapped_block_shows_the_attributes_of_its_own() -> None:
    blocks = nn.ModuleList(Doubling(False) for _ in range(2))
    apply_checkpointing(blocks, parse_checkpointing("every-2"), dropout=False)
    assert [block.extra for block in blocks] == [False, False]
    with pytest.raises(AttributeError, match="nothing_of_the_sort"):
        _ = blocks[0].nothing_of_the_sort


def test_replays_say_so() -> None:
    """What counts FLOPs can tell recomputation from the rest."""
    seen: set[bool] = set()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's own
            if func is torch.ops.aten.gelu.default:
                seen.add(replaying())
            return func(*args, **(kwargs or {}))

    training = build(small(checkpointing="selective:mlp-activation"), CPU)
    with Watch():
        training.step(0)
    assert seen == {False, True}
