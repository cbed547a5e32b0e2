"""RunSpec refuses values of another type, and lookalikes of what it accepts."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from engine.spec import RunSpec


@pytest.mark.parametrize(
    "field",
    [
        {"memory_limit_gib": True}, {"memory_limit_gib": "1"}, {"dropout": "0.1"}, {"dropout": False},
        {"checkpointing": "every-١"}, {"checkpointing": "budget-0.٣"}, {"model": "gpt:16385,64,4"},
    ],
    ids=str,
)  # fmt: skip
def test_a_lookalike_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(field))):
        RunSpec.model_validate(field)


def test_a_whole_number_is_a_number() -> None:
    assert RunSpec.model_validate({"memory_limit_gib": 1, "dropout": 0}).memory_limit_gib == 1.0


@pytest.mark.parametrize("value", [1, None, True, 0.5, ["gpt-tiny"]], ids=repr)
def test_a_model_of_the_wrong_type_is_one_error_on_the_field(value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        RunSpec.model_validate({"model": value})
    assert [error["loc"] for error in caught.value.errors()] == [("model",)]
    assert "preset name" in str(caught.value)
