"""From a model's name to the parts of an engine: files found and checked, memory planned and allocated,
reading begun."""

from penstock.loader.loading import begin_tokenizer, load_model, open_folder, plan_on
from penstock.loader.parts import LoadedModel, Model, ModelSource, PlannedModel, Share, SharedEnds
from penstock.loader.planning import plan_model
from penstock.loader.processor import settle_processor
from penstock.loader.reading import begin_reading

__all__ = [
    "LoadedModel",
    "Model",
    "ModelSource",
    "PlannedModel",
    "Share",
    "SharedEnds",
    "begin_reading",
    "begin_tokenizer",
    "load_model",
    "open_folder",
    "plan_model",
    "plan_on",
    "settle_processor",
]
