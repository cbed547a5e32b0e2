"""Settings: one frozen object, read once from REMAT_* variables (docs/cli.md lists them) and passed to who needs it."""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from app.errors import SettingsRefused
from engine.places import data_home

HOST_NAME = re.compile(r"(?=.*[A-Za-z])[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")
"""With a letter in it: 300.1.1.1 is a misspelt address."""

_PACKAGE = Path(__file__).resolve().parent


def templates_directory() -> Path:
    """`templates/` of the checkout, or the copy inside an installed wheel."""
    return _beside_or_inside("templates")


def static_directory() -> Path:
    """`static/` of the checkout, or the copy inside an installed wheel."""
    return _beside_or_inside("static")


def _beside_or_inside(name: str) -> Path:
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def _lock_home() -> Path:
    return Path(tempfile.gettempdir()) / f"remat-{os.getuid()}"


class Settings(BaseSettings):
    """What an administrator may choose. Every field is the environment variable REMAT_<NAME>; a blank one, which a
    compose file passes on for a variable that is not set, is its default."""

    model_config = SettingsConfigDict(
        env_prefix="REMAT_", env_ignore_empty=True, frozen=True, extra="forbid", validate_default=True
    )

    data_dir: Path = Field(
        default_factory=data_home, description="The database, its backups and this machine's measured bandwidths."
    )
    lock_dir: Path = Field(
        default_factory=_lock_home, description="Locks that keep two benchmarks of one machine from running at once."
    )
    host: str = Field(default="127.0.0.1", description="Address to listen on. Beyond loopback a token is required.")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(default=8000, description="Port to listen on.")
    token: SecretStr | None = Field(
        default=None, description="Secret that clients send as a Bearer token, browsers by the login form."
    )
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(), description="Host names, beside loopback and `host`, that requests may be addressed to (commas)."
    )
    root_path: str = Field(default="", description="Prefix under which a reverse proxy serves Remat.")
    max_body_bytes: Annotated[int, Field(ge=1024)] = Field(
        default=2**20, description="Largest request body; a larger one is answered 413."
    )
    busy_seconds: Annotated[float, Field(gt=0, le=60)] = Field(
        default=15.0, description="How long a write waits for the database before it is answered 503."
    )
    runner_command: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(sys.executable, "-m", "engine.runner"), description="The process that executes runs."
    )
    benchmark_lanes: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1, description="Measured jobs a worker runs side by side, on different devices."
    )
    simulation_lanes: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1, description="Predicted jobs a worker runs side by side, beside the benchmarks."
    )
    lease_seconds: Annotated[float, Field(gt=0)] = Field(
        default=30.0, description="A job whose worker, on another host, is silent for so long is queued again."
    )
    grace_seconds: Annotated[float, Field(ge=0)] = Field(
        default=5.0, description="Between SIGTERM and SIGKILL when a job is cancelled or over time."
    )
    timeout_seconds: Annotated[float, Field(gt=0)] = Field(
        default=6 * 3600.0, description="Time limit of a job that names none."
    )
    prediction_seconds: Annotated[float, Field(gt=0)] = Field(
        default=120.0, description="Time limit of a simulated prediction asked for over HTTP."
    )
    max_losses: Annotated[int, Field(ge=1)] = Field(
        default=3, description="Times in a row a job may lose its worker without a new result before it fails."
    )
    log_bytes: Annotated[int, Field(ge=1024)] = Field(default=4 * 2**20, description="Log kept for a job.")

    @field_validator("data_dir", "lock_dir", mode="before")
    @classmethod
    def _some_folder(cls, value: object) -> object:
        if isinstance(value, str) and not value.strip():
            raise ValueError("must name a folder: . is the current one")
        return value

    @field_validator("host")
    @classmethod
    def _address_or_name(cls, value: str) -> str:
        if not (is_address(value) or HOST_NAME.fullmatch(value)):
            raise ValueError(
                f"{value[:100]!r} is no address this machine can listen on: an IP address or a host's name"
            )
        return value

    @field_validator("allowed_hosts", mode="before")
    @classmethod
    def _commas(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("runner_command", mode="before")
    @classmethod
    def _words(cls, value: object) -> object:
        return tuple(shlex.split(value)) if isinstance(value, str) else value

    @field_validator("token")
    @classmethod
    def _long_enough(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and len(value.get_secret_value()) < 16:
            raise ValueError("must have at least 16 characters")
        return value

    @model_validator(mode="after")
    def _token_beyond_loopback(self) -> Self:
        if not is_loopback(self.host) and self.token is None:
            raise ValueError(f"host {self.host} can be reached from other machines: set REMAT_TOKEN, or use 127.0.0.1")
        return self

    def environment(self) -> dict[str, str]:
        """The variables that give a worker process these settings; how the server listens is not its business."""
        server_only = {"host", "port", "token", "allowed_hosts", "root_path"}
        values = {name: getattr(self, name) for name in type(self).model_fields if name not in server_only}
        return {f"REMAT_{name.upper()}": _as_text(value) for name, value in values.items() if value is not None}

    @property
    def database_path(self) -> Path:
        return self.data_dir / "remat.sqlite"


def _as_text(value: object) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return shlex.join(value) if isinstance(value, tuple) else str(value)


def is_address(host: str) -> bool:
    """Whether `host` is an IP address, an IPv6 one perhaps in brackets."""
    try:
        ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    return host == "localhost" or (is_address(host) and ip_address(host.strip("[]")).is_loopback)


def read_settings(**chosen: object) -> Settings:
    """From the environment, with what the command line names put over it. Raises SettingsRefused in one line."""
    try:
        return Settings.model_validate({name: value for name, value in chosen.items() if value is not None})
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        name = f"REMAT_{str(fault['loc'][0]).upper()}: " if fault["loc"] else ""
        raise SettingsRefused(name + fault["msg"].removeprefix("Value error, ")) from None
