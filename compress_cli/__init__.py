"""The command line: thin click commands, one file each, and how they talk to people."""
