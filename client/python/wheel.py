"""Makes the wheel: the package, with libkvd in it, so that who installs it needs no compiler and no network.

    python3 wheel.py --library libkvd.so --version 0.1.0 --out dist

It is a zip file of a simple form (PEP 427), so this needs no tool of others: none that a builder fetches, and none of
Debian's, which differ by release. The same files give the same bytes; SOURCE_DATE_EPOCH is their time.
"""

import argparse
import base64
import hashlib
import os
import re
import struct
import time
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
MACHINES = {62: "x86_64", 183: "aarch64"}
OLDEST_GLIBC = 17  # 2.17, of manylinux2014: installers know no older tag of this form

METADATA = """\
Metadata-Version: 2.1
Name: kvd
Version: {version}
Summary: A key-value store in the memory of other machines
License: Apache-2.0
Project-URL: Source, https://github.com/kvd-project/kvd
Requires-Python: >=3.9
Classifier: Operating System :: POSIX :: Linux
Classifier: Programming Language :: Python :: 3
Classifier: Typing :: Typed
Description-Content-Type: text/plain

The client of kvd for Python. It needs numpy or torch only if you have them, and a broker on the same machine.
"""


def tag(library: bytes) -> str:
    """Gives the platforms that a shared library runs on, from its ELF header and the versions that it wants of libc."""
    if library[:6] != b"\x7fELF\x02\x01":
        raise ValueError("the library is no ELF file of 64 bits, little endian")
    kind, machine = struct.unpack_from("<HH", library, 16)
    if kind != 3 or machine not in MACHINES:
        raise ValueError(f"the library is of kind {kind} for machine {machine}, want a shared one for {MACHINES}")
    if b"libc.musl-" in library:
        return f"musllinux_1_2_{MACHINES[machine]}"
    newest = max((int(n) for n in re.findall(rb"\0GLIBC_2\.(\d+)(?=[.\0])", library)), default=OLDEST_GLIBC)
    return f"manylinux_2_{max(newest, OLDEST_GLIBC)}_{MACHINES[machine]}"


def files(library: bytes, version: str, license_file: Path) -> "dict[str, bytes]":
    """Gives what is in the wheel but its list of files, by name."""
    info = f"kvd-{version}.dist-info"
    files = sorted(p for p in (HERE / "kvd").rglob("*") if p.suffix in (".py", ".typed"))
    out = {p.relative_to(HERE).as_posix(): p.read_bytes() for p in files}
    out["kvd/libkvd.so"] = library
    out[f"{info}/LICENSE"] = license_file.read_bytes()
    out[f"{info}/METADATA"] = METADATA.format(version=version).encode()
    wheel = f"Wheel-Version: 1.0\nGenerator: kvd\nRoot-Is-Purelib: false\nTag: py3-none-{tag(library)}\n"
    out[f"{info}/WHEEL"] = wheel.encode()
    return out


def record(content: "dict[str, bytes]", name: str) -> bytes:
    """Gives the list of files, with their digests."""
    lines = []
    for path, data in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(data)}\n")
    return "".join([*lines, f"{name},,\n"]).encode()


def build(library: Path, version: str, out: Path, license_file: Path) -> Path:
    """Writes the wheel to the folder `out`, and gives its path."""
    if not re.fullmatch(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.dev\d+)?", version):
        raise ValueError(f"the version is {version!r}, want one as 0.1.0")
    data = library.read_bytes()
    content = files(data, version, license_file)
    name = f"kvd-{version}.dist-info/RECORD"
    content[name] = record(content, name)
    when = time.gmtime(max(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), 315532800))[:6]  # zip begins in 1980
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"kvd-{version}-py3-none-{tag(data)}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as z:
        for file, body in content.items():
            entry = zipfile.ZipInfo(file, when)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if file.endswith(".so") else 0o100644) << 16
            z.writestr(entry, body)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="makes the wheel of kvd")
    parser.add_argument("--library", type=Path, required=True, help="libkvd.so")
    parser.add_argument("--version", required=True, help="the library's, as 0.1.0")
    parser.add_argument("--out", type=Path, required=True, help="the folder for it")
    given = parser.parse_args()
    print(build(given.library, given.version, given.out, HERE.parent.parent / "LICENSE"))
