"""The Learn pages: one a learning objective, each with a live figure computed for the reader's own numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from app.pages import learn_choices as choices
from app.pages import learn_figures as figures
from app.pages.figures import show, show_both
from app.pages.mathml import mathml
from app.pages.render import page, templates
from engine.errors import SpecError
from engine.exercises import EXERCISES
from engine.exercises.exercise import Input

router = APIRouter(include_in_schema=False)
templates().env.filters.update(mathml=mathml, show=show, show_both=show_both)


@dataclass(frozen=True, slots=True)
class Topic:
    """One page. `live` turns the reader's inputs into what the template's figure shows."""

    slug: str
    name: str
    title: str
    objective: str
    inputs: tuple[Input, ...]
    live: Callable[[Mapping[str, Any]], dict[str, Any]]

    @property
    def exercises(self) -> list[int]:
        return [exercise.number for exercise in EXERCISES.values() if exercise.objective == self.slug]


_ALL = (
    Topic(
        "memory",
        "Memory",
        "Where the memory goes",
        "Decompose the memory of a training step into weights, gradients, optimizer states and activations.",
        figures.MEMORY_INPUTS,
        figures.memory,
    ),
    Topic(
        "sqrt",
        "Checkpoints",
        "Checkpoints and the square root",
        "Derive why a checkpoint every √L layers divides memory, and when it is not the minimum.",
        figures.REPLAY_INPUTS,
        figures.replayed,
    ),
    Topic(
        "selective",
        "Selective",
        "Recompute what is large and cheap",
        "Design a selective strategy: which tensors to store and which to make again.",
        choices.SELECTIVE_INPUTS,
        choices.selective,
    ),
    Topic(
        "offload",
        "Offload",
        "What the link can carry",
        "Analyse when moving optimizer states off the card is free, and when it is not.",
        choices.OFFLOAD_INPUTS,
        choices.offload,
    ),
    Topic(
        "flash",
        "Attention",
        "Attention without the square",
        "Explain how flash attention computes exact attention in memory linear in the sequence.",
        figures.FLASH_INPUTS,
        figures.flash,
    ),
    Topic(
        "pitfalls",
        "Pitfalls",
        "Three pitfalls",
        "See what the three usual mistakes cost, in the numbers of a model of your choice.",
        choices.PITFALL_INPUTS,
        choices.pitfalls,
    ),
    Topic(
        "decision",
        "Decision",
        "The decision ladder",
        "Decide, rung by rung, which technique to add next, and whether it is needed at all.",
        choices.LADDER_INPUTS,
        choices.ladder,
    ),
)
TOPICS = {topic.slug: topic for topic in _ALL}


@router.get("/learn")
def index(request: Request) -> Response:
    """Every page with its objective."""
    return page(request, "learn.html", {"here": "/learn", "topics": TOPICS})


@router.get("/learn/{slug}")
def topic_page(request: Request, slug: str) -> Response:
    """One topic with the figure for the inputs in the query string."""
    topic = TOPICS.get(slug)
    if topic is None:
        raise HTTPException(404, f"no such page; the Learn pages are {', '.join(TOPICS)}")
    typed = {name: value for name, value in request.query_params.items() if value.strip()}
    live, error = _live(topic, typed)
    context = {
        "here": "/learn",
        "topics": TOPICS,
        "topic": topic,
        "typed": {each.name: typed.get(each.name, each.default) for each in topic.inputs},
        "live": live,
        "error": error,
    }
    return page(request, f"learn_{slug}.html", context, block="work", status=422 if error else 200)


def _live(topic: Topic, typed: Mapping[str, str]) -> tuple[dict[str, Any] | None, SpecError | None]:
    known = {each.name: each for each in topic.inputs}
    try:
        if unknown := [name for name in typed if name not in known]:
            raise SpecError(unknown[0][:40], f"no such input; this page takes {', '.join(known)}")
        inputs = {name: each.parse(typed.get(name, each.default)) for name, each in known.items()}
        return topic.live(inputs), None
    except SpecError as error:
        return None, error
