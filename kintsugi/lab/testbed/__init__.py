"""Surroundings of a run that will be broken: hosts, disk, name server, tagged processes, system tools."""
