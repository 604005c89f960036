"""Text <-> token ids: a checkpoint's own tokenizer.json and chat template, without transformers.

Here: finding the files (a directory, the hub, or the built-in character tokenizer "tiny"), encoding, decoding,
rendering a conversation with the checkpoint's Jinja template, and which ids end an answer. Not here: model aliases
(model.py), what a problem is and how long it may be (data/__init__.py).

The ids of a conversation are those of transformers' `apply_chat_template(..., add_generation_prompt=True)`: the
template writes every special token, so nothing is added to what it wrote. After sampling nothing is encoded again: the
learner trains on the sampler's ids ("ids in, ids out"), and text made by `decode` is for rewards and people.

Try it:  python -c "from data.tokenizer import load_tokenizer as t; print(t('tiny').encode('3 1 2 ='))"
"""

import json
import warnings
from datetime import datetime
from pathlib import Path

import jinja2
import jinja2.ext
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import decoders, models, pre_tokenizers

# What a tokenizer is made of. config.json is read for its end tokens only: it is the model's, and never written here.
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
         "generation_config.json", "chat_template.jinja", "chat_template.json")
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_tokenizer(name):
    """The tokenizer of `name`: "tiny", a directory with a tokenizer.json, or a hub id such as Qwen/Qwen3-0.6B.

    From the hub only tokenizer files are downloaded, with huggingface_hub's cache, progress bar and offline mode.
    Raises ValueError for a name or directory that has no tokenizer, ConnectionError where the hub cannot be reached.
    """
    name = str(name)
    if name == "tiny":
        return Tokenizer(tiny_files(), name)
    directory = Path(name).expanduser()
    if not directory.is_dir():
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise ValueError(f"tokenizer {name!r}: no such directory")
        directory = download(name)
    files = {file: (directory / file).read_bytes() for file in (*FILES, "config.json") if (directory / file).is_file()}
    if "tokenizer.json" not in files:
        raise ValueError(
            f"tokenizer {name!r}: no tokenizer.json in {directory} (transformers writes one: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    return Tokenizer(files, str(directory))


def download(repo):
    """The hub's files for `repo` that make a tokenizer -> their directory in huggingface_hub's cache."""
    from huggingface_hub import snapshot_download  # half a second to import, which local runs need not wait for
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(repo, allow_patterns=[*FILES, "config.json"]))
    except (HFValidationError, RepositoryNotFoundError):
        raise ValueError(
            f"tokenizer {repo!r} is not known: give 'tiny', a directory with a tokenizer.json, or a hub id "
            "(owner/name; private and gated ones need `hf auth login`)"
        ) from None
    except Exception as error:  # every way a network can fail, and the hub's own offline errors
        raise ConnectionError(
            f"tokenizer {repo!r}: not in the hub's cache and not downloadable now "
            f"({type(error).__name__}); go online once, or give 'tiny' or a directory with a tokenizer.json"
        ) from None


