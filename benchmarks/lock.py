"""Lock file of the dependencies: the versions of constraints.txt with the hashes of all their files.

    python benchmarks/lock.py write INDEX    # requirements.lock, from the pages of a package index (…/simple)
    python benchmarks/lock.py check          # 1 if it does not fit constraints.txt
    python benchmarks/lock.py audit          # 1 if a version has a known vulnerability, by the database OSV

`pip install --require-hashes --no-deps -r requirements.lock` then installs nothing but these files. The wheels of torch
for a CPU or for another version of CUDA come from an index of their own and have hashes of their own: install torch
first, and leave its line out.
"""

from __future__ import annotations

import json
import os
import re
import ssl
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CONSTRAINTS, LOCK = ROOT / "constraints.txt", ROOT / "requirements.lock"
HEAD = "# Written by `python benchmarks/lock.py write`: constraints.txt with the hashes of all files.\n"
VULNERABILITIES = "https://api.osv.dev/v1/querybatch"
TIMEOUT_S = 30.0
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)$", re.MULTILINE)
_LINK = re.compile(r"href=\"[^\"]*?([^/\"]+)#sha256=([0-9a-f]{64})\"")


def pins(text: str) -> dict[str, str]:
    """`pins("aiohttp==3.14.5") == {"aiohttp": "3.14.5"}`."""
    return dict(_PIN.findall(text))


def locked(text: str) -> dict[str, tuple[str, list[str]]]:
    """Return version and hashes of each package of a lock file."""
    found = {}
    for block in re.split(r"(?<!\\)\n", text):
        name, is_pin, rest = block.partition("==")
        if is_pin:
            found[name] = (rest.split()[0], re.findall(r"--hash=sha256:([0-9a-f]{64})", rest))
    return found


def problems(constraints: str, lock: str) -> list[str]:
    """Return what does not fit between the pins and the lock."""
    wanted, found = pins(constraints), locked(lock)
    missing = [f"{name}: not locked" for name in wanted.keys() - found.keys()]
    surplus = [f"{name}: locked, but not in constraints.txt" for name in found.keys() - wanted.keys()]
    others = [
        f"{name}: expected {wanted[name]} with hashes, found {version} with {len(hashes)}"
        for name, (version, hashes) in found.items()
        if name in wanted and (version != wanted[name] or not hashes)
    ]
    return sorted([*missing, *surplus, *others])


def fetch(url: str, data: bytes | None = None) -> bytes:
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
    with urllib.request.urlopen(url, data, timeout=TIMEOUT_S, context=context) as answer:
        content: bytes = answer.read()
    return content


def hashes_of(pin: tuple[str, str], *, index: str) -> list[str]:
    """Return the hashes of all files of a version."""
    name, version = pin
    page = fetch(f"{index}/{re.sub(r'[-_.]+', '-', name).lower()}/").decode()
    stem = re.compile(
        rf"{re.sub(r'[-_.]+', '[-_.]+', name)}-{re.escape(version)}(-|\.tar|\.zip)", re.IGNORECASE
    )
    return sorted({digest for file, digest in _LINK.findall(page) if stem.match(file)})


def write(index: str) -> int:
    wanted = pins(CONSTRAINTS.read_text())
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(partial(hashes_of, index=index), wanted.items()))
    lines = [HEAD]
    for (name, version), hashes in zip(wanted.items(), found, strict=True):
        if not hashes:
            sys.stderr.write(f"{name}=={version}: the index has no file of it\n")
            return 1
        lines.append(
            " \\\n".join([f"{name}=={version}", *(f"    --hash=sha256:{each}" for each in hashes)]) + "\n"
        )
    LOCK.write_text("".join(lines))
    return 0


def vulnerabilities() -> list[str]:
    """Return the known vulnerabilities of the locked versions; OSError if the database can not be reached."""
    versions = [(name, version) for name, (version, _) in locked(LOCK.read_text()).items()]
    queries = [
        {"package": {"ecosystem": "PyPI", "name": name}, "version": version} for name, version in versions
    ]
    answer: dict[str, Any] = json.loads(fetch(VULNERABILITIES, json.dumps({"queries": queries}).encode()))
    return [
        f"{name}=={version}: {', '.join(each['id'] for each in result['vulns'])}"
        for (name, version), result in zip(versions, answer["results"], strict=True)
        if result.get("vulns")
    ]


def main(action: str, *arguments: str) -> int:
    if action == "write":
        return write(*arguments)
    found = problems(CONSTRAINTS.read_text(), LOCK.read_text()) if action == "check" else vulnerabilities()
    sys.stdout.write("".join(f"{each}\n" for each in found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
