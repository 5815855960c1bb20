"""Forms of prompts: blanks, sentinels of CPM-2 and T5, fill-in-the-middle tokens, EVA's dialogue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cpm_folders import save_cpm1, save_cpm2, save_cpm2_english, save_eva
from cpm_originals import cpm2, eva, lines_of
from tiny_tokenizers import save_byte_level, save_sentencepiece

from penstock.errors import InvalidParameter
from penstock.generation.chosen import SampledToken
from penstock.generation.grammars.blanks import Blanks
from penstock.generation.prompt_frame import PromptFrame
from penstock.generation.requests.answer import Answer, Gain
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.sequence import Sequence
from penstock.text.chat import can_chat, render_chat
from penstock.text.detokenizer import Detokenizer
from penstock.text.middle_tokens import KINDS
from penstock.text.prompt_forms import BlankText, PromptForms
from penstock.text.tokenizer import NoText, Tokenizer

UNKNOWN = 0


@pytest.mark.parametrize(
    ("text", "marker", "pieces", "positions"),
    [
        ("a<span>b<span>", None, ("a", "b", ""), (1, 8)),
        ("____a______b", None, ("", "a", "b"), (0, 5)),
        ("def __init__(a___b): ____", None, ("def __init__(a___b): ", ""), (21,)),
        ("a ____ <span>", None, ("a ____ ", ""), (7,)),
        ("a [..] <span> ____", "[..]", ("a ", " <span> ____"), (2,)),
    ],
)
def test_blanks_of_a_text(
    text: str, marker: str | None, pieces: tuple[str, ...], positions: tuple[int, ...]
) -> None:
    found = BlankText.read(text, marker)
    assert (found.pieces, found.positions) == (pieces, positions)
    assert found.filled(["X"] * found.num_blanks) == "X".join(pieces)


def test_a_text_without_blanks_is_refused() -> None:
    for text, marker in (("a ___ b", None), ("", None), ("<span>", "[..]")):
        with pytest.raises(InvalidParameter, match="no blank"):
            BlankText.read(text, marker)


def t5_tokenizer(is_mt5: bool = False) -> Tokenizer:
    """T5's class over a few pieces. mT5's sentinels are ordinary pieces, the last ones first."""
    from transformers import T5Tokenizer

    words = ["▁", "▁Thank", "▁you", "▁me", "▁to", "▁your", "▁party", "▁week", ".", "<", "extra", ">"]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((word, -2.0) for word in words)]
    if is_mt5:
        pieces += [(f"▁<extra_id_{number}>", -2.0) for number in range(9, -1, -1)]
    theirs = T5Tokenizer(vocab=pieces, extra_ids=0 if is_mt5 else 10)
    return Tokenizer(theirs, frozenset({1}))


@pytest.mark.parametrize("is_mt5", [False, True])
def test_t5_gets_the_ids_of_its_own_tokenizer(is_mt5: bool) -> None:
    tokenizer = t5_tokenizer(is_mt5)
    forms = PromptForms(tokenizer, has_encoder=True)
    formed = forms.fill(("Thank you ", " me to your party ", " week."))
    assert formed.token_ids == tokenizer.encode("Thank you <extra_id_0> me to your party <extra_id_1> week.")
    assert formed.token_ids[-1] == 1 and 2 not in formed.token_ids
    close = forms.fill(("you", "me", "."))  # without spaces around the blanks
    assert [token_id for token_id in close.token_ids if token_id in tokenizer.sentinels] == list(
        tokenizer.sentinels[:2]
    )
    first, second, third = tokenizer.sentinels[:3]
    assert (formed.answer_start, formed.closers) == ((first,), (second, third))
    assert set(formed.forbidden) == {*tokenizer.sentinels, 2}
    assert forms.complete("Thank you") is None and forms.forbidden_ids == ()
    with pytest.raises(InvalidParameter, match="own mark"):
        forms.fill(("Thank <extra_id_3> ", " me"))


@pytest.mark.parametrize("is_mt5", [False, True])
def test_sentinels_leave_nothing_in_a_blanks_text(is_mt5: bool) -> None:
    """No space in front, as in the texts of further blanks, which are decoded from nothing, and no name of a
    sentinel at the end. mT5's sentinels are ordinary pieces."""
    tokenizer = t5_tokenizer(is_mt5)
    formed = PromptForms(tokenizer, has_encoder=True).fill(("Thank ", " party"))
    params = SamplingParams(
        stop_token_ids=formed.closers, blanks=Blanks(formed.closers), include_stop_str_in_output=True
    )
    request = GenerationRequest(formed.token_ids, params)
    sequence = Sequence(0, request, 20, frame=PromptFrame((0, *formed.answer_start)))
    token_ids, gain = tokenizer.encode("to your", add_special_tokens=False), Gain()
    Answer(sequence, tokenizer).extend(
        [SampledToken(each, None) for each in (*token_ids, *formed.closers)], gain
    )
    later = Detokenizer(tokenizer, ())
    assert gain.text == "to your" == "".join(map(later.add, token_ids)) + later.finish()


