from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from footplate.engine.text.detokenizer import Detokenizer, TokenTexts
from footplate.engine.text.pipeline import TextPipeline

_BYTES = TokenTexts([bytes([value]) for value in range(256)])


def _stream(texts: TokenTexts, ids: list[int]) -> list[str]:
    decoder = Detokenizer(texts)
    return [*(decoder.push(token_id) for token_id in ids), decoder.flush()]


def test_only_whole_characters_go_out() -> None:
    """FAULTS a7."""
    astronaut = "🧑‍🚀".encode()
    pieces = _stream(_BYTES, list(astronaut))
    assert "".join(pieces) == "🧑‍🚀"
    assert "\ufffd" not in "".join(pieces)
    assert pieces[:3] == ["", "", ""]


def test_a_lone_continuation_byte_becomes_a_replacement_character() -> None:
    """FAULTS a7."""
    assert _stream(_BYTES, [0x41, 0x80, 0x42]) == ["A", "\ufffd", "B", ""]


def test_an_unfinished_character_is_replaced_at_the_end() -> None:
    assert _stream(_BYTES, [0x41, 0xE2, 0x82]) == ["A", "", "", "\ufffd"]


@given(st.binary(max_size=60))
def test_any_bytes_join_to_the_full_decode(data: bytes) -> None:
    assert "".join(_stream(_BYTES, list(data))) == data.decode("utf-8", "replace")


def test_random_ids_over_the_whole_vocabulary_equal_the_full_decode(
    smollm2: TextPipeline, gemma: TextPipeline
) -> None:
    """FAULTS a9."""
    draw = random.Random(9)
    for pipeline in (smollm2, gemma):
        texts = TokenTexts(pipeline.tokenizer.vocabulary.token_bytes)
        ids = [draw.randrange(pipeline.vocab_size + 100) for _ in range(10_000)]
        # Byte tokens are rare among all ids, so mix more of them in.
        ids += [draw.choice([id for id in range(238, 494)]) for _ in range(2_000)]
        assert (
            "".join(_stream(texts, ids))
            == texts.decode(ids)
            == pipeline.decode(ids, skip_special_tokens=False)
        )


def test_unknown_ids_write_nothing() -> None:
    assert _stream(_BYTES, [0x41, 256, 10**9, -1, 0x42]) == ["A", "", "", "", "B", ""]


def test_hidden_ids_do_not_break_a_character() -> None:
    texts = TokenTexts([b"\xe2", b"<s>", b"\x82\xac"])
    assert "".join(_stream(texts.hiding([1]), [0, 1, 2])) == "€"
    assert "".join(_stream(texts, [0, 1, 2])) == "\ufffd<s>\ufffd\ufffd"
