"""Data and measurement: text to token windows, the block stream, statistics, perplexity and KL."""
