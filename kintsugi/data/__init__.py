"""Prompts enter: rows of files, datasets, streams and generators, in a resumable order, tokenised.

dataset.py      all rows of a run: training rows in order and mixture, and held-out rows
order.py        which row stands at a position
jsonl_rows.py   rows of JSON lines by offset; files.py converts other formats
columns.py      from a record to a `Row`
tokenized.py    token ids of a row; prefetch.py reads ahead in idle time
"""
