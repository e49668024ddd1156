"""Files: the only code that opens them. A write is whole or it did not happen.

Everything is written under a temporary name in the target's own folder, flushed to the disk and
renamed: a reader sees the old file or the new one, never a part, and a full disk leaves the old one.
Folders are built the same way. Reading accepts what the field's files come as: gzip, zstd (several
frames too), a byte order mark, CRLF, a last line without its end. Text is UTF-8 under any locale.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import orjson

from agentx.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

MAX_RECORD_BYTES = 1 << 30
"""Longest line or JSON document read, uncompressed: a bound on memory, far above any recorded session."""

_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_CHUNK = 1 << 16


# Writing.


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Write the file whole; raises InputError, the old file untouched, where the system refuses."""
    with atomic_file(path) as file:
        file.write(data)


def atomic_write_json(path: Path, obj: Any) -> None:
    """Write `obj` as indented UTF-8 JSON with a final newline."""
    atomic_write_bytes(path, orjson.dumps(obj, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def atomic_write_table(path: Path, table: pa.Table, **parquet: Any) -> None:
    """Write the table as Parquet, or as an Arrow IPC file where the suffix is `.arrow`.

    `parquet` are options of pyarrow.parquet.write_table; the default compression is zstd.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with atomic_file(path) as file:
        if path.suffix == ".arrow":
            with pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)
        else:
            pq.write_table(table, file, **{"compression": "zstd", **parquet})


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A binary file that becomes `path` when the block ends without an exception."""
    with _write_faults(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        temporary = Path(name)
        try:
            with os.fdopen(number, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.chmod(_new_mode(0o666))
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


@contextmanager
def atomic_folder(path: Path, is_ours: Callable[[Path], bool]) -> Iterator[Path]:
    """An empty folder that becomes `path` when the block ends without an exception.

    A folder already there is replaced only where it is empty or `is_ours` says so; anything else
    raises InputError before the block runs. The block syncs the files it writes.
    """
    _refuse_foreign(path, is_ours)
    with _write_faults(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"))
        try:
            yield temporary
            temporary.chmod(_new_mode(0o777))
            _sync_folder(temporary)
            _refuse_foreign(path, is_ours)
            _swap(temporary, path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _sync_folder(path.parent)


def _swap(new: Path, path: Path) -> None:
    """Rename `new` to `path`; what was there is removed after, or put back on a failure."""
    if not path.exists():
        new.rename(path)
        return
    old = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".old"))
    path.rename(old)
    try:
        new.rename(path)
    except BaseException:
        old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _refuse_foreign(path: Path, is_ours: Callable[[Path], bool]) -> None:
    if not path.exists() and not path.is_symlink():
        return
    if path.is_dir() and not path.is_symlink() and (not any(path.iterdir()) or is_ours(path)):
        return
    raise InputError(f"{path}: exists and holds what was not made by agentx", "choose another folder, or move it away")


@contextmanager
def _write_faults(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(
            f"{path}: cannot be written: {reason}", "check the folder, its rights and the free space"
        ) from (error)


def _new_mode(mode: int) -> int:
    """What the process's umask leaves of `mode` (temporary names are private, results are not)."""
    mask = os.umask(0)
    os.umask(mask)
    return mode & ~mask


def _sync_folder(folder: Path) -> None:
    """Make a rename last; systems that cannot open a folder do without."""
    try:
        number = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(number)
    except OSError:
        pass
    finally:
        os.close(number)


# Reading.


@contextmanager
def open_decompressed(path: Path) -> Iterator[BinaryIO]:
    """The file's content as a stream of bytes, decompressed by its first bytes, without a byte order mark.

    Raises InputError where the file cannot be opened, or its compressed data is damaged or cut off.
    """
    try:
        with path.open("rb") as raw:
            start = raw.read(4)
            raw.seek(0)
            stream: BinaryIO = raw
            if start.startswith(_GZIP):
                stream = gzip.GzipFile(fileobj=raw)  # type: ignore[assignment]
            elif start == _ZSTD or (len(start) == 4 and start[0] & 0xF0 == 0x50 and start[1:] == b"\x2a\x4d\x18"):
                stream = io.BufferedReader(_ZstdFrames(raw), _CHUNK)
            yield _without_bom(stream)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"{path}: cannot be read: {reason}", "check the path and the file") from error
    except (EOFError, zlib.error) as error:
        raise InputError(
            f"{path}: the compressed data is damaged or cut off: {error}", "fetch the file again"
        ) from error


def read_bytes(path: Path) -> bytes:
    """The file's whole content, decompressed, without a byte order mark."""
    with open_decompressed(path) as stream:
        data = stream.read(MAX_RECORD_BYTES + 1)
        while len(data) <= MAX_RECORD_BYTES and (more := stream.read(_CHUNK)):
            data += more
    if len(data) > MAX_RECORD_BYTES:
        raise InputError(
            f"{path}: more than {MAX_RECORD_BYTES:,} bytes in one document", "use .jsonl, one session a line"
        )
    return data


def read_json(path: Path) -> Any:
    """The file's JSON value; raises InputError with line and column where it is none."""
    try:
        return orjson.loads(read_bytes(path))
    except orjson.JSONDecodeError as error:
        raise InputError(f"{path}: not JSON: {error}", "check the file") from error


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, content without its end) of every line that is not blank; a line may be huge."""
    with open_decompressed(path) as stream:
        number = 0
        while line := stream.readline(MAX_RECORD_BYTES + 1):
            number += 1
            if len(line) > MAX_RECORD_BYTES:
                raise InputError(f"{path}: line {number} is longer than {MAX_RECORD_BYTES:,} bytes", "split the record")
            if line := line.strip():
                yield number, line


def _without_bom(stream: BinaryIO) -> BinaryIO:
    buffered = stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(stream, _CHUNK)  # type: ignore[type-var]
    if buffered.peek(len(_BOM))[: len(_BOM)] == _BOM:
        buffered.read(len(_BOM))
    return buffered


class _ZstdFrames(io.RawIOBase):
    """The content of zstd frames, one after the other; a frame cut off raises EOFError.

    The library's own stream reader takes the end of the file inside a frame for the end of the data.
    """

    def __init__(self, raw: BinaryIO) -> None:
        import zstandard

        self._raw = raw
        self._new = zstandard.ZstdDecompressor().decompressobj
        self._frame = self._new()
        self._started = False
        self._ready = memoryview(b"")
        self._fault = zstandard.ZstdError

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer; the number of bytes, 0 at the end of the last frame."""
        while not self._ready:
            data = self._raw.read(1 << 13)
            if not data:
                if self._started:
                    raise EOFError("the last zstd frame is cut off")
                return 0
            self._feed(data)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _feed(self, data: bytes) -> None:
        parts = []
        while data:
            self._started = True
            try:
                parts.append(self._frame.decompress(data))
            except self._fault as error:
                raise EOFError(str(error)) from error
            data = b""
            if self._frame.eof:
                data = self._frame.unused_data
                self._frame, self._started = self._new(), False
        self._ready = memoryview(b"".join(parts))
