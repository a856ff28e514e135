"""Container images without a registry: the machine's own /usr is mounted into them, so they hold links alone."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

PAUSE = "docker.io/local/pause:1"
HOST = "docker.io/local/host:1"
EMPTY = "docker.io/local/empty:1"
"""An image without any program."""
_FOLDERS = ("usr", "etc", "root", "tmp", "proc", "sys", "dev", "run", "var", "opt", "scratch")
_WAIT_FOR_EVER = "trap 'exit 0' TERM INT; while :; do /bin/busybox sleep 3600 & wait $!; done"


def write_images(folder: Path) -> list[Path]:
    """Write the images as archives that containerd imports."""
    busybox = Path("/bin/busybox").read_bytes()
    pause = _layer({"bin/busybox": busybox}, links=())
    host = _layer({}, links=("bin", "sbin", "lib", "lib64"))
    return [
        _image(folder / "pause.tar", PAUSE, pause, ["/bin/busybox", "sh", "-c", _WAIT_FOR_EVER]),
        _image(folder / "host.tar", HOST, host, ["/bin/sh"]),
        _image(folder / "empty.tar", EMPTY, _layer({}, links=()), ["/bin/sh"]),
    ]


def _layer(files: dict[str, bytes], *, links: Sequence[str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        folders = [*_FOLDERS, *{str(Path(name).parent) for name in files}]
        for name in folders:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        for name in links:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, f"usr/{name}"
            archive.addfile(entry)
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.mode, entry.size = 0o755, len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _image(path: Path, tag: str, layer: bytes, command: list[str]) -> Path:
    digest = hashlib.sha256(layer).hexdigest()
    environment = ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Cmd": command, "Env": environment},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
            "history": [{"created_by": "tests"}],
        }
    ).encode()
    name = f"{hashlib.sha256(config).hexdigest()}.json"
    tag = tag.removeprefix("docker.io/")
    manifest = [{"Config": name, "RepoTags": [tag], "Layers": [f"{digest}/layer.tar"]}]
    with tarfile.open(path, "w") as archive:
        for each, content in (
            (name, config),
            (f"{digest}/layer.tar", layer),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            entry = tarfile.TarInfo(each)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path
