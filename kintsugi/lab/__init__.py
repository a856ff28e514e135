"""The laboratory: breaks real runs on purpose and measures what happens.

faults/      mechanisms, one module per kind of fault
injector/    injections as values, their execution, undo log and reaper
testbed/     hosts, disks, tagged processes, system tools
soak/        signals at random against an undisturbed twin
campaign/    random faults with a blind diagnosis, scored
scenarios/   experiments from files, on this system and the conventional one
fragile/     a conventional RL system from the same parts, for contrast
residue/     proof that nothing is left on the host
report/      tables, figures and page of the results
"""
