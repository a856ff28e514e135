"""Exports: Prometheus, OpenTelemetry, Chrome trace, webhooks."""
