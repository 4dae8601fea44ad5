"""The pipelines behind the commands, free of click: typed arguments in, a report object out. Also the Python API."""
