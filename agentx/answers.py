"""What an answer amounts to: from the bytes of an exchange to the columns of the run table.

A call is `ok` when it ended with its finish reason or `[DONE]` and gave output. A stream that ends
without either is `truncated`, one that ends well without output is `empty`, an error status or an
error object inside the stream is `error`, a refusal for the context's length is `overflow`, and what
we cut ourselves is `cancelled`.
"""

from __future__ import annotations

import re
import zlib
from typing import Any

import orjson

from agentx.exchange import Exchange
from agentx.sse import StreamFacts, StreamFormatError, StreamParser

LONGEST_MESSAGE = 500
"""Characters of a server's error text that are kept."""
LARGEST_DOCUMENT = 64 * 1024 * 1024
"""Bytes of an answer that is no stream."""
ABORTED = frozenset({"abort", "error", "cancelled"})
"""Finish reasons by which a server says that an answer is not whole."""
EXPANSION = 4 * 1024 * 1024
"""Bytes that one read may grow to when it is decompressed."""

_OVERFLOW = re.compile(
    r"maximum context length|context[_ ](length|window|size)|longer than the model|exceed_context_size"
    r"|(prompt|input|request)( tokens?)? (is|are)? ?too (long|large)|max_model_len|input tokens exceed"
    r"|exceeds the (model'?s )?(max|limit).{0,40}token",
    re.IGNORECASE,
)


class Answer:
    """Reads one exchange's body as it gathers, so that little is left to do when it ends."""

    def __init__(self, keep_text: bool = False) -> None:
        self._stream = StreamParser(keep_text)
        self._inflate: Any = None
        self._document: list[bytes] = []
        self.size = 0
        """Bytes of body read so far, decompressed."""
        self._is_stream: bool | None = None
        self._broken: str | None = None
        self.encoding: str | None = None

    def take(self, exchange: Exchange) -> None:
        """Read what has gathered in the exchange."""
        reads, exchange.reads = exchange.reads, []
        if self._broken:
            return
        try:
            for time_ns, data in _joined(reads):
                if self._is_stream is None:
                    self._set_decoder(exchange)
                plain = self._decode(data)
                self.size += len(plain)
                if self._is_stream is None:
                    start = plain.lstrip()[:1]
                    self._is_stream = exchange.status == 200 and start not in (b"{", b"[") if start else None
                if self._is_stream:
                    self._stream.feed(time_ns, plain)
                else:
                    self._keep(plain)
        except (zlib.error, StreamFormatError) as error:
            self._broken = str(error)

    def finish(self, exchange: Exchange) -> StreamFacts:
        """The facts of the exchange, which has ended."""
        self.take(exchange)
        end = exchange.end_ns or 0
        if exchange.status == 200 and self._is_stream is False:
            return self._stream.whole(end, b"".join(self._document))
        return self._stream.finish(end)

    @property
    def broken(self) -> str | None:
        """Why the body could not be read; None where it could."""
        return self._broken

    @property
    def chunks(self) -> int:
        """Output chunks read so far."""
        return len(self._stream.facts.chunk_ns)

    @property
    def has_body(self) -> bool:
        """More than white space came."""
        return self._is_stream is not None

    @property
    def document(self) -> bytes:
        """The body of an answer that is no stream."""
        return b"".join(self._document)

    def _set_decoder(self, exchange: Exchange) -> None:
        encoding = exchange.header("content-encoding").strip().lower()
        if encoding in ("gzip", "x-gzip", "deflate"):
            self.encoding = encoding
            self._inflate = self._inflate or zlib.decompressobj(zlib.MAX_WBITS | 32)
        elif encoding not in ("", "identity"):
            raise StreamFormatError(f"content encoding {encoding!r}, although identity was asked for")

    def _keep(self, plain: bytes) -> None:
        if self.size > LARGEST_DOCUMENT:
            raise StreamFormatError(f"an answer of over {LARGEST_DOCUMENT} bytes that is no event stream")
        self._document.append(plain)

    def _decode(self, data: bytes) -> bytes:
        if self._inflate is None:
            return data
        plain: bytes = self._inflate.decompress(data, EXPANSION)
        if self._inflate.unconsumed_tail:
            raise StreamFormatError(f"one read of {len(data)} bytes grows past {EXPANSION} bytes")
        return plain