@pytest.mark.parametrize("save", [save_cpm2, save_cpm2_english])
def test_cpm2_has_sentinels_between_the_pieces(save: Any, tmp_path: Path) -> None:
    save(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    forms, lines = PromptForms(tokenizer, has_encoder=True), lines_of(tmp_path)
    formed = forms.fill(("", "天气很好，<s_0>", ""))
    inner = tokenizer.encode("天气很好，<s_0>")
    s = [lines.index(f"<s_{number}>") for number in range(3)]
    assert s[0] not in inner
    assert formed.token_ids == [s[0], *inner, s[1]]
    assert (formed.answer_start, formed.closers) == ((s[0],), (s[1], s[2]))
    completion = forms.complete("天气很好")
    assert completion is not None and completion.answer_start == (len(lines) - 1,)
    assert completion.token_ids == [*tokenizer.encode("天气很好"), len(lines) - 1]
    assert set(completion.stop_token_ids) == set(tokenizer.sentinels)
    assert forms.forbidden_ids == (UNKNOWN,)


def test_the_ids_of_a_fill_are_bminfs(tmp_path: Path) -> None:
    """Nothing stands before or after the pieces and the sentinels."""
    encode, _ = cpm2(save_cpm2(tmp_path))
    formed = PromptForms(Tokenizer.load(tmp_path), has_encoder=True).fill(("今天天气", "，我们去", "。"))
    first = lines_of(tmp_path).index("<s_0>")
    assert formed.token_ids == [*encode("今天天气"), first, *encode("，我们去"), first + 1, *encode("。")]


def test_more_blanks_than_sentinels() -> None:
    forms = PromptForms(t5_tokenizer(), has_encoder=True)
    assert forms.max_blanks == 9
    forms.fill([" party "] * 10)
    with pytest.raises(InvalidParameter, match="10 blanks; this model fills in 9 blanks"):
        forms.fill([" party "] * 11)


def test_models_that_cannot_fill(tmp_path: Path) -> None:
    plain = Tokenizer.load(save_cpm1(tmp_path / "cpm1"))
    talker = Tokenizer.load(save_eva(tmp_path / "eva"))
    for forms, reason in (
        (PromptForms(plain, has_encoder=False), "no fill-in-the-middle tokens"),
        (PromptForms(talker, has_encoder=True), "EVA talks"),
        (PromptForms(NoText(), has_encoder=True), "no sentinel tokens"),
    ):
        assert forms.max_blanks == 0 and forms.complete("天气") is None
        with pytest.raises(InvalidParameter, match=reason):
            forms.fill(("a", "b"))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.prefix)
def test_decoders_of_code(kind: Any, tmp_path: Path) -> None:
    """Prefix token, text, suffix token, text, middle token, as the models' documents have it."""
    from transformers import AutoTokenizer

    is_sentencepiece = kind.prefix.startswith("▁")  # CodeLlama: spaces after a token are the text's own
    (save_sentencepiece if is_sentencepiece else save_byte_level)(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    theirs.add_tokens([*kind.names, *kind.ends], special_tokens=True)
    tokenizer = Tokenizer(theirs, frozenset({1}))
    forms = PromptForms(tokenizer, has_encoder=False)
    assert forms.max_blanks == 1
    formed = forms.fill(("the water", "runs down"))
    ids = theirs.convert_tokens_to_ids([*kind.names, *kind.ends])
    before, behind = (formed.token_ids.index(token_id) for token_id in ids[:2])
    assert formed.token_ids[:before] == tokenizer.encode("") and formed.token_ids[-1] == ids[2]
    assert tokenizer.decode(formed.token_ids[before + 1 : behind]) == "the water"
    rest = [tokenizer.token_bytes(token_id) for token_id in formed.token_ids[behind + 1 : -1]]
    assert b"".join(rest) == b"runs down"
    assert formed.stop_token_ids == tuple(ids) and formed.closers == ()
    with pytest.raises(InvalidParameter, match="2 blanks; this model fills in one blank"):
        forms.fill(("a", "b", "c"))


def test_a_dialogue_of_eva(tmp_path: Path) -> None:
    encode, _ = eva(save_eva(tmp_path))
    tokenizer, lines = Tokenizer.load(tmp_path), lines_of(tmp_path)
    assert can_chat(tokenizer) and not tokenizer.has_chat_template
    texts = ["今天天气很好！", "我们去公园？", "<sep>好的"]
    messages = [
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant", "user"), texts, strict=True)
    ]
    ids = [token_id for text in texts for token_id in (*encode(text), lines.index("<sep>"))]
    assert render_chat(tokenizer, messages) == [*ids, lines.index("<s_0>")]
    assert render_chat(tokenizer, messages, add_generation_prompt=False) == ids
    with pytest.raises(InvalidParameter, match="no system messages"):
        render_chat(tokenizer, [{"role": "system", "content": "Be kind"}, *messages])
    with pytest.raises(InvalidParameter, match="EVA has no chat template: leave mood out") as refused:
        render_chat(tokenizer, messages, mood="!")
    assert refused.value.param == "mood"
    with pytest.raises(InvalidParameter, match="continue_final_message"):
        render_chat(tokenizer, messages, add_generation_prompt=False, continue_final_message=True)
