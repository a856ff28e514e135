"""Where the API server is and how to be let in: from a kubeconfig file, or from the service account of a pod."""

from __future__ import annotations

import base64
import os
import ssl
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from kintsugi.cluster.spawn import in_memory
from kintsugi.errors import UserError, WorldError
from kintsugi.runtime.waits import wait

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PLUGIN_S = 20.0
"""Time for a credential plugin of the kubeconfig to answer."""


class Access:
    """Address of an API server, with what a client needs to be let in."""

    def __init__(
        self,
        server: str,
        *,
        namespace: str = "default",
        tls: ssl.SSLContext | None = None,
        server_name: str | None = None,
        token: str = "",
        token_file: Path | None = None,
        plugin: Mapping[str, Any] | None = None,
        origin: str = "",
    ) -> None:
        """`tls` is None for plain HTTP. The token is given, in a file that may be renewed, or asked of a plugin."""
        self.server, self.namespace, self.tls, self.server_name = (
            server.rstrip("/"),
            namespace,
            tls,
            server_name,
        )
        self.origin = origin
        """File that this was read from, for messages."""
        self._token, self._token_file, self._plugin = token, token_file, plugin

    def token(self, *, renew: bool = False) -> str:
        """Return the bearer token, empty if there is none. With `renew` a plugin is asked again."""
        if self._token_file is not None:
            try:
                return self._token_file.read_text(encoding="ascii").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"{self.origin}: expected a token in {self._token_file}: {error}") from error
        if self._plugin is not None and (renew or not self._token):
            self._token = _token_of_plugin(self._plugin, origin=self.origin)
        return self._token


def load_access(environment: Mapping[str, str] | None = None, *, account: Path = SERVICE_ACCOUNT) -> Access:
    """Return the access that kubectl would use here. UserError names the file that is missing or wrong."""
    environment = os.environ if environment is None else environment
    named = [Path(name) for name in environment.get("KUBECONFIG", "").split(os.pathsep) if name]
    usual = Path(environment.get("HOME", "/")) / ".kube" / "config"
    for path in named or [usual]:
        if path.exists():
            return read_kubeconfig(path)
    if named:
        raise UserError(f"KUBECONFIG: expected a file, {named[0]} does not exist")
    if (account / "token").exists() and "KUBERNETES_SERVICE_HOST" in environment:
        return _of_a_pod(environment, account)
    raise UserError(
        f"`--on k8s` expects a kubeconfig (KUBECONFIG, or {usual}), or a pod with a service account; found neither"
    )


def _of_a_pod(environment: Mapping[str, str], account: Path) -> Access:
    host, port = environment["KUBERNETES_SERVICE_HOST"], environment.get("KUBERNETES_SERVICE_PORT", "443")
    try:
        tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
        namespace = (account / "namespace").read_text(encoding="ascii").strip()
    except (OSError, ssl.SSLError) as error:
        raise UserError(f"{account}: expected ca.crt and namespace of a service account: {error}") from error
    shown = f"[{host}]" if ":" in host else host
    return Access(
        f"https://{shown}:{port}",
        namespace=namespace,
        tls=tls,
        token_file=account / "token",
        origin=str(account),
    )


class _Named(msgspec.Struct, frozen=True):
    """One entry of a list of a kubeconfig."""

    name: str
    cluster: dict[str, Any] = {}
    user: dict[str, Any] = {}
    context: dict[str, Any] = {}


class _Kubeconfig(msgspec.Struct, frozen=True, rename="kebab"):
    """A kubeconfig, as far as it is needed."""

    current_context: str = ""
    clusters: list[_Named] | None = None
    users: list[_Named] | None = None
    contexts: list[_Named] | None = None


def read_kubeconfig(path: Path) -> Access:
    """Read the current context of a kubeconfig. UserError names what is wrong with it."""
    try:
        content = msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")), _Kubeconfig)
        context = _entry(content.contexts, content.current_context, "context").context
        cluster = _entry(content.clusters, context.get("cluster", ""), "cluster").cluster
        user = _entry(content.users, context["user"], "user").user if context.get("user") else {}
        server = str(cluster["server"])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise UserError(f"{path}: expected a kubeconfig: {error}") from error
    except KeyError as error:
        raise UserError(
            f"{path}: expected a kubeconfig with {error.args[0]}, found none of that name"
        ) from error
    tls = _tls(path, cluster, user) if server.startswith("https://") else None
    token_file = user.get("tokenFile")
    return Access(
        server,
        namespace=str(context.get("namespace") or "default"),
        tls=tls,
        server_name=cluster.get("tls-server-name"),
        token=str(user.get("token") or ""),
        token_file=None if token_file is None else path.parent / str(token_file),
        plugin=user.get("exec"),
        origin=str(path),
    )


def _entry(entries: list[_Named] | None, name: str, kind: str) -> _Named:
    for entry in entries or ():
        if entry.name == name:
            return entry
    raise KeyError(f"a {kind} {name!r}")


def _tls(path: Path, cluster: Mapping[str, Any], user: Mapping[str, Any]) -> ssl.SSLContext:
    try:
        authority = _content(path, cluster, "certificate-authority")
        tls = ssl.create_default_context(cadata=None if authority is None else authority.decode("ascii"))
        if cluster.get("insecure-skip-tls-verify"):
            tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        certificate, key = (_content(path, user, name) for name in ("client-certificate", "client-key"))
        if certificate is not None and key is not None:
            # The library only reads files; these exist in memory alone.
            both = in_memory(certificate + b"\n" + key)
            try:
                tls.load_cert_chain(f"/proc/self/fd/{both}")
            finally:
                os.close(both)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: expected certificates that can be read: {error}") from error
    return tls


def _content(path: Path, entry: Mapping[str, Any], name: str) -> bytes | None:
    """Return a certificate or a key that is part of the file, or is named by it."""
    if data := entry.get(f"{name}-data"):
        return base64.b64decode(str(data), validate=True)
    return (path.parent / str(entry[name])).read_bytes() if entry.get(name) else None


def _token_of_plugin(plugin: Mapping[str, Any], *, origin: str) -> str:
    """Ask the credential plugin of a kubeconfig (`user.exec`)."""
    command = [str(plugin.get("command", "")), *map(str, plugin.get("args") or ())]
    asked = {"apiVersion": str(plugin.get("apiVersion", "")), "kind": "ExecCredential", "spec": {}}
    environment = {**os.environ, "KUBERNETES_EXEC_INFO": msgspec.json.encode(asked).decode()}
    environment |= {str(each["name"]): str(each["value"]) for each in plugin.get("env") or ()}

    def attempt(remaining_s: float) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=remaining_s,
            env=environment,
            check=False,
        )

    try:
        result = wait(attempt, whom=command[0], what="a token", timeout_s=PLUGIN_S)
        return str(msgspec.json.decode(result.stdout)["status"]["token"])
    except (OSError, subprocess.SubprocessError) as error:
        raise WorldError(f"{origin}: the credential plugin {command[0]!r} failed: {error}") from error
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        said = result.stderr.decode(errors="replace").strip()[-500:]
        raise WorldError(f"{origin}: the credential plugin {command[0]!r} gave no token: {said}") from error
