# SPDX-License-Identifier: Apache-2.0
"""Whether two builds hold the same GPU kernels, names aside: for changes that only rename and rewrite comments.

compare_kernels.py OLD NEW         two folders, each with the .cubin files that keep_reports.py left beside the objects;
                                   exit status 1 if a kernel of one has no equal in the other
compare_kernels.py OLD --selftest  compares OLD with copies of itself: one under other names, one whose kernels come in
                                   another order, one with a changed byte

Compared of every kernel and architecture: machine code, registers, constants, shared and local memory, and what the
driver is told of it (.nv.info.KERNEL). Names of kernels and files and their order do not count.
"""

import hashlib
import re
import struct
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

NO_BITS = 8  # ELF's section type of memory without bytes in the file
WITH_SIZE, PARAMETERS = 4, 0x0A  # in .nv.info: an entry that has its own size; the constant bank of the parameters
OF_A_KERNEL = re.compile(r"\.(text|nv\.info|nv\.shared|nv\.local|nv\.constant\d+)\.(\w+)$")


def sections(cubin):
    """(name, sh_info, length, bytes) of every section of an ELF64 file."""
    (headers_at,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, headers_at + i * size) for i in range(count)]
    names = headers[of_names][4]
    for name, kind, _, _, offset, length, _, info, _, _ in headers:
        text = cubin[names + name : cubin.index(b"\0", names + name)].decode()
        yield text, info, length, b"" if kind == NO_BITS else cubin[offset : offset + length]


def symbols_at(info):
    """Where a .nv.info.KERNEL holds the number of a symbol, 4 bytes each: numbers follow the order of the kernels."""
    at = 0
    while at < len(info):
        kind, attribute, size = struct.unpack_from("<BBH", info, at)
        if (kind, attribute) == (WITH_SIZE, PARAMETERS):
            yield at + 4  # symbol of the constants, then offset and size of the parameters
        at += 4 + (size if kind == WITH_SIZE else 0)


def without_symbols(info):
    info = bytearray(info)
    for at in symbols_at(info):
        info[at : at + 4] = bytes(4)
    return bytes(info)


def kernels(cubin):
    """{name: fingerprint} of the kernels in a cubin."""
    parts = defaultdict(list)
    for name, info, length, data in sections(cubin):
        if found := OF_A_KERNEL.match(name):
            registers = info >> 24 if found[1] == "text" else 0
            data = without_symbols(data) if found[1] == "nv.info" else data
            parts[found[2]].append((found[1], registers, length, data))
    return {
        kernel: hashlib.sha256(repr(sorted(of)).encode()).hexdigest()
        for kernel, of in parts.items()
        if any(kind == "text" for kind, *_ in of)
    }


def build(folder):
    """{(architecture, fingerprint): [names]} of all cubins below a folder."""
    found = defaultdict(list)
    for path in sorted(folder.rglob("*.cubin")):
        architecture = path.suffixes[-2].lstrip(".")
        for kernel, fingerprint in kernels(path.read_bytes()).items():
            found[architecture, fingerprint].append(kernel)
    if not found:
        sys.exit(f"compare_kernels: no kernels in .cubin files below {folder}")
    return found


def differences(old, new):
    """One line for every kernel that one build has more often than the other."""
    said = []
    for key in sorted(old.keys() | new.keys()):
        more, fewer, build = old.get(key, []), new.get(key, []), "old"
        if len(more) < len(fewer):
            more, fewer, build = fewer, more, "new"
        said += [f"{key[0]}: only in the {build} build: {name}" for name in more[len(fewer) :]]
    return said


def selftest(folder):
    path = max(folder.rglob("*.cubin"), key=lambda p: p.stat().st_size)
    cubin = path.read_bytes()
    kernel = next(iter(kernels(cubin)))
    renamed = cubin.replace(kernel.encode(), kernel[::-1].encode())
    info = next(s[3] for s in sections(cubin) if s[0] == f".nv.info.{kernel}")
    at = cubin.index(info) + next(symbols_at(info))
    moved = cubin[:at] + bytes([cubin[at] ^ 1]) + cubin[at + 1 :]
    code = max((s[3] for s in sections(cubin) if s[0].startswith(".text.")), key=len)
    at = cubin.index(code) + len(code) // 2
    changed = cubin[:at] + bytes([cubin[at] ^ 1]) + cubin[at + 1 :]
    for data, expected in ((renamed, 0), (moved, 0), (changed, 2)):
        with tempfile.TemporaryDirectory() as name:
            copy, sound = Path(name, "copy"), Path(name, "sound")
            for to, content in ((copy, data), (sound, cubin)):
                to.mkdir()
                (to / path.name).write_bytes(content)
            assert kernel in str(build(sound)) and (data is not renamed or kernel not in str(build(copy)))
            found = differences(build(sound), build(copy))
            assert len(found) == expected, f"{expected} differences expected, found {found}"
    print("a kernel under another name or in another place is found equal, one with a changed byte different")


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    if sys.argv[2] == "--selftest":
        return selftest(Path(sys.argv[1]))
    old, new = build(Path(sys.argv[1])), build(Path(sys.argv[2]))
    said = differences(old, new)
    count = sum(map(len, old.values()))
    print("\n".join(said) or f"{count} kernels: the same but for their names")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
