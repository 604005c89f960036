"""data/tokenizer.py: which ids a text and a conversation become, what ends an answer, and files that are not there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from data.tokenizer import StreamDecoder, load_tokenizer

SPECIALS = ["<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>", "<|eot|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Llama 3's habit: the template writes the bos by its variable, and the post-processor would add one again.
WITH_BOS = "{{ bos_token }}" + CHATML
# Qwen3's test for the switch, word for word: only the boolean False makes it true.
THINKING = CHATML + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
QUESTION = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2+2?"}]


def write_tokenizer(directory, template=CHATML, post_bos=False, generation=None, model=None, **config):
    """A byte-level BPE tokenizer (256 bytes, no merges, SPECIALS first) with its Hugging Face files in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    vocab = {token: i for i, token in enumerate(SPECIALS + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if post_bos:
        backend.post_processor = processors.TemplateProcessing("<|bos|> $A", special_tokens=[("<|bos|>", 1)])
    backend.add_special_tokens(SPECIALS)
    backend.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", **config}
    if template is not None:
        config["chat_template"] = template
    for name, content in (("tokenizer_config", config), ("generation_config", generation), ("config", model)):
        if content is not None:
            (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


# ---------------------------------------------------------------- the built-in character tokenizer


def test_tiny_has_98_fixed_ids():
    tiny = load_tokenizer("tiny")
    assert tiny.vocab_size == 98 and tiny.pad_id == 0 and tiny.eos_id == 1 and tiny.stop_ids == {1}
    assert tiny.encode("<|end|>\n 09~") == [1, 2, 3, 19, 28, 97]
    assert tiny.encode("4 1 =") == [23, 3, 20, 3, 32]
    text = "".join(map(chr, range(32, 127))) + "\n"
    assert tiny.decode(tiny.encode(text)) == text
    assert tiny.decode([20, 1, 0]) == "1" and tiny.decode([20, 1], skip_special=False) == "1<|end|>"


def test_tiny_names_a_character_it_does_not_know():
    with pytest.raises(ValueError, match="no token for 'é'"):
        load_tokenizer("tiny").encode("caf\u00e9")


def test_tiny_renders_contents_one_after_another_and_survives_saving(tmp_path):
    tiny = load_tokenizer("tiny")
    tiny.save(tmp_path / "model")
    again = load_tokenizer(tmp_path / "model")
    for tokenizer in (tiny, again):
        assert tokenizer.render([{"role": "user", "content": "3 1 ="}]) == "3 1 ="
        assert tokenizer.encode_prompt([{"role": "user", "content": "3 1 ="}]) == tokenizer.encode_prompt("3 1 =")
        assert (tokenizer.stop_ids, tokenizer.pad_id, tokenizer.eos_id, tokenizer.vocab_size) == ({1}, 0, 1, 98)
        with pytest.raises(ValueError, match="no token for '\\\\t'"):
            tokenizer.encode("\t")


# ---------------------------------------------------------------- special tokens


@pytest.mark.filterwarnings("ignore:.*no pad token")
def test_bos_stands_once_in_templated_and_in_raw_prompts(tmp_path):
    # The template wrote {{ bos_token }}, the post-processor added another, and models trained on two.
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, WITH_BOS, post_bos=True, bos_token="<|bos|>"))
    rendered = tokenizer.render(QUESTION)
    assert rendered.startswith("<|bos|><|im_start|>system\n")
    for ids in (tokenizer.encode_chat(QUESTION), tokenizer.encode(rendered), tokenizer.encode("2+2?")):
        assert ids.count(1) == 1 and ids[0] == 1
    assert tokenizer.encode_chat(QUESTION) == tokenizer.encode(rendered)
    assert tokenizer.encode("2+2?", special=False).count(1) == 0


@pytest.mark.filterwarnings("ignore:.*no pad token")
def test_bos_is_not_added_to_a_template_that_writes_none(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, CHATML, post_bos=True, bos_token="<|bos|>"))
    assert tokenizer.encode_chat(QUESTION).count(1) == 0
    assert tokenizer.encode("2+2?").count(1) == 1


@pytest.mark.parametrize(
    "generation, model, stop",
    [
        ({"eos_token_id": [0, 4]}, {"eos_token_id": 1}, {0, 1, 3, 4}),  # a list, as Llama 3's
        ({"eos_token_id": 4}, {"eos_token_id": [1, 4]}, {1, 3, 4}),
        ({"eos_token_id": None}, {}, {3}),
        ({"temperature": 0.6}, None, {3}),  # omits the end of a turn: the tokenizer's own still ends an answer
        (None, None, {3}),  # no file at all
    ],
)
def test_stop_ids_are_the_union_of_all_three_places(tmp_path, generation, model, stop):
    # One place alone let answers run past <|im_end|> to the length limit.
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, generation=generation, model=model, pad_token="<|pad|>"))
    assert tokenizer.stop_ids == stop and tokenizer.eos_id == 3


