"""Methods that choose which weights to drop, one file each."""
