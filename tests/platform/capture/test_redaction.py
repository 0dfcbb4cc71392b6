"""What names a person or opens a door is taken out, in bounded time, also where it lies across the end."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from footplate.platform.capture.plain_text import plain_text
from footplate.platform.capture.redaction import MARGIN, MAX_CHARACTERS, redact

KEY = f"fp_{'a1B2' * 3}_{'c3D4' * 8}"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
PRIVATE = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nIBAAK\n-----END RSA PRIVATE KEY-----"
PLANTED = {
    "email": ("jo.doe+x@mail.example.co.uk", "ŏtto@exämple.de", "o'neil@host"),
    "phone": ("+49 30 901820", "(212) 555-0123", "0170/1234567", "555-0123"),
    "iban": ("DE89 3704 0044 0532 0130 00", "GB29NWBK60161331926819", "fr1420041010050500013m02606"),
    "card": ("4111 1111 1111 1111", "5500-0000-0000-0004", "378282246310005"),
    "ip_address": ("10.1.2.3", "2001:db8::8a2e:370:7334", "fe80::1"),
    "ssn": ("536-90-4399", "536 90 4399"),
    "jwt": (JWT,),
    "api_key": (
        KEY,
        f"SG.{'aB3_' * 5}xy.{'cD4-' * 10}xyz",
        "sk-proj-abcDEF123456",
        "AKIAIOSFODNN7EXAMPLE",
        "ghp_" + "aB3" * 12,
        "hf_" + "q" * 30,
    ),
    "private_key": (PRIVATE, PRIVATE.partition("-----END")[0]),
    "secret": ("wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "d41d8cd98f00b204e9800998ecf8427e"),
}
CASES = [(kind, text) for kind, texts in PLANTED.items() for text in texts]


@pytest.mark.parametrize(("kind", "text"), CASES)
def test_each_form_is_replaced_by_its_kind_and_the_words_around_it_stay(kind: str, text: str) -> None:
    found = redact(f"Please note {text}")
    assert (found.text, found.found) == (f"Please note [{kind}]", {kind: 1})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Authorization: Bearer abc.def-123", "Authorization: Bearer [secret]"),
        ("password=hunter2;x", "password=[secret];x"),
        ('{"api_key": "xyz-1"}', '{"api_key": "[secret]"}'),
        ("my password is hunter2 ok", "my password is [secret] ok"),
        ("at https://jo:s3cret@host/x", "at https://jo:[url_password]@host/x"),
        ("at https://jo:s3cret@hunter2@host/x", "at https://jo:[url_password]@host/x"),
        ("Cookie: session=hunter2; theme=s3cret\nx", "Cookie: [secret]\nx"),
        ("set-cookie: a=hunter2", "set-cookie: [secret]"),
        ('{"Cookie": "sid=hunter2"}', '{"Cookie": "[secret]"}'),
        ("PHPSESSID=hunter2", "PHPSESSID=[secret]"),
    ],
)
def test_what_follows_the_name_of_a_secret_goes(text: str, expected: str) -> None:
    assert redact(text).text.startswith(expected)
    assert "hunter2" not in redact(text).text and "s3cret" not in redact(text).text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("to bob%40example.org now", "to [email] now"),
        ("to bob%2540example.org now", "to [email] now"),
        ("to bob&#64;example.org now", "to [email] now"),
        ("to bob\uff20example\uff0eorg now", "to [email] now"),
        (
            "to \uff42\uff4f\uff42@\uff45\uff58\uff41\uff4d\uff50\uff4c\uff45.org\uff0c\uff4e\uff4f\uff57",
            "to [email]\uff0c\uff4e\uff4f\uff57",
        ),
        ("4111\u200b1111\u200b1111\u200b1111 is it", "[card] is it"),
        (
            "\uff14\uff11\uff11\uff11 \uff11\uff11\uff11\uff11 1111 \uff11\uff11\uff11\uff11 is it",
            "[card] is it",
        ),
        ("4111\u20131111\u20131111\u20131111 is it", "[card] is it"),
        ("my pass\u00adword\uff1ahunter2", "my pass\u00adword\uff1a[secret]"),
        ("A\u2060KIAIOSFODNN7EXAMPLE", "[api_key]"),
    ],
)
def test_other_ways_to_write_a_character_hide_nothing(text: str, expected: str) -> None:
    assert redact(text).text == expected


@settings(max_examples=100, deadline=None)
@given(st.text(st.sampled_from("aé\uff20%40\u200b½ﷺ&#;\uff16@.\U0001d7ce"), max_size=40))
def test_a_plain_texts_places_are_the_originals(text: str) -> None:
    found = plain_text(text)
    if found is None:
        return
    assert len(found.starts) == len(found.text) + 1 and found.starts[-1] == len(text)
    for at in range(len(found.text)):
        begin, end = found.original(at, at + 1)
        assert 0 <= begin < end <= len(text)
        same = plain_text(text[begin:end])
        assert found.text[at] in (text[begin:end] if same is None else same.text)


@pytest.mark.parametrize(
    "text",
    [
        "\uff37\uff52\uff49\uff54\uff45 ①②③ ﷺ — 日本語、ｶﾅ e\u0301\u200d, 40%, the cookie: sweet",
        "Write a poem about 42 sheep, 3.5 goats and the year 2026.",
        "At 12:30:45 the meeting begins; see foo::bar and a@ b.",
        "https://example.com/some/long/path/of-words-that-say-nothing-at-all",
        "def token_bucket(tokens): return tokens",
        "",
    ],
)
def test_plain_text_stays_as_it_is(text: str) -> None:
    found = redact(text)
    assert (found.text, found.found, found.is_cut) == (text, {}, False)


@pytest.mark.parametrize("text", [KEY, JWT, PRIVATE, "4111 1111 1111 1111", "jo@example.com"])
def test_nothing_of_a_secret_that_lies_across_the_end_is_left(text: str) -> None:
    for inside in range(1, len(text)):
        before = "x " * ((MAX_CHARACTERS - inside) // 2) + " " * ((MAX_CHARACTERS - inside) % 2)
        found = redact(before + text + " tail")
        assert found.is_cut and found.text.startswith(before)
        assert found.text.removeprefix(before).startswith("["), inside


def test_a_text_is_cut_at_what_was_asked_for() -> None:
    assert redact("ab " * 10, 6).text == "ab ab "
    assert not redact("abcdef", 6).is_cut


ADVERSARIAL = (
    *("eyJ", "-eyJ", "a@", "@a.", "@", "1 ", "1.", "1:", ":", "a:", "://a:", "://", "-----BEGIN "),
    *("-----BEGIN PRIVATE KEY-----", "-----END ", "bearer ", "password", "password ", "password: ", "AA11"),
    *("AA11 ", "A", "a", "0", "(", "+", "((1", "fp_", "sk-", "aA1", ".", "_", "x.", "@a_", "@_", "\u00a0"),
    *("1\u00a0", "secret is ", 'token"', "é", "1-", "::1"),
    *("%40", "a%40", "\uff05", "\uff20a", "1\u200b", "\u200b", "½", "cookie: ", "cookie:a=", "a="),
    *("://a:a", "SG.", "sid="),
)


@pytest.mark.parametrize("unit", ADVERSARIAL)
def test_no_text_takes_long(unit: str) -> None:
    size = MAX_CHARACTERS + MARGIN
    for tail in ("", "@", "!", "."):
        text = (unit * size)[:size] + tail
        begun = time.process_time()
        redact(text)
        # A pattern that is quadratic in this size takes many seconds.
        assert time.process_time() - begun < 1.0


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=200), st.sampled_from(CASES), st.text(max_size=200))
def test_a_secret_is_found_among_anything(before: str, case: tuple[str, str], after: str) -> None:
    _, text = case
    assert text not in redact(f"{before} \n{text}\n {after}").text