def _joined(reads: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """The same with what one socket read brought in one piece: a read may hold several HTTP chunks."""
    if len(reads) < 2:
        return reads
    if reads[0][0] == reads[-1][0]:
        return [(reads[0][0], b"".join([data for _, data in reads]))]
    found: list[tuple[int, list[bytes]]] = []
    for time_ns, data in reads:
        if found and found[-1][0] == time_ns:
            found[-1][1].append(data)
        else:
            found.append((time_ns, [data]))
    return [(time_ns, b"".join(parts)) for time_ns, parts in found]


def observe(exchange: Exchange, answer: Answer) -> dict[str, Any]:
    """The observed columns of the run table, `status` included, for an exchange that has ended."""
    facts = answer.finish(exchange)
    status, kind, message = _verdict(exchange, facts, answer)
    chunks = facts.chunk_ns
    return {
        "status": status,
        "error_kind": kind,
        "error_message": None if message is None else message[:LONGEST_MESSAGE],
        "http_status": exchange.status,
        "sent_ns": exchange.sent_ns,
        "uploaded_ns": exchange.uploaded_ns,
        "headers_ns": exchange.headers_ns,
        "first_token_ns": chunks[0] if chunks else None,
        "first_content_ns": facts.first_content_ns,
        "last_token_ns": chunks[-1] if chunks else None,
        "end_ns": exchange.end_ns,
        "chunk_ns": chunks,
        "prompt_tokens": facts.prompt_tokens,
        "cached_tokens": facts.cached_tokens,
        "completion_tokens": facts.completion_tokens,
        "reasoning_tokens": facts.reasoning_tokens,
        "finish_reason": facts.finish_reason,
        "response_model": facts.model,
        "connection_reused": exchange.connection_reused if exchange.attempts else None,
        "attempts": exchange.attempts,
        "content_encoding": answer.encoding,
    }


def _verdict(exchange: Exchange, facts: StreamFacts, answer: Answer) -> tuple[str, str | None, str | None]:
    """(status, error kind, error message)."""
    finished = facts.done or facts.finish_reason is not None
    if exchange.error_kind is not None and not (exchange.error_kind == "reset" and facts.done):
        status = "cancelled" if exchange.error_kind == "cancelled" else "error"
        return status, exchange.error_kind, exchange.error_message
    if exchange.status != 200:
        return _refusal(exchange.status, answer.document)
    if answer.broken:
        return "error", "protocol", answer.broken
    if facts.error_message is not None:
        if is_overflow(facts.error_message, facts.error_code):
            return "overflow", "context", facts.error_message
        return "error", "in_stream", facts.error_message
    if not finished:
        kind = exchange.header("content-type")
        other = facts.malformed > 0 or (kind != "" and "event-stream" not in kind)
        if facts.events == 0 and exchange.complete and answer.has_body and other:
            what = f"the answer ({kind or 'of no stated type'})"
            return "error", "protocol", f"{what} is neither an event stream nor a completion"
        return "truncated", "truncated", "the stream ended without finish reason or [DONE]"
    if facts.finish_reason in ABORTED:
        return "error", "aborted", f"the server ended the answer with finish reason {facts.finish_reason!r}"
    if not facts.chunk_ns:
        return "empty", None, None
    return "ok", None, None


def _refusal(status: int | None, document: bytes) -> tuple[str, str, str]:
    message, code = error_text(document)
    if status in (400, 413, 422) and is_overflow(message, code):
        return "overflow", "context", message
    return "error", f"http_{status}", message or f"HTTP status {status}"


def is_overflow(message: str, code: str | None = None) -> bool:
    """True for a refusal because prompt and output do not fit the context window."""
    return bool(_OVERFLOW.search(message) or (code and _OVERFLOW.search(code)))


def error_text(document: bytes) -> tuple[str, str | None]:
    """(message, code) of an error body in any of the usual shapes; the text itself where it has none."""
    try:
        body = orjson.loads(document)
    except orjson.JSONDecodeError:
        return document[: 4 * LONGEST_MESSAGE].decode("utf-8", "replace").strip(), None
    error = body.get("error", body) if isinstance(body, dict) else body
    if not isinstance(error, dict):
        return str(error), None
    message = error.get("message") or error.get("detail") or error.get("error")
    code = " ".join(str(error[name]) for name in ("code", "type") if error.get(name) is not None)
    return (message if isinstance(message, str) else str(message or error)), code or None
