"""transformers models: every family under every policy, every config's parameter count, no network."""

import socket

import pytest
import torch

from engine.architecture import from_config
from engine.catalog import model_configs
from engine.errors import SpecError, UnsupportedError
from engine.models.huggingface import block_lists, model_class, transformers_config
from engine.simulate import simulate
from engine.spec import RunSpec
from engine.training import build
from engine.validate.grid import TRANSFORMERS

CPU = torch.device("cpu")
POLICIES = ("none", "per-layer", "every-2", "selective", "nested", "sqrt")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", TRANSFORMERS)
def test_every_family_runs_under_every_policy(family: str, policy: str) -> None:
    """One real step; the first loss is ln V, give or take the random weights."""
    spec = RunSpec(model=TRANSFORMERS[family], seq=32, precision="fp32", checkpointing=policy)
    loss = float(build(spec, CPU).step(0))
    assert loss == pytest.approx(7.62, abs=0.6)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_checkpointing_leaves_the_gradients_bit_equal(family: str) -> None:
    def gradients(policy: str) -> list[torch.Tensor]:
        training = build(RunSpec(model=TRANSFORMERS[family], seq=32, precision="fp32", checkpointing=policy), CPU)
        training._forward(0).backward()
        return [parameter.grad for parameter in training.model.parameters() if parameter.grad is not None]

    plain = gradients("none")
    assert plain
    for policy in ("per-layer", "selective", "nested"):
        assert all(torch.equal(a, b) for a, b in zip(plain, gradients(policy), strict=True))


@pytest.mark.parametrize("attention", ["standard", "tiled"])
def test_other_kernels_give_the_same_loss(attention: str) -> None:
    base = RunSpec(model=TRANSFORMERS["llama"], seq=32, precision="fp32")
    losses = [float(build(base.model_copy(update={"attention": name}), CPU).step(0)) for name in ("flash", attention)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_chunked_loss_is_transformers_loss_on_shifted_targets() -> None:
    spec = RunSpec(model=TRANSFORMERS["llama"], seq=32, precision="fp32", loss_chunks=4)
    assert float(build(spec, CPU).step(0)) == pytest.approx(7.62, abs=0.6)


def test_a_capped_head_refuses_the_chunked_loss() -> None:
    with pytest.raises(UnsupportedError, match="loss_chunks"):
        build(RunSpec(model=TRANSFORMERS["gemma2"], seq=32, loss_chunks=4), CPU).step(0)


BARE = {
    "mpt": {"model_type": "mpt", "n_layers": 2, "d_model": 32, "n_heads": 4, "vocab_size": 64, "max_seq_len": 32},
    "opt": {"model_type": "opt", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_dim": 48,
            "vocab_size": 64, "max_position_embeddings": 32, "word_embed_proj_dim": 32},
}  # fmt: skip
"""Small configs of families that do something in a way of their own."""


def bare(kind: str, **fields: object) -> RunSpec:
    return RunSpec.model_validate({"model": BARE[kind], "seq": 16, "precision": "fp32", "device": "cpu"} | fields)


@pytest.mark.parametrize("kind", BARE)
def test_dropout_reaches_every_family(kind: str) -> None:
    plain, dropped = (build(bare(kind, dropout=rate), CPU)._forward(0).item() for rate in (0.0, 0.5))
    assert plain != dropped


def test_a_block_without_an_mlp_module_has_its_groups() -> None:
    def saved(policy: str) -> int:
        return simulate(bare("opt", checkpointing=policy))[0].memory.saved_activation_bytes or 0

    assert saved("selective:mlp-activation") <= saved("none")
    assert saved("selective:norms+mlp-in+mlp-activation") < saved("selective:norms")


def test_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the network was asked for something")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    simulate(RunSpec(model=TRANSFORMERS["llama"], seq=32))


def test_a_config_that_its_class_refuses_names_the_field() -> None:
    config = {**TRANSFORMERS["llama"], "rope_parameters": "no"}
    with pytest.raises((SpecError, ValueError), match="model"):
        build(RunSpec(model=config, seq=32), CPU)


def masked_head(hidden: int, vocab: int) -> int:
    """A BERT's stated count has the pooler (h² + h). The masked LM has a transform of that size instead, its LayerNorm
    (2h) and an output bias (V)."""
    return 2 * hidden + vocab


EXPLAINED = {"bert-base-uncased": masked_head(768, 30522), "bert-large": masked_head(1024, 30522)}
STATED_FOR_ANOTHER_BUILD = ("mpt",)
"""MPT's stated counts are llm-foundry's build, with biases and learned positions that transformers' class has not."""


@pytest.mark.parametrize("name", list(model_configs()))
def test_parameter_counts_are_the_real_class_s(name: str) -> None:
    config = model_configs()[name]
    arch = from_config(config, name)
    built = transformers_config(arch)
    with torch.device("meta"):
        model = model_class(built)(built)
    model.tie_weights()
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == arch.parameters + EXPLAINED.get(name, 0)
    stated = config.get("_true_param_count")
    if stated and config["model_type"] not in STATED_FOR_ANOTHER_BUILD:
        assert count == stated + EXPLAINED.get(name, 0)


def test_an_encoder_decoder_has_two_stacks() -> None:
    config = transformers_config(from_config(model_configs()["t5-base"], "t5-base"))
    with torch.device("meta"):
        model = model_class(config)(config)
    assert [len(stack) for stack in block_lists(model)] == [12, 12]
