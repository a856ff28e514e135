"""Records of a run, and how they are read.

events.py readings.py spans.py   typed records of every process      jsonl_log.py   their files
step_metrics.py eval_stats.py    metrics of steps and evaluations
collect/   from /proc, cgroups, TCP, clocks, probes
store/     index, search and trace          export/   Prometheus, OpenTelemetry, Chrome trace, webhooks
"""
