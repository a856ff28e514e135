"""The page of a run: a reader over run folders, served to a browser (`kintsugi page`)."""
