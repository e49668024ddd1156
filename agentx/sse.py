"""Server-sent events of LLM servers: bytes with arrival times in, what happened when out.

Two layers. `EventParser` follows the event-stream format of the HTML standard (section 9.2): lines end
with LF, CR or CRLF in any mixture, a blank line ends an event, `data` lines join with LF, comments and
unknown fields are ignored, a byte-order mark at the start is dropped. Reads may be cut anywhere; an
event carries the arrival time of the read that completed it. `StreamParser` reads the JSON in the
events: output is a non-empty `content`, `text`, reasoning or tool call; usage and finish reason are
facts, not output; an `error` object is a failure whatever the HTTP status said.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

LONGEST_LINE = 64 * 1024 * 1024
"""Bytes without a line end after which a stream is given up: no server sends an event of this size."""


class StreamFormatError(Exception):
    """The bytes are no event stream that can be followed."""


class EventParser:
    """Splits bytes into the data of events, whatever the reads' boundaries are."""

    __slots__ = ("_data", "_name", "_skip_lf", "_started", "_tail", "_tail_size")

    def __init__(self) -> None:
        self._tail: list[bytes] = []
        self._tail_size = 0
        self._data: list[bytes] = []
        self._name = b""
        self._skip_lf = False
        self._started = False

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """(event name, data) of each event that these bytes complete."""
        if not self._started:
            data = self._drop_mark(data)
        if self._skip_lf and data:
            self._skip_lf = False
            data = data[1:] if data.startswith(b"\n") else data
        if b"\r" in data:
            self._skip_lf = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if b"\n" not in data:
            self._keep(data)
            return []
        if data.endswith(b"\n\n") and not (self._tail or self._data or self._name):
            parts = data[:-2].split(b"\n\ndata: ")  # as most servers send: whole events of one line each
            if data.startswith(b"data: ") and data.count(b"\n") == 2 * len(parts):
                parts[0] = parts[0][6:]
                return [(b"", part) for part in parts]
        lines = data.split(b"\n")
        if self._tail:
            lines[0] = b"".join(self._tail) + lines[0]
            self._tail, self._tail_size = [], 0
        self._keep(lines.pop())
        events = []
        for line in lines:
            if line.startswith(b"data: "):
                self._data.append(line[6:])
            elif line:
                self._line(line)
            elif self._data:
                events.append(self._take())
            else:
                self._name = b""
        return events

    def finish(self) -> list[tuple[bytes, bytes]]:
        """The event that the end of the stream cuts off before its blank line, if there is one."""
        if self._tail:
            self._line(b"".join(self._tail))
            self._tail = []
        return [self._take()] if self._data else []

    def _drop_mark(self, data: bytes) -> bytes:
        data = b"".join((*self._tail, data))
        self._tail, self._tail_size = [], 0
        mark = b"\xef\xbb\xbf"
        if len(data) < len(mark) and mark.startswith(data):
            self._keep(data)
            return b""
        self._started = True
        return data.removeprefix(mark)

    def _keep(self, data: bytes) -> None:
        if data:
            self._tail.append(data)
            self._tail_size += len(data)
            if self._tail_size > LONGEST_LINE:
                raise StreamFormatError(f"no line end within {LONGEST_LINE} bytes")

    def _take(self) -> tuple[bytes, bytes]:
        data = self._data
        event = (self._name, data[0] if len(data) == 1 else b"\n".join(data))
        self._name, self._data = b"", []
        return event

    def _line(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value[1:] if value.startswith(b" ") else value)
        elif name == b"event":
            self._name = value.strip()


