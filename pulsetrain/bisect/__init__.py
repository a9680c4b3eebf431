"""Which of the settings, or of the commits, that differ between two runs makes a metric worse: `pulsetrain bisect`."""
