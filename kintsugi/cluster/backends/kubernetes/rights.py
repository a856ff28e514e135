"""Comparison of the rights that an account has in a namespace with those that are needed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kintsugi.cluster.backends.kubernetes.client import ApiError, Client
from kintsugi.cluster.backends.kubernetes.manifests import Right

REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


async def check_rights(client: Client, rights: Sequence[Right], *, namespace: str) -> None:
    """Ask the API server for each right; ApiError names all that are missing, as the rules that a Role needs."""
    checks = [_is_allowed(client, right, verb, namespace) for right in rights for verb in right.verbs]
    asked = [(right, verb) for right in rights for verb in right.verbs]
    allowed = await asyncio.gather(*checks)
    missing = [each for each, may in zip(asked, allowed, strict=True) if not may]
    if missing:
        rules = "; ".join(
            f"verbs [{', '.join(verb for other, verb in missing if other == right)}] on "
            f"{right.resource} in API group {right.group!r}"
            for right in dict.fromkeys(right for right, _ in missing)
        )
        raise ApiError(
            f"this account lacks rights in namespace {namespace}: a Role needs {rules} (403); see docs/cluster.md",
            status=403,
        )


async def _is_allowed(client: Client, right: Right, verb: str, namespace: str) -> bool:
    resource, _, subresource = right.resource.partition("/")
    asked = {"namespace": namespace, "group": right.group, "resource": resource, "verb": verb}
    if subresource:
        asked["subresource"] = subresource
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": asked},
    }
    answer = await client.request("POST", REVIEWS, body=body)
    return bool((answer.get("status") or {}).get("allowed"))
