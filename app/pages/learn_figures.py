"""What the Learn pages draw, from the predictor and the exercises' own pieces. Pure: inputs to template values."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import log
from typing import Any

from app.pages.figures import ACROSS, curves, stacked
from app.pages.form import query_of
from engine.catalog import gpu, gpus
from engine.closed_form import predict
from engine.closed_form.fits import usable_bytes
from engine.closed_form.training import schedule_of
from engine.exercises.exercise import Bar, Bars, Input, Lines, Series, build_spec, saved_bytes
from engine.exercises.online_softmax import Walk, random_inputs, walk_tiles
from engine.exercises.replay import Frame, replay
from engine.planning.course import Reconciliation, reconciliations
from engine.recipes import RECIPES
from engine.result import CATEGORIES, RunResult
from engine.spec import RunSpec

Inputs = Mapping[str, Any]

MODELS = (
    "gpt-tiny", "llama-tiny", "llama-3.2-1b", "llama-7b", "llama-2-7b", "mistral-7b-v0.1",
    "llama-3.1-8b", "llama-13b", "llama-2-70b", "llama-3.1-70b",
)  # fmt: skip
POLICIES = ("none", "selective", "sqrt", "per-layer", "nested")
PRECISIONS = tuple(RECIPES)
BATCH = Input("batch", "Micro-batch", 8, "", "B", 1, 4096)
SEQ = Input("seq", "Sequence length", 4096, "", "S", 1, 1_048_576)


def model_input(default: str) -> Input:
    return Input("model", "Model", default, choices=MODELS)


def gpu_input(default: str = "a100-80gb-sxm") -> Input:
    return Input("gpu", "GPU", default, choices=tuple(gpus()))


def at_peak(label: str, result: RunResult) -> Bar:
    """A stacked bar of the categories alive at the peak."""
    assert result.memory.at_peak is not None
    return Bar(label, tuple((category, getattr(result.memory.at_peak, category)) for category in CATEGORIES))


MEMORY_INPUTS = (
    model_input("llama-2-7b"),
    BATCH,
    SEQ,
    Input("attention", "Attention", "flash", choices=("flash", "standard")),
    Input("precision", "Precision", "bf16-12", choices=PRECISIONS),
    gpu_input(),
)


@cache
def reconciled() -> tuple[Reconciliation, ...]:
    """The notes' figures beside the exact ones: the same on every visit."""
    return reconciliations()


def memory(inputs: Inputs) -> dict[str, Any]:
    """Peak by category for each policy, and by recipe; the notes' figures beside the exact ones."""

    def spec(**changes: Any) -> RunSpec:
        fields = {
            "model": inputs["model"],
            "micro_batch": inputs["batch"],
            "seq": inputs["seq"],
            "attention": inputs["attention"],
            "precision": inputs["precision"],
        }
        return build_spec(**(fields | changes))

    card = gpu(inputs["gpu"])
    limit = ((f"usable on {card.name}", usable_bytes(card)),)
    policies = tuple(at_peak(policy, predict(spec(checkpointing=policy))) for policy in POLICIES)
    recipes = tuple(at_peak(name, predict(spec(precision=name, checkpointing="per-layer"))) for name in PRECISIONS)
    return {
        "policies": stacked(Bars("Peak memory by checkpoint policy", "B", policies, limit)),
        "recipes": stacked(Bars("The same model by precision recipe, per-layer checkpoints", "B", recipes, limit)),
        "figures": reconciled(),
        "predict": query_of(spec(gpu=inputs["gpu"]).model_dump()),
    }


REPLAY_INPUTS = (
    Input("layers", "Layers", 9, "", "L", 1, 24, slider=True),
    Input("checkpointing", "Policy", "sqrt", choices=("none", "per-layer", "every-2", "every-4", "sqrt", "nested")),
    Input("ratio", "Ratio", 16.0, "what a layer holds, in inputs", "a/b", 1, 200),
    Input("frame", "Moment", 1, "", "", 1, 1000),
)


def replayed(inputs: Inputs) -> dict[str, Any]:
    """Every moment of one step under the policy, in units of a layer's input."""
    spec = build_spec(model=f"gpt:{inputs['layers']},64,4", checkpointing=inputs["checkpointing"])
    frames = replay(schedule_of(spec))
    alive = [frame.alive_bytes(1, inputs["ratio"]) for frame in frames]
    at = min(inputs["frame"], len(frames)) - 1
    everything = inputs["layers"] * inputs["ratio"]
    drawn = curves(
        Lines(
            "Alive over the step, in layer inputs",
            "Moment",
            "Layer inputs alive",
            "ratio",
            (
                Series("Alive", tuple((i + 1, value) for i, value in enumerate(alive)), "line"),
                Series("Peak", ((alive.index(max(alive)) + 1, max(alive)),), "mark", (f"peak {max(alive):g}",)),
            ),
            x_unit="layers",
        ),
        ACROSS,
    )
    return {
        "frames": [
            _moment(frame, value, i, len(frames)) for i, (frame, value) in enumerate(zip(frames, alive, strict=True))
        ],
        "at": at,
        "layers": inputs["layers"],
        "curve": drawn,
        "peak": max(alive),
        "kept": max(len(frame.inputs) for frame in frames),
        "everything": everything,
        "recomputed": sum(frame.action == "recompute" for frame in frames),
        "verify": query_of(
            {"model": "gpt:16,256,4", "precision": "fp32", "device": "cpu"}, {"checkpointing": POLICIES}
        ),
    }


