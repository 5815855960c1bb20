"""The larger demo model: what it learns to copy, and how it grows out of the demo model."""

from __future__ import annotations

import itertools

import torch
from test_demo_corpus import module
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

copies, larger = module("copies"), module("larger")


def test_answers_are_made_of_the_text_in_the_request() -> None:
    """By splitting the request again: a text as it was, with one word replaced, or one of its sentences."""
    made = list(itertools.islice(copies.documents_with_copies(3), 200))
    assert made == list(itertools.islice(copies.documents_with_copies(3), 200))
    kinds = {"again": 0, "edited": 0, "quoted": 0}
    for document in made:
        request, _, text = document.turns[0][1].partition("\n") if document.turns else ("", "", "")
        reply = document.turns[-1][1] if document.turns else ""
        if request in copies.AGAIN:
            kinds["again"] += 1
            assert reply == text
        elif reply.startswith('The text says: "'):
            kinds["quoted"] += 1
            assert reply.removeprefix('The text says: "').removesuffix('"') in text
        elif text and request.startswith(("Replace", "Change", "Write this text with")):
            kinds["edited"] += 1
            before, after = text.split(), reply.split()
            changed = {(a.rstrip(".,"), b.rstrip(".,")) for a, b in zip(before, after, strict=True) if a != b}
            assert len(changed) <= 1 and all(a in request and b in request for a, b in changed)
    assert min(kinds.values()) > 20


def test_rows_begin_with_a_document() -> None:
    """So that no answer is learned whose request was cut off."""
    tokenizer = Tokenizer.from_file(str(larger.DEMO / "tokenizer.json"))
    bos, assistant = tokenizer.token_to_id("<|bos|>"), tokenizer.token_to_id("<|assistant|>")
    chunk = next(larger.shaped(tokenizer, 3, (4, 200)))
    assert chunk.inputs.shape == chunk.labels.shape == (4, 200) and (chunk.inputs[:, 0] == bos).all()
    is_learned = chunk.labels >= 0
    assert is_learned.any(dim=1).all() and not is_learned.all(dim=1).any()
    assert torch.equal(chunk.labels[:, :-1][is_learned[:, :-1]], chunk.inputs[:, 1:][is_learned[:, :-1]])
    assert is_learned[chunk.inputs == assistant].all(), "the first token of an answer is learned"


def test_a_grown_model_computes_what_the_small_one_does() -> None:
    """Before it is trained further: twice as wide, and with layers that add nothing."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=90, num_hidden_layers=3, tie_word_embeddings=True, **sizes)
    small = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in small.named_parameters():
            if "norm" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    model = larger.grown(small).eval()
    assert model.config.num_hidden_layers == larger.NUM_LAYERS and model.config.hidden_size == 64
    ids = torch.randint(0, 90, (2, 30))
    with torch.inference_mode():
        expected = small(ids).logits
        assert torch.allclose(model(ids).logits, expected, atol=1e-4 * float(expected.abs().max()))
    layers = model.model.layers
    assert layers[0].self_attn.o_proj.weight.any() and not layers[1].self_attn.o_proj.weight.any()
