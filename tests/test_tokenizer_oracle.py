"""data/tokenizer.py against transformers, on tokenizers made here: the same ids, the same text."""

import pytest
from test_tokenizer import CHATML, QUESTION, THINKING, WITH_BOS, byte_fallback, write_tokenizer

from data.tokenizer import load_tokenizer

transformers = pytest.importorskip("transformers", reason="compares with transformers (requirements-oracles.txt)")
pytestmark = pytest.mark.filterwarnings("ignore:.*no pad token")

LANGUAGE = """
{%- set ns = namespace(found=false) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- continue %}
    {%- endif %}
    {% if loop.index0 > 3 %}
        {% break %}
    {% endif %}
    {%- set ns.found = true %}
{{ message.role }}{{ message.name }}: {% generation %}{{ message.content | tojson }}{% endgeneration %}
    {% if message.tool_calls %}
        {%- for call in message.tool_calls %}{{ call | tojson(indent=2) }}{% endfor %}
    {% endif %}

{% endfor %}
{% if tools is not none %}
{{ tools | tojson }}
{% endif %}
{{ ns.found }} {{ strftime_now('%Y') }} {{ bos_token }}{{ eos_token }}{{ nothing }}
"""
TOOL = {"type": "function", "function": {"name": "add", "description": "a<b & c", "parameters": {"type": "object"}}}
CHATS = [
    QUESTION,
    [{"role": "user", "content": "  🙂 é 안녕 <b>\n\n"}],
    [*QUESTION, {"role": "assistant", "content": "<think>\n4</think>\n4"}, {"role": "user", "content": "<|im_end|>?"}],
    [{"role": "user", "content": ""}, {"role": "assistant", "content": "x", "name": None}],
]


@pytest.mark.parametrize("template", [CHATML, WITH_BOS, THINKING, LANGUAGE], ids=["chatml", "bos", "think", "language"])
@pytest.mark.parametrize("post_bos", [False, True])
def test_ids_of_conversations_equal_transformers(tmp_path, template, post_bos):
    write_tokenizer(tmp_path, template, post_bos=post_bos, bos_token="<|bos|>", pad_token="<|pad|>")
    ours, theirs = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for chat in CHATS:
        for kwargs in ({}, {"enable_thinking": False}, {"enable_thinking": True}, {"tools": [TOOL]}):
            options = {"add_generation_prompt": True, **kwargs}
            assert ours.render(chat, **kwargs) == theirs.apply_chat_template(chat, tokenize=False, **options)
            ids = theirs.apply_chat_template(chat, tokenize=True, return_dict=False, **options)
            assert ours.encode_chat(chat, **kwargs) == ids
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
            assert ours.decode(ids, skip_special=False) == theirs.decode(ids)


@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}], ids=str)
@pytest.mark.parametrize("post_bos", [False, True])
def test_ids_of_texts_equal_transformers(tmp_path, post_bos, config):
    write_tokenizer(tmp_path, post_bos=post_bos, bos_token="<|bos|>", pad_token="<|pad|>", **config)
    ours, theirs = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("2+2=", " 🙂 é 안녕\n", "<|im_start|>a"):
        assert ours.encode(text) == theirs(text).input_ids
        assert ours.encode(text, special=False) == theirs(text, add_special_tokens=False).input_ids


def test_byte_fallback_equals_transformers(tmp_path):
    byte_fallback(tmp_path)
    ours, theirs = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("a b", " 🙂 é 안녕\n", "aaa</s>b"):
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids and ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_transformers_loads_a_saved_tiny_tokenizer(tmp_path):
    tiny = load_tokenizer("tiny")
    tiny.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) == 98 and theirs.pad_token_id == 0 and theirs.eos_token_id == 1
    text = "4 1 3 2 =\n~<|end|>"
    ids = tiny.encode(text)
    assert theirs(text).input_ids == ids and theirs.decode(ids, skip_special_tokens=True) == tiny.decode(ids)
    chat = [{"role": "user", "content": "3 1 ="}]
    assert theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) == tiny.encode_chat(chat)
    assert transformers.GenerationConfig.from_pretrained(tmp_path).eos_token_id == 1
