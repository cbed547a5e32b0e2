"""RunSpec as command-line flags: one flag a field, a comma-separated list for a grid."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from app.fields import read, spell
from engine.errors import SpecError
from engine.spec import RunSpec

MAX_CONFIG_BYTES = 2**20


class Command(TyperCommand):
    """A command that refuses an option given twice, of which the last would count and the first be lost."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        for option in given:
            if option.param_type_name == "option" and given.count(option) > 1:
                ctx.fail(f"{option.opts[0]} is given twice; several values are one list, with commas between.")
        return super().parse_args(ctx, args)


def with_spec_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command(flags, …)` a typer option for each RunSpec field; `flags` maps the given ones to their text."""
    hints = get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[parameter.name])
        for parameter in list(inspect.signature(command).parameters.values())[1:]
    ]

    def wrapped(**given: Any) -> None:
        flags = {key: given.pop(key) for key in RunSpec.model_fields}
        command({key: text for key, text in flags.items() if text is not None}, **given)

    spec = [_parameter(key, field.description or "", field.default) for key, field in RunSpec.model_fields.items()]
    wrapped.__signature__ = inspect.Signature([*spec, *own])  # type: ignore[attr-defined]
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in (*spec, *own)}
    wrapped.__doc__ = command.__doc__
    wrapped.__name__ = command.__name__
    return wrapped


def _parameter(key: str, description: str, default: Any) -> inspect.Parameter:
    help_text = f"{description.replace('`', '')} [{spell(default)}]"
    option = typer.Option(f"--{key.replace('_', '-')}", help=help_text, metavar="VALUE[,VALUE]", show_default=False)
    return inspect.Parameter(
        key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, option]
    )


def grid(flags: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """(spec, vary) of the flags given. Raises SpecError for a config file that cannot be read."""
    values = {key: [_value(key, word) for word in _words(key, text)] for key, text in flags.items()}
    empty = next((key for key, found in values.items() if not found), None)
    if empty is not None:
        raise SpecError(empty, "needs a value")
    spec = {key: found[0] for key, found in values.items() if len(found) == 1}
    return spec, {key: found for key, found in values.items() if len(found) > 1}


def _words(key: str, text: str) -> list[str]:
    """The list's parts. The commas inside gpt:4,256,4 are followed by a digit; a model's name never starts with one."""
    parts = re.split(r",(?![0-9\s])", text) if key == "model" else text.split(",")
    return [part.strip() for part in parts if part.strip()]


def _value(key: str, word: str) -> Any:
    if key == "model" and (word.endswith(".json") or "/" in word):
        return _config(Path(word))
    return read(key, word)


def _config(path: Path) -> Any:
    from app.api.strict_json import loads

    try:
        if path.exists() and not path.is_file():
            raise SpecError("model", f"cannot read {path}: no regular file")  # opening a pipe would wait for a writer
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise SpecError("model", f"cannot read {path}: {error.strerror}") from error
    if len(text) > MAX_CONFIG_BYTES:
        raise SpecError("model", f"{path} is larger than 1 MiB: not a config.json")
    try:
        config = loads(text)
    except json.JSONDecodeError as error:
        raise SpecError("model", f"{path} is not JSON: {error.msg}") from error
    if not isinstance(config, dict):
        raise SpecError("model", f"{path} must hold a JSON object, as a Hugging Face config.json does")
    return config