class Tokenizer:
    """Made of `files`, name -> bytes as they stand in a Hugging Face directory; `save` writes the same bytes again."""

    def __init__(self, files, name="tokenizer"):
        self.files, self.name = files, name
        self._json("tokenizer.json")  # for an error with file and cause, which the next line's has not
        self.backend = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
        self.backend.no_truncation()  # a tokenizer.json remembers what it was last used with
        self.backend.no_padding()
        config, generation, model = (
            self._json(file) for file in ("tokenizer_config.json", "generation_config.json", "config.json")
        )

        named = {**self._json("special_tokens_map.json"), **config}
        texts = {key: named[key]["content"] if isinstance(named[key], dict) else named[key]
                 for key in SPECIAL_TOKENS if named.get(key)}
        self.special_tokens = texts  # "eos_token" -> "<|im_end|>": the variables a template sees
        ids = {key: self.backend.token_to_id(text) for key, text in texts.items()}
        self.bos_id = ids.get("bos_token")

        ends = [ids.get("eos_token")]  # often not all: of the three in Llama's generation_config one ends a turn
        for source in (generation, model):
            end = source.get("eos_token_id")
            ends += end if isinstance(end, list) else [end]
        ends = [i for i in ends if i is not None]
        self.stop_ids = set(ends)
        self.eos_id = ends[0] if ends else None
        # Masks come from lengths, so any id can pad. A pad token that is not in the vocabulary would need a new row of
        # the embedding: not for something the model never looks at.
        self.pad_id = ids.get("pad_token")
        if self.pad_id is None:
            self.pad_id = self.eos_id if ends else 0
            warnings.warn(f"{name}: no pad token in the vocabulary; padding with id {self.pad_id}", stacklevel=3)
        self.vocab_size = self.backend.get_vocab_size()
        self.template = self._template(config)

    def _json(self, file):
        if file not in self.files:
            return {}
        try:
            return json.loads(self.files[file])
        except ValueError as error:
            pointer = self.files[file].startswith(b"version https://git-lfs")
            cause = "a Git LFS pointer: download the file (`git lfs pull`)" if pointer else f"not JSON ({error})"
            raise ValueError(f"{self.name}/{file} is {cause}") from None

    def _template(self, config):
        """The compiled chat template, from where the checkpoint's transformers version wrote it; None without one."""
        source = config.get("chat_template") or self._json("chat_template.json").get("chat_template")
        if "chat_template.jinja" in self.files:
            source = self.files["chat_template.jinja"].decode()
        if isinstance(source, list):  # several by name, e.g. one for tool use
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if source is None:
            return None
        # The sandbox, because a template is a program somebody uploaded. Trimming, loop controls, filters and globals
        # are those transformers renders with: templates are written against them, blank for blank.
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation]
        )
        env.filters["tojson"] = tojson
        env.globals.update(raise_exception=raise_exception, strftime_now=lambda text: datetime.now().strftime(text))
        try:
            return env.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"{self.name}: the chat template does not compile: {error}") from None

    def encode(self, text, special=True):
        """Ids of `text`. special: with the tokens that tokenizer.json's post-processor puts around a text (often a bos,
        often none), but never a second bos where the text, rendered by a template, begins with one."""
        try:
            ids = self.backend.encode(text, add_special_tokens=special).ids
        except Exception:  # a vocabulary of characters without an unknown token, such as tiny's
            unknown = next((char for char in text if self.backend.token_to_id(char) is None), None)
            if unknown is None:
                raise
            raise ValueError(f"{self.name}: the tokenizer has no token for {unknown!r}") from None
        doubled = special and self.bos_id is not None and ids[:2] == [self.bos_id] * 2
        return ids[1:] if doubled else ids

    def encode_chat(self, messages, **template_kwargs):
        """Ids of a conversation up to and with the header of the answer to come."""
        return self.encode(self.render(messages, **template_kwargs), special=False)

    def encode_prompt(self, prompt, **template_kwargs):
        """Ids of a problem's prompt: text as it is, messages through the chat template."""
        return self.encode(prompt) if isinstance(prompt, str) else self.encode_chat(prompt, **template_kwargs)

    def decode(self, ids, skip_special=True):
        """Text of all `ids` at once: one token may hold only part of a character's bytes. No blanks are tidied away."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def render(self, messages, **template_kwargs):
        """Text of a conversation, [{"role", "content", ...}, ...], with the header of the answer to come at its end.

        template_kwargs reach the template: enable_thinking=False, tools=[...], date_string="26 Jul 2024" (without it
        some templates write today's date, so that the same command makes other prompts tomorrow).
        Raises ValueError without a template, or where the template refuses the messages.
        """
        if self.template is None:
            raise ValueError(f"{self.name} has no chat template: give the prompt as text instead of messages")
        if not messages:
            raise ValueError("a conversation needs at least one message")
        for key, value in template_kwargs.items():
            if str(value).lower() in ("true", "false") and not isinstance(value, bool):
                raise ValueError(f"chat template: {key}={value!r} is text, no boolean; templates tell them apart")
        messages = [{key: value for key, value in m.items() if value is not None} for m in messages]
        try:
            return self.template.render(
                **{"tools": None, "documents": None, **self.special_tokens, **template_kwargs},
                messages=messages, add_generation_prompt=True,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"{self.name}: the chat template refuses this conversation: {error}") from None

    def save(self, directory):
        """Writes the tokenizer's files, byte for byte, next to a model's in `directory` (made if missing)."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        for file in self.files.keys() & set(FILES):
            (directory / file).write_bytes(self.files[file])


class StreamDecoder:
    """Tokens in, one by one; text out, as soon as its characters are whole. Bytes that never become one are not shown.

        stream = StreamDecoder(tokenizer)
        for token in tokens: print(stream.push(token), end="", flush=True)
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.ids = []  # a shown token, because decoders may treat the first one differently, then those not shown yet
        self.shown = 0  # characters of their text that are shown

    def push(self, token):
        """The text that `token` completes, "" while a character lacks bytes (decoding writes U+FFFD for those)."""
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids)
        piece = text.rstrip("\ufffd")[self.shown :]
        self.shown += len(piece)
        alone = self.tokenizer.decode([token])
        if piece and "\ufffd" not in alone:  # starts and ends between characters: the tokens before it are settled
            self.ids, self.shown = [token], len(alone)
        return piece.replace("\ufffd", "")

    def flush(self):
        """Ends a text, and is ready for the next: drops a character that lacks bytes. -> "", all else was shown."""
        self.ids, self.shown = [], 0
        return ""


class Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} marks an assistant's words for supervised training; here plain text."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message):
    raise jinja2.TemplateError(message)


def tiny_files():
    """The character tokenizer of model "tiny", 98 ids: <|pad|> 0, <|end|> 1, newline 2, then printable ASCII, " " 3 to
    "~" 97. A conversation is its messages' contents, one after another. Other characters are an error, not a guess."""
    characters = ["<|pad|>", "<|end|>", "\n", *map(chr, range(32, 127))]
    backend = tokenizers.Tokenizer(models.WordLevel({char: i for i, char in enumerate(characters)}))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(characters[:2])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|pad|>",
        "eos_token": "<|end|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }
    generation = {"eos_token_id": 1, "pad_token_id": 0}
    return {
        "tokenizer.json": backend.to_str().encode(),
        "tokenizer_config.json": json.dumps(config, indent=2).encode(),
        "generation_config.json": json.dumps(generation, indent=2).encode(),
    }
