"""Packed files, read without unpacking them to disk: no path outside, no bomb, no link."""

from __future__ import annotations

import gzip
import stat
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from apportion.errors import DataError

MAX_TOTAL_BYTES = 1_000_000_000
MAX_MEMBER_BYTES = 64_000_000
MAX_MEMBERS = 1_000_000
MAX_GZIP_BYTES = 200_000_000


def read_gzip(path: Path, *, max_bytes: int = MAX_GZIP_BYTES) -> bytes:
    """What a gzip'd file unpacks to.

    Raises:
        DataError: it can't be unpacked, or to more than ``max_bytes``.
    """
    try:
        with gzip.open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} can't be unpacked ({error}); fetch it again") from None
    if len(data) > max_bytes:
        raise DataError(f"{path} unpacks to more than {max_bytes} bytes; it is refused")
    return data


def read_zip(
    path: Path, *, max_total_bytes: int = MAX_TOTAL_BYTES, max_member_bytes: int = MAX_MEMBER_BYTES
) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files in a zip, sorted by name.

    Sizes are checked as declared before anything is read, and again while reading, since a zip can lie.

    Raises:
        DataError: not a zip, a name outside its folder, a link, or more bytes than allowed.
    """
    try:
        with zipfile.ZipFile(path) as file:
            members = [member for member in file.infolist() if not member.is_dir()]
            if len(members) > MAX_MEMBERS:
                raise DataError(f"{path} holds {len(members)} files, more than {MAX_MEMBERS}; it is refused")
            for member in members:
                _check_name(path, member)
            declared = sum(member.file_size for member in members)
            largest = max((member.file_size for member in members), default=0)
            if declared > max_total_bytes or largest > max_member_bytes:
                raise DataError(
                    f"{path} unpacks to {declared} bytes, its largest file to {largest}; at most {max_total_bytes} and "
                    f"{max_member_bytes} are read: give a smaller archive"
                )
            for member in sorted(members, key=lambda member: member.filename):
                with file.open(member) as stream:
                    data = stream.read(member.file_size + 1)
                if len(data) > member.file_size:
                    raise DataError(f"{path}: {member.filename!r} is larger than it declares; the archive is refused")
                yield member.filename, data
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, OSError) as error:
        raise DataError(f"{path} can't be read as a zip ({error}); fetch it again") from None


def _check_name(path: Path, member: zipfile.ZipInfo) -> None:
    parts = PurePosixPath(member.filename.replace("\\", "/")).parts
    is_link = stat.S_ISLNK(member.external_attr >> 16)
    if not parts or parts[0] == "/" or ":" in parts[0] or ".." in parts or "\0" in member.filename or is_link:
        raise DataError(f"{path} holds {member.filename!r}, which leads outside its folder; the archive is refused")
