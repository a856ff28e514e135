"""Collection of readings: processes, hosts, connections, clocks, disk and name probes."""
