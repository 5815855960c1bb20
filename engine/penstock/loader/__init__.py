"""From a model's name to the parts of an engine: files found and checked, memory planned and allocated,
reading begun."""

from penstock.loader.loading import assemble, begin_tokenizer, load_model, open_folder
from penstock.loader.parts import LoadedModel, Model, PlannedModel, Share, SharedEnds
from penstock.loader.planning import plan_model
from penstock.loader.reading import begin_reading

__all__ = [
    "LoadedModel",
    "Model",
    "PlannedModel",
    "Share",
    "SharedEnds",
    "assemble",
    "begin_reading",
    "begin_tokenizer",
    "load_model",
    "open_folder",
    "plan_model",
]
