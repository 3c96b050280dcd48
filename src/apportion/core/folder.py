"""Files and folders that appear whole or not at all, and the folder of a run: what was asked, and what came out."""

from __future__ import annotations

import glob
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from apportion.core.certificate import Certificate
from apportion.errors import ApportionError


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file so that others see all of it or none: a draft beside it, then a rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), 0o666 & ~_umask())
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A draft folder to write into; it takes its place when the block ends well and vanishes when it does not."""
    folder = folder.absolute()  # which has a name, where "." has none
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    draft = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    draft.mkdir()
    try:
        yield draft
        if folder.exists():
            folder.rename(old)
        try:
            draft.rename(folder)
        except BaseException:
            if old.exists():
                old.rename(folder)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Removes the drafts of a folder that killed processes left beside it; puts back what one had moved away."""
    for left in folder.parent.glob(f".{glob.escape(folder.name)}.*"):
        number, _, kind = left.name.removeprefix(f".{folder.name}.").partition(".")
        if kind not in ("tmp", "old") or not number.isdecimal() or _runs(int(number)):
            continue
        if kind == "old" and not folder.exists():
            left.rename(folder)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _runs(process: int) -> bool:
    """Whether another process of this number runs."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is someone else's
        return True
    return True


class Folder:
    """JSON files of a folder: a certificate, a result, and others by name; ``what`` is what errors call it."""

    what = "run"

    def __init__(self, path: Path) -> None:
        self.path = path

    def certificate(self) -> Certificate:
        path = self.path / "certificate.json"
        if not path.is_file():
            result = self.result()
            if result is None:
                why = "is not finished; start it again to go on"
            elif result.get("met"):
                why = "was not measured; make it again with a measurement"
            else:
                why = "ended without one, as nothing met what was asked; ask for less in another folder"
            raise ApportionError(f"{self.path} has no certificate: the {self.what} {why}")
        return Certificate.from_json(path.read_bytes())

    def result(self) -> dict[str, Any] | None:
        """The result, where it is finished."""
        return self.read("result.json") if (self.path / "result.json").is_file() else None

    def write(self, name: str, content: object) -> None:
        write_whole(self.path / name, (json.dumps(content, indent=1) + "\n").encode())

    def read(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ApportionError(
                f"{self.path} holds no {self.what} ({name} is missing); give the folder of a {self.what}"
            ) from None
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise ApportionError(f"{path} is damaged; start the {self.what} again in another folder")
        return content


class RunFolder(Folder):
    """The folder of one run, which keeps what was asked in ``file`` and refuses to be another run's."""

    file = "run.json"
    version = 1

    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_dir():
            raise ApportionError(f"{path} is a file; give a folder for the {self.what}")
        super().__init__(path)

    @property
    def store(self) -> Path:
        return self.path / "measurements.sqlite"

    @property
    def model(self) -> Path:
        return self.path / "model"

    def begin(self, identity: str, config: Mapping[str, Any]) -> None:
        """Saves what was asked, or checks that the run that is there was asked the same."""
        if (self.path / self.file).is_file():
            if self.read(self.file).get("identity") != identity:
                raise ApportionError(f"{self.path} holds a {self.what} with other settings; choose another -o folder")
        elif self.path.is_dir() and any(self.path.iterdir()):
            raise ApportionError(f"{self.path} is not empty and holds no {self.what}; choose another -o folder")
        else:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ApportionError(
                    f"can't make the folder {self.path} ({error.strerror}); choose another -o"
                ) from None
            mark = {f"apportion_{self.what}": self.version}
            self.write(self.file, {**mark, "identity": identity, "config": dict(config)})

    def asked(self, known: set[str], later: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What the run was asked for, if its fields are the ``known`` ones.

        Args:
            later: fields that runs from before they existed lack, with what stands in for them.
        """
        saved = self.read(self.file)
        config = saved.get("config")
        if isinstance(config, dict):
            config = {**(later or {}), **config}
        version = saved.get(f"apportion_{self.what}")
        if version != self.version or not isinstance(config, dict) or set(config) != known:
            raise ApportionError(
                f"{self.path}/{self.file} is no {self.what} of version {self.version}; give the folder of a {self.what}"
            )
        return config