@dataclass(slots=True)
class StreamFacts:
    """What one response said, and when; times are the arrival times given to `feed`."""

    chunk_ns: list[int] = field(default_factory=list)
    """Arrival of each chunk that carried output."""
    first_content_ns: int | None = None
    """First content or tool call (reasoning does not count)."""
    events: int = 0
    """JSON events seen."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    finish_reason: str | None = None
    model: str | None = None
    done: bool = False
    """The `[DONE]` marker came."""
    error_message: str | None = None
    error_code: str | None = None
    malformed: int = 0
    """Events whose data is no JSON object."""
    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, str]] = field(default_factory=list)


class StreamParser:
    """Reads one response's events into `facts`; text is only kept where `keep_text` asks for it."""

    def __init__(self, keep_text: bool = False) -> None:
        self.facts = StreamFacts()
        self._events = EventParser()
        self._keep_text = keep_text
        self._content: list[str] = []
        self._reasoning: list[str] = []

    def feed(self, time_ns: int, data: bytes) -> None:
        """Bytes of the body that arrived at `time_ns`."""
        for name, payload in self._events.feed(data):
            self._event(time_ns, name, payload)

    def finish(self, time_ns: int) -> StreamFacts:
        """The facts of the whole stream, which ended at `time_ns`."""
        for name, payload in self._events.finish():
            self._event(time_ns, name, payload)
        self.facts.content = "".join(self._content)
        self.facts.reasoning = "".join(self._reasoning)
        return self.facts

    def whole(self, time_ns: int, body: bytes) -> StreamFacts:
        """The facts of a reply that came as one JSON document instead of a stream."""
        self._event(time_ns, b"", body)
        if self.facts.finish_reason is not None:
            self.facts.done = True
        return self.finish(time_ns)

    def _event(self, time_ns: int, name: bytes, payload: bytes) -> None:
        if payload[:1] != b"{" and payload.strip() == b"[DONE]":
            self.facts.done = True
            return
        try:
            event = orjson.loads(payload)
        except orjson.JSONDecodeError:
            event = None
        if not isinstance(event, dict):
            if name == b"error":
                self._error({"message": payload.decode("utf-8", "replace")})
            elif payload:
                self.facts.malformed += 1
            return
        facts = self.facts
        facts.events += 1
        get = event.get
        if get("error") or name == b"error" or get("object") == "error":
            self._error(get("error") or event)
        if get("usage") is not None:
            self._usage(get("usage"))
        if facts.model is None:
            model = get("model")
            facts.model = model if isinstance(model, str) else None
        choices = get("choices")
        output = content = False
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                some_output, some_content = self._choice(choice)
                output, content = output or some_output, content or some_content
        if output:
            facts.chunk_ns.append(time_ns)
            if content and facts.first_content_ns is None:
                facts.first_content_ns = time_ns

    def _choice(self, choice: dict[str, Any]) -> tuple[bool, bool]:
        """(carries output on any channel, carries content or a tool call)."""
        reason = choice.get("finish_reason")
        if reason and isinstance(reason, str):
            self.facts.finish_reason = reason
        delta = choice.get("delta") or choice.get("message")
        if not isinstance(delta, dict):
            delta = choice
        content = delta.get("content") or delta.get("text") or delta.get("refusal")
        if content and not self._keep_text:
            return True, True
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        calls = delta.get("tool_calls") or delta.get("function_call")
        if self._keep_text:
            self._content.append(content if isinstance(content, str) else "")
            self._reasoning.append(reasoning if isinstance(reasoning, str) else "")
            self._merge_calls(calls)
        return bool(content or reasoning or calls), bool(content or calls)

    def _merge_calls(self, fragments: object) -> None:
        """Tool-call fragments join by their index."""
        for place, fragment in enumerate(fragments if isinstance(fragments, list) else []):
            if not isinstance(fragment, dict):
                continue
            index = fragment.get("index", place)
            known = self.facts.tool_calls
            while isinstance(index, int) and 0 <= index < 1024 and len(known) <= index:
                known.append({"id": "", "name": "", "arguments": ""})
            if isinstance(index, int) and 0 <= index < len(known):
                function = fragment.get("function")
                parts = function if isinstance(function, dict) else {}
                known[index]["id"] = known[index]["id"] or _text(fragment, "id")
                known[index]["name"] += _text(parts, "name")
                known[index]["arguments"] += _text(parts, "arguments")

    def _usage(self, usage: object) -> None:
        if not isinstance(usage, dict):
            return
        facts = self.facts
        prompt_details = usage.get("prompt_tokens_details")
        output_details = usage.get("completion_tokens_details")
        if (count := _count(usage, "prompt_tokens")) is not None:
            facts.prompt_tokens = count
        if (count := _count(usage, "completion_tokens")) is not None:
            facts.completion_tokens = count
        if (count := _count(prompt_details, "cached_tokens")) is not None:
            facts.cached_tokens = count
        if (count := _count(output_details, "reasoning_tokens")) is not None:
            facts.reasoning_tokens = count

    def _error(self, error: object) -> None:
        facts = self.facts
        if facts.error_message is not None:
            return
        fields = error if isinstance(error, dict) else {"message": error}
        message = fields.get("message")
        facts.error_message = message if isinstance(message, str) and message else str(error)[:2000]
        code = fields.get("code") or fields.get("type")
        facts.error_code = None if code is None else str(code)


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    return value if isinstance(value, str) else ""


def _count(fields: object, name: str) -> int | None:
    """A whole number of tokens, None where it is absent, null or no such number."""
    value = fields.get(name) if isinstance(fields, dict) else None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        return None
    return value
