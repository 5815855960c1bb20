"""What goes with what: for each two features whether they work together, and if not, why and what to do.

A new feature is a member of Feature, and stands in the tables below with what it can't be used with. It gets
a row and a column of docs/reference/goes-with.md, which shows every crossing, those that work as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import Enum
from itertools import combinations, product
from typing import NamedTuple

from penstock.errors import ConfigError, PenstockError


class Feature(Enum):
    """What a user asks for, and what a machine or a model is. Values are the words of errors."""

    NO_SPECULATION = "--speculation off"
    DRAFT_MODEL = "--draft-model"
    EAGLE3 = "method eagle3 of --speculative-config"
    MTP = "--mtp on"
    PLANES = "method planes of --speculative-config"
    DRAFTING = "the part of a draft model"
    NO_PREFIX_CACHING = "--no-enable-prefix-caching"
    KV_DISK = "--kv-disk"
    KV_HOST = "--kv-host-memory"
    KV_SPILL = "--kv-spill"
    KV_SPILL_MEMORY = "--kv-spill-memory"
    KV_EVENTS = "--kv-events-config"
    KV_INT8 = "--kv-dtype int8"
    LORA = "--lora"
    RUNTIME_LORA = "--allow-runtime-lora-updating"
    KEEP_ALIVE = "--keep-alive"
    NODES = "--nodes"
    SEVERAL_MODELS = "several models"
    GENERATE = "--runner generate"
    POOLING = "--pooling or --score-tokens"
    THROUGH_TRANSFORMERS = "--model-impl transformers"
    TORCH_KERNELS = "--kernels torch or reference"
    TUNING = "--kernel-tuning"
    DEVICE_MEMORY = "--device-memory"
    CALIBRATE = "--calibrate"
    PERPLEXITY = "penstock eval"
    UNQUANTIZED = "a comparison with the unquantized model"
    NO_GPU = "a machine without a GPU, or --device cpu"
    GPU = "a GPU"
    RECURRENT = "a model with recurrent states"
    ENCODER = "a model with an encoder"
    BOTH_WAYS = "a model that sees its prompts both ways"
    SOFT_PROMPT = "a model with a soft prompt"
    EXPERTS = "a model with experts"
    LATENT = "a model with latent attention (MLA)"
    UNEVEN_KV = "a model whose layers differ in their keys and values"
    SHARED_KV = "a model whose layers read keys and values of other layers"
    SHARED_CHOICE = "a model whose layers share chosen keys"
    LAYER_INPUTS = "a model whose layers have inputs of their own"
    FOREIGN = "a model whose layers transformers' modules compute"
    FOREIGN_EXPERTS = "a model whose experts transformers' modules compute"
    POOLED = "a model that makes vectors or scores"
    WHOLE_TEXTS = "a model that computes each text as a whole"
    QUANTIZED = "a checkpoint that is quantized already"


#: Features of machines and models. They are facts that nobody chooses, so that no two of them are refused.
FACTS = tuple(Feature)[[*Feature].index(Feature.NO_GPU) :]


#: Pairs that make no sense: features, "x" and what each of them can't be used with; why; and what
#: to do.
_REFUSED = """
NO_SPECULATION x DRAFT_MODEL EAGLE3 MTP PLANES: nothing guesses then; leave one of the two out
DRAFT_MODEL EAGLE3 x MTP: one of them guesses; leave one of the two out
EAGLE3 MTP x PLANES: a head does not guess beside the upper planes; leave one of the two out
NO_PREFIX_CACHING x KV_DISK KV_HOST: the prefix cache finds what is kept; leave one of the two out
NO_PREFIX_CACHING x KV_EVENTS: events tell of what the prefix cache holds; leave one of the two out
KV_SPILL x KV_SPILL_MEMORY: what has no room lies in a file, or in RAM beside a GPU; leave one of the two out
PLANES x KV_SPILL KV_SPILL_MEMORY: upper planes read all of a sequence in memory; leave one of the two out
GENERATE x POOLING: text is neither pooled nor scored; leave one of the two out
TORCH_KERNELS x TUNING: it is for native kernels; leave one of the two out
RUNTIME_LORA x KEEP_ALIVE: adapters that are loaded at run time go with their model; leave one of the two out
NODES x SEVERAL_MODELS: it shares one model among machines; name one
KV_HOST x NO_GPU: layers are computed in this memory; give it to the KV cache (--kv-cache-memory)
KV_SPILL_MEMORY x NO_GPU: layers are computed there; pass --kv-cache-memory, or --kv-spill for the disk
DEVICE_MEMORY x NO_GPU: there is no memory that it could limit; leave it out
KV_SPILL x GPU: beside a GPU they lie in RAM; pass --kv-spill-memory SIZE, or --device cpu
DRAFT_MODEL EAGLE3 x BOTH_WAYS: its prompts change with each token; leave it out
DRAFT_MODEL EAGLE3 x SOFT_PROMPT: the other model has none; leave it out
DRAFT_MODEL EAGLE3 MTP PLANES x POOLED: it makes no tokens; leave it out
DRAFTING x BOTH_WAYS: its prompts change with each token; take a decoder with attention alone
DRAFTING x SOFT_PROMPT: the other model has none; take a decoder with attention alone
KV_DISK KV_HOST KV_EVENTS x WHOLE_TEXTS: kept keys and values serve no other text; leave it out
KV_EVENTS x ENCODER BOTH_WAYS: prompts that begin alike share nothing; leave it out
KV_SPILL KV_SPILL_MEMORY x ENCODER: each step reads an encoder's, so that they lie in memory; leave it out
KV_SPILL KV_SPILL_MEMORY x RECURRENT: recurrent states have no blocks; leave it out
KV_INT8 x LATENT: a latent is not stored as int8; choose --kv-dtype float16 or float32
CALIBRATE x QUANTIZED: its weights are rounded; calibrate where the unquantized checkpoint is converted
PERPLEXITY x ENCODER BOTH_WAYS: it predicts no token of a prompt; evaluate a decoder that sees a text one way
UNQUANTIZED x ENCODER BOTH_WAYS: it predicts no token of a prompt; compare a decoder that sees a text one way
"""
#: Pairs that nobody has built yet.
_NOT_YET = """
KV_DISK KV_HOST KV_SPILL KV_SPILL_MEMORY LORA x NODES: each machine would keep a part; leave it out
EAGLE3 MTP PLANES x NODES: drafts would need the layers of all machines; leave it out
LORA x GPU: adapters are computed on the processor only; pass --device cpu
LORA x FOREIGN: adapters need a family of Penstock's own; merge the adapter into the model with peft
DRAFT_MODEL EAGLE3 x ENCODER: it encodes its prompts; leave it out
DRAFTING x ENCODER: it encodes its prompts; take a decoder with attention alone
PLANES x RECURRENT ENCODER EXPERTS: upper planes guess for layers of attention and one MLP; leave it out
THROUGH_TRANSFORMERS x POOLED: transformers' modules make no vectors or scores here; leave it out
KV_HOST x RECURRENT: states have no blocks that could leave a GPU; leave it out
KV_SPILL KV_SPILL_MEMORY x UNEVEN_KV SHARED_KV: blocks outside are alike in all layers; leave it out
NODES x ENCODER: a sweep has two stacks; leave --nodes out
NODES x RECURRENT: states stay where they are computed; leave --nodes out
NODES x POOLED: nobody gathers vectors from other machines; leave --nodes out
NODES x FOREIGN: only Penstock's own families are divided; leave --nodes out
NODES x SHARED_KV: a layer would read keys and values on another machine; leave --nodes out
NODES x SHARED_CHOICE: the choice is on one machine; leave --nodes out
CALIBRATE x ENCODER BOTH_WAYS: it knows decoders that see a text one way; convert without --calibrate
CALIBRATE x FOREIGN_EXPERTS: it knows the experts of Penstock's own families; convert without --calibrate
CALIBRATE x LATENT: it knows the inputs of matrices, and not of transposes; convert without --calibrate
CALIBRATE x UNEVEN_KV LAYER_INPUTS: it knows hidden states alone; convert without --calibrate
CALIBRATE x RECURRENT: it computes attention alone; convert without --calibrate
"""


class Refusal(NamedTuple):
    """Why two features are refused together, and what to do. is_final: it makes no sense; False: not yet."""

    why: str
    advice: str
    is_final: bool

    def sentence(self, pair: tuple[Feature, Feature], name: str = "") -> str:
        """For people. name: of the model."""
        first, second = pair
        of = f" ({name})" if name and second in FACTS else ""
        yet = "" if self.is_final else " yet"
        return f"{first.value} can't be used with {second.value}{of}{yet}: {self.why}; {self.advice}"


def _read(table: str, is_final: bool) -> Iterator[tuple[tuple[Feature, Feature], Refusal]]:
    for line in table.strip().splitlines():
        pairs, reason = line.split(": ", 1)
        these, those = (map(Feature.__getitem__, side.split()) for side in pairs.split(" x "))
        why, advice = reason.split("; ")
        refusal = Refusal(why, advice, is_final)
        yield from ((pair, refusal) for pair in product(these, those))


_ORDER = {feature: place for place, feature in enumerate(Feature)}
#: Refused pairs, the feature first that Feature has first.
REFUSALS = {
    (min(pair, key=_ORDER.__getitem__), max(pair, key=_ORDER.__getitem__)): refusal
    for pair, refusal in (*_read(_REFUSED, True), *_read(_NOT_YET, False))
}


def refused(features: Collection[Feature], name: str = "") -> tuple[str, ...]:
    """What is refused of features that are wanted together, in sentences. name: of the model."""
    pairs = combinations(sorted(features, key=_ORDER.__getitem__), 2)
    return tuple(REFUSALS[pair].sentence(pair, name) for pair in pairs if pair in REFUSALS)


def check_together(
    features: Collection[Feature], name: str = "", error: type[PenstockError] = ConfigError
) -> None:
    """Raises `error` for features that can't be used together. name: of the model."""
    if found := refused(features, name):
        raise error(". ".join(found))
