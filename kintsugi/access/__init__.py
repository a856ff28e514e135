"""Access control: named tokens with roles, and the audit log.

    roles.py      four nested roles, and the role that each action needs
    tokens.py     the file of tokens: hashes, scopes, expiry, quotas
    gate.py       the decision about one request: `Gate.decide` → caller, HTTP status, reason
    quota.py      requests per minute and in flight, per token
    audit.py      hash-chained, append-only logs: one per run, one per host

A server asks the gate, acts, and records what it answered:

    gate = Gate(TokenFile(default_token_file()))
    decision = gate.decide(request.headers.get("Authorization"), Action.STOP, run=folder.name, origin=request.remote)
    if decision.caller is None:
        return refuse(decision.status, decision.reason)        # 401, 403, 429 or 503
    record(folder, decision.caller, Action.STOP, answer="accepted")

On one host the owner of a run folder needs no token: `local_caller` gives the owner and root the role admin.
"""
