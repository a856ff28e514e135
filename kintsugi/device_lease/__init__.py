"""How ranks and generation servers take turns on a device: a lease, granted by the host's agent, fenced by tokens."""