def _moment(frame: Frame, alive: float, index: int, count: int) -> dict[str, Any]:
    verbs = {"forward": "forward of", "recompute": "recompute", "backward": "backward of"}
    return {
        "text": f"{verbs[frame.action]} layer {frame.block + 1}, {alive:g} inputs' worth alive",
        "block": frame.block,
        "inputs": frame.inputs,
        "inside": frame.inside,
        "place": round((index + 1) / (1.05 * count), 4),
    }


FLASH_INPUTS = (
    Input("tokens", "Tokens", 8, "", "S", 2, 12, slider=True),
    Input("block", "Tile size", 3, "", "", 1, 12, slider=True),
    Input("seed", "Random seed", 1, "other numbers", "", 0, 10_000),
    model_input("llama-2-7b"),
    Input("batch", "Micro-batch", 1, "for the curve", "B", 1, 4096),
    Input("frame", "Tile", 1, "", "", 1, 1000),
)


def flash(inputs: Inputs) -> dict[str, Any]:
    """The tiles of a small attention, and what the two kernels keep at real sizes."""
    walk = walk_tiles(*random_inputs(inputs["tokens"], 3, inputs["seed"]), inputs["block"])
    lengths = [2**n for n in range(9, 16)]
    kept = {kind: [_layer_bytes(inputs, kind, seq) for seq in lengths] for kind in ("standard", "flash")}
    colours = [
        Series(f"{kind} attention", tuple(zip(lengths, values, strict=True)), "line") for kind, values in kept.items()
    ]
    at = min(inputs["frame"], len(walk.tiles)) - 1
    return {
        "walk": walk,
        "tiles": [_tile(walk, index) for index in range(len(walk.tiles))],
        "frames": [{"text": _tile_text(walk, index), "index": index} for index in range(len(walk.tiles))],
        "at": at,
        "tokens": inputs["tokens"],
        "curve": curves(
            Lines("Activations one layer keeps", "Sequence length", "Bytes", "B", tuple(colours), "tokens", True, True),
            ACROSS,
        ),
        "slopes": {kind: _slope(lengths, values) for kind, values in kept.items()},
        "verify": query_of(
            {"model": "gpt-tiny", "precision": "fp32", "device": "cpu"},
            {"attention": ["standard", "tiled", "flash"], "seq": [512, 1024, 2048]},
        ),
    }


def _layer_bytes(inputs: Inputs, attention: str, seq: int) -> int:
    """Growth of what is saved for one more layer of this width."""
    spec = build_spec(model=inputs["model"], micro_batch=inputs["batch"], seq=seq, attention=attention)
    checkpointed = spec.model_copy(update={"checkpointing": "per-layer"})
    inside = saved_bytes(predict(spec)) - saved_bytes(predict(checkpointed))
    return inside // spec.architecture.layers


def _slope(lengths: list[int], values: list[int]) -> float:
    """Slope of the last octave on log-log axes: the power of S."""
    return log(values[-1] / values[-2]) / log(lengths[-1] / lengths[-2])


def _tile_text(walk: Walk, index: int) -> str:
    tile = walk.tiles[index]
    rows, columns = len(tile.scores), len(tile.scores[0])
    return (
        f"queries {tile.first_query + 1} to {tile.first_query + rows} meet "
        f"keys {tile.first_key + 1} to {tile.first_key + columns}"
    )


def _tile(walk: Walk, index: int) -> dict[str, Any]:
    """The whole S×S square as the kernel sees it at one tile, and the running numbers of the tile's rows."""
    tile = walk.tiles[index]
    rows = range(tile.first_query, tile.first_query + len(tile.scores))
    columns = range(tile.first_key, tile.first_key + len(tile.scores[0]))

    def cell(q: int, k: int) -> tuple[str, str]:
        if q in rows and k in columns:
            score = tile.scores[q - rows[0]][k - columns[0]]
            return "tile-now", "–" if score is None else f"{score:.2f}"
        if k > q:
            return "tile-hidden", "–"
        seen = q < rows[0] or (q in rows and k < columns[0])
        return ("tile-seen", "·") if seen else ("tile-later", "")

    size = range(len(walk.queries))
    return {
        "square": [[cell(q, k) for k in size] for q in size],
        "rows": [
            {
                "query": tile.first_query + r + 1,
                "maximum": tile.maximum[r],
                "rescale": tile.rescale[r],
                "total": tile.total[r],
                "output": [value / tile.total[r] for value in tile.output[r]],
            }
            for r in range(len(tile.scores))
        ],
        "last": tile.last,
    }
