"""The bulk channel: weights, states and checkpoints between hosts, one hop, by connections beside the control channel.

A process offers bytes as an *export*, and another one fetches parts of it into their final place. Sizes and offsets are
agreed before any byte is sent, and nothing that arrives is interpreted: it fills announced places.

    fetching process                                   offering process
    OpenBulk(certificate) ──────── CURVE ────────────► a session: key, certificate, address
    session id, nonce ──────────── TCP ──────────────► unknown ids are refused
    TLS 1.3, both certificates pinned; or keys of this connection from the session's key and both nonces
    BulkRequest(export, ranges) ─────────────────────► looked up; a part that is still arriving is waited for
    receive into place ◄────────────────────────────── BulkHeader(sizes), then the bytes, by sendfile where they can

exports.py      bytes on offer: views, files in memory, and pieces that are still arriving
credentials.py  the certificate of a process, and TLS contexts that accept exactly one other
channel.py      one connection after its set-up: messages and bytes, encrypted or with a code per chunk
server.py       listener, sessions, one thread per connection
client.py       sessions with other processes, and their connections
endpoint.py     server and client of one process
files.py        files on disk: offered where they are, fetched in pieces
pull.py         one version or state from several sources at a time; slow ones are reported and gone around
"""
