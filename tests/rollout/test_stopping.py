"""Stop conditions, and stop strings wherever token borders fall."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from surefoot.config.rollout import SamplingConfig
from surefoot.rollout.stopping import StopRules
from tests.tiny import tiny_tokenizer


def first_stop(tokenizer, ids, sampling, eos=()):
    """Feed tokens one by one; return (how many were taken, reason)."""
    rules = StopRules(sampling, eos, tokenizer)
    for n in range(1, len(ids) + 1):
        if reason := rules.reason(ids[:n]):
            return n, reason
    return len(ids), None


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level tokens, and a few longer ones, so that strings and characters are cut anywhere."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("<", "/"), ("o", "k"), ("a", "b"), ("k", ">"), ("ab", "<")]
    vocab = {token: i for i, token in enumerate([*alphabet, *("".join(m) for m in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


BYTES = byte_tokenizer()


def test_several_end_ids_and_stop_ids():
    sampling = SamplingConfig(stop_token_ids=[9])
    assert first_stop(tiny_tokenizer(), [5, 6, 9, 7], sampling, eos=(2, 4)) == (3, "stop")
    assert first_stop(tiny_tokenizer(), [5, 4, 9, 7], sampling, eos=(2, 4)) == (2, "stop")
    assert first_stop(tiny_tokenizer(), [5, 2, 9, 7], sampling, eos=(2, 4)) == (2, "stop")
    assert first_stop(tiny_tokenizer(), [5, 6, 7], sampling, eos=(2, 4)) == (3, None)


def test_length_limit_and_an_end_on_the_last_token():
    sampling = SamplingConfig(max_response_length=3)
    assert first_stop(tiny_tokenizer(), [5, 6, 7, 8], sampling, eos=(2,)) == (3, "length")
    assert first_stop(tiny_tokenizer(), [5, 6, 2], sampling, eos=(2,)) == (3, "stop")


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("xx</ok>yy", ["</ok>"], "xx</ok>"),  # over the border of the tokens `</`, `ok` / `k>`
        ("ab<ab", ["b<"], "ab<"),
        ("one\n\ntwo", ["\n\n"], "one\n\n"),
        ("Grüße 🙂 da", ["🙂"], "Grüße 🙂"),  # one character in four tokens
        ("a. b", [". "], "a. "),
        ("first", ["zzz", "rs"], "firs"),
        ("naïve", ["ï"], "naï"),
    ],
)
def test_stop_strings(text, stop, kept):
    ids = BYTES.encode(text)
    taken, reason = first_stop(BYTES, ids, SamplingConfig(stop=stop))
    assert reason == "stop"
    said = BYTES.decode(ids[:taken])
    assert said.startswith(kept)
    assert kept not in BYTES.decode(ids[: taken - 1])


@given(
    text=st.text(alphabet="ab</ok> \n🙂é", max_size=30),
    stop=st.lists(st.text(alphabet="ab</ok> \n🙂é", min_size=1, max_size=6), min_size=1, max_size=3),
)
def test_stops_at_the_first_token_that_completes_a_stop_string(text, stop):
    ids = BYTES.encode(text)
    expected = next((n for n in range(1, len(ids) + 1) if any(s in BYTES.decode(ids[:n]) for s in stop)), None)
    taken, reason = first_stop(BYTES, ids, SamplingConfig(stop=stop))
    assert (taken if reason else None) == expected


def test_special_tokens_can_be_stop_strings():
    ids = tiny_tokenizer().encode("hi<|im_start|>more")
    assert first_stop(tiny_tokenizer(), ids, SamplingConfig(stop=["<|im_start|>"])) == (3, "stop")
