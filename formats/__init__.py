"""What a compressed tensor means and how it lies on disk: grids, schemes, packings, checkpoints, architecture facts."""
