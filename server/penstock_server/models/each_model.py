"""From the settings of a server to those of each of its models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

from penstock.errors import ConfigError
from penstock.goes_with import Feature, check_together
from penstock_server.facade.model_folders import models_in
from penstock_server.settings.settings import Settings
from penstock_server.settings.speculative_config import SpeculativeConfig


def each_model(settings: Settings) -> tuple[Settings, ...]:
    """Settings with one model each; a folder of models gives one for each of them. Raises ConfigError, also
    for two models of one name."""
    if settings.model and settings.models:
        raise ConfigError("--models is in place of MODEL: leave one of the two out")
    given = settings.models or (settings.model,)
    found = [each for model in given for each in _models(replace(settings, model=model, models=()))]
    if not found:
        raise ConfigError(f"{settings.model} has no models in it")
    if len(found) > 1:
        _check(settings, [each.model_names[0] for each in found])
    elif settings.pin:
        raise ConfigError("--pin is for one of several models; a single one stays loaded by --keep-alive -1")
    return tuple(found)


def _models(settings: Settings) -> Iterator[Settings]:
    inside = models_in(Path(settings.model).expanduser())
    if not inside:
        yield settings
    names = settings.served_model_name if len(inside) == 1 else ()
    for name, path in inside.items():
        yield replace(settings, model=str(path), served_model_name=names or (name,))


def _check(settings: Settings, names: list[str]) -> None:
    if settings.nodes > 1:
        check_together({Feature.NODES, Feature.SEVERAL_MODELS})
    for field in fields(settings):
        value = getattr(settings, field.name)
        is_of_one = "one model" in field.metadata["tags"]
        if value and is_of_one and not (isinstance(value, SpeculativeConfig) and not value.is_of_one_model):
            flag = "--" + field.name.replace("_", "-")
            raise ConfigError(f"{flag} is about one model, and these are {len(names)}: leave it out")
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two of the models have the name {name!r}: rename one of their folders")
    if unknown := set(settings.pin) - set(names):
        raise ConfigError(f"--pin {min(unknown)}: there is no such model; these are {', '.join(names)}")
