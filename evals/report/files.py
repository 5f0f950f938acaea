"""Several files that belong together, replaced together."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["replace_together"]


def replace_together(folder: Path, files: Mapping[str, bytes], stale: Sequence[str] = ()) -> None:
    """Write ``files``, by name, into ``folder`` and remove those called ``stale``.

    Every one is written beside its place first, and renamed once all are there: where the disk is full, what was in the
    folder stays, and a folder that was made for them goes. Raises ``OSError``.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    written: dict[str, Path] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in files:
            if (folder / name).is_dir():
                raise IsADirectoryError(errno.EISDIR, "there is a folder of that name", str(folder / name))
        for name, content in files.items():
            _write(folder, name, content, written)
        for name in list(written):
            os.replace(written[name], folder / name)
            del written[name]
        for name in stale:
            (folder / name).unlink(missing_ok=True)
    except BaseException as error:
        for path in written.values():
            path.unlink(missing_ok=True)
        for path in made:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        if isinstance(error, OSError):
            raise OSError(f"{error.filename or folder} cannot be written: {error.strerror or error}") from error
        raise


def _write(folder: Path, name: str, content: bytes, written: dict[str, Path]) -> None:
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
    written[name] = Path(temporary)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.chmod(temporary, 0o644)
