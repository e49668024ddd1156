"""Writes are whole or did not happen; reads take the field's files as they come."""

from __future__ import annotations

import errno
import gzip
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from agentx import store
from agentx.errors import InputError


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_writes_replace_whole_files_and_leave_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "new" / "a.json"
    store.atomic_write_json(target, {"é": [1, None]})
    store.atomic_write_json(target, {"é": [2]})
    assert target.read_bytes() == '{\n  "é": [\n    2\n  ]\n}\n'.encode()
    assert names(target.parent) == ["a.json"]
    table = pa.table({"x": [1, 2]})
    store.atomic_write_table(target.with_name("t.parquet"), table)
    store.atomic_write_table(target.with_name("t.arrow"), table)
    assert pq.read_table(target.with_name("t.parquet")) == table
    assert pa.ipc.open_file(target.with_name("t.arrow")).read_all() == table
    mask = os.umask(0)
    os.umask(mask)
    assert target.stat().st_mode & 0o777 == 0o666 & ~mask


def test_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "result.json"
    target.write_text('{"run": "old"}', encoding="utf-8")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="No space left on device") as caught:
        store.atomic_write_bytes(target, b"new")
    assert caught.value.exit_code != 0
    assert target.read_text(encoding="utf-8") == '{"run": "old"}'
    assert names(tmp_path) == ["result.json"]


LIMITED = """
import resource, signal, sys
from pathlib import Path
from agentx import store
from agentx.errors import AgentxError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
try:
    store.atomic_write_bytes(Path(sys.argv[1]), bytes(1 << 20))
except AgentxError as error:
    sys.exit(error.exit_code)
"""


def test_a_write_that_the_system_cuts_short_is_an_error(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    target.write_bytes(b"old")
    done = subprocess.run([sys.executable, "-c", LIMITED, str(target)], check=False)
    assert done.returncode == InputError.exit_code
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["result.json"]


def test_target_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InputError, match="cannot be written"):
        store.atomic_write_bytes(tmp_path / "file" / "below.json", b"x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="cannot be written"):
        store.atomic_write_bytes(tmp_path / "folder", b"x")
    assert names(tmp_path) == ["file", "folder"]


def ours(folder: Path) -> bool:
    return (folder / "mark").exists()


def leave_half_done(target: Path) -> None:
    with store.atomic_folder(target, ours) as folder:
        (folder / "mark").write_bytes(b"half")
        raise ZeroDivisionError


def test_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with pytest.raises(ZeroDivisionError):
        leave_half_done(target)
    assert names(tmp_path) == []
    for content in (b"first", b"second"):
        with store.atomic_folder(target, ours) as folder:
            (folder / "mark").write_bytes(content)
            (folder / content.decode()).write_bytes(b"")
    assert names(tmp_path) == ["out"]
    assert names(target) == ["mark", "second"]


def test_folder_that_is_not_ours_is_never_touched(tmp_path: Path) -> None:
    target = tmp_path / "thesis"
    target.mkdir()
    (target / "chapter1").write_bytes(b"years of work")
    with pytest.raises(InputError, match="not made by agentx"), store.atomic_folder(target, ours):
        pytest.fail("the block must not run")
    assert (target / "chapter1").read_bytes() == b"years of work"
    link = tmp_path / "link"
    link.symlink_to(target)
    (tmp_path / "plain").write_bytes(b"")
    for other in (link, tmp_path / "plain"):
        with pytest.raises(InputError, match="not made by agentx"), store.atomic_folder(other, lambda _: True):
            pytest.fail("the block must not run")


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    with store.atomic_folder(target, ours) as folder:
        (folder / "a").write_bytes(b"")
    assert names(target) == ["a"]


CONTENT = b"\xef\xbb\xbf" + b'{"a": 1}\r\n\r\n' + b'{"b": "' + b"x" * 300_000 + b'"}'


def as_is(data: bytes) -> bytes:
    return data


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def two_zstd_frames(data: bytes) -> bytes:
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00meta"
    return zstd(data[:7]) + skippable + zstd(data[7:])


def two_gzip_members(data: bytes) -> bytes:
    return gzip.compress(data[:7]) + gzip.compress(data[7:])


@pytest.mark.parametrize("pack", [as_is, gzip.compress, two_gzip_members, zstd, two_zstd_frames])
def test_reading_any_wrapping(tmp_path: Path, pack: Any) -> None:
    path = tmp_path / "trace"
    path.write_bytes(pack(CONTENT))
    lines = list(store.read_lines(path))
    assert [number for number, _ in lines] == [1, 3]
    assert lines[0][1] == b'{"a": 1}'
    assert orjson.loads(lines[1][1]) == {"b": "x" * 300_000}
    assert store.read_bytes(path) == CONTENT[3:]


@pytest.mark.parametrize("pack", [gzip.compress, zstd, two_zstd_frames])
@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:30] + bytes(30) + data[60:]])
def test_damaged_compressed_file_is_an_error(tmp_path: Path, pack: Any, damage: Any) -> None:
    path = tmp_path / "trace"
    path.write_bytes(damage(pack(os.urandom(5000))))
    with pytest.raises(InputError, match=r"damaged or cut off|cannot be read"):
        store.read_bytes(path)


def test_missing_and_malformed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        store.read_json(tmp_path / "none.json")
    (tmp_path / "bad.json").write_bytes(b'{"a": \n NaN}')
    with pytest.raises(InputError, match="line 2"):
        store.read_json(tmp_path / "bad.json")


def test_a_record_over_the_bound_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_RECORD_BYTES", 100)
    path = tmp_path / "trace"
    path.write_bytes(b"x" * 101)
    with pytest.raises(InputError, match="line 1 is longer than 100"):
        list(store.read_lines(path))
    with pytest.raises(InputError, match="more than 100"):
        store.read_bytes(path)


def test_a_reader_may_stop_early(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(CONTENT))

    def first(stream: BinaryIO) -> bytes:
        return stream.read(3)

    with store.open_decompressed(path) as stream:
        assert first(stream) == b'{"a'