def test_pad_is_the_tokenizers_own_or_an_end_token_never_a_new_row(tmp_path):
    assert load_tokenizer(write_tokenizer(tmp_path / "own", pad_token={"content": "<|pad|>"})).pad_id == 0
    for name, config in (("none", {}), ("new", {"pad_token": "[PAD]"})):  # [PAD] would be a new row of the embedding
        with pytest.warns(UserWarning, match="no pad token.* id 3"):
            tokenizer = load_tokenizer(write_tokenizer(tmp_path / name, **config))
        assert tokenizer.pad_id == 3 == tokenizer.eos_id and tokenizer.vocab_size == 261


def test_special_tokens_map_counts_where_the_configuration_is_silent(tmp_path):
    write_tokenizer(tmp_path, WITH_BOS, pad_token="<|pad|>")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<|bos|>", "eos_token": "<|eot|>"}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.render(QUESTION).startswith("<|bos|>") and tokenizer.stop_ids == {3}


def test_remembered_truncation_and_padding_are_off(tmp_path):
    # A tokenizer.json keeps the last padding and truncation it was used with; prompts came out cut or padded.
    write_tokenizer(tmp_path, pad_token="<|pad|>")
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=32)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path).encode("12345678")) == 8


# ---------------------------------------------------------------- templates


def test_only_the_boolean_false_switches_thinking_off(tmp_path):
    # "false" from a command line is a true value for the template: the block never came, silently.
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, THINKING, pad_token="<|pad|>"))
    header = "<|im_start|>assistant\n"
    assert tokenizer.render(QUESTION).endswith(header)
    assert tokenizer.render(QUESTION, enable_thinking=True).endswith(header)
    assert tokenizer.render(QUESTION, enable_thinking=False).endswith(header + "<think>\n\n</think>\n\n")
    for text in ("False", "false", "True"):
        with pytest.raises(ValueError, match="enable_thinking"):
            tokenizer.render(QUESTION, enable_thinking=text)


@pytest.mark.parametrize("place", ["string", "list", "chat_template.jinja", "chat_template.json"])
def test_template_is_found_wherever_a_checkpoint_keeps_it(tmp_path, place):
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]
    write_tokenizer(tmp_path, {"string": CHATML, "list": several}.get(place), pad_token="<|pad|>")
    if place.startswith("chat"):
        (tmp_path / place).write_text(CHATML if place.endswith("jinja") else json.dumps({"chat_template": CHATML}))
    tokenizer = load_tokenizer(tmp_path)
    expected = "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render(QUESTION) == expected
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").render(QUESTION) == expected


def test_template_language_is_transformers(tmp_path):
    template = """
    {%- for message in messages %}
        {%- if message.role == 'system' %}
            {%- continue %}
        {%- endif %}
        {%- generation %}{{ message.content | tojson }}{% endgeneration %}
    {%- endfor %}
    {% if tools %}
{{ tools | tojson }}
    {% endif %}
{{ strftime_now('%Y')|length }} {{ eos_token }} {{ nothing }}"""
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, template, pad_token="<|pad|>"))
    messages = [{"role": "system", "content": "no"}, {"role": "user", "content": "안 <b> & 'q'"}]
    # no \u escapes, no &lt;, statements leave no line behind, a loop can go on
    assert tokenizer.render(messages) == "\"안 <b> & 'q'\"4 <|im_end|> "
    assert '"[{"type": "function"}]\n4' in tokenizer.render(messages, tools=[{"type": "function"}])


def test_template_errors_are_one_clear_line(tmp_path):
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "a", refuses, pad_token="<|pad|>"))
    with pytest.raises(ValueError, match="System role not supported"):
        tokenizer.render(QUESTION)
    with pytest.raises(ValueError, match="at least one message"):
        tokenizer.render([])
    with pytest.raises(ValueError, match="has no chat template"):
        load_tokenizer(write_tokenizer(tmp_path / "b", None, pad_token="<|pad|>")).render(QUESTION)
    with pytest.raises(ValueError, match="does not compile"):
        load_tokenizer(write_tokenizer(tmp_path / "c", "{% for %}", pad_token="<|pad|>"))
    escape = load_tokenizer(write_tokenizer(tmp_path / "d", "{{ ''.__class__.__mro__ }}", pad_token="<|pad|>"))
    with pytest.raises(ValueError, match="unsafe"):
        escape.render(QUESTION)


