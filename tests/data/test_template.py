"""Rendering and tokenising: begin-of-sequence, turns, tools, and text that templates and tokenizers stumble over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.data.rows import parse_rows
from surefoot.data.template import Template, make_template
from surefoot.errors import UserError
from surefoot.records import Prompt
from tests.data.helpers import TOOL, file_source, tokenizer
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

CHATML = "<|im_start|>{role}\n{text}<|im_end|>\n"
GENERATE = "<|im_start|>assistant\n"
WITH_BOS = "{{ bos_token }}" + CHAT_TEMPLATE


def prompts(template: Template, rows: list[dict[str, Any]], **keys: Any) -> list[Prompt]:
    return template.encode_prompts(parse_rows(rows, file_source("x.jsonl", **keys), "x", "data.sources.0"))


def chat(*messages: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role, text in messages]


def ids_of(template: Template, text: str) -> list[int]:
    return template.encode([text])[0].tolist()


class TestPrompts:
    def test_text_and_messages_of_one_prompt_give_the_same_tokens(self):
        template = make_template(tiny_tokenizer())
        text, messages = prompts(template, [{"prompt": "Hi"}, {"prompt": chat(("user", "Hi"))}])
        assert text.text == CHATML.format(role="user", text="Hi") + GENERATE
        assert text.token_ids.tolist() == messages.token_ids.tolist()
        assert text.token_ids.dtype == np.int32
        assert template.tokenizer.decode(text.token_ids.tolist()) == text.text
        assert text.messages == ({"role": "user", "content": "Hi"},)

    def test_tool_schemas_and_the_generation_prompt_are_part_of_the_tokens(self):
        template = make_template(tiny_tokenizer())
        plain, tools = prompts(template, [{"prompt": "Hi"}, {"prompt": "Hi", "tools": [TOOL]}])
        assert '"description": "Add."' in tools.text
        assert tools.text.endswith(GENERATE)
        assert len(tools.token_ids) > len(plain.token_ids)
        assert tools.tools == (TOOL,)

    def test_earlier_tool_calls_are_shown(self):
        call = {"function": {"name": "add", "arguments": {"a": [1, 2], "exact": True}}}
        messages = [
            *chat(("user", "1+2")),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            *chat(("tool", "3")),
        ]
        (prompt,) = prompts(make_template(tiny_tokenizer()), [{"prompt": messages}])
        assert '{"a": [1, 2], "exact": true}' in prompt.text
        assert "None" not in prompt.text

    def test_many_rows_keep_their_order_over_batches(self):
        rows = [{"prompt": str(i)} for i in range(5000)]
        made = prompts(make_template(tiny_tokenizer()), rows)
        assert all(f"\n{i}<|im_end|>" in made[i].text for i in (0, 1, 4095, 4096, 4999))
        assert [p.id for p in made] == [f"x/{i}" for i in range(5000)]

    @given(st.text(st.characters(exclude_categories=()), min_size=1).filter(str.strip))
    @settings(max_examples=60, deadline=None)
    def test_any_text_becomes_tokens(self, text: str):
        (prompt,) = prompts(make_template(tiny_tokenizer()), [{"prompt": text}])
        content = prompt.messages[0]["content"]
        assert content == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        # This tokenizer has one token a character; 19 are the template's.
        assert len(prompt.token_ids) == 19 + len(content)

    def test_limits_and_padding_that_a_tokenizer_file_brings_along_cut_nothing(self):
        tight = tokenizer()
        tight.backend_tokenizer.enable_truncation(4)
        tight.backend_tokenizer.enable_padding(length=64)
        made = prompts(make_template(tight), [{"prompt": "a"}, {"prompt": "bcd"}])
        assert [len(p.token_ids) for p in made] == [20, 22]

    def test_without_a_chat_template_text_is_encoded_as_it_stands_and_messages_are_refused(self):
        template = make_template(tokenizer(chat_template=None))
        plain, full = (
            prompts(template, [{"prompt": "2+2="}], **keys)[0]
            for keys in ({}, {"system_prompt": "S", "prompt_suffix": "!"})
        )
        assert plain.text == "2+2="
        assert full.text == "S\n\n2+2=!"
        assert full.messages == ({"role": "system", "content": "S"}, {"role": "user", "content": "2+2=!"})
        with pytest.raises(UserError, match=r"model\.chat_template"):
            prompts(template, [{"prompt": chat(("user", "a"))}])

    def test_a_template_that_refuses_the_messages_names_the_row(self):
        strict = (
            "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHAT_TEMPLATE
        )
        template = make_template(tokenizer(strict))
        with pytest.raises(UserError) as caught:
            prompts(template, [{"prompt": "a"}, {"prompt": chat(("system", "s"), ("user", "a"))}])
        assert caught.value.code == "data-template"
        assert "x/1" in str(caught.value)
        assert "no system role" in str(caught.value)

    def test_a_template_that_reads_only_lists_of_parts_gets_them(self):
        part = "{% if c.type == 'text' %}{{ c.text }}{% endif %}"
        parts = "{% for m in messages %}{% for c in m['content'] %}" + part + "{% endfor %};{% endfor %}"
        (prompt,) = prompts(make_template(tokenizer(parts)), [{"prompt": "Hi"}])
        assert prompt.text == "Hi;"
        assert prompt.messages == ({"role": "user", "content": "Hi"},)

    def test_variables_reach_the_template_and_unknown_ones_are_refused(self):
        text = CHAT_TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
        (prompt,) = prompts(make_template(tokenizer(text), {"enable_thinking": False}), [{"prompt": "a"}])
        assert prompt.text.endswith(GENERATE + "<think></think>")
        with pytest.raises(UserError, match="`enable_thinking`"):
            make_template(tokenizer(text), {"enable_thinkin": False})
        for reserved in ("tools", "add_generation_prompt", "messages"):
            with pytest.raises(UserError, match="template_kwargs"):
                make_template(tokenizer(text), {reserved: False})


class TestBeginOfSequence:
    @pytest.mark.parametrize(
        ("chat_template", "row"),
        [
            (WITH_BOS, {"prompt": "Hi"}),
            (WITH_BOS, {"prompt": chat(("user", "Hi"))}),
            (CHAT_TEMPLATE, {"prompt": "Hi"}),
            ("{{ bos_token }}" + WITH_BOS, {"prompt": "Hi"}),
            (None, {"prompt": "Hi"}),
            (None, {"prompt": "<s>Hi"}),
            (None, {"prompt": "<s><s>Hi"}),
        ],
    )
    def test_exactly_one_on_a_model_that_has_one(self, chat_template: str | None, row: dict[str, Any]):
        template = make_template(tokenizer(chat_template, bos=True))
        (prompt,) = prompts(template, [row])
        bos = template.tokenizer.bos_token_id
        assert prompt.token_ids[0] == bos
        assert (prompt.token_ids == bos).sum() == 1
        assert prompt.text.startswith("<s>")
        assert template.tokenizer.decode(prompt.token_ids.tolist()) == prompt.text
        assert str(template.tokenizer.decode(prompt.token_ids[1:].tolist())).startswith(("Hi", "<|im_start|>user\nHi"))

    @pytest.mark.parametrize("chat_template", [CHAT_TEMPLATE, None])
    def test_none_on_a_model_that_has_none(self, chat_template: str | None):
        template = make_template(tokenizer(chat_template))
        (prompt,) = prompts(template, [{"prompt": "Hi"}])
        assert template.tokenizer.bos_token_id is None
        assert prompt.token_ids.tolist() == ids_of(template, prompt.text)

    def test_one_inside_the_text_stays(self):
        template = make_template(tokenizer(CHAT_TEMPLATE, bos=True))
        (prompt,) = prompts(template, [{"prompt": "a<s>b"}])
        assert (prompt.token_ids == template.tokenizer.bos_token_id).sum() == 2


class TestNextTurn:
    def test_three_turns_give_the_ids_of_the_whole_conversation_with_each_separator_once(self):
        template = make_template(tiny_tokenizer())
        messages = chat(("user", "1+1"))
        ids = prompts(template, [{"prompt": messages}])[0].token_ids
        for answer, question in (("2", "2+2"), ("4", "3+3"), ("6", "thanks")):
            generated = np.asarray(ids_of(template, answer + "<|im_end|>"), dtype=np.int32)
            messages = [*messages, *chat(("assistant", answer))]
            new = chat(("user", question))
            ids = np.concatenate([ids, generated, template.next_turn(messages, generated, new)])
            messages = [*messages, *new]
        assert ids.tolist() == ids_of(template, template.render(messages))
        assert str(template.tokenizer.decode(ids.tolist())).count("<|im_end|>\n") == 7

    def test_a_turn_cut_at_the_limit_is_closed(self):
        template = make_template(tiny_tokenizer())
        messages = chat(("user", "a"), ("assistant", "whatever was parsed"))
        tail = "\n" + CHATML.format(role="user", text="b") + GENERATE
        for text, want in (("4", "<|im_end|>" + tail), ("4<|im_end|>", tail), ("", "<|im_end|>" + tail)):
            generated = np.asarray(ids_of(template, text), dtype=np.int32)
            assert (
                template.tokenizer.decode(template.next_turn(messages, generated, chat(("user", "b"))).tolist()) == want
            )

    def test_a_turn_ended_by_another_stop_token_keeps_it_and_gets_the_turns_end(self):
        template = make_template(tiny_tokenizer(), stop_ids=[tiny_tokenizer().convert_tokens_to_ids("<|im_start|>")])
        generated = np.asarray(ids_of(template, "4<|im_start|>"), dtype=np.int32)
        after = template.next_turn(chat(("user", "a"), ("assistant", "4")), generated, chat(("user", "b")))
        assert str(template.tokenizer.decode(after.tolist())).startswith("<|im_end|>\n<|im_start|>user")

    def test_the_models_own_tokens_are_never_made_from_text(self):
        # The message's text differs from what was sampled, and nothing of it is in the result.
        template = make_template(tiny_tokenizer())
        call = {"function": {"name": "add", "arguments": {"a": 1}}}
        messages = [*chat(("user", "a")), {"role": "assistant", "content": "parsed text", "tool_calls": [call]}]
        generated = np.asarray(ids_of(template, 'raw {"add"} <|im_end|>'), dtype=np.int32)
        after = template.tokenizer.decode(template.next_turn(messages, generated, chat(("tool", "1"))).tolist())
        assert after == "\n" + CHATML.format(role="tool", text="1") + GENERATE

    def test_tool_calls_of_the_first_turn_are_still_shown_at_the_third(self):
        template = make_template(tiny_tokenizer())
        call = {"function": {"name": "first_tool", "arguments": {}}}
        messages = [
            *chat(("user", "a")),
            {"role": "assistant", "content": "", "tool_calls": [call]},
            *chat(("tool", "1")),
        ]
        generated = np.asarray(ids_of(template, "x<|im_end|>"), dtype=np.int32)
        for text in ("b", "c"):
            messages = [*messages, *chat(("assistant", text))]
            template.next_turn(messages, generated, chat(("user", text)))
            messages = [*messages, *chat(("user", text))]
        assert "first_tool" in template.render(messages)

    def test_a_template_that_writes_a_space_before_its_end(self):
        spaced = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }} {{ eos_token }}\n{% endfor %}"
        template = make_template(tokenizer(spaced))
        generated = np.asarray(ids_of(template, "4<|im_end|>"), dtype=np.int32)
        after = template.next_turn(chat(("user", "a"), ("assistant", "4")), generated, chat(("user", "b")))
        assert template.tokenizer.decode(after.tolist()) == "\n[user] b <|im_end|>\n"

    def test_a_template_that_takes_tool_messages_only_after_calls(self):
        strict = (
            "{% for m in messages %}{% if m['role'] == 'tool' and not messages[loop.index0 - 1].get('tool_calls') %}"
            "{{ raise_exception('tool message without a call') }}{% endif %}{% endfor %}" + CHAT_TEMPLATE
        )
        template = make_template(tokenizer(strict))
        call = {"function": {"name": "add", "arguments": {"a": 1}}}
        messages = [*chat(("user", "a")), {"role": "assistant", "content": "x", "tool_calls": [call]}]
        generated = np.asarray(ids_of(template, "x<|im_end|>"), dtype=np.int32)
        after = template.tokenizer.decode(template.next_turn(messages, generated, chat(("tool", "1"))).tolist())
        assert after == "\n" + CHATML.format(role="tool", text="1") + GENERATE
        with pytest.raises(UserError, match="without a call"):
            template.next_turn(chat(("user", "a"), ("assistant", "x")), generated, chat(("tool", "1")))

    def test_a_template_that_strips_earlier_thoughts(self):
        thinking = (
            "{% for m in messages %}{% set text = m['content'] %}{% if m['role'] == 'assistant' and not loop.last %}"
            "{% set text = text.split('</think>')[-1] %}{% endif %}"
            "{{ m['role'] }}:{{ text }}{{ eos_token }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant:{% endif %}"
        )
        template = make_template(tokenizer(thinking))
        generated = np.asarray(ids_of(template, "<think>long</think>4<|im_end|>"), dtype=np.int32)
        messages = chat(("user", "a"), ("assistant", "<think>long</think>4"))
        after = template.next_turn(messages, generated, chat(("user", "b")))
        assert template.tokenizer.decode(after.tolist()) == "\nuser:b<|im_end|>\nassistant:"

    def test_no_begin_of_sequence_between_turns(self):
        template = make_template(tokenizer(WITH_BOS, bos=True))
        generated = np.asarray(ids_of(template, "4<|im_end|>"), dtype=np.int32)
        after = template.next_turn(chat(("user", "a"), ("assistant", "4")), generated, chat(("user", "b")))
        assert template.tokenizer.bos_token_id not in after.tolist()

    def test_variables_of_the_template_hold_between_turns_too(self):
        text = CHAT_TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
        template = make_template(tokenizer(text), {"enable_thinking": False})
        generated = np.asarray(ids_of(template, "4<|im_end|>"), dtype=np.int32)
        after = template.next_turn(chat(("user", "a"), ("assistant", "4")), generated, chat(("user", "b")))
        assert str(template.tokenizer.decode(after.tolist())).endswith(GENERATE + "<think></think>")

    def test_the_token_that_ends_a_turn(self):
        assert make_template(tiny_tokenizer()).turn_end_id() == tiny_tokenizer().eos_token_id
        words = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        assert make_template(tokenizer(words)).turn_end_id() is None
