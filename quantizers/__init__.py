"""Methods that choose codes for weights: transforms and roundings, one file each, registered by name."""
