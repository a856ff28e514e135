"""The report of experiments and campaigns: one HTML page, Markdown, figures, raw tables."""
