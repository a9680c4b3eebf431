"""From a configuration file to a trainer and its run folder."""
