"""Estimates of prompts' tokens: by tenant and path, with what the chat template adds."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.frontdoor.body_fields import BodyFields
from rubato.frontdoor.paths import CHAT, TEXT
from rubato.frontdoor.prompt_length import PromptLengths, prefix_keys


def chat(text: str) -> BodyFields:
    return BodyFields.parse(json.dumps({"messages": [{"role": "user", "content": text}]}).encode(), 65_536)


def size_of(text: str) -> int:
    return PromptLengths.text_bytes(chat(text))


def test_document_after_a_hundred_short_chats_is_estimated_within_a_fifth() -> None:
    lengths = PromptLengths()
    for _ in range(100):
        lengths.learn("a", CHAT, size_of("hi"), 31)  # 2 bytes of text, 30 tokens of the template
    document = "word " * 4000  # some 5,000 tokens
    assert lengths.estimate("a", CHAT, size_of(document)) == pytest.approx(5030, rel=0.2)
    assert lengths.estimate("a", CHAT, size_of("hi")) == 31


def test_chats_of_one_tenant_or_path_change_no_estimate_of_another() -> None:
    lengths = PromptLengths()
    before = [lengths.estimate(tenant, path, 20_000) for tenant, path in (("b", CHAT), ("a", TEXT))]
    for _ in range(100):
        lengths.learn("a", CHAT, 40, 2000)  # an image in each
    assert [lengths.estimate(tenant, path, 20_000) for tenant, path in (("b", CHAT), ("a", TEXT))] == before


def test_bytes_of_a_token_are_learnt_where_lengths_differ() -> None:
    lengths = PromptLengths()
    for size in range(100, 20_000, 500):
        lengths.learn("a", CHAT, size, 20 + size // 3)
    assert lengths.estimate("a", CHAT, 12_000) == pytest.approx(4020, rel=0.02)


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)), max_size=30), st.integers(0, 4 << 20))
def test_estimate_of_any_prompt_is_between_one_and_all_its_bytes_and_the_longest_seen(
    seen: list[tuple[int, int]], size: int
) -> None:
    lengths = PromptLengths()
    for bytes_, tokens in seen:
        lengths.learn("a", CHAT, bytes_, tokens)
    longest = max([tokens for _, tokens in seen], default=0)
    assert 1 <= lengths.estimate("a", CHAT, size) <= size + longest + 1


def test_images_count_nothing_and_texts_that_look_like_them_count() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * 10_000}}
    body = json.dumps({"messages": [{"role": "user", "content": [image]}]}).encode()
    assert PromptLengths.text_bytes(BodyFields.parse(body, 100)) < 200
    assert size_of('{"url": "' + "x" * 10_000 + '"}') > 10_000


@pytest.mark.parametrize("ids", [False, True])
def test_prompts_that_begin_alike_have_keys_that_begin_alike(ids: bool) -> None:
    def keys(tail: int) -> tuple[int, ...]:
        prompt = [*range(1000, 2000), tail] if ids else "so it goes " * 400 + str(tail)
        return prefix_keys(BodyFields.parse(json.dumps({"prompt": prompt}, separators=(",", ":")).encode(), 65_536))

    one, other = keys(1), keys(2)
    assert len(one) >= 15
    assert one == other
