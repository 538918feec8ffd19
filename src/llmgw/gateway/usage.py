"""Tokens: read from what engines say at the end of an answer, asked for where a client did not ask, never invented."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

_OBJECT = re.compile(rb'"(?:usage|timings)"[ \t]*:[ \t]*(\{(?:[^{}]++|\{[^{}]*+\})*+\})')
_EMPTY_CHOICES = re.compile(rb'"choices"[ \t]*:[ \t]*\[[ \t]*\]')
_REST = 64 << 10
_OPTIONS = re.compile(rb'"stream_options"')
# events of a stream before the first that carries a token, as llama-server sends them
_OPENING = {"/v1/chat/completions": 1, "/v1/messages": 2, "/v1/responses": 4}


# what is no such number is not believed: sums, limits and the control process go by it
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]


class _Said(msgspec.Struct, gc=False):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    total_tokens: _Count | None = None
    input_tokens: _Count | None = None
    output_tokens: _Count | None = None
    cache_read_input_tokens: _Count | None = None
    cache_creation_input_tokens: _Count | None = None
    prompt_n: _Count | None = None
    predicted_n: _Count | None = None
    cache_n: int | None = None


_SAID = msgspec.json.Decoder(_Said)


class Tokens:
    """Prompt and completion tokens of one answer; None while unknown.

    Attributes:
        of: of how many choices the engine has told those of one; more than 1 means that the rest is not known.
    """

    __slots__ = ("completion", "prompt")
    of = 1

    def __init__(self) -> None:
        self.prompt: int | None = None
        self.completion: int | None = None

    def read(self, data: bytes) -> None:
        """Take what `usage` objects (OpenAI, Anthropic) say, and llama.cpp's `timings` where there is no `usage`.

        Prompt tokens are all of the prompt, those found in a cache too: OpenAI's count has them, Anthropic's has not.
        Quotes inside of generated text are escaped, so no text can be taken for a `usage` object.
        """
        at = data.rfind(b'"usage"')
        if at >= 0 and data[at + 7 : at + 9] == b":{":
            # the last one is plain, the common case; what it says would replace what earlier ones said
            try:
                said = _SAID.decode(data[at + 8 : data.find(b"}", at) + 1])
            except (msgspec.DecodeError, RecursionError):
                pass  # with objects in it
            else:
                if said.prompt_tokens is not None and said.completion_tokens is not None:
                    self.prompt, self.completion = said.prompt_tokens, said.completion_tokens
                    return
        for match in _OBJECT.finditer(data):
            try:
                said = _SAID.decode(match[1])
            except (msgspec.DecodeError, RecursionError):
                continue
            prompt, completion = said.prompt_tokens, said.completion_tokens
            if prompt is None and said.input_tokens is not None:
                cached = (said.cache_read_input_tokens or 0) + (said.cache_creation_input_tokens or 0)
                prompt = said.input_tokens + cached
            if completion is None:
                completion = said.output_tokens
            if prompt is None and completion is None and said.predicted_n is not None:
                if self.prompt is None and said.prompt_n is not None:
                    self.prompt = said.prompt_n + min(max(0, said.cache_n or 0), 1 << 40)
                if self.completion is None:
                    self.completion = said.predicted_n
                continue
            if prompt is not None:
                self.prompt = prompt
                if completion is None and said.total_tokens is not None:
                    completion = max(0, said.total_tokens - prompt)
            if completion is not None:
                self.completion = completion


class ManyTokens(Tokens):
    """Of an answer with several choices.

    Engines count them together, but for llama-server: in a stream it tells those of each choice, one event with `usage`
    and `timings` after the other, and in an answer that is no stream those of the first alone. A prompt of several
    choices counts once, as it does in the engine's own counters.

    Args:
        choices: how many were asked for each prompt.
        stream: `read` gets the parts of an event stream, none twice; else the whole answer.
    """

    __slots__ = ("_choices", "_completions", "_prompts", "_rest", "_stream", "_told", "of")

    def __init__(self, choices: int, stream: bool) -> None:
        super().__init__()
        self.of = 1
        self._choices = choices
        self._stream = stream
        self._rest = b""
        self._told = False
        self._prompts = self._completions = 0

    def read(self, data: bytes) -> None:
        """See `Tokens.read`."""
        if not self._stream:
            super().read(data)
            if b'"timings"' in data:
                self.of = max(self.of, self._choices, data.count(b'"finish_reason"'))
            return
        *events, self._rest = (self._rest + data).split(b"\n\n")
        self._rest = self._rest[-_REST:]
        for event in events:
            if b'"usage"' not in event:
                continue
            if b'"timings"' not in event and not _EMPTY_CHOICES.search(event):
                if not self._told:
                    super().read(event)  # of all so far, from an engine that tells as it goes
                continue
            said = Tokens()
            said.read(event)
            self._told = True
            if said.prompt is not None:
                # events of one prompt's choices say the same; where one event tells of all there is nothing to divide
                self._prompts += said.prompt
                self.prompt = max(said.prompt, self._prompts // self._choices)
            if said.completion is not None:
                self._completions += said.completion
                self.completion = self._completions


def passed_on(path: str, events: int, tokens: Tokens | None) -> int:
    """Completion tokens of an answer that broke off: what the engine had said by then, else the events with a token.

    Args:
        path: the endpoint, such as `/v1/messages`.
        events: data events passed on, with those before the first token. One to three after the last token and before
            the engine's own count, of an answer that breaks off just there, are counted as tokens.
    """
    seen = max(0, events - _OPENING.get(path, 0))
    if tokens is not None and tokens.completion:
        # of several choices some may have been told, and others not yet
        return tokens.completion if tokens.__class__ is Tokens else max(tokens.completion, seen)
    return seen


class _Options(msgspec.Struct, gc=False):
    include_usage: bool | None = None


class _Body(msgspec.Struct, gc=False):
    stream_options: _Options | None = None


def ask_for_usage(body: bytes | bytearray) -> tuple[bytes | bytearray, bool]:
    """Make a streaming request for chat or completions ask for usage.

    Returns:
        The body to send, and whether the client did not ask for it (what comes must then be stripped again).
    """
    if not _OPTIONS.search(body):
        end = body.rstrip()
        if end.endswith(b"}"):
            return end[:-1] + b',"stream_options":{"include_usage":true}}', True
        return body, False
    try:
        options = msgspec.json.decode(body, type=_Body).stream_options
        if options is not None and options.include_usage:
            return body, False
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        theirs = msgspec.json.decode(fields.get("stream_options", b"null"))
    except (msgspec.DecodeError, RecursionError):
        return body, False  # what is wrong with it is the engine's to say
    asked = {**theirs, "include_usage": True} if isinstance(theirs, dict) else {"include_usage": True}
    fields["stream_options"] = msgspec.Raw(msgspec.json.encode(asked))
    return msgspec.json.encode(fields), True


def strip_usage(body: bytes) -> bytes:
    """Leave out the event that is there only because the gateway asked for usage. `body` holds whole events."""
    events = body.split(b"\n\n")
    kept = [event for event in events if not (b'"usage"' in event and _EMPTY_CHOICES.search(event))]
    return body if len(kept) == len(events) else b"\n\n".join(kept)