# ---------------------------------------------------------------- decoding


def byte_fallback(directory):
    """Llama 2's kind: words with a leading mark, and bytes as tokens of their own for what is not in the vocabulary."""
    pieces = ["<s>", "</s>", "<unk>", "▁", "a", "b", "▁a", *(f"<0x{i:02X}>" for i in range(256))]
    backend = tokenizers.Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(pieces[:3])
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "pad_token": "<unk>"}))
    return directory


@pytest.mark.parametrize("kind", [write_tokenizer, byte_fallback])
@pytest.mark.filterwarnings("ignore:.*no pad token")
def test_text_survives_and_streaming_shows_only_whole_characters(tmp_path, kind):
    # A character of several byte tokens was printed as one replacement mark a byte.
    tokenizer = load_tokenizer(kind(tmp_path))
    for text in ("🙂 é 안녕", "a  b a", "🙂🙂", "aé🙂b 안a"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        stream = StreamDecoder(tokenizer)
        pieces = [stream.push(i) for i in ids]
        assert "".join(pieces) == text
        assert all("\ufffd" not in piece for piece in pieces) and sum(map(bool, pieces)) > 1
        assert stream.flush() == ""
        for _ in range(2):  # a text that ends inside a character, and the next one, which must not know of it
            assert "".join(stream.push(i) for i in tokenizer.encode("a🙂")[:-1]) + stream.flush() == "a"


def test_streaming_survives_bytes_that_are_no_text(tmp_path):
    # Random weights write stray bytes: they are left out, and what follows them appears at once.
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, pad_token="<|pad|>"))
    lead, middle, *_ = tokenizer.encode("🙂")
    a, end = tokenizer.encode("a")[0], 3
    stream = StreamDecoder(tokenizer)
    shown = [stream.push(i) for i in (middle, a, lead, a, middle, middle, *tokenizer.encode("é"), end, a)]
    assert shown == ["", "a", "", "a", "", "", "", "é", "", "a"]


# ---------------------------------------------------------------- files that are not as they should be


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(ValueError, match="no tokenizer.json in"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="no such directory"):
        load_tokenizer(tmp_path / "nowhere")
    write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match="generation_config.json is not JSON"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ValueError, match="tokenizer.json is a Git LFS pointer"):
        load_tokenizer(tmp_path)


def test_saving_over_the_source_and_after_it_is_gone(tmp_path):
    source = write_tokenizer(tmp_path / "a", generation={"eos_token_id": [3, 4]}, model={"x": 1}, pad_token="<|pad|>")
    tokenizer = load_tokenizer(source)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    tokenizer.save(source)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    for path in source.iterdir():
        path.unlink()
    tokenizer.save(tmp_path / "b")
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == [
        "generation_config.json", "tokenizer.json", "tokenizer_config.json",  # config.json is the model's to write
    ]
    assert load_tokenizer(tmp_path / "b").stop_ids == {3, 4}


def test_hub_ids_use_the_cache_offline_and_say_so_without_one(tmp_path):
    snapshot = tmp_path / "hub/models--someone--model/snapshots/0123456789012345678901234567890123456789"
    write_tokenizer(snapshot, pad_token="<|pad|>")
    refs = tmp_path / "hub/models--someone--model/refs"
    refs.mkdir()
    (refs / "main").write_text(snapshot.name)
    script = (
        "from data.tokenizer import load_tokenizer\n"
        "print(load_tokenizer('someone/model').encode('a'))\n"
        "for name in ('someone/else', 'bad..name'):\n"
        "    try: load_tokenizer(name)\n"
        "    except (ConnectionError, ValueError) as error: print(type(error).__name__, error)\n"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parent.parent)}
    env.pop("HF_HUB_CACHE", None)
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == str(load_tokenizer(snapshot).encode("a"))
    assert lines[1].startswith("ConnectionError tokenizer 'someone/else': not in the hub's cache")
    assert lines[2].startswith("ValueError tokenizer 'bad..name' is not known") and len(lines) == 3


def test_only_tokenizer_files_are_downloaded(tmp_path, monkeypatch):
    import huggingface_hub

    asked = {}

    def snapshot_download(repo, allow_patterns):
        asked[repo] = allow_patterns
        return str(write_tokenizer(tmp_path, pad_token="<|pad|>"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    load_tokenizer("someone/model")
    patterns = asked["someone/model"]
    assert "tokenizer.json" in patterns and "chat_template.jinja" in patterns and "config.json" in patterns
    assert not any("safetensors" in pattern or "*" in pattern for pattern in patterns)
